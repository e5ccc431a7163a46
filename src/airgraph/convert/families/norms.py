"""Normalisations over layers, groups and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.convert.chip import newer
from airgraph.convert.direct import constant, direct, emitted, sized
from airgraph.convert.promote import to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType, Dim

aten = torch.ops.aten
Outputs = list[Value | None]
HALVES = (DataType.DT_FLOAT16, DataType.DT_BF16)
direct(aten.native_layer_norm.default, "LayerNormV4", "x=input normalized_shape gamma=weight beta=bias epsilon=eps")
direct(
    aten.batch_norm_backward_reduce.default,
    "SyncBatchNormBackwardReduce",
    "grad_output=grad_out x=input mean invstd weight input_g weight_g bias_g",
)


# -- layers ---------------------------------------------------------------------------------------------------------
@converts(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad_out: Value,
    input: Value,
    normalized_shape: Any,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: list[bool],
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd,
    Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""
    gamma = filled(normalized_shape, 1.0, input) if weight is None else weight
    inputs = [grad_out, input, rstd, mean, gamma, bias, normalized_shape]
    return emitted("LayerNormGradV3", inputs, {"output_mask": output_mask}, meta_outputs)


def filled(dims: Any, number: float, like: Value) -> Value:
    return ge.Fill(dims, to(number, like.dtype), place=like.type.place)


@converts(aten._fused_rms_norm.default)
def rms_norm(
    input: Value, normalized_shape: Any, weight: Value | None, eps: float | None, *, meta_outputs: list[TensorSpec]
) -> Outputs:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)

    In the operations it consists of: GE's RmsNorm rounds before it multiplies by the weight, PyTorch's kernel does not.
    """
    if eps is None:
        raise UnsupportedConversion("the smallest eps, which depends on the kernel")
    wide = meta_outputs[1].dtype
    x = to(input, wide)
    axes = list(range(input.rank - len(normalized_shape), input.rank))
    rstd = ge.Rsqrt(ge.Add(ge.ReduceMean(ge.Mul(x, x), axes, keep_dims=True), to(eps, wide)))
    y = ge.Mul(x, rstd)
    y = y if weight is None else ge.Mul(y, to(weight, wide))
    return [to(y, input.dtype), rstd]


# -- groups ---------------------------------------------------------------------------------------------------------
@converts(aten.native_group_norm.default)
def group_norm(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: Any,
    eps: float,
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps)
    -> (Tensor, Tensor, Tensor)"""
    same_sizes(input, N, C)
    attrs = {"num_groups": constant("group", group), "eps": constant("eps", eps)}
    gamma, beta = (filled(C, number, input) if v is None else v for v, number in ((weight, 1.0), (bias, 0.0)))
    if newer():
        return emitted("GroupNormV2", [input, gamma, beta], attrs, meta_outputs)
    y, mean, _ = emitted("GroupNorm", [input, gamma, beta], attrs, [*meta_outputs[:2], None])
    variance = sized(y.node.outputs[2], meta_outputs[2].symsize)
    rstd = ge.Rsqrt(ge.Add(variance, to(eps, variance.dtype)))
    return [y, mean, to(rstd, meta_outputs[2].dtype)]


@converts(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad_out: Value,
    input: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: Any,
    output_mask: list[bool],
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N,
    SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""
    same_sizes(input, N, C)
    attrs = {"num_groups": constant("group", group), "output_mask": list(output_mask)}
    flat, groups, channels = (ge.Pack(numbers, N=len(numbers)) for numbers in ([N, C, HxW], [N, group], [C]))
    dy, x = (ge.Reshape(v, flat) for v in (grad_out, input))
    mean, rstd = (ge.Reshape(v, groups) for v in (mean, rstd))
    gamma = ge.Reshape(filled(channels, 1.0, input) if weight is None else weight, channels)
    dx, *rest = emitted("GroupNormGrad", [dy, mean, rstd, x, gamma], attrs, meta_outputs)
    return [None if dx is None else ge.Reshape(dx, shape_of(input)), *rest]


def same_sizes(x: Value, *numbers: Any) -> None:
    """The first sizes of x are these; the engine takes them from there."""
    sizes: list[Dim] = [n.known if isinstance(n, Value) else n for n in numbers]
    if x.rank < len(sizes) or list((x.type.shape or ())[: len(sizes)]) != sizes:
        raise UnsupportedConversion("sizes that are not those of the input")


def shape_of(x: Value) -> Value:
    return ge.Shape(x, dtype=int(DataType.DT_INT64))


# -- batches --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Batch:
    """The input of a batch norm as GE's kernels take it, [n, channels, height, width] or with a depth, and the way back.

    x: [n, c] → Unsqueeze → [n, c, 1, 1] → BNInfer → Squeeze → [n, c]
    """

    x: Value
    most: int  # dimensions the kernel takes

    @property
    def sizes(self) -> Value:
        return shape_of(self.x)

    @property
    def folds(self) -> bool:
        return self.x.rank > self.most and 0 not in (self.x.type.shape or (0,))

    def given(self, parameter: Value | None, number: float) -> Value:
        """A number for each channel where there is no parameter."""
        return filled(ge.Gather(self.sizes, 1), number, self.x) if parameter is None else parameter

    def taken(self, x: Value) -> Value:
        if x.rank in (2, 3):
            return ge.Unsqueeze(x, axes=list(range(x.rank, 4)))
        if not self.folds:
            return x
        first = [ge.Gather(self.sizes, i) for i in range(self.most - 1)]
        return ge.Reshape(x, ge.Pack([*first, -1], N=self.most))

    def back(self, y: Value) -> Value:
        if self.x.rank in (2, 3):
            return ge.Squeeze(y, axis=list(range(3, self.x.rank - 1, -1)))
        return ge.Reshape(y, self.sizes) if self.folds else y


def batch_of(x: Value, most: int = 5) -> Batch:
    if x.rank < 2:
        raise UnsupportedConversion("a batch norm of fewer than two dimensions")
    return Batch(x, most)


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Any,
    eps: Any,
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean,
    Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""
    batch = batch_of(input, 5 if newer() else 4)
    x, scale, offset = batch.taken(input), batch.given(weight, 1.0), batch.given(bias, 0.0)
    parameters = [x, scale, offset, running_mean, running_var]
    if newer():
        y, *_ = normalised(parameters, False, momentum, eps, [meta_outputs[0], *[None] * 4])
    else:
        y = emitted("BNInfer", parameters, {"epsilon": constant("eps", eps)}, meta_outputs[0])
    if meta_outputs[1].symsize == (0,):
        return [batch.back(y), *[filled([0], 0.0, input)] * 2]
    # A GPU hands on the statistics it has used.
    variance = to(running_var, meta_outputs[2].dtype)
    return [batch.back(y), to(running_mean, meta_outputs[1].dtype), ge.Rsqrt(ge.Add(variance, to(eps, variance.dtype)))]


@converts(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: Any,
    eps: Any,
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean,
    Tensor running_var, bool training, float momentum, float eps)
    -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)"""
    running = [ge.TensorMove(v) for v in (running_mean, running_var)]
    return batch_norm_with(input, weight, bias, running, training, momentum, eps, meta_outputs)


