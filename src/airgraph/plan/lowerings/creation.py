"""Tensors made from a size and a few numbers."""

from __future__ import annotations

from airgraph.plan.lowerings.table import BOOL, LoweringView, UnsupportedLowering, known, lowers
from airgraph.plan.tensors import Tensor, cast, const, converted, expand_to, iota, point


@lowers("Eye")
def eye(view: LoweringView) -> Tensor:
    rank = len(view.result_shape)
    return point("eq", (iota(view.result_shape, rank - 2, 0, 1), iota(view.result_shape, rank - 1, 0, 1)), BOOL)


@lowers("Fill", "Empty", "ZerosLike", "OnesLike")
def fill(view: LoweringView) -> Tensor:
    if view.node.op == "Fill":
        return expand_to(cast(view["value"], view.result_dtype), view.result_shape)
    value = 1 if view.node.op == "OnesLike" else 0
    return const(converted(value, view.result_dtype), view.result_dtype, view.result_shape)


@lowers("Range")
def arange(view: LoweringView) -> Tensor:
    start, step = known(view, "start"), known(view, "delta")
    if isinstance(start, tuple) or not isinstance(step, int) or isinstance(start, float):
        raise UnsupportedLowering("of fractions")
    return iota(view.result_shape, 0, start, step)
