"""Sums, means, extremes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
