"""Copies and casts."""

from __future__ import annotations

from airgraph.plan.lowerings.formulas import truth
from airgraph.plan.lowerings.table import BOOL, LoweringView, first, lowers
from airgraph.plan.tensors import Tensor, cast


@lowers("Cast")
def casted(view: LoweringView) -> Tensor:
    return truth(first(view)) if view.result_dtype == BOOL else cast(first(view), view.result_dtype)


@lowers("Identity", "TensorMove")
def identity(view: LoweringView) -> Tensor:
    return first(view)
