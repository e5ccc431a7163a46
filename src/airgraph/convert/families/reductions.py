"""Reductions over axes: sums, extremes, means, variances, norms, histograms; softmax and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.chip import newer
from airgraph.convert.families.matrices import REAL
from airgraph.convert.promote import promoted, real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten


def axes_of(x: Value, dims: Sequence[int] | int | None) -> list[int]:
    """No dims means all of them; a scalar has none."""
    if x.rank == 0:
        return []
    listed = [dims] if isinstance(dims, int) else list(dims or range(x.rank))
    return [d % x.rank for d in listed]


def reduction(op: str) -> Any:
    """For reductions whose last argument is the type to compute in."""

    def convert(
        self: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta_outputs: TensorSpec
    ) -> Value:
        if isinstance(dim, Value):
            raise UnsupportedConversion("symbolic axes")
        if op == "ReduceMean" and dtype is not None and self.dtype != meta_outputs.dtype:
            real(self)
            return ge.ReduceMeanWithCast(self, axes_of(self, dim), keep_dims=keepdim, dtype=int(meta_outputs.dtype))
        (x,) = promoted(self, dtype=meta_outputs.dtype)
        return getattr(ge, op)(x, axes_of(x, dim), keep_dims=keepdim)

    return convert


@converts(aten.sum.dim_IntList)
def sum_(self: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta_outputs: TensorSpec) -> Value:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    if isinstance(dim, Value) or 0 not in (self.type.shape or ()):
        return reduction("ReduceSum")(self, dim, keepdim, dtype=dtype, meta_outputs=meta_outputs)
    real(self)
    sizes = remaining(self, axes_of(self, dim), keepdim)
    return ge.Fill(sizes, to(0, meta_outputs.dtype), place=meta_outputs.place)


def remaining(x: Value, axes: Sequence[int], keepdim: bool) -> Any:
    """The sizes of x without these axes."""
    sizes = [ge.Gather(ge.Shape(x, dtype=int(DataType.DT_INT64)), i) for i in range(x.rank)]
    kept = [1 if i in axes else size for i, size in enumerate(sizes) if keepdim or i not in axes]
    return ge.Pack(kept, N=len(kept)) if kept else []


def truth(op: str) -> Any:
    """any and all. Those of uint8 are uint8 again."""

    def convert(self: Value, dim: Any = None, keepdim: bool = False, *, meta_outputs: TensorSpec) -> Value:
        (x,) = promoted(self, dtype=DataType.DT_BOOL)
        if dim == []:  # unlike for sums: over nothing
            return to(x, meta_outputs.dtype)
        return to(getattr(ge, op)(x, axes_of(x, dim), keep_dims=keepdim), meta_outputs.dtype)

    return convert


@converts(aten.any.default)
def any_(self: Value, *, meta_outputs: TensorSpec) -> Value:
    """any(Tensor self) -> Tensor"""
    (x,) = promoted(self, dtype=DataType.DT_BOOL)
    x = ge.Unsqueeze(x, axes=[0]) if x.rank == 0 else x
    return to(ge.ReduceAny(x, axes_of(x, None), keep_dims=False), meta_outputs.dtype)


def total(op: str) -> Any:
    """For reductions over everything."""

    def convert(self: Value, *, dtype: Any = None, meta_outputs: TensorSpec) -> Value:
        return reduction(op)(self, dtype=dtype, meta_outputs=meta_outputs)

    return convert


REDUCTIONS = {
    aten.mean.dim: "ReduceMean",
    aten.amax.default: "ReduceMax",
    aten.amin.default: "ReduceMin",
    aten.prod.dim_int: "ReduceProd",
}
TRUTHS = {
    aten.any.dim: "ReduceAny",
    aten.any.dims: "ReduceAny",
    aten.all.default: "ReduceAll",
    aten.all.dim: "ReduceAll",
    aten.all.dims: "ReduceAll",
}
TOTALS = {
    aten.sum.default: "ReduceSum",
    aten.mean.default: "ReduceMean",
    aten.max.default: "ReduceMax",
    aten.min.default: "ReduceMin",
    aten.prod.default: "ReduceProd",
}
for target, op in REDUCTIONS.items():
    REGISTRY.register(target, reduction(op))
for target, op in TOTALS.items():
    REGISTRY.register(target, total(op))
for target, op in TRUTHS.items():
    REGISTRY.register(target, truth(op))


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


@converts(aten._safe_softmax.default)
def safe_softmax(self: Value, dim: int, dtype: torch.dtype | None = None, *, meta_outputs: TensorSpec) -> Value:
    """_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor: a row of -inf gives zeros"""
    real(self)
    if self.dtype != meta_outputs.dtype:
        raise UnsupportedConversion("softmax with a result of another type")
    hidden = ge.Equal(self, to(float("-inf"), self.dtype))
    rows = ge.ReduceAll(hidden, [dim] if self.rank else [], keep_dims=True)
    return ge.SelectV2(rows, to(0.0, self.dtype), ge.SoftmaxV2(self, axes=[dim]))


@converts(aten.histc.default)
def histc(self: Value, bins: Any = 100, min: Any = 0, max: Any = 0) -> Value:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor"""
    numbers = all(isinstance(n, int | float) for n in (bins, min, max))
    if not numbers or self.dtype not in REAL or not -torch.inf < min < max < torch.inf or bins < 1:
        raise UnsupportedConversion("only a histogram of floats between constant bounds is one of GE's")
    return ge.Histogram(self, bins=bins, min=float(min), max=float(max))


