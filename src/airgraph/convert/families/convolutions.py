"""Convolutions and poolings."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import bound, constant, direct, emitted, sized
from airgraph.convert.promote import real
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten

WINDOW = "ksize=kernel_size strides=stride pads=padding dilation ceil_mode"
ROWS = {
    aten.max_pool2d_with_indices_backward.default: (
        "MaxPoolGradWithArgmaxV1",
        f"x=self grad=grad_output argmax=indices {WINDOW}",
    ),
    aten.max_pool3d_with_indices_backward.default: (
        "MaxPool3DGradWithArgmax",
        f"x=self grad=grad_output argmax=indices {WINDOW}",
    ),
    aten._adaptive_avg_pool2d.default: ("AdaptiveAvgPool2d", "x=self output_size"),
    aten._adaptive_avg_pool3d.default: ("AdaptiveAvgPool3d", "x=self output_size"),
    aten.adaptive_max_pool2d.default: ("AdaptiveMaxPool2d", "x=self output_size"),
    aten.adaptive_max_pool3d.default: ("AdaptiveMaxPool3d", "x=self output_size"),
    aten.adaptive_max_pool2d_backward.default: (
        "AdaptiveMaxPool2dGrad",
        "input_grad=grad_output x=self argmax=indices",
    ),
    aten.adaptive_max_pool3d_backward.default: (
        "AdaptiveMaxPool3dGrad",
        "input_grad=grad_output x=self argmax=indices",
    ),
}
for target, row in ROWS.items():
    direct(target, *row)


# -- convolutions ---------------------------------------------------------------------------------------------------
@converts(aten.convolution.default)
def convolution(
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation,
    bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""
    numbers = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    attrs = {name: constant(name, value) for name, value in {**numbers, "groups": groups}.items()}
    sizes = meta_outputs.symsize
    open_sizes = not all(isinstance(n, int) for n in sizes)
    if not 3 <= weight.rank <= 5 or input.rank != weight.rank or (transposed and open_sizes):
        return emitted("Convolution", [input, weight, bias], {**attrs, "transposed": transposed}, meta_outputs)
    real(input, weight, bias)
    if len({v.dtype for v in (input, weight, bias) if v is not None}) > 1:
        raise UnsupportedConversion("a mixture of element types")
    full, line = spatial(attrs, weight.rank - 2), weight.rank == 3
    x, filter = (raised(v) if line else v for v in (input, weight))
    kind = f"Conv{max(weight.rank - 2, 2)}D"
    if transposed:
        extra = [0] * (x.rank - weight.rank) + spread(attrs["output_padding"], weight.rank - 2)
        full["output_padding"] = [0, 0, *extra]
        room = [*sizes[:2], 1, *sizes[2:]] if line else list(sizes)
        y = getattr(ge, f"{kind}Transpose")(room, x, filter, bias, **full)
    else:
        y = getattr(ge, kind)(x, filter, bias, **full)
    return ge.Squeeze(sized(y, [*sizes[:2], 1, *sizes[2:]]), axis=[2]) if line else y


def spatial(attrs: dict[str, Any], dims: int) -> dict[str, Any]:
    """The attributes for all dimensions, as GE has them; a line is an image of one row."""
    strides, pads, dilations = (spread(attrs[name], dims) for name in ("stride", "padding", "dilation"))
    if dims == 1:
        strides, pads, dilations = [1, *strides], [0, *pads], [1, *dilations]
    return {
        "strides": [1, 1, *strides],
        "pads": [p for pad in pads for p in (pad, pad)],
        "dilations": [1, 1, *dilations],
        "groups": attrs["groups"],
    }


def raised(x: Value) -> Value:
    return ge.Unsqueeze(x, axes=[2])


def spread(numbers: list[int], dims: int) -> list[int]:
    """One number stands for all dimensions."""
    return numbers * dims if len(numbers) == 1 else numbers


@converts(aten.convolution_backward.default)
def convolution_backward(
    grad_output: Value,
    input: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    output_mask: list[bool],
    *,
    meta_outputs: list[TensorSpec],
) -> list[Value | None]:
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride,
    SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask)
    -> (Tensor, Tensor, Tensor)"""
    numbers = {
        "bias_sizes": bias_sizes,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "transposed": transposed,
        "output_padding": output_padding,
        "groups": groups,
        "output_mask": output_mask,
    }
    attrs = {name: constant(name, value) for name, value in numbers.items()}
    values = [grad_output, input, weight]
    wanted = [meta is not None for meta in meta_outputs]
    if transposed or wanted[2] or not 3 <= weight.rank <= 5 or input.rank != weight.rank:
        # PyTorch sums up the gradient of the bias while it computes that of the weights: another order, other digits.
        return emitted("ConvolutionBackward", values, attrs, meta_outputs)
    real(*values)
    if len({v.dtype for v in values}) > 1:
        raise UnsupportedConversion("a mixture of element types")
    full, line = spatial(attrs, weight.rank - 2), weight.rank == 3
    dy, x, filter = (raised(v) if line else v for v in values)
    kind = f"Conv{max(weight.rank - 2, 2)}DBackprop"
    dx = getattr(ge, f"{kind}Input")(ge.Shape(x, dtype=9), filter, dy, **full) if wanted[0] else None
    dw = getattr(ge, f"{kind}Filter")(x, ge.Shape(filter, dtype=9), dy, **full) if wanted[1] else None
    if line:
        dx, dw = (v and ge.Squeeze(sized(v, like.type.shape or ()), axis=[2]) for v, like in ((dx, x), (dw, filter)))
    return [dx, dw, None]


