"""Tensors made from a size and a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.numbers import number
from airgraph.convert.promote import real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType
from airgraph.torch_types import TORCH_TYPES

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


for target, constant, first in (
    (aten.zeros.default, 0, "size"),
    (aten.ones.default, 1, "size"),
    (aten.new_zeros.default, 0, "tensor"),
    (aten.new_ones.default, 1, "tensor"),
):
    REGISTRY.register(target, filled(constant, first=first))
REGISTRY.register(aten.zeros_like.default, like("ZerosLike"))
REGISTRY.register(aten.ones_like.default, like("OnesLike"))


@converts(aten._efficientzerotensor.default)
def zero_tensor(size: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    """_efficientzerotensor(SymInt[] size, *, …) -> Tensor: a gradient that is zero everywhere, such as that of sgn"""
    return full(size, 0, meta_outputs=meta_outputs, **options)


aten, prims = torch.ops.aten, torch.ops.prims
INT64 = DataType.DT_INT64


def placed(spec: TensorSpec, pin_memory: Any = None, **others: Any) -> dict[str, Any]:
    """Type and place of the result; `others` (dtype, layout, device) are in it already."""
    if pin_memory or spec.dtype.is_complex or spec.dtype not in TORCH_TYPES:
        raise UnsupportedConversion("pinned memory, complex or special element types")
    return {"dtype": int(spec.dtype), "place": spec.place}


@converts(aten.arange.start_step)
def arange_step(start: Any, end: Any, step: Any = 1, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, …) -> Tensor"""
    return ge.Range(number(start), number(end), number(step), **placed(meta_outputs, **how))


@converts(aten.arange.start)
def arange_start(start: Any, end: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, …) -> Tensor"""
    return arange_step(start, end, 1, meta_outputs=meta_outputs, **how)


@converts(aten.arange.default)
def arange(end: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """arange(Scalar end, *, ScalarType? dtype=None, …) -> Tensor"""
    return arange_step(0, end, 1, meta_outputs=meta_outputs, **how)


@converts(prims.iota.default)
def iota(
    length: Any, *, start: Any, step: Any, dtype: Any, device: Any, requires_grad: bool, meta_outputs: TensorSpec
) -> Value:
    """iota(SymInt length, *, SymInt start, SymInt step, ScalarType dtype, Device device, bool requires_grad) -> Tensor"""
    end = ge.Add(ge.Mul(number(length), number(step)), number(start))
    return arange_step(start, end, step, meta_outputs=meta_outputs)


@converts(aten.linspace.default)
def linspace(start: Any, end: Any, steps: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """linspace(Scalar start, Scalar end, int steps, *, ScalarType? dtype=None, …) -> Tensor"""
    return ge.LinSpace(number(start), number(end), number(steps), **placed(meta_outputs, **how))


@converts(aten.eye.m)
def eye_of(n: Any, m: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """eye.m(SymInt n, SymInt m, *, ScalarType? dtype=None, …) -> Tensor"""
    if not isinstance(n, int) or not isinstance(m, int):
        raise UnsupportedConversion("a symbolic size")
    return ge.Eye(num_rows=n, num_columns=m, **placed(meta_outputs, **how))


@converts(aten.eye.default)
def eye(n: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """eye(SymInt n, *, ScalarType? dtype=None, …) -> Tensor"""
    return eye_of(n, n, meta_outputs=meta_outputs, **how)


@converts(aten.empty.memory_format, aten.empty_permuted.default)
def empty(size: Any, *layout: Any, memory_format: Any = None, meta_outputs: TensorSpec, **how: Any) -> Value:
    """empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, …, MemoryFormat? memory_format=None) -> Tensor"""
    return full(size, 0, meta_outputs=meta_outputs, **how)


@converts(aten.empty_strided.default)
def empty_strided(size: Any, stride: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """empty_strided(SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, …) -> Tensor"""
    return full(size, 0, meta_outputs=meta_outputs, **how)


@converts(aten.new_empty.default)
def new_empty(self: Value, size: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """new_empty(Tensor self, SymInt[] size, *, ScalarType? dtype=None, …) -> Tensor"""
    return ge.Empty(size, **placed(meta_outputs, **how))


@converts(aten.new_empty_strided.default)
def new_empty_strided(self: Value, size: Any, stride: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """new_empty_strided(Tensor self, SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, …) -> Tensor"""
    empty = new_empty(self, size, meta_outputs=meta_outputs, **how)
    if isinstance(size, Value) or isinstance(stride, Value) or not fits(size, stride):
        return empty  # strides are a matter of the boundary
    return ge.AsStrided(empty, size, stride, 0)


def fits(size: Sequence[int], stride: Sequence[int]) -> bool:
    """So laid out, a tensor needs no more memory than it has elements."""
    return 0 not in size and sum((n - 1) * step for n, step in zip(size, stride)) < math.prod(size)


@converts(aten.empty_like.default)
def empty_like(self: Value, *, memory_format: Any = None, meta_outputs: TensorSpec, **how: Any) -> Value:
    """empty_like(Tensor self, *, ScalarType? dtype=None, …, MemoryFormat? memory_format=None) -> Tensor"""
    return full(ge.Shape(self, dtype=int(INT64)), 0, meta_outputs=meta_outputs, **how)


@converts(aten.fill.Scalar, aten.fill.Tensor)
def fill(self: Value, value: Any, *, meta_outputs: TensorSpec) -> Value:
    """fill.Scalar(Tensor self, Scalar value) -> Tensor"""
    if isinstance(value, Value) and value.type.place != self.type.place:
        raise UnsupportedConversion("a value from another device")
    return full(ge.Shape(self, dtype=int(INT64)), value, meta_outputs=meta_outputs)


@converts(aten.zero.default)
def zero(self: Value) -> Value:
    """zero(Tensor self) -> Tensor"""
    real(self)
    return ge.ZerosLike(self)
