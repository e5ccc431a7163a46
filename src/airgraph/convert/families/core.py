"""Copies, casts and writes."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import real, to
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.torch_types import TORCH_TYPES

aten, prims = torch.ops.aten, torch.ops.prims


@converts(aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
def identity(self: Value, *, memory_format: Any = None) -> Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor. Strides are a matter of the boundary."""
    return ge.Identity(self)


@converts(aten._to_copy.default)
def to_copy(
    self: Value,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    meta_outputs: TensorSpec,
) -> Value:
    """_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, …) -> Tensor"""
    if meta_outputs.place != self.type.place or layout not in (None, torch.strided) or pin_memory:
        raise UnsupportedConversion("a copy to another device or layout")
    if self.dtype.is_complex and not meta_outputs.dtype.is_complex:
        raise UnsupportedConversion("a cast from complex to real")
    if self.dtype == meta_outputs.dtype and self.dtype in TORCH_TYPES:
        return ge.TensorMove(self)
    return convert_element_type(self, dtype, meta_outputs=meta_outputs)


@converts(prims.convert_element_type.default)
def convert_element_type(a: Value, dtype: Any, *, meta_outputs: TensorSpec) -> Value:
    """convert_element_type(Tensor a, ScalarType dtype) -> Tensor"""
    if a.dtype not in TORCH_TYPES or meta_outputs.dtype not in TORCH_TYPES:
        raise UnsupportedConversion("an element type without a GE number")
    return ge.Identity(a) if a.dtype == meta_outputs.dtype else ge.Cast(a, dst_type=int(meta_outputs.dtype))


@converts(aten.copy.default)
def copy(self: Value, src: Value, non_blocking: bool = False, *, meta_outputs: TensorSpec) -> Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor"""
    real(self, src)
    if src.type.place != self.type.place:
        raise UnsupportedConversion("a copy from another device")
    if src.type.shape is not None and src.type.shape == self.type.shape:
        return ge.Identity(to(src, meta_outputs.dtype))
    return ge.BroadcastTo(to(src, meta_outputs.dtype), ge.Shape(self, dtype=9))


@converts(aten.copy_.default)
def copy_(self: Value, src: Value, non_blocking: bool = False, *, meta_outputs: TensorSpec) -> Value:
    """copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!): the write to an input at the end"""
    if self.node.op != "Data":
        raise UnsupportedConversion("a write to something that is not an input")
    return ge.Assign(self, src)


@converts(aten.view.dtype)
def view_dtype(self: Value, dtype: Any, *, meta_outputs: TensorSpec) -> Value:
    """view.dtype(Tensor(a) self, ScalarType dtype) -> Tensor(a)"""
    real(self)
    new = TORCH_TYPES.get(meta_outputs.dtype)
    if new is None or new.is_complex or new.itemsize != TORCH_TYPES[self.dtype].itemsize:
        raise UnsupportedConversion("elements of another size")
    return ge.Bitcast(self, type=int(meta_outputs.dtype))
