"""Picking by index tensors, and writing a part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.promote import real, to
from airgraph.convert.registry import NoConversion, TensorSpec, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
INDEX_TYPES = (DataType.DT_INT32, DataType.DT_INT64)
END = 2**63 - 1
REDUCTIONS = {"add": "add", "multiply": "mul"}
REDUCTIONS_OF_TWO = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def mask_of(indices: Sequence[Value | None]) -> list[int]:
    return [0 if i is None else 1 for i in indices]


def given(indices: Sequence[Value | None], *types: DataType) -> list[Value]:
    found = [i for i in indices if i is not None]
    if not found or any(i.dtype not in types for i in found):
        raise NoConversion("a mask among the indices: the result's size is only known when run")
    return found


# -- by index -------------------------------------------------------------------------------------------------------
@converts(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self: Value, indices: Sequence[Value | None]) -> Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    real(self)
    return ge.IndexByTensor(self, given(indices, *INDEX_TYPES), indices_mask=mask_of(indices))


@converts(aten.take.default)
def take(self: Value, index: Value) -> Value:
    """take(Tensor self, Tensor index) -> Tensor"""
    real(self)
    return ge.IndexByTensor(ge.Reshape(self, [-1]), [index], indices_mask=[1])


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    real(self, values)
    found = given(indices, *INDEX_TYPES, DataType.DT_BOOL)
    return ge.IndexPutV2(self, values, mask_of(indices), [], found, accumulate=accumulate)


@converts(aten.put.default)
def put(self: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor"""
    real(self, source)
    flat, size = ge.Reshape(self, [-1]), int(DataType.DT_INT64)
    values = ge.Reshape(source, ge.Shape(index, dtype=size))
    return ge.Reshape(ge.IndexPutV2(flat, values, [1], [], [index], accumulate=accumulate), ge.Shape(self, dtype=size))


@converts(aten.index_add.default)
def index_add(self: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    axis = axis_of(self, dim, index)
    real(self, source, alpha)
    factor = None if isinstance(alpha, int | float) and alpha == 1 else to(alpha, self.dtype)
    return ge.InplaceIndexAdd(self, index, source, factor, axis=axis)


@converts(aten.index_copy.default)
def index_copy(self: Value, dim: int, index: Value, source: Value) -> Value:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    axis = axis_of(self, dim, index)
    real(self, source)
    if axis == 0:
        return ge.InplaceUpdate(self, index, source)
    swap = list(range(self.rank))
    swap[0], swap[axis] = axis, 0
    rows = ge.InplaceUpdate(ge.Transpose(self, swap), index, ge.Transpose(source, swap))
    return ge.Transpose(rows, swap)


@converts(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: Value, dim: int, index: Value, value: Any) -> Value:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    axis = axis_of(self, dim, index)
    real(self, value)
    return ge.IndexFill(self, index, to(value, self.dtype), dim=axis)


def axis_of(x: Value, dim: int, index: Value) -> int:
    if x.rank == 0 or index.rank != 1:
        raise NoConversion("a scalar")
    return dim % x.rank


# -- element by element ---------------------------------------------------------------------------------------------
@converts(aten.scatter.src, aten.scatter.reduce)
def scatter(self: Value, dim: int, index: Value, src: Value, *, reduce: str | None = None) -> Value:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    real(self, src)
    return ge.ScatterElements(self, index, src, axis=dim, reduction=REDUCTIONS[reduce] if reduce else "none")


@converts(aten.scatter_add.default)
def scatter_add(self: Value, dim: int, index: Value, src: Value) -> Value:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return scatter(self, dim, index, src, reduce="add")


@converts(aten.scatter.value, aten.scatter.value_reduce)
def scatter_value(self: Value, dim: int, index: Value, value: Any, *, reduce: str | None = None,
                  meta_outputs: TensorSpec) -> Value:  # fmt: skip
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    real(self, value)
    sizes = ge.Shape(index, dtype=int(DataType.DT_INT64))
    values = ge.Fill(sizes, to(value, self.dtype), place=meta_outputs.place)
    return scatter(self, dim, index, values, reduce=reduce)


@converts(aten.scatter_reduce.two)
def scatter_reduce(self: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True) -> Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, …) -> Tensor"""
    real(self, src)
    if reduce not in REDUCTIONS_OF_TWO or not include_self:
        raise NoConversion("ScatterElements knows no mean, and takes what is there into account")
    return ge.ScatterElements(self, index, src, axis=dim, reduction=REDUCTIONS_OF_TWO[reduce])


@converts(aten.masked_scatter.default)
def masked_scatter(self: Value, mask: Value, source: Value) -> Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    real(self, source)
    return ge.MaskedScatter(self, mask, source)


# -- slices ---------------------------------------------------------------------------------------------------------
def assign(x: Value, part: Value, dim: int, start: Any, end: Any, step: Any) -> Value:
    """x with x[start:end:step] along one axis replaced."""
    real(x, part)
    begin, end = 0 if start is None else start, END if end is None else end
    bounds = [[n] if isinstance(n, int) else ge.Pack([n], N=1) for n in (begin, end, step)]
    return ge.StridedSliceAssignV2(x, to(part, x.dtype), *bounds, [dim % x.rank])


def assign_one(x: Value, part: Value, dim: int, index: Any) -> Value:
    if not isinstance(index, int):
        raise NoConversion("a symbolic index")
    axis = dim % x.rank
    return assign(x, ge.Unsqueeze(part, axes=[axis]), axis, index, END if index == -1 else index + 1, 1)


def zeros(sizes: Any, meta: TensorSpec) -> Value:
    return ge.Fill(sizes, to(0, meta.dtype), place=meta.place)


@converts(aten.slice_scatter.default)
def slice_scatter(self: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""
    return assign(self, src, dim, start, end, step)


@converts(aten.slice_backward.default)
def slice_backward(grad_output: Value, input_sizes: Any, dim: int, start: Any, end: Any, step: Any, *,
                   meta_outputs: TensorSpec) -> Value:  # fmt: skip
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""
    real(grad_output)
    return assign(zeros(input_sizes, meta_outputs), grad_output, dim, start, end, step)


@converts(aten.select_scatter.default)
def select_scatter(self: Value, src: Value, dim: int, index: Any) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    return assign_one(self, src, dim, index)


@converts(aten.select_backward.default)
def select_backward(grad_output: Value, input_sizes: Any, dim: int, index: Any, *, meta_outputs: TensorSpec) -> Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    real(grad_output)
    return assign_one(zeros(input_sizes, meta_outputs), grad_output, dim, index)
