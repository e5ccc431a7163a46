"""Type rules of ops with several outputs, and of those whose sizes only PyTorch knows."""

from __future__ import annotations

from airgraph.ir.ops.table import NodeView, TypeRule
from airgraph.ir.types import DataType, TensorType

HALVES = (DataType.DT_FLOAT16, DataType.DT_BF16)


def each(*rules: TypeRule) -> TypeRule:
    """One rule for each output."""
    return lambda view: [t for rule in rules for t in rule(view)]


def sized(name: str = "x", dtype: DataType | None = None) -> TypeRule:
    """The element type of one input; the sizes are FX's."""

    def rule(view: NodeView) -> list[TensorType]:
        return view.result(view.dtype(name) if dtype is None else dtype, None)

    return rule


def first_given(*names: str) -> TypeRule:
    """The element type of the first of these inputs that is there; the sizes are FX's."""

    def rule(view: NodeView) -> list[TensorType]:
        used = next(name for name in names if view.has(name))
        return view.result(view.dtype(used), None)

    return rule


def wide(name: str = "x") -> TypeRule:
    """float32 for a half type, else the input's own."""

    def rule(view: NodeView) -> list[TensorType]:
        dtype = view.dtype(name)
        return view.result(DataType.DT_FLOAT if dtype in HALVES else dtype, None)

    return rule


def statistics(name: str = "x") -> TypeRule:
    """Means and deviations: the CPU keeps them in the input's type, accelerators in float32."""

    def rule(view: NodeView) -> list[TensorType]:
        return list((sized(name) if view.place == "CPU" else wide(name))(view))

    return rule
