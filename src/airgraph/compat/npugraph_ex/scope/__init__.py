"""Scopes: `with npugraph_ex.scope.limit_core_num(4, 8): y = f(x)`

What is said of the ops inside travels with them through the trace (PyTorch calls that an annotation) into the journal of
the graph they end up in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.fx.traceback import annotate

__all__ = ["limit_core_num"]


def limit_core_num(op_aicore_num: int, op_vectorcore_num: int, stream: Any = None) -> AbstractContextManager[None]:
    """How many cores of an NPU the ops inside may use. There are none here: the journal says that it has no effect."""
    for name, count in (("op_aicore_num", op_aicore_num), ("op_vectorcore_num", op_vectorcore_num)):
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} of limit_core_num must be an int, got {type(count).__name__}")
        if count < 1:
            raise ValueError(f"{name} of limit_core_num must be at least 1, got {count}")
    said = f"scope.limit_core_num({op_aicore_num}, {op_vectorcore_num}) has no effect: cores cannot be limited here"
    return annotate({"airgraph": said})