def batch_norm_with(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running: list[Value],
    training: bool,
    momentum: Any,
    eps: Any,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """The outputs, then the new running values, if FX asks for them."""
    spec, *saved = meta_outputs[:3]
    batch = batch_of(input)
    inputs = [batch.taken(input), batch.given(weight, 1.0), batch.given(bias, 0.0), *running]
    expected = [spec, *(meta_outputs[3:] or (None, None)), *saved]
    y, *new, save_mean, save_rstd = normalised(inputs, training, momentum, eps, expected)
    return [batch.back(y), save_mean, save_rstd, *new]


@converts(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_stats(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: Any,
    eps: Any,
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum,
    float eps) -> (Tensor, Tensor, Tensor)"""
    batch = batch_of(input)
    if not training:
        raise UnsupportedConversion("inference without statistics")
    running = [batch.given(None, number) for number in (0.0, 1.0)]
    return batch_norm_with(input, weight, bias, running, training, momentum, eps, meta_outputs)[:3]


def normalised(
    inputs: Sequence[Value | None], training: bool, momentum: Any, eps: Any, expected: list[Any]
) -> list[Any]:
    attrs = {"epsilon": constant("eps", eps), "momentum": constant("momentum", momentum), "is_training": training}
    make = widened if is_wide(inputs[0], expected[-1], training) else emitted
    return make("BatchNormV3", inputs, attrs, expected)


def is_wide(x: Value | None, statistics: TensorSpec | Value | None, training: bool) -> bool:
    """Statistics of halves that are kept in float32, which FX knows (capture/dtypes.py): a GPU's, and a CPU's beside
    float32 parameters. (Else a CPU rounds them.)"""
    halves = x is not None and x.dtype in HALVES
    return training and halves and statistics is not None and statistics.dtype == DataType.DT_FLOAT


def widened(op: str, inputs: Sequence[Value | None], attrs: dict[str, Any], meta_outputs: list[Any]) -> list[Any]:
    """The node in float32, its results as FX expects them; the first has the shape of the first input."""
    given = [v if v is None else to(v, DataType.DT_FLOAT) for v in inputs]
    if "output_mask" in attrs:
        attrs = {**attrs, "output_mask": [meta is not None for meta in meta_outputs]}
    results = getattr(ge, op)(*given, **attrs)
    shapes = [given[0].type.shape if given[0] is not None else None, *(m and m.symsize for m in meta_outputs[1:])]
    return [
        None if meta is None else to(sized(value, shape or ()), meta.dtype)
        for value, meta, shape in zip(results, meta_outputs, shapes)
    ]


@converts(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad_out: Value,
    input: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: Any,
    output_mask: list[bool],
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, Tensor? running_var,
    Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""
    batch = batch_of(input)
    dy, x, scale = batch.taken(grad_out), batch.taken(input), batch.given(weight, 1.0)
    attrs = {"is_training": train, "epsilon": constant("eps", eps), "output_mask": output_mask}
    inputs = [dy, x, scale, running_mean, running_var, save_mean, save_invstd]
    make = widened if is_wide(input, save_mean, train) else emitted
    dx, *rest = make("BatchNormGradV3", inputs, attrs, meta_outputs)
    return [None if dx is None else batch.back(sized(dx, x.type.shape or ())), *rest]


# -- the parts of a batch norm over several processes ---------------------------------------------------------------
@converts(aten.batch_norm_elemt.default)
def batch_norm_elements(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    invstd: Value,
    eps: Any,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    """batch_norm_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, float eps) -> Tensor

    invstd is all that counts, whatever ε it was made with: the variance it stands for is taken with an ε of 0."""
    batch = batch_of(input, 5 if newer() else 4)
    one, none = (to(number, invstd.dtype) for number in (1.0, 0.0))
    variance = ge.Sub(ge.Div(one, ge.Mul(invstd, invstd)), none)
    scale, offset = (each_channel(v, number, batch, mean) for v, number in ((weight, 1.0), (bias, 0.0)))
    parameters = [batch.taken(input), scale, offset, mean, variance]
    if newer():
        y, *_ = normalised(parameters, False, 0.1, 0.0, [meta_outputs, *[None] * 4])
    else:
        y = emitted("BNInfer", parameters, {"epsilon": 0.0}, meta_outputs)
    return batch.back(y)


@converts(aten.batch_norm_backward_elemt.default)
def batch_norm_backward_elements(
    grad_out: Value,
    input: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    sum_dy: Value,
    sum_dy_xmu: Value,
    count: Value,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    """batch_norm_backward_elemt(Tensor grad_out, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor sum_dy,
    Tensor sum_dy_xmu, Tensor count) -> Tensor"""
    batch = batch_of(input)
    total = ge.ReduceSum(to(count, DataType.DT_INT64), list(range(count.rank)), keep_dims=False)
    means = [ge.RealDiv(v, to(total, v.dtype)) for v in (sum_dy, sum_dy_xmu)]
    scale = each_channel(weight, 1.0, batch, mean)
    axes, sizes = [0, *range(2, input.rank)], batch.sizes
    numbers = [ge.BroadcastTo(ge.Unsqueeze(v, axes=axes), sizes) for v in (mean, invstd, scale, *means)]
    return emitted("SyncBatchNormBackwardElemt", [grad_out, input, *numbers], {}, meta_outputs)


def each_channel(parameter: Value | None, number: float, batch: Batch, like: Value) -> Value:
    return filled(ge.Gather(batch.sizes, 1), number, like) if parameter is None else parameter


# -- element types --------------------------------------------------------------------------------------------------
def of_one_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Float32 parameters beside a half-precision input: PyTorch runs such a norm itself, but for batch norms that keep
    float32 statistics, or hand on none."""

    @functools.wraps(function)
    def convert(*args: Any, **kwargs: Any) -> Any:
        training = next((a for a in args if isinstance(a, bool)), False)
        values = [v for v in args if isinstance(v, Value) and v.dtype.is_float]
        statistics = args[5] if function is batch_norm_backward else kwargs["meta_outputs"][1]
        if len({v.dtype for v in values}) > 1 and not (
            is_wide(values[0], statistics, training and "batch_norm" in function.__name__)
            or (function is batch_norm_inference and is_half_in_single(values, kwargs["meta_outputs"]))
        ):
            raise UnsupportedConversion("parameters of another type than the input")
        return function(*args, **kwargs)

    return convert


def is_half_in_single(values: Sequence[Value], meta_outputs: list[TensorSpec]) -> bool:
    """A half-precision input, float32 parameters, as under autocast, and no statistics: a CPU hands on none."""
    x, *parameters = values
    single = all(v.dtype == DataType.DT_FLOAT for v in parameters)
    return x.dtype in HALVES and single and meta_outputs[1].symsize == (0,)


for target, converter in list(REGISTRY.converters.items()):
    if "_norm" in str(target) and str(target).startswith(("aten.native_", "aten._native_")):
        REGISTRY.register(target, of_one_type(converter.function))
