"""Padding, and pixels as channels."""

from __future__ import annotations

from airgraph.plan.lowerings.formulas import number_of, padded
from airgraph.plan.lowerings.table import LoweringView, UnsupportedLowering, first, known, lowers
from airgraph.plan.tensors import Tensor, converted, permute, reshape


@lowers("PadV3")
def pad(view: LoweringView) -> Tensor:
    paddings, x = known(view, "paddings"), view["x"]
    flat = [n for p in paddings for n in (p if isinstance(p, tuple) else (p,))]
    flat = [0] * (2 * len(x.shape) - len(flat)) + flat  # of the last axes
    if view.attr("mode") != "constant" or not all(isinstance(n, int) and n >= 0 for n in flat):
        raise UnsupportedLowering("other than by a constant, or cutting")
    value = number_of(view["constant_values"]) if view.has("constant_values") else 0
    if value is None:
        raise UnsupportedLowering("by a value that is computed")
    fill = converted(value, view.result_dtype)
    for axis, (low, high) in enumerate(zip(flat[::2], flat[1::2])):
        x = padded(x, axis, low, high, fill)
    return x


@lowers("PixelShuffle", "PixelUnshuffle")
def pixel_shuffle(view: LoweringView) -> Tensor:
    """[…, c·r·r, h, w] ↔ […, c, h·r, w·r]"""
    x = first(view)
    apart = view.node.op == "PixelShuffle"
    *rest, c, h, w = view.result_shape if apart else x.shape
    r = view.attr("upscale_factor" if apart else "downscale_factor")
    if not all(isinstance(n, int) for n in (c, h, w)):
        raise UnsupportedLowering("of symbolic sizes")
    n = len(rest)
    sizes = (*rest, c, r, r, h // r, w // r) if apart else (*rest, c, h // r, r, w // r, r)
    order = (0, 3, 1, 4, 2) if apart else (0, 2, 4, 1, 3)
    return reshape(permute(reshape(x, sizes), [*range(n), *(n + i for i in order)]), view.result_shape)
