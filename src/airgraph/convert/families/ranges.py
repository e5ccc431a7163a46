"""Sequences of numbers, tensors without values yet, and complex numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.families.creation import full
from airgraph.convert.numbers import number
from airgraph.convert.promote import TORCH_TYPES, real
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten, prims = torch.ops.aten, torch.ops.prims
INT64 = DataType.DT_INT64


def placed(spec: TensorSpec, pin_memory: Any = None, **others: Any) -> dict[str, Any]:
    """Type and place of the result; `others` (dtype, layout, device) are in it already."""
    if pin_memory or spec.dtype.is_complex or spec.dtype not in TORCH_TYPES:
        raise UnsupportedConversion("pinned memory, complex or special element types")
    return {"dtype": int(spec.dtype), "place": spec.place}


# -- sequences ------------------------------------------------------------------------------------------------------
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


# -- values that do not matter: zeros -------------------------------------------------------------------------------
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


# -- complex numbers ------------------------------------------------------------------------------------------------
@converts(aten.complex.default)
def complex_(real: Value, imag: Value) -> Value:
    """complex(Tensor real, Tensor imag) -> Tensor"""
    return ge.Complex(real, imag)


@converts(aten.view_as_complex.default)
def view_as_complex(self: Value) -> Value:
    """view_as_complex(Tensor(a) self) -> Tensor(a): the last dimension holds the two parts"""
    last = self.rank - 1
    return ge.Complex(*(ge.GatherV2(self, ge.Const(i, dtype=int(INT64)), last) for i in (0, 1)))


@converts(aten.view_as_real.default)
def view_as_real(self: Value) -> Value:
    """view_as_real(Tensor(a) self) -> Tensor(a)"""
    return ge.Pack([ge.Real(self), ge.Imag(self)], N=2, axis=-1)


@converts(aten._fft_c2c.default)
def fft(self: Value, dim: Any, normalization: int, forward: bool) -> Value:
    """_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor"""
    if isinstance(dim, Value):
        raise UnsupportedConversion("symbolic axes")
    return ge.FFT(self, dims=list(dim), normalization=normalization, forward=forward)