def window(kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> dict[str, Any]:
    numbers = {"ksize": kernel_size, "strides": stride, "pads": padding, "dilation": dilation}
    return {**{name: constant(name, value) for name, value in numbers.items()}, "ceil_mode": ceil_mode}


@converts(aten.max_pool2d_with_indices.default)
def max_pool2d(
    self: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    meta_outputs: list[TensorSpec],
) -> list[Value]:
    """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1,
    bool ceil_mode=False) -> (Tensor, Tensor)"""
    attrs = window(kernel_size, stride, padding, dilation, ceil_mode)
    y, argmax = emitted("MaxPoolWithArgmaxV1", [self], attrs, meta_outputs)
    return [y, ge.Identity(sized(argmax, meta_outputs[1].symsize))]


@converts(aten.max_pool3d_with_indices.default)
def max_pool3d(
    self: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    meta_outputs: list[TensorSpec],
) -> list[Value]:
    """max_pool3d_with_indices(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, int[3] dilation=1,
    bool ceil_mode=False) -> (Tensor, Tensor)"""
    attrs = window(kernel_size, stride, padding, dilation, ceil_mode)
    x = ge.Unsqueeze(self, axes=[0]) if self.rank == 4 else self
    found = emitted("MaxPool3DWithArgmaxV2", [x], attrs, meta_outputs)
    if self.rank != 4:
        return found
    return [ge.Squeeze(sized(y, [1, *meta.symsize]), axis=[0]) for y, meta in zip(found, meta_outputs)]


# -- averages -------------------------------------------------------------------------------------------------------
def average(target: Any, op: str) -> Any:
    """avg_pool and its gradient, which reads only the shape of the input."""
    spatial_rank = 3 if "3D" in op else 2

    def convert(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Value:
        given = {
            name: constant(name, v) if not isinstance(v, Value) else v
            for name, v in bound(target, args, kwargs).items()
        }
        grad = given.get("grad_output")
        x, alone = given["self"], grad is None and given["self"].rank == spatial_rank + 1
        inputs = [ge.Unsqueeze(x, axes=[0]) if alone else x] if grad is None else [ge.Shape(x, dtype=9), grad]
        attrs = {
            "ksize": given["kernel_size"],
            "strides": given["stride"],
            "pads": given["padding"],
            "ceil_mode": given["ceil_mode"],
            "exclusive": not given["count_include_pad"],
            "divisor_override": given["divisor_override"] or 0,
        }
        y = emitted(op, inputs, attrs, meta_outputs)
        return ge.Squeeze(sized(y, [1, *meta_outputs.symsize]), axis=[0]) if alone else y

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    return convert


def adaptive_gradient(op: str) -> Any:
    def convert(grad_output: Value, self: Value, *, meta_outputs: TensorSpec) -> Value:
        """_adaptive_avg_pool2d_backward(Tensor grad_output, Tensor self) -> Tensor"""
        return emitted(op, [grad_output, ge.Shape(self, dtype=9)], {}, meta_outputs)

    return convert


AVERAGES = {
    aten.avg_pool2d.default: "AvgPoolV2",
    aten.avg_pool3d.default: "AvgPool3D",
    aten.avg_pool2d_backward.default: "AvgPoolV2Grad",
    aten.avg_pool3d_backward.default: "AvgPool3DGrad",
}
for target, op in AVERAGES.items():
    REGISTRY.register(target, average(target, op))
REGISTRY.register(aten._adaptive_avg_pool2d_backward.default, adaptive_gradient("AdaptiveAvgPool2dGrad"))
REGISTRY.register(aten._adaptive_avg_pool3d_backward.default, adaptive_gradient("AdaptiveAvgPool3dGrad"))
