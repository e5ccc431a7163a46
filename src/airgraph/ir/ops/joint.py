"""Type rules of ops with several outputs, and of those whose sizes only PyTorch knows."""

from __future__ import annotations

from airgraph.ir.ops.table import Call, TypeRule
from airgraph.ir.types import DataType, TensorType

HALVES = (DataType.DT_FLOAT16, DataType.DT_BF16)


def each(*rules: TypeRule) -> TypeRule:
    """One rule for each output."""
    return lambda call: [t for rule in rules for t in rule(call)]


def sized(name: str = "x", dtype: DataType | None = None) -> TypeRule:
    """The element type of one input; the sizes are FX's."""

    def rule(call: Call) -> list[TensorType]:
        return call.result(call.dtype(name) if dtype is None else dtype, None)

    return rule


def first_given(*names: str) -> TypeRule:
    """The element type of the first of these inputs that is there; the sizes are FX's."""

    def rule(call: Call) -> list[TensorType]:
        used = next(name for name in names if call.has(name))
        return call.result(call.dtype(used), None)

    return rule


def wide(name: str = "x") -> TypeRule:
    """float32 for a half type, else the input's own."""

    def rule(call: Call) -> list[TensorType]:
        dtype = call.dtype(name)
        return call.result(DataType.DT_FLOAT if dtype in HALVES else dtype, None)

    return rule


def statistics(name: str = "x") -> TypeRule:
    """Means and deviations: the CPU keeps them in the input's type, accelerators in float32."""

    def rule(call: Call) -> list[TensorType]:
        return list((sized(name) if call.place == "CPU" else wide(name))(call))

    return rule
