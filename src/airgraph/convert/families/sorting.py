"""Sorting, the indices of extremes, scans, search."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import common_type, promoted, real
from airgraph.convert.registry import REGISTRY, TensorSpec, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
INT32, INT64 = int(DataType.DT_INT32), int(DataType.DT_INT64)


# -- sorting --------------------------------------------------------------------------------------------------------
@converts(aten.sort.default)
def sort(self: Value, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> list[Value]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    real(self)
    last = self.rank - 1
    attrs = {"descending": descending, "stable": bool(stable), "y2_dtype": INT64}
    if self.rank == 0 or dim % self.rank == last:
        return ge.Sort(self, axis=max(last, 0), **attrs)
    swap = list(range(self.rank))
    swap[dim % self.rank], swap[last] = last, dim % self.rank
    return [ge.Transpose(y, swap) for y in ge.Sort(ge.Transpose(self, swap), axis=last, **attrs)]


@converts(aten.sort.stable)
def sort_stable(self: Value, *, stable: bool | None, dim: int = -1, descending: bool = False) -> list[Value]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    return sort(self, dim, descending, stable=stable)


@converts(aten.topk.default)
def topk(self: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)"""
    real(self)
    return ge.TopKV2(self, k, sorted=sorted, dim=dim, largest=largest, indices_dtype=INT64)


def place(op: str, with_value: str) -> Any:
    """argmax, argmin: without an axis, the place in the flattened tensor."""

    def convert(self: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        real(self)
        if dim is None or self.rank == 0:
            found = getattr(ge, op)(ge.Reshape(self, [-1]), 0, dtype=INT64)
            return ge.Reshape(found, [1] * self.rank) if keepdim else found
        if keepdim:
            indices, _ = getattr(ge, with_value)(self, dimension=dim % self.rank, keep_dims=True)
            return ge.Cast(indices, dst_type=INT64)
        return getattr(ge, op)(self, dim % self.rank, dtype=INT64)

    return convert


def extreme(op: str) -> Any:
    """max and min along an axis, with the place."""

    def convert(self: Value, dim: int, keepdim: bool = False) -> list[Value]:
        real(self)
        indices, values = getattr(ge, op)(self, dimension=dim, keep_dims=keepdim)
        return [values, ge.Cast(indices, dst_type=INT64)]

    return convert


# -- running totals -------------------------------------------------------------------------------------------------
def running(op: str) -> Any:
    def convert(self: Value, dim: int, *, dtype: Any = None, meta_outputs: TensorSpec) -> Value:
        (x,) = promoted(self, dtype=meta_outputs.dtype)
        return getattr(ge, op)(x, dim % max(x.rank, 1))

    return convert


def running_extreme(op: str, axis: str) -> Any:
    def convert(self: Value, dim: int) -> list[Value]:
        real(self)
        return getattr(ge, op)(self, **{axis: dim})

    return convert


PLACES = {aten.argmax.default: ("ArgMaxV2", "ArgMaxWithValue"), aten.argmin.default: ("ArgMin", "ArgMinWithValue")}
EXTREMES = {aten.max.dim: "ArgMaxWithValue", aten.min.dim: "ArgMinWithValue"}
RUNNING = {
    aten.cumsum.default: "Cumsum",
    aten.cumprod.default: "Cumprod",
    aten.logcumsumexp.default: "CumulativeLogsumexp",
}
RUNNING_EXTREMES = {aten.cummax.default: ("Cummax", "dim"), aten.cummin.default: ("Cummin", "axis")}
for target, ops in PLACES.items():
    REGISTRY.register(target, place(*ops))
for table, make in ((EXTREMES, extreme), (RUNNING, running)):
    for target, op in table.items():
        REGISTRY.register(target, make(op))
for target, names in RUNNING_EXTREMES.items():
    REGISTRY.register(target, running_extreme(*names))


# -- search ---------------------------------------------------------------------------------------------------------
@converts(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    sorted_sequence: Value,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, …) -> Tensor"""
    dtype = common_type(sorted_sequence, self)
    sequence, values = promoted(sorted_sequence, self, dtype=dtype)
    found = INT32 if out_int32 else INT64
    return ge.SearchSorted(sequence, values, sorter, dtype=found, right=right or side == "right")


@converts(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(self: Any, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    return searchsorted(boundaries, self, out_int32=out_int32, right=right)
