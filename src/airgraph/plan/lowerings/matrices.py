"""The dot product. Matrix products are steps of their own (plan/opaque.py)."""

from __future__ import annotations

from airgraph.plan.index import same
from airgraph.plan.lowerings.formulas import widened
from airgraph.plan.lowerings.table import FLOATS, LoweringView, UnsupportedLowering, first, lowers
from airgraph.plan.tensors import Tensor, point, reduce


@lowers("Dot")
def dot(view: LoweringView) -> Tensor:
    x = widened(first(view))
    if x.dtype not in FLOATS or any(same(s, 0) for s in x.shape):
        raise UnsupportedLowering("of whole numbers or nothing")
    return reduce("sum", point("mul", (x, widened(view["input_y"])), x.dtype), [0], False)
