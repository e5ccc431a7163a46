"""How a formula is registered, and the node as it sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from airgraph.errors import Unsupported
from airgraph.ir.graph import Node, Value
from airgraph.ir.ops import OPS
from airgraph.ir.types import DataType, Dim
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
LOWERINGS: dict[str, Callable[[Use], Lowered]] = {}


class UnsupportedLowering(Unsupported):
    """This use of the op is left to the library; the text says why."""


class Use:
    """One node, as a formula sees it."""

    def __init__(self, node: Node, of: Callable[[Value], Tensor]) -> None:
        self.node, self.of = node, of
        self.op = OPS[node.op]

    def value(self, name: str) -> Value:
        entry = self.node.inputs[self.op.slot(name)]
        assert isinstance(entry, Value)
        return entry

    def has(self, name: str) -> bool:
        return self.node.inputs[self.op.slot(name)] is not None

    def __getitem__(self, name: str) -> Tensor:
        return self.of(self.value(name))

    def many(self, name: str) -> list[Tensor]:
        entry = self.node.inputs[self.op.slot(name)]
        assert isinstance(entry, tuple)
        return [self.of(v) for v in entry]

    def known(self, name: str) -> Any:
        known = self.value(name).known
        if known is None:
            raise UnsupportedLowering(f"{name} is only known when it runs")
        return known

    def attr(self, name: str) -> Any:
        return self.node.attrs.get(name, self.op.attrs.get(name))

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.node.output.type.shape or ()

    @property
    def dtype(self) -> DataType:
        return self.node.output.dtype

    @property
    def x(self) -> Tensor:
        return self.of(next(self.node.values()))


def lowers(*names: str) -> Callable[[Callable[[Use], Lowered]], Callable[[Use], Lowered]]:
    def add(fn: Callable[[Use], Lowered]) -> Callable[[Use], Lowered]:
        for name in names:
            LOWERINGS[name] = fn
        return fn

    return add
