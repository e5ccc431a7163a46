"""Images made larger, smaller, sampled, padded and cut into patches."""

from __future__ import annotations

import math
from typing import Any

import torch

from airgraph.convert.direct import bound, constant, direct, emitted, sized, word_of
from airgraph.convert.promote import promoted
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten
GRID = "x=input grid interpolation_mode padding_mode align_corners"
SAMPLERS = {
    aten.grid_sampler_2d.default: ("GridSampler2D", GRID),
    aten.grid_sampler_3d.default: ("GridSampler3D", GRID),
    aten.grid_sampler_2d_backward.default: ("GridSampler2DGrad", f"{GRID} grad=grad_output output_mask"),
    aten.grid_sampler_3d_backward.default: ("GridSampler3DGrad", f"{GRID} grad=grad_output output_mask"),
}
PATCHES = {
    aten.im2col.default: ("Im2col", "x=self ksizes=kernel_size dilations=dilation pads=padding strides=stride"),
    aten.col2im.default: ("Col2im", "x=self output_size kernel_size dilation padding stride"),
    aten.pixel_shuffle.default: ("PixelShuffle", "x=self upscale_factor"),
    aten.pixel_unshuffle.default: ("PixelUnshuffle", "x=self downscale_factor"),
}
RESIZES = {
    aten.upsample_linear1d.default: "UpsampleLinear1d",
    aten.upsample_trilinear3d.default: "UpsampleTrilinear3d",
    aten.upsample_nearest2d.default: "ResizeNearestNeighborV2",
    aten.upsample_nearest1d_backward.default: "UpsampleNearest1dGrad",
    aten.upsample_nearest2d_backward.default: "ResizeNearestNeighborV2Grad",
    aten.upsample_nearest3d_backward.default: "UpsampleNearest3dGrad",
    aten._upsample_nearest_exact1d_backward.default: "UpsampleNearestExact1dGrad",
    aten._upsample_nearest_exact2d_backward.default: "UpsampleNearestExact2dGrad",
    aten._upsample_nearest_exact3d_backward.default: "UpsampleNearestExact3dGrad",
    aten.upsample_linear1d_backward.default: "UpsampleLinear1dGrad",
    aten.upsample_bilinear2d_backward.default: "ResizeBilinearV2Grad",
    aten.upsample_bicubic2d_backward.default: "ResizeBicubicV2Grad",
    aten.upsample_trilinear3d_backward.default: "UpsampleTrilinear3dGrad",
}
# Padding that repeats what is there: the op and its mode.
PADS = {
    aten.reflection_pad1d.default: ("MirrorPad", "REFLECT"),
    aten.reflection_pad2d.default: ("MirrorPad", "REFLECT"),
    aten.reflection_pad3d.default: ("MirrorPad", "REFLECT"),
    aten.replication_pad1d.default: ("PadV3", "edge"),
    aten.replication_pad2d.default: ("PadV3", "edge"),
    aten.replication_pad3d.default: ("PadV3", "edge"),
}
PAD_GRADIENTS = {
    aten.reflection_pad1d_backward.default: "REFLECT",
    aten.reflection_pad2d_backward.default: "REFLECT",
    aten.reflection_pad3d_backward.default: "REFLECT",
    aten.replication_pad1d_backward.default: "edge",
    aten.replication_pad2d_backward.default: "edge",
    aten.replication_pad3d_backward.default: "edge",
}
for target, row in SAMPLERS.items():
    direct(
        target,
        *row,
        interpolation_mode=word_of("bilinear", "nearest", "bicubic"),
        padding_mode=word_of("zeros", "border", "reflection"),
    )
for target, row in PATCHES.items():
    direct(target, *row)