def spread(op: str, *, mean: bool) -> Any:
    """var, std (one output) and var_mean, std_mean (two)."""

    def convert(self: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value | list[Value]:
        real(self)
        attrs = {"dim": axes_of(self, dim), "correction": whole(correction), "keepdim": keepdim}
        results = getattr(ge, op)(self, **attrs, is_mean_out=mean)
        return results if mean else results[0]

    return convert


def whole(correction: Any) -> int:
    number = 1 if correction is None else correction
    if not isinstance(number, int | float) or int(number) != number:
        raise UnsupportedConversion("a correction that is no whole number")
    return int(number)


@converts(aten.std.correction)
def std(self: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value | list[Value]:
    """std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    if newer() or self.rank == 0 or 0 in (self.type.shape or ()):
        return spread("ReduceStdV2", mean=False)(self, dim, correction=correction, keepdim=keepdim)
    real(self)
    axes = axes_of(self, dim)
    mean = ge.ReduceMean(self, axes, keep_dims=keepdim)
    if not keepdim and len(axes) < self.rank:
        mean = ge.Unsqueeze(mean, axes=sorted(axes))
    mean = ge.Expand(mean, ge.Shape(self, dtype=int(DataType.DT_INT64)))
    return ge.ReduceStdWithMean(self, mean, dim=axes, correction=whole(correction), keepdim=keepdim)


REGISTRY.register(aten.var.correction, spread("ReduceVar", mean=False))
REGISTRY.register(aten.var_mean.correction, spread("ReduceVar", mean=True))
REGISTRY.register(aten.std_mean.correction, spread("ReduceStdV2", mean=True))


@converts(aten.linalg_vector_norm.default)
def vector_norm(
    self: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta_outputs: TensorSpec
) -> Value:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, …) -> Tensor"""
    (x,) = promoted(self, dtype=meta_outputs.dtype)
    if not isinstance(ord, int | float):
        raise UnsupportedConversion("the order is not a constant")
    axes = [] if not dim else axes_of(x, dim)
    return ge.LpNormV2(x, p=float(ord), axes=axes, keepdim=keepdim)


@converts(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm_dim(
    self: Value, p: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None, meta_outputs: TensorSpec
) -> Value:
    """norm.ScalarOpt_dim(Tensor self, Scalar? p, int[1] dim, bool keepdim=False) -> Tensor"""
    return vector_norm(self, 2 if p is None else p, dim, keepdim, meta_outputs=meta_outputs)


@converts(aten.norm.Scalar, aten.norm.ScalarOpt_dtype)
def norm(self: Value, p: Any = 2, *, dtype: Any = None, meta_outputs: TensorSpec) -> Value:
    """norm.Scalar(Tensor self, Scalar p=2) -> Tensor"""
    return norm_dim(self, p, None, meta_outputs=meta_outputs)


def summed(op: str) -> Any:
    def convert(
        self: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta_outputs: TensorSpec
    ) -> Value:
        (x,) = promoted(self, dtype=meta_outputs.dtype)
        return getattr(ge, op)(x, axes_of(x, dim), keep_dims=keepdim)

    return convert


REGISTRY.register(aten.nansum.default, summed("ReduceNansum"))


@converts(aten.logsumexp.default)
def logsumexp(self: Value, dim: Any, keepdim: bool = False, *, meta_outputs: TensorSpec) -> Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor: the largest is taken out, unless it is infinite"""
    (x,) = promoted(self, dtype=meta_outputs.dtype)
    axes = axes_of(x, dim)
    if 0 in (x.type.shape or ()):  # nothing has no largest
        return ge.ReduceLogSumExp(x, axes, keep_dims=keepdim)
    largest = ge.ReduceMax(x, axes, keep_dims=True)
    infinite = ge.Equal(ge.Abs(largest), to(float("inf"), x.dtype))
    shift = ge.MaskedFill(largest, infinite, to(0.0, x.dtype))
    rest = ge.ReduceLogSumExp(ge.Sub(x, shift), axes, keep_dims=keepdim)
    return ge.Add(rest, shift if keepdim or not axes else ge.Squeeze(shift, axis=axes))


@converts(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(self: Value, dim: Any = None) -> Value:
    """count_nonzero.dim_IntList(Tensor self, int[] dim) -> Tensor"""
    real(self)
    marked = self if self.dtype == DataType.DT_BOOL else ge.NotEqual(self, to(0, self.dtype))
    return ge.ReduceSum(to(marked, DataType.DT_INT64), axes_of(self, dim), keep_dims=False)


@converts(aten.aminmax.default)
def aminmax(self: Value, *, dim: int | None = None, keepdim: bool = False) -> list[Value]:
    """aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)"""
    real(self)
    axes = axes_of(self, dim)
    return [ge.ReduceMin(self, axes, keep_dims=keepdim), ge.ReduceMax(self, axes, keep_dims=keepdim)]
