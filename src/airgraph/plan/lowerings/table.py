"""How a formula is registered, and the node as it sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from airgraph.errors import Unsupported
from airgraph.ir.ops import NodeView
from airgraph.ir.types import DataType
from airgraph.plan.tensors import Tensor

FLOAT, HALF, BF16, DOUBLE, BOOL, INT64 = (
    DataType.DT_FLOAT,
    DataType.DT_FLOAT16,
    DataType.DT_BF16,
    DataType.DT_DOUBLE,
    DataType.DT_BOOL,
    DataType.DT_INT64,
)
TYPES = frozenset(
    {FLOAT, HALF, BF16, DOUBLE, BOOL, INT64, DataType.DT_INT32, DataType.DT_INT16, DataType.DT_INT8, DataType.DT_UINT8}
)
NUMBERS = TYPES - {BOOL}
FLOATS = frozenset({FLOAT, HALF, BF16, DOUBLE})
INTS = NUMBERS - FLOATS
Lowered = Tensor | Sequence[Tensor | None] | None
LoweringView = NodeView[Tensor]  # a node as its formula sees it
LOWERINGS: dict[str, Callable[[LoweringView], Lowered]] = {}


class UnsupportedLowering(Unsupported):
    """This use of the op is left to the library; the text says why."""


def known(view: LoweringView, name: str) -> Any:
    """The value of an index input, which the formula depends on."""
    value = view.numbers(name)
    if value is None:
        raise UnsupportedLowering(f"{name} is only known when it runs")
    return value


def first(view: LoweringView) -> Tensor:
    """The first input."""
    return view.of(next(view.node.values()))


def lowers(*names: str) -> Callable[[Callable[[LoweringView], Lowered]], Callable[[LoweringView], Lowered]]:
    def add(fn: Callable[[LoweringView], Lowered]) -> Callable[[LoweringView], Lowered]:
        for name in names:
            LOWERINGS[name] = fn
        return fn

    return add
