"""Ops that AOTAutograd takes apart or never leaves behind. A user's pass over FX, or somebody's own graph, has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.families.elementwise import compare
from airgraph.convert.families.matrices import bmm, dot, mm, mv
from airgraph.convert.families.random import rand, randn
from airgraph.convert.families.symbols import sym_numel, sym_size
from airgraph.convert.promote import real
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import Dim

aten = torch.ops.aten
# Other names of what has a converter; `aten.sym_size` without an overload is how some tracers write it.
SAME = {
    aten.less.Tensor: compare("Less"),
    aten.less.Scalar: compare("Less"),
    aten.rand.generator: rand,
    aten.randn.generator: randn,
    aten.sym_numel: sym_numel,
}
for target, function in SAME.items():
    REGISTRY.register(target, function)


@converts(aten.sym_size)
def size(self: Value, dim: int | None = None) -> Any:
    """sym_size.int(Tensor self, int dim) -> SymInt"""
    if dim is None:
        raise UnsupportedConversion("all sizes at once")
    return sym_size(self, dim)


@converts(aten.prelu.default)
def prelu(self: Value, weight: Value) -> Value:
    """prelu(Tensor self, Tensor weight) -> Tensor: one weight, or one for each channel"""
    if self.dtype != weight.dtype or not self.dtype.is_float or weight.rank > 1:
        raise UnsupportedConversion("weights that PyTorch refuses")
    if weight.rank == 1 and self.rank > 2:
        weight = ge.Unsqueeze(weight, axes=list(range(1, self.rank - 1)))
    if weight.rank == 1 and self.rank < 2:
        weight = ge.Squeeze(weight, axis=[0])
    return ge.PRelu(self, weight)


# -- matmul ---------------------------------------------------------------------------------------------------------
@converts(aten.matmul.default)
def matmul(self: Value, other: Value, *, meta_outputs: TensorSpec) -> Value:
    """matmul(Tensor self, Tensor other) -> Tensor"""
    if self.dtype != other.dtype:
        raise UnsupportedConversion("matrices of two types")
    match self.rank, other.rank:
        case 1, 1:
            return dot(self, other)
        case 1, 2:
            return ge.Squeeze(mm(ge.Unsqueeze(self, axes=[0]), other), axis=[0])
        case 2, 1:
            return mv(self, other)
        case 2, 2:
            return mm(self, other)
        case _, 1 | 2:
            return rows_by_matrix(self, other, meta_outputs)
        case 3, 3 if shape_of(self)[0] == shape_of(other)[0]:
            return bmm(self, other)
    return of_many(self, other, meta_outputs)


def rows_by_matrix(x: Value, matrix: Value, meta: TensorSpec) -> Value:
    """[…, n, k] × [k, m] as [… n, k] × [k, m]"""
    rows = ge.Reshape(x, sizes([product(shape_of(x)[:-1]), shape_of(x)[-1]]))
    y = mm(rows, matrix) if matrix.rank == 2 else mv(rows, matrix)
    return ge.Reshape(y, sizes(meta.symsize))


def of_many(a: Value, b: Value, meta: TensorSpec) -> Value:
    """[…, n, k] × […, k, m], both repeated to the same […]"""
    if a.rank == 1:
        a = ge.Unsqueeze(a, axes=[0])
    batch = torch.broadcast_shapes(fixed(a)[:-2], fixed(b)[:-2])
    a, b = (ge.BroadcastTo(x, [*batch, *fixed(x)[-2:]]) for x in (a, b))
    y = bmm(*(ge.Reshape(x, [product(batch), *fixed(x)[-2:]]) for x in (a, b)))
    return ge.Reshape(y, sizes(meta.symsize))


@converts(aten.matmul_backward.default)
def matmul_backward(grad: Value, self: Value, other: Value, mask: Sequence[bool]) -> list[Value | None]:
    """matmul_backward(Tensor grad, Tensor self, Tensor other, bool[2] mask) -> (Tensor, Tensor)

    PyTorch has it for nested tensors only. Here: of matrices, and of as many matrices on either side."""
    real(grad, self, other)
    many = [shape_of(x)[:-2] for x in (grad, self, other)]
    if len({x.dtype for x in (grad, self, other)}) > 1 or self.rank < 2 or many[0] != many[1] or many[1] != many[2]:
        raise UnsupportedConversion("vectors, or matrices that are repeated")
    left = product_of(grad, transposed(other)) if mask[0] else None
    return [left, product_of(transposed(self), grad) if mask[1] else None]


def transposed(x: Value) -> Value:
    return ge.Transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def product_of(a: Value, b: Value) -> Value:
    if a.rank == 2:
        return mm(a, b)
    if a.rank == 3:
        return bmm(a, b)
    y = bmm(*(ge.Reshape(x, [product(fixed(x)[:-2]), *fixed(x)[-2:]]) for x in (a, b)))
    return ge.Reshape(y, [*fixed(a)[:-1], fixed(b)[-1]])


def shape_of(x: Value) -> tuple[Dim, ...]:
    if x.type.shape is None:
        raise UnsupportedConversion("sizes that are not known")
    return x.type.shape


def fixed(x: Value) -> list[int]:
    numbers = [d for d in shape_of(x) if isinstance(d, int)]
    if len(numbers) != x.rank:
        raise UnsupportedConversion("symbolic sizes of many matrices")
    return numbers


def product(dims: Sequence[Dim]) -> Any:
    result: Any = 1
    for d in dims:
        result = result * d
    return result


def sizes(dims: Sequence[Dim]) -> list[int]:
    """For a Reshape: one symbolic size is the one left over."""
    numbers = [d if isinstance(d, int) else -1 for d in dims]
    if numbers.count(-1) > 1 or (-1 in numbers and 0 in numbers):
        raise UnsupportedConversion("several symbolic sizes")
    return numbers
