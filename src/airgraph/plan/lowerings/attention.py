"""Rotary embeddings. Attention itself is a step of its own (plan/opaque.py)."""

from __future__ import annotations

from airgraph.plan.lowerings.formulas import floats_only, widened
from airgraph.plan.lowerings.table import LoweringView, UnsupportedLowering, lowers
from airgraph.plan.tensors import Tensor, concat, part


@lowers("RotaryMul")
def rotary(view: LoweringView) -> Tensor:
    """x · cos + rotate_half(x) · sin, with rotate_half(x) = [-x2, x1]."""
    f, x = floats_only(view), widened(view["x"])
    axis, size = len(x.shape) - 1, x.shape[-1]
    if not isinstance(size, int) or size % 2:
        raise UnsupportedLowering("of an odd or symbolic size")
    rotated = concat([f("neg", part(x, axis, size // 2, size // 2)), part(x, axis, 0, size // 2)], axis)
    return f("add", f("mul", x, view["r1"]), f("mul", rotated, view["r2"]))
