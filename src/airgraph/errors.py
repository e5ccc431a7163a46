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
from functools import cache
from typing import Any, NoReturn


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


class Unsupported(Exception):
    """Something has to be done in a more general way; `reason` says why, and goes into the journal.

    The base of every refusal. Each layer raises a subclass of its own and catches it where it chooses the other way:

        raise UnsupportedLowering("its axes are only known when it runs")      the library computes this node

    A refusal is no error: none of them reaches the user.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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


def raise_from_op(error: Exception, op: str, where: Mapping[str, str]) -> NoReturn:
    """Raises again what a kernel raised: as an EngineError with the place, which is also of the type eager raises.

        except IndexError as error:
            raise_from_op(error, "GatherV2", where)      an EngineError and an IndexError

    An exception of a user's own class stays as it is, for only its author knows how to construct another one.
    """
    eager: Any = type(error)
    known = eager.__module__ in ("builtins", "torch", "torch._C", "torch.linalg")
    if isinstance(error, EngineError) or not known:
        raise error
    raise engine_error_type(eager)(f"{op} failed: {error}", where=where) from error


@cache
def engine_error_type(eager: Any) -> type[EngineError]:
    if issubclass(EngineError, eager):
        return EngineError
    return type(f"Engine{eager.__name__.lstrip('_')}", (EngineError, eager), {"__module__": __name__})


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


class BuildError(AirgraphError):
    """A program that cannot be built into an object file for C."""
