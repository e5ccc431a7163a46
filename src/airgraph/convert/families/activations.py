"""Activations and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import constant, direct, emitted, sized
from airgraph.convert.promote import promoted, real
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten


@converts(aten.silu.default)
def silu(self: Value) -> Value:
    """silu(Tensor self) -> Tensor"""
    real(self)
    return ge.Swish(self, scale=1.0)


@converts(aten.gelu.default)
def gelu(self: Value, *, approximate: str = "none") -> Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    return ge.Gelu(self, approximate=approximate)


@converts(aten.gelu_backward.default)
def gelu_backward(grad_output: Value, self: Value, *, approximate: str = "none") -> Value:
    """gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor"""
    return ge.GeluGrad(grad_output, self, ge.Gelu(self, approximate=approximate), approximate=approximate)


@converts(aten.leaky_relu.default)
def leaky_relu(self: Value, negative_slope: Any = 0.01) -> Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    if not isinstance(negative_slope, int | float):
        raise UnsupportedConversion("negative_slope is not a constant")
    return ge.LeakyRelu(self, negative_slope=float(negative_slope))


@converts(aten.threshold_backward.default)
def threshold_backward(grad_output: Value, self: Value, threshold: Any) -> Value:
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    if not isinstance(threshold, int | float):
        raise UnsupportedConversion("threshold is not a constant")
    if threshold == 0:
        return ge.ReluGrad(grad_output, self)
    return ge.ThresholdGradV2D(grad_output, self, threshold=float(threshold))


@converts(aten.sigmoid_backward.default)
def sigmoid_backward(grad_output: Value, output: Value) -> Value:
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    real(grad_output, output)
    return ge.SigmoidGrad(output, grad_output)


@converts(aten.tanh_backward.default)
def tanh_backward(grad_output: Value, output: Value) -> Value:
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    real(grad_output, output)
    return ge.TanhGrad(output, grad_output)


ROWS = {
    aten.elu.default: ("Elu", "x=self alpha scale input_scale"),
    aten.elu_backward.default: (
        "EluGradV2",
        "grads=grad_output activations=self_or_result alpha scale input_scale is_result",
    ),
    aten.celu.default: ("CeluV2", "x=self alpha"),
    aten.glu.default: ("GLU", "x=self dim"),
    aten.glu_backward.default: ("GLUGrad", "y_grad=grad_output x=self dim"),
    aten.hardswish.default: ("HardSwish", "x=self"),
    aten.hardswish_backward.default: ("HardSwishGrad", "grad=grad_output x=self"),
    aten.hardsigmoid.default: ("HardSigmoid", "input_x=self"),
    aten.hardsigmoid_backward.default: ("HardSigmoidGrad", "grads=grad_output input_x=self"),
    aten.hardtanh_backward.default: ("HardtanhGrad", "result=self grad=grad_output min_val max_val"),
    aten.mish.default: ("Mish", "x=self"),
    aten.mish_backward.default: ("MishGrad", "grad=grad_output x=self"),
    aten.log_sigmoid_backward.default: ("LogSigmoidGrad", "grads=grad_output features=self buffer"),
    aten._prelu_kernel.default: ("PRelu", "x=self weight"),
    aten._prelu_kernel_backward.default: ("PReluGrad", "grads=grad_output features=self weights=weight"),
    aten.leaky_relu_backward.default: (
        "LeakyReluGrad",
        "gradients=grad_output features=self negative_slope self_is_result",
    ),
    aten.silu_backward.default: ("SiluGrad", "dy=grad_output x=self"),
    aten.softplus.default: ("SoftplusV2", "x=self beta threshold"),
    aten.softplus_backward.default: (
        "SoftplusV2Grad",
        "input_gradients=grad_output input_features=self beta threshold",
    ),
    aten.softshrink_backward.default: ("SoftShrinkGrad", "input_grad=grad_output input_x=self lambd"),
    aten.hardshrink_backward.default: ("HardShrinkGrad", "gradients=grad_out features=self lambd"),
}
for target, row in ROWS.items():
    direct(target, *row)


@converts(aten.hardtanh.default)
def hardtanh(self: Value, min_val: Any = -1, max_val: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    bounds = (constant("min_val", min_val), constant("max_val", max_val))
    if self.dtype != meta_outputs.dtype or not self.dtype.is_float:
        raise UnsupportedConversion("hardtanh of integers")
    x, low, high = promoted(self, *bounds, dtype=self.dtype)
    if bounds[0] >= bounds[1]:  # all numbers become the upper one, a NaN stays
        return ge.SelectV2(ge.IsNan(x), x, ge.Fill(ge.Shape(x), high, place=x.type.place))
    return ge.ClipByValueV2(x, low, high)


@converts(aten.log_sigmoid_forward.default)
def log_sigmoid(self: Value, *, meta_outputs: list[TensorSpec]) -> list[Value]:
    """log_sigmoid_forward(Tensor self) -> (Tensor output, Tensor buffer)"""
    y, buffer = emitted("LogSigmoid", [self], {}, meta_outputs)
    return [y, ge.Identity(sized(buffer, meta_outputs[1].symsize))]


@converts(aten.threshold.default)
def threshold(self: Value, threshold: Any, value: Any) -> Value:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    real(self)
    return ge.ThresholdV2(self, exact("threshold", threshold), exact("value", value))


def exact(name: str, number: Any) -> Value:
    """All digits of a number: PyTorch rounds it to the tensor's type itself."""
    dtype = DataType.DT_DOUBLE if isinstance(constant(name, number), float) else DataType.DT_INT64
    return ge.Const(number, dtype=int(dtype))
