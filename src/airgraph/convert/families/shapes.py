"""Views, slices, joins."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import promoted
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
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
