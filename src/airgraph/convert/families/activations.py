"""Activations, softmax and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import real
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten


@converts(aten.relu.default)
def relu(self: Value) -> Value:
    """relu(Tensor self) -> Tensor"""
    return ge.Relu(self)


@converts(aten.sigmoid.default)
def sigmoid(self: Value, *, meta_outputs: TensorSpec) -> Value:
    """sigmoid(Tensor self) -> Tensor"""
    real(self)
    return ge.Sigmoid(self if self.dtype == meta_outputs.dtype else ge.Cast(self, dst_type=int(meta_outputs.dtype)))


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


@converts(aten._softmax.default)
def softmax(self: Value, dim: int, half_to_float: bool) -> Value:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    if half_to_float:
        raise UnsupportedConversion("softmax of float16 with a float32 result")
    return ge.SoftmaxV2(self, axes=[dim])


@converts(aten._log_softmax.default)
def log_softmax(self: Value, dim: int, half_to_float: bool) -> Value:
    """_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    if half_to_float:
        raise UnsupportedConversion("log_softmax of float16 with a float32 result")
    return ge.LogSoftmaxV2(self, axes=[dim])


@converts(aten._softmax_backward_data.default)
def softmax_backward(
    grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype, *, meta_outputs: TensorSpec
) -> Value:
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    if meta_outputs.dtype != output.dtype or grad_output.dtype != output.dtype:
        raise UnsupportedConversion("the gradient of softmax in another type than its output")
    return ge.SoftmaxGrad(output, grad_output, axes=[dim])


@converts(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype, *, meta_outputs: TensorSpec
) -> Value:
    """_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    if meta_outputs.dtype != output.dtype or grad_output.dtype != output.dtype:
        raise UnsupportedConversion("the gradient of log_softmax in another type than its output")
    return ge.LogSoftmaxGrad(grad_output, output, axis=[dim])
