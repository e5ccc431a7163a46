"""Picking elements by index."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import real, to
from airgraph.convert.registry import UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten


@converts(aten.select.int)
def select(self: Value, dim: int, index: Any) -> Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    size = self.type.shape[dim] if self.type.shape else None
    if not isinstance(index, int) or not isinstance(size, int):
        raise UnsupportedConversion("a symbolic index or size")
    return ge.GatherV2(self, ge.Const(index % size, dtype=9), dim % self.rank)


@converts(aten.embedding.default)
def embedding(
    weight: Value, indices: Value, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, …) -> Tensor"""
    return ge.GatherV2(weight, indices, 0)


@converts(aten.index_select.default)
def index_select(self: Value, dim: int, index: Value) -> Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if self.rank == 0 or index.rank != 1:
        raise UnsupportedConversion("a scalar")
    return ge.GatherV2(self, index, dim % self.rank)


@converts(aten.gather.default)
def gather(self: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    if self.rank == 0 or index.rank != self.rank:
        raise UnsupportedConversion("a scalar")
    return ge.GatherElements(self, index, dim=dim)


@converts(aten.nonzero.default)
def nonzero(self: Value) -> Value:
    """nonzero(Tensor self) -> Tensor"""
    real(self)
    return ge.NonZero(self)


@converts(aten.masked_select.default)
def masked_select(self: Value, mask: Value) -> Value:
    """masked_select(Tensor self, Tensor mask) -> Tensor"""
    real(self)
    return ge.MaskedSelect(self, to(mask, DataType.DT_BOOL))
