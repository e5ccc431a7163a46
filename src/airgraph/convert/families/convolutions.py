"""Convolutions and poolings."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import bound, constant, direct, emitted
from airgraph.convert.registry import REGISTRY, TensorSpec, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten

WINDOW = "ksize=kernel_size strides=stride pads=padding dilation ceil_mode"
ROWS = {
    aten.max_pool2d_with_indices.default: ("MaxPoolWithArgmaxV1", f"x=self {WINDOW}"),
    aten.max_pool3d_with_indices.default: ("MaxPool3DWithArgmaxV2", f"x=self {WINDOW}"),
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
def convolution(input: Value, weight: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
                transposed: bool, output_padding: Any, groups: Any, *, meta_outputs: TensorSpec) -> Value:  # fmt: skip
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation,
    bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""
    numbers = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    attrs = {name: constant(name, value) for name, value in {**numbers, "groups": groups}.items()}
    dims, inputs = weight.rank - 2, [input, weight, bias]
    if transposed or dims not in (2, 3) or input.rank != weight.rank:
        return emitted("Convolution", inputs, {**attrs, "transposed": transposed}, meta_outputs)
    strides, pads, dilations = (spread(attrs[name], dims) for name in ("stride", "padding", "dilation"))
    full = {
        "strides": [1, 1, *strides],
        "pads": [p for pad in pads for p in (pad, pad)],
        "dilations": [1, 1, *dilations],
    }
    return emitted(f"Conv{dims}D", inputs, {**full, "groups": attrs["groups"]}, meta_outputs)


def spread(numbers: list[int], dims: int) -> list[int]:
    """One number stands for all dimensions."""
    return numbers * dims if len(numbers) == 1 else numbers


@converts(aten.convolution_backward.default)
def convolution_backward(grad_output: Value, input: Value, weight: Value, bias_sizes: Any, stride: Any, padding: Any,
                         dilation: Any, transposed: bool, output_padding: Any, groups: Any, output_mask: list[bool], *,
                         meta_outputs: list[TensorSpec]) -> list[Value | None]:  # fmt: skip
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride,
    SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask)
    -> (Tensor, Tensor, Tensor)"""
    numbers = {"bias_sizes": bias_sizes, "stride": stride, "padding": padding, "dilation": dilation,
               "transposed": transposed, "output_padding": output_padding, "groups": groups,
               "output_mask": output_mask}  # fmt: skip
    attrs = {name: constant(name, value) for name, value in numbers.items()}
    return emitted("ConvolutionBackward", [grad_output, input, weight], attrs, meta_outputs)


# -- averages -------------------------------------------------------------------------------------------------------
def average(target: Any, op: str) -> Any:
    """avg_pool and its gradient, which reads only the shape of the input."""

    def convert(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Value:
        given = {
            name: constant(name, v) if not isinstance(v, Value) else v
            for name, v in bound(target, args, kwargs).items()
        }
        grad = given.get("grad_output")
        inputs = [given["self"]] if grad is None else [ge.Shape(given["self"], dtype=9), grad]
        attrs = {"ksize": given["kernel_size"], "strides": given["stride"], "pads": given["padding"],
                 "ceil_mode": given["ceil_mode"], "exclusive": not given["count_include_pad"],
                 "divisor_override": given["divisor_override"] or 0}  # fmt: skip
        return emitted(op, inputs, attrs, meta_outputs)

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
