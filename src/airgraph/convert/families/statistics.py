"""Variances, norms, sums of a special kind."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.chip import newer
from airgraph.convert.families.reductions import axes_of
from airgraph.convert.promote import promoted, real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten


# -- variances ------------------------------------------------------------------------------------------------------
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


# -- norms ----------------------------------------------------------------------------------------------------------
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


# -- sums -----------------------------------------------------------------------------------------------------------
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
