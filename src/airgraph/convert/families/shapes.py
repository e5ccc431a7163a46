"""Views, slices, joins, windows, diagonals and rolls: the same elements in other places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.promote import promoted, real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.convert.views import VIEWS
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten


@converts(*VIEWS)
def view(self: Value, *args: Any) -> Value:
    """view, reshape, t, transpose, permute: the walk keeps these back until they are needed (views.py)."""
    raise UnsupportedConversion("views are emitted by the walk")


@converts(aten.t.default)
def t(self: Value) -> Value:
    """t(Tensor(a) self) -> Tensor(a): here of fewer than two dimensions, others are views as those above"""
    return ge.Identity(self)


@converts(aten.unsqueeze.default)
def unsqueeze(self: Value, dim: int) -> Value:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    return ge.Unsqueeze(self, axes=[dim % (self.rank + 1)])


@converts(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(self: Value, dim: Any) -> Value:
    """squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a): only dimensions of size 1 go"""
    shape = self.type.shape or ()
    dims = [d % max(self.rank, 1) for d in ([dim] if isinstance(dim, int) else dim)]
    gone = [d for d in dims if d < len(shape) and shape[d] == 1]
    return ge.Squeeze(self, axis=gone) if gone else ge.Identity(self)


@converts(aten.expand.default)
def expand(self: Value, size: Any, *, implicit: bool = False) -> Value:
    """expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)"""
    return ge.BroadcastTo(self, size)


@converts(aten.slice.Tensor)
def slice_(self: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Value:
    """slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)"""
    start, end = 0 if start is None else start, 2**63 - 1 if end is None else end
    if not isinstance(start, int) or not isinstance(step, int):
        raise UnsupportedConversion("a symbolic start or step")
    ends = [end] if isinstance(end, int) else ge.Pack([end], N=1)
    return ge.StridedSliceV2(self, [start], ends, [dim % self.rank], [step])


@converts(aten.cat.default)
def cat(tensors: list[Value], dim: int = 0, *, meta_outputs: TensorSpec) -> Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    full = [
        t for t in tensors if t.rank == meta_outputs.rank or t.type.shape != (0,)
    ]  # PyTorch skips a bare `tensor([])`
    if not full or any(t.rank != meta_outputs.rank for t in full):
        raise UnsupportedConversion("tensors of several ranks")
    parts = promoted(*full, dtype=meta_outputs.dtype)
    return ge.ConcatV2(parts, dim % meta_outputs.rank, N=len(parts))


@converts(aten.stack.default)
def stack(tensors: list[Value], dim: int = 0, *, meta_outputs: TensorSpec) -> Value:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    parts = promoted(*tensors, dtype=meta_outputs.dtype)
    return ge.Pack(parts, N=len(parts), axis=dim % meta_outputs.rank)


@converts(aten.split.Tensor)
def split(self: Value, split_size: Any, dim: int = 0, *, meta_outputs: list[TensorSpec]) -> list[Value]:
    """split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]"""
    count = len(meta_outputs)
    sizes = ge.Pack([*[split_size] * (count - 1), -1], N=count)
    return ge.SplitV(self, sizes, dim % self.rank, num_split=count)


@converts(aten.split_with_sizes.default)
def split_with_sizes(self: Value, split_sizes: Any, dim: int = 0, *, meta_outputs: list[TensorSpec]) -> list[Value]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    if isinstance(split_sizes, Value):
        raise UnsupportedConversion("symbolic sizes")
    return ge.SplitV(self, list(split_sizes), dim % self.rank, num_split=len(meta_outputs))


@converts(aten.unbind.int)
def unbind(self: Value, dim: int = 0, *, meta_outputs: list[TensorSpec]) -> list[Value]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    if not meta_outputs:
        raise UnsupportedConversion("a dimension of size 0")
    return ge.Unpack(self, num=len(meta_outputs), axis=dim % self.rank)


@converts(aten.repeat.default)
def repeat(self: Value, repeats: Any) -> Value:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    return ge.Tile(self, repeats)


@converts(aten.flip.default)
def flip(self: Value, dims: list[int]) -> Value:
    """flip(Tensor self, int[] dims) -> Tensor"""
    return ge.ReverseV2(self, [d % max(self.rank, 1) for d in dims])


@converts(aten.tril.default)
def tril(self: Value, diagonal: Any = 0) -> Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    if not isinstance(diagonal, int):
        raise UnsupportedConversion("a symbolic diagonal")
    return ge.Tril(self, diagonal=diagonal)


@converts(aten.triu.default)
def triu(self: Value, diagonal: Any = 0) -> Value:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    if not isinstance(diagonal, int):
        raise UnsupportedConversion("a symbolic diagonal")
    return ge.Triu(self, diagonal=diagonal)


FAR = 256  # elements: neighbours further apart are read in another order and transposed
REGISTRY.register(aten.unsafe_split.Tensor, split)
REGISTRY.register(aten.unsafe_split_with_sizes.default, split_with_sizes)


@converts(aten.squeeze.default)
def squeeze_all(self: Value) -> Value:
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


@converts(aten.alias.default)
def alias(self: Value) -> Value:
    """alias(Tensor(a) self) -> Tensor(a)"""
    return ge.Reshape(self, ge.Shape(self, dtype=9))