# -- sizes ----------------------------------------------------------------------------------------------------------
def resize(target: Any, op: str) -> Any:
    def convert(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Value:
        given = bound(target, args, kwargs)
        scales = [constant(name, number) for name, number in given.items() if name.startswith("scales")]
        attrs = {name: value for name, value in given.items() if name == "align_corners"}
        return emitted(op, spatial(given), {**attrs, "scales": chosen(scales)}, meta_outputs)

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    return convert


def spatial(given: dict[str, Any]) -> list[Any]:
    """The tensor and the sizes of the result's spatial dimensions; a gradient's result is as large as the input was."""
    if "input_size" not in given:
        return [given["self"], given["output_size"]]
    return [given["grad_output"], listed(items(given["input_size"])[2:])]


def chosen(scales: list[float | None]) -> list[float]:
    known = [scale for scale in scales if scale is not None]
    if known and len(known) < len(scales):
        raise UnsupportedConversion("a scale for some dimensions and none for others")
    return known


def items(sizes: Any) -> list[Any]:
    """The entries of a list of sizes, also of one with symbols in it."""
    if not isinstance(sizes, Value):
        return list(sizes)
    packed = sizes.node.inputs[0]
    if sizes.node.op != "Pack" or not isinstance(packed, tuple):
        raise UnsupportedConversion("sizes that are not a list")
    return list(packed)


def listed(entries: list[Any]) -> Any:
    """A list of sizes as an input."""
    return ge.Pack(entries, N=len(entries)) if any(isinstance(e, Value) for e in entries) else entries


# -- padding --------------------------------------------------------------------------------------------------------
def outermost_first(pad: Any) -> Any:
    numbers = items(pad)
    if len(numbers) % 2:
        raise UnsupportedConversion("an odd number of paddings")
    return listed([n for i in range(len(numbers) - 2, -1, -2) for n in numbers[i : i + 2]])


@converts(aten.constant_pad_nd.default)
def constant_pad(self: Value, pad: Any, value: Any = 0, *, meta_outputs: TensorSpec) -> Value:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    if not items(pad):
        raise UnsupportedConversion("no paddings")
    if isinstance(value, float) and not math.isfinite(value) and not self.dtype.is_float:
        raise UnsupportedConversion("an infinite padding of integers")
    _, fill = promoted(self, value, dtype=self.dtype)
    return emitted("PadV3", [self, outermost_first(pad), fill], {}, meta_outputs)


def pad_more(op: str, mode: str) -> Any:
    def convert(self: Value, padding: Any, *, meta_outputs: TensorSpec) -> Value:
        unbatched = self.rank == len(items(padding)) // 2 + 1
        pads = outermost_first(padding)
        if op == "MirrorPad" and not isinstance(pads, Value) and len(pads) == 4:
            pads = in_pairs([0, 0, 0, 0, *pads])
        inputs = [ge.Unsqueeze(self, axes=[0]) if unbatched else self, pads]
        y = emitted(op, inputs if op == "MirrorPad" else [*inputs, None], {"mode": mode}, meta_outputs)
        return ge.Squeeze(sized(y, [1, *meta_outputs.symsize]), axis=[0]) if unbatched else y

    return convert


def in_pairs(numbers: list[int]) -> Value:
    """Two for each dimension."""
    pairs: Value = ge.Reshape(numbers, [len(numbers) // 2, 2])
    pairs.known = tuple(zip(numbers[::2], numbers[1::2]))
    return pairs


def pad_gradient(mode: str) -> Any:
    def convert(grad_output: Value, self: Value, padding: Any, *, meta_outputs: TensorSpec) -> Value:
        numbers = items(padding)
        if mode == "edge" and all(isinstance(n, int) and n == 0 for n in numbers):
            return ge.Identity(grad_output)
        unbatched = self.rank == len(numbers) // 2 + 1
        grad, x = (ge.Unsqueeze(v, axes=[0]) if unbatched else v for v in (grad_output, self))
        y = emitted("PadV3Grad", [grad, outermost_first(padding), ge.Shape(x, dtype=9)], {"mode": mode}, meta_outputs)
        return ge.Squeeze(sized(y, [1, *meta_outputs.symsize]), axis=[0]) if unbatched else y

    return convert


for target, op in RESIZES.items():
    REGISTRY.register(target, resize(target, op))
for target, row in PADS.items():
    REGISTRY.register(target, pad_more(*row))
for target, mode in PAD_GRADIENTS.items():
    REGISTRY.register(target, pad_gradient(mode))
