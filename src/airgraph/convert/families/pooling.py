"""Pooling: maxima and averages of windows, and their gradients."""

from __future__ import annotations

from typing import Any

from airgraph.convert.direct import bound, constant, direct, emitted, sized
from airgraph.convert.families.convolutions import aten
from airgraph.convert.registry import REGISTRY, TensorSpec, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

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


def average(target: Any, op: str) -> Any:
    """avg_pool and its gradient, which reads only the shape of the input."""
    spatial_rank = 3 if "3D" in op else 2

    def convert(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Value:
        given = {
            name: constant(name, v) if not isinstance(v, Value) else v
            for name, v in bound(target, args, kwargs).items()
        }
        grad = given.get("grad_output")
        x, unbatched = given["self"], grad is None and given["self"].rank == spatial_rank + 1
        inputs = [ge.Unsqueeze(x, axes=[0]) if unbatched else x] if grad is None else [ge.Shape(x, dtype=9), grad]
        attrs = {
            "ksize": given["kernel_size"],
            "strides": given["stride"],
            "pads": given["padding"],
            "ceil_mode": given["ceil_mode"],
            "exclusive": not given["count_include_pad"],
            "divisor_override": given["divisor_override"] or 0,
        }
        y = emitted(op, inputs, attrs, meta_outputs)
        return ge.Squeeze(sized(y, [1, *meta_outputs.symsize]), axis=[0]) if unbatched else y

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
