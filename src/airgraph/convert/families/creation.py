"""Tensors made from nothing but a size."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten


@converts(aten.full.default)
def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    meta_outputs: TensorSpec,
) -> Value:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, …) -> Tensor"""
    real(fill_value)
    if meta_outputs.dtype.is_complex or pin_memory:
        raise UnsupportedConversion("complex or pinned memory")
    return ge.Fill(size, to(fill_value, meta_outputs.dtype), place=meta_outputs.place)


@converts(aten.new_full.default)
def new_full(self: Value, size: Any, fill_value: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, …) -> Tensor"""
    return full(size, fill_value, meta_outputs=meta_outputs, **options)


@converts(aten.full_like.default)
def full_like(
    self: Value, fill_value: Any, *, memory_format: Any = None, meta_outputs: TensorSpec, **options: Any
) -> Value:
    """full_like(Tensor self, Scalar fill_value, *, …) -> Tensor"""
    return full(ge.Shape(self, dtype=9), fill_value, meta_outputs=meta_outputs, **options)


@converts(aten.scalar_tensor.default)
def scalar_tensor(s: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, …) -> Tensor"""
    return full([], s, meta_outputs=meta_outputs, **options)


def filled(value: int, *, first: str) -> Any:
    """zeros, ones (size first) and new_zeros, new_ones (a tensor first)."""

    def from_size(size: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
        return full(size, value, meta_outputs=meta_outputs, **options)

    def from_tensor(self: Value, size: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
        return full(size, value, meta_outputs=meta_outputs, **options)

    return from_size if first == "size" else from_tensor


def like(op: str) -> Any:
    def convert(self: Value, *, meta_outputs: TensorSpec, **options: Any) -> Value:
        if meta_outputs.place != self.type.place or meta_outputs.dtype.is_complex:
            raise UnsupportedConversion("another device, or complex")
        return getattr(ge, op)(to(self, meta_outputs.dtype))

    return convert


for target, number, first in (
    (aten.zeros.default, 0, "size"),
    (aten.ones.default, 1, "size"),
    (aten.new_zeros.default, 0, "tensor"),
    (aten.new_ones.default, 1, "tensor"),
):
    REGISTRY.register(target, filled(number, first=first))
REGISTRY.register(aten.zeros_like.default, like("ZerosLike"))
REGISTRY.register(aten.ones_like.default, like("OnesLike"))
