"""Settings of the NPU's own compiler and formats: `torch.npu.config`, `matmul`, `conv`, `set_compile_mode`, `set_option`.

Scripts set them in their first lines. They choose among ways of an NPU to compute the same, so here they are kept and
can be read back, and change nothing. A value of the wrong kind is refused as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airgraph.errors import CompatError


class NpuSwitches:
    """Named switches, each True or False; a name that does not exist is an error."""

    def __init__(self, owner: str, **switches: bool) -> None:
        vars(self).update(_owner=owner, **switches)

    def __setattr__(self, name: str, value: Any) -> None:
        where = f"torch.npu.{vars(self)['_owner']}"
        if name not in vars(self):
            known = ", ".join(key for key in vars(self) if key != "_owner")
            raise AttributeError(f"{where} has no switch {name!r}; it has {known}")
        if not isinstance(value, bool):
            raise CompatError(f"{where}.{name} cannot be {value!r}", where={"allowed": "True, False"})
        vars(self)[name] = value


config = NpuSwitches("config", allow_internal_format=True)
matmul = NpuSwitches("matmul", allow_hf32=False)
conv = NpuSwitches("conv", allow_hf32=True)
_jit_compile = False
_options: dict[str, Any] = {}


def set_compile_mode(jit_compile: bool = False) -> None:
    """Whether ops are compiled when they are called; here all are there already."""
    global _jit_compile
    if not isinstance(jit_compile, bool):
        raise CompatError(f"jit_compile cannot be {jit_compile!r}", where={"allowed": "True, False"})
    _jit_compile = jit_compile


def is_jit_compile_false() -> bool:
    return not _jit_compile


def set_option(option: Mapping[str, Any]) -> None:
    """Options of the NPU's graph compiler, by name."""
    if not isinstance(option, Mapping):
        raise TypeError("npu option must be a dict.")
    _options.update(option)
