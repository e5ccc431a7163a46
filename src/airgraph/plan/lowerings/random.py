"""Dropout with a mask that is given: the random part is a call into PyTorch."""

from __future__ import annotations

from airgraph.plan.lowerings.formulas import floats_only
from airgraph.plan.lowerings.table import LoweringView, lowers
from airgraph.plan.tensors import Tensor


@lowers("DropOutDoMask")
def dropout(view: LoweringView) -> Tensor:
    f = floats_only(view)
    return f("mul", view["x"], f("mul", view["mask"], float(view.attr("scale"))))
