"""Images made larger, smaller, sampled, padded and cut into patches: PyTorch's own ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.layouts import on_dense
from airgraph.engine.meanings.norms import or_empty
from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten
Ints = Sequence[int]
INTERPOLATIONS = {"bilinear": 0, "nearest": 1, "bicubic": 2}
BORDERS = {"zeros": 0, "border": 1, "reflection": 2}
RESIZES = {
    "ResizeNearestNeighborV2": aten.upsample_nearest2d.default,
    "UpsampleLinear1d": aten.upsample_linear1d,
    "UpsampleTrilinear3d": aten.upsample_trilinear3d,
}
RESIZE_GRADIENTS = {
    "ResizeNearestNeighborV2Grad": aten.upsample_nearest2d_backward,
    "UpsampleNearest1dGrad": aten.upsample_nearest1d_backward,
    "UpsampleNearest3dGrad": aten.upsample_nearest3d_backward,
    "UpsampleNearestExact1dGrad": aten._upsample_nearest_exact1d_backward,
    "UpsampleNearestExact2dGrad": aten._upsample_nearest_exact2d_backward,
    "UpsampleNearestExact3dGrad": aten._upsample_nearest_exact3d_backward,
    "ResizeBilinearV2Grad": aten.upsample_bilinear2d_backward,
    "ResizeBicubicV2Grad": aten.upsample_bicubic2d_backward,
    "UpsampleLinear1dGrad": aten.upsample_linear1d_backward,
    "UpsampleTrilinear3dGrad": aten.upsample_trilinear3d_backward,
}
PADS = {
    "REFLECT": (aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d),
    "edge": (aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d),
}
PAD_GRADIENTS = {
    "REFLECT": (aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.reflection_pad3d_backward),
    "edge": (aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward),
}


def scales_of(scales: Sequence[float], size: Ints) -> Sequence[float | None]:
    return scales or [None] * len(size)


def resize(call: Any) -> Meaning:
    def meaning(x: Tensor, size: Ints, scales: Sequence[float], **corners: bool) -> Tensor:
        return call(x, size, *corners.values(), *scales_of(scales, size))

    return meaning


def resize_gradient(call: Any) -> Meaning:
    def meaning(grads: Tensor, size: Ints, scales: Sequence[float], **corners: bool) -> Tensor:
        shape = [*grads.shape[:2], *size]
        return call(grads, grads.shape[2:], shape, *corners.values(), *scales_of(scales, size))

    return meaning


def grid_sample(call: Any) -> Meaning:
    return lambda *inputs, interpolation_mode, padding_mode, align_corners: call(
        *inputs, INTERPOLATIONS[interpolation_mode], BORDERS[padding_mode], align_corners
    )


def grid_sample_gradient(call: Any) -> Meaning:
    def meaning(
        grad: Tensor,
        x: Tensor,
        grid: Tensor,
        interpolation_mode: str,
        padding_mode: str,
        align_corners: bool,
        output_mask: Sequence[bool],
    ) -> list[Tensor]:
        modes = INTERPOLATIONS[interpolation_mode], BORDERS[padding_mode]
        return or_empty(call(grad, x, grid, *modes, align_corners, output_mask), x)

    return meaning


def innermost_first(paddings: Ints) -> list[int]:
    """ATen's order of the pairs."""
    return [n for i in range(len(paddings) - 2, -1, -2) for n in paddings[i : i + 2]]


def mirror(x: Tensor, paddings: Sequence[Any], mode: str) -> Tensor:
    """The paddings of the spatial dimensions as a list, or two for each dimension, batch and channels too."""
    if paddings and isinstance(paddings[0], list | tuple):
        paddings = [n for pair in paddings[2:] for n in pair]
    return pad(x, paddings, mode=mode)


def pad(x: Tensor, paddings: Ints, value: Tensor | None = None, *, mode: str) -> Tensor:
    numbers = innermost_first(paddings)
    if mode == "constant":
        return aten.constant_pad_nd(x, numbers, 0 if value is None else value.item())
    return PADS[mode][len(numbers) // 2 - 1](x, numbers)


def pad_gradient(grad: Tensor, paddings: Ints, shape: Ints, mode: str) -> Tensor:
    call = PAD_GRADIENTS[mode][len(paddings) // 2 - 1]
    return call(grad, grad.new_empty(shape), innermost_first(paddings))


def im2col(x: Tensor, ksizes: Ints, dilations: Ints, pads: Ints, strides: Ints) -> Tensor:
    return aten.im2col(x, ksizes, dilations, pads, strides)


RESAMPLING: dict[str, Meaning] = {
    **{name: resize(call) for name, call in RESIZES.items()},
    **{name: resize_gradient(call) for name, call in RESIZE_GRADIENTS.items()},
    "GridSampler2D": grid_sample(aten.grid_sampler_2d),
    "GridSampler2DGrad": grid_sample_gradient(aten.grid_sampler_2d_backward),
    "GridSampler3D": grid_sample(aten.grid_sampler_3d),
    "GridSampler3DGrad": grid_sample_gradient(aten.grid_sampler_3d_backward),
    "PadV3": pad,
    "MirrorPad": mirror,
    "PadV3Grad": pad_gradient,
    "Im2col": im2col,
    "Col2im": aten.col2im.default,
    "PixelShuffle": aten.pixel_shuffle.default,
    "PixelUnshuffle": aten.pixel_unshuffle.default,
}
RESAMPLING = {name: on_dense(meaning) for name, meaning in RESAMPLING.items()}
