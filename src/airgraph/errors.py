"""Errors that say what happened, where, and what to try.

raise ConvertError(
    "no converter for aten.grid_sampler_2d.default (strict=True)",
    where={"graph": "%7 = aten.grid_sampler_2d(%2, %5, 0, 0, True)", "from": 'model.py:42  y = F.grid_sample(x, grid)'},
    hint="strict=False to run this op by PyTorch, or register one: docs/converters.md",
)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class AirgraphError(RuntimeError):
    """The base of every error airgraph raises on purpose."""

    def __init__(self, what: str, *, where: Mapping[str, str] | None = None, hint: str = "") -> None:
        self.what = what
        self.where = dict(where or {})
        self.hint = hint
        super().__init__(self.text())

    def text(self) -> str:
        rows = [*self.where.items()]
        if self.hint:
            rows.append(("try", self.hint))
        width = max((len(key) for key, _ in rows), default=0) + 1
        return "\n".join([self.what, *(f"  {key + ':':<{width}} {value}" for key, value in rows)])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'dump_path'?` where one of the known words is near, else nothing."""
    nearest = difflib.get_close_matches(word, [*known], 1, 0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


class ConfigError(AirgraphError, ValueError):
    """An option that does not exist or has a value that is not allowed."""


class ConvertError(AirgraphError):
    """An FX node could not be turned into graph nodes."""


class VerifyError(AirgraphError):
    """A graph breaks a rule of the IR."""


class EngineError(AirgraphError):
    """A node has no kernel, or its kernel failed."""


class BadIndexError(EngineError, IndexError):
    """A number that picks an element is out of range."""


class BindError(AirgraphError):
    """The arguments of a call do not fit the program."""


class ReplayError(AirgraphError):
    """A captured program cannot be replayed as asked, or its replay was found to be wrong."""


class DumpError(AirgraphError, OSError):
    """A dump could not be written."""


class CompatError(AirgraphError):
    """The emulation cannot be installed or used here."""


class ExportError(AirgraphError, OSError):
    """An exported model cannot be written, or a file is not one that can be read."""
