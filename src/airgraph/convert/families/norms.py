"""Normalisations over layers, groups and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from airgraph.convert.direct import constant, direct, emitted
from airgraph.convert.registry import REGISTRY, NoConversion, TensorSpec, converts
from airgraph.ir.graph import Value
from airgraph.ir.types import Dim

aten = torch.ops.aten
Outputs = list[Value | None]

direct(aten.native_layer_norm.default, "LayerNormV4", "x=input normalized_shape gamma=weight beta=bias epsilon=eps")
direct(aten.native_layer_norm_backward.default, "LayerNormGradV3",
       "dy=grad_out x=input rstd mean gamma=weight beta=bias normalized_shape output_mask")  # fmt: skip
direct(aten._native_batch_norm_legit_no_training.default, "BNInfer",
       "x=input scale=weight offset=bias mean=running_mean variance=running_var momentum epsilon=eps")  # fmt: skip
direct(aten.native_batch_norm_backward.default, "BatchNormGradV3",
       "dy=grad_out x=input weight running_mean running_var save_mean save_rstd=save_invstd is_training=train epsilon=eps "
       "output_mask")  # fmt: skip
direct(aten.batch_norm_elemt.default, "BatchNormElemt", "x=input weight bias mean invstd eps")
direct(aten.batch_norm_backward_reduce.default, "SyncBatchNormBackwardReduce",
       "grad_output=grad_out x=input mean invstd weight input_g weight_g bias_g")  # fmt: skip
direct(aten.batch_norm_backward_elemt.default, "SyncBatchNormBackwardElemt",
       "grad_output=grad_out x=input mean invstd weight sum_dy sum_dy_xmu count")  # fmt: skip


@converts(aten.native_group_norm.default)
def group_norm(input: Value, weight: Value | None, bias: Value | None, N: Any, C: Any, HxW: Any, group: Any,
               eps: float, *, meta_outputs: list[TensorSpec]) -> Outputs:  # fmt: skip
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps)
    -> (Tensor, Tensor, Tensor)"""
    same_sizes(input, N, C)
    attrs = {"num_groups": constant("group", group), "eps": constant("eps", eps)}
    return emitted("GroupNormV2", [input, weight, bias], attrs, meta_outputs)


@converts(aten.native_group_norm_backward.default)
def group_norm_backward(grad_out: Value, input: Value, mean: Value, rstd: Value, weight: Value | None, N: Any, C: Any,
                        HxW: Any, group: Any, output_mask: list[bool], *,
                        meta_outputs: list[TensorSpec]) -> Outputs:  # fmt: skip
    """native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N,
    SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""
    same_sizes(input, N, C)
    attrs = {"num_groups": constant("group", group), "output_mask": list(output_mask)}
    return emitted("GroupNormGrad", [grad_out, mean, rstd, input, weight], attrs, meta_outputs)


def same_sizes(x: Value, *numbers: Any) -> None:
    """The first sizes of x are these; the engine takes them from there."""
    sizes: list[Dim] = [n.known if isinstance(n, Value) else n for n in numbers]
    if x.rank < len(sizes) or list((x.type.shape or ())[: len(sizes)]) != sizes:
        raise NoConversion("sizes that are not those of the input")


@converts(aten._native_batch_norm_legit_functional.default)
def batch_norm(input: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value,
               training: bool, momentum: Any, eps: Any, *, meta_outputs: list[TensorSpec]) -> Outputs:  # fmt: skip
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean,
    Tensor running_var, bool training, float momentum, float eps)
    -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)"""
    y, save_mean, save_rstd, *running = meta_outputs
    inputs = [input, weight, bias, running_mean, running_var]
    y, *running, save_mean, save_rstd = normalised(inputs, training, momentum, eps, [y, *running, save_mean, save_rstd])
    return [y, save_mean, save_rstd, *running]


@converts(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_stats(input: Value, weight: Value | None, bias: Value | None, training: bool, momentum: Any,
                             eps: Any, *, meta_outputs: list[TensorSpec]) -> Outputs:  # fmt: skip
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum,
    float eps) -> (Tensor, Tensor, Tensor)"""
    y, save_mean, save_rstd = meta_outputs
    expected = [y, None, None, save_mean, save_rstd]
    y, _, _, save_mean, save_rstd = normalised([input, weight, bias, None, None], training, momentum, eps, expected)
    return [y, save_mean, save_rstd]


def normalised(inputs: list[Value | None], training: bool, momentum: Any, eps: Any, expected: list[Any]) -> list[Any]:
    attrs = {"epsilon": constant("eps", eps), "momentum": constant("momentum", momentum), "is_training": training}
    return emitted("BatchNormV3", inputs, attrs, expected)


# -- element types --------------------------------------------------------------------------------------------------
def of_one_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """With float32 parameters beside a half-precision input PyTorch keeps float32 statistics, and FX says they are half;
    a graph that believes FX would round them. PyTorch runs such a norm itself."""

    @functools.wraps(function)
    def convert(*args: Any, **kwargs: Any) -> Any:
        if len({v.dtype for v in args if isinstance(v, Value) and v.dtype.is_float}) > 1:
            raise NoConversion("parameters of another type than the input")
        return function(*args, **kwargs)

    return convert


for target, converter in list(REGISTRY.converters.items()):
    if "_norm" in str(target) and str(target).startswith(("aten.native_", "aten._native_")):
        REGISTRY.register(target, of_one_type(converter.function))
