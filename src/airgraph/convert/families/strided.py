"""Windows, diagonals, rolls and other readings of the same elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.families.shapes import split, split_with_sizes
from airgraph.convert.promote import TORCH_TYPES, promoted, real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten
FAR = 256  # elements: neighbours further apart are read in another order and transposed
REGISTRY.register(aten.unsafe_split.Tensor, split)
REGISTRY.register(aten.unsafe_split_with_sizes.default, split_with_sizes)


@converts(aten.squeeze.default)
def squeeze(self: Value) -> Value:
    """squeeze(Tensor(a) self) -> Tensor(a)"""
    gone = [i for i, d in enumerate(self.type.shape or ()) if d == 1]
    return ge.Squeeze(self, axis=gone) if gone else ge.Identity(self)


@converts(aten.as_strided.default)
def as_strided(self: Value, size: Any, stride: Any, storage_offset: Any = None) -> Value:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)

    It counts in memory. The walk hands over only values that begin theirs; they must lie there as the graph's do."""
    contiguous(self)
    offset = 0 if storage_offset is None else storage_offset
    if isinstance(stride, Value) or isinstance(size, Value) or not stride or stride[-1] < FAR:
        return ge.AsStrided(self, size, stride, offset)
    order = sorted(range(len(stride)), key=lambda i: (stride[i], i), reverse=True)
    near = ge.AsStrided(self, [size[i] for i in order], [stride[i] for i in order], offset)
    return ge.Transpose(near, [order.index(i) for i in range(len(stride))])


@converts(aten.as_strided_scatter.default)
def as_strided_scatter(self: Value, src: Value, size: Any, stride: Any, storage_offset: Any = None) -> Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor"""
    contiguous(self)
    offset = 0 if storage_offset is None else storage_offset
    return ge.ViewCopy(self, size, stride, offset, to(src, self.dtype), size, plain_strides(size), 0)


def plain_strides(size: Any) -> Any:
    """Those of a contiguous tensor of this size."""
    if not isinstance(size, Value):
        return [math.prod(size[i + 1 :]) for i in range(len(size))]
    (rank,) = size.type.shape or (0,)
    strides: list[Any] = [ge.Const(1, dtype=int(size.dtype))] * rank
    for i in reversed(range(rank - 1)):
        strides[i] = ge.Mul(strides[i + 1], ge.Gather(size, i + 1))
    return ge.Pack(strides, N=rank)


def contiguous(x: Value) -> None:
    if not x.dense:
        raise UnsupportedConversion("it counts in memory that does not lie in the order of the elements")


@converts(aten.unfold.default)
def unfold(self: Value, dimension: int, size: int, step: int) -> Value:
    """unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)"""
    shape = self.type.shape
    if not shape or not all(isinstance(n, int) for n in (*shape, size, step)):
        raise UnsupportedConversion("a scalar or symbolic sizes")
    axis = dimension % len(shape)
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    count = (shape[axis] - size) // step + 1
    sizes = [*shape[:axis], count, *shape[axis + 1 :], size]
    windows = [*strides[:axis], strides[axis] * step, *strides[axis + 1 :], strides[axis]]
    return ge.AsStrided(self, sizes, windows, 0)


@converts(aten.view.dtype)
def view_dtype(self: Value, dtype: Any, *, meta_outputs: TensorSpec) -> Value:
    """view.dtype(Tensor(a) self, ScalarType dtype) -> Tensor(a)"""
    real(self)
    new = TORCH_TYPES.get(meta_outputs.dtype)
    if new is None or new.is_complex or new.itemsize != TORCH_TYPES[self.dtype].itemsize:
        raise UnsupportedConversion("elements of another size")
    return ge.Bitcast(self, type=int(meta_outputs.dtype))


@converts(aten.roll.default)
def roll(self: Value, shifts: Any, dims: Sequence[int] = ()) -> Value:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    if isinstance(shifts, Value):
        raise UnsupportedConversion("symbolic shifts")
    return ge.Roll(self, shifts=list(shifts), dims=list(dims))


@converts(aten.rot90.default)
def rot90(self: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    """rot90(Tensor self, int k=1, int[] dims=[0,1]) -> Tensor"""
    a, b = (d % self.rank for d in dims)
    if k % 2 == 0:
        return ge.ReverseV2(self, [a, b]) if k % 4 else ge.Identity(self)
    perm = list(range(self.rank))
    perm[a], perm[b] = b, a
    return ge.Transpose(ge.ReverseV2(self, [b if k % 4 == 1 else a]), perm)


# -- diagonals ------------------------------------------------------------------------------------------------------
def reordered(x: Value, perm: Sequence[int]) -> Value:
    return x if list(perm) == list(range(len(perm))) else ge.Transpose(x, list(perm))


def to_the_end(rank: int, dim1: int, dim2: int) -> tuple[list[int], list[int]]:
    """The order of axes with two of them last, and the way back."""
    last = [dim1 % rank, dim2 % rank]
    perm = [*(a for a in range(rank) if a not in last), *last]
    return perm, [perm.index(a) for a in range(rank)]


@converts(aten.diagonal.default)
def diagonal(self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    real(self)
    perm, _ = to_the_end(self.rank, dim1, dim2)
    return ge.MatrixDiagPartV2(reordered(self, perm), offset, to(0, self.dtype))


@converts(aten.diag_embed.default)
def diag_embed(self: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor"""
    real(self)
    _, back = to_the_end(self.rank + 1, dim1, dim2)
    return reordered(ge.MatrixDiagV2(self, offset, -1, -1, to(0, self.dtype)), back)


@converts(aten.diagonal_scatter.default)
def diagonal_scatter(self: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    real(self, src)
    perm, back = to_the_end(self.rank, dim1, dim2)
    return reordered(ge.MatrixSetDiagV2(reordered(self, perm), to(src, self.dtype), offset), back)


@converts(aten.diagonal_backward.default)
def diagonal_backward(
    grad_output: Value, input_sizes: Any, offset: int, dim1: int, dim2: int, *, meta_outputs: TensorSpec
) -> Value:
    """diagonal_backward(Tensor grad_output, SymInt[] input_sizes, int offset, int dim1, int dim2) -> Tensor"""
    real(grad_output)
    zeros = ge.Fill(input_sizes, to(0, meta_outputs.dtype), place=meta_outputs.place)
    return diagonal_scatter(zeros, grad_output, offset, dim1, dim2)


@converts(aten.trace.default)
def trace(self: Value, *, meta_outputs: TensorSpec) -> Value:
    """trace(Tensor self) -> Tensor"""
    return ge.Trace(*promoted(self, dtype=meta_outputs.dtype))
