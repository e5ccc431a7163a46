"""Activations made of pieces and gates, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import constant, direct, emitted, sized
from airgraph.convert.promote import promoted, real, to
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten

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


@converts(aten._safe_softmax.default)
def safe_softmax(self: Value, dim: int, dtype: torch.dtype | None = None, *, meta_outputs: TensorSpec) -> Value:
    """_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor: a row of -inf gives zeros"""
    real(self)
    if self.dtype != meta_outputs.dtype:
        raise UnsupportedConversion("softmax with a result of another type")
    hidden = ge.Equal(self, to(float("-inf"), self.dtype))
    rows = ge.ReduceAll(hidden, [dim] if self.rank else [], keep_dims=True)
    return ge.SelectV2(rows, to(0.0, self.dtype), ge.SoftmaxV2(self, axes=[dim]))


@converts(aten.threshold.default)
def threshold(self: Value, threshold: Any, value: Any) -> Value:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    real(self)
    return ge.ThresholdV2(self, exact("threshold", threshold), exact("value", value))


def exact(name: str, number: Any) -> Value:
    """All digits of a number: PyTorch rounds it to the tensor's type itself."""
    dtype = DataType.DT_DOUBLE if isinstance(constant(name, number), float) else DataType.DT_INT64
    return ge.Const(number, dtype=int(dtype))
