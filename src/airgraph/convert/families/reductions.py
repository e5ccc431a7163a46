"""Sums, means, extremes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.promote import promoted, real, to
from airgraph.convert.registry import REGISTRY, NoConversion, TensorSpec
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
            raise NoConversion("symbolic axes")
        if op == "ReduceMean" and dtype is not None and self.dtype != meta_outputs.dtype:
            real(self)
            return ge.ReduceMeanWithCast(self, axes_of(self, dim), keep_dims=keepdim, dtype=int(meta_outputs.dtype))
        (x,) = promoted(self, dtype=meta_outputs.dtype)
        return getattr(ge, op)(x, axes_of(x, dim), keep_dims=keepdim)

    return convert


def truth(op: str) -> Any:
    """any and all. Those of uint8 are uint8 again."""

    def convert(self: Value, dim: Any = None, keepdim: bool = False, *, meta_outputs: TensorSpec) -> Value:
        (x,) = promoted(self, dtype=DataType.DT_BOOL)
        if dim == []:  # unlike for sums: over nothing
            return to(x, meta_outputs.dtype)
        return to(getattr(ge, op)(x, axes_of(x, dim), keep_dims=keepdim), meta_outputs.dtype)

    return convert


def total(op: str) -> Any:
    """For reductions over everything."""

    def convert(self: Value, *, dtype: Any = None, meta_outputs: TensorSpec) -> Value:
        return reduction(op)(self, dtype=dtype, meta_outputs=meta_outputs)

    return convert


REDUCTIONS = {
    aten.sum.dim_IntList: "ReduceSum",
    aten.mean.dim: "ReduceMean",
    aten.amax.default: "ReduceMax",
    aten.amin.default: "ReduceMin",
    aten.prod.dim_int: "ReduceProd",
}
TRUTHS = {
    aten.any.default: "ReduceAny",
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
