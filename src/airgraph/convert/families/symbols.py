"""Symbolic numbers: sizes, and the arithmetic Python does with them. Its floats are doubles."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from airgraph.convert.promote import to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
INT64, DOUBLE = DataType.DT_INT64, DataType.DT_DOUBLE


@converts(aten.sym_size.int)
def sym_size(self: Value, dim: int) -> Any:
    """sym_size.int(Tensor self, int dim) -> SymInt"""
    size = self.type.shape[dim] if self.type.shape is not None else None
    return size if isinstance(size, int) else ge.Gather(ge.Shape(self, dtype=int(INT64)), dim)


@converts(aten.sym_numel.default)
def sym_numel(self: Value) -> Value:
    """sym_numel(Tensor self) -> SymInt"""
    return ge.Cast(ge.ReduceProdD(ge.Shape(self, dtype=int(INT64)), axes=[0]), dst_type=int(INT64))


def arithmetic(op: str) -> Any:
    def convert(a: Any, b: Any, *, meta_outputs: TensorSpec) -> Value:
        if meta_outputs.dtype != INT64:
            raise UnsupportedConversion("floating-point arithmetic of the host")
        return getattr(ge, op)(to(a, INT64), to(b, INT64))

    return convert


for target, op in (
    (operator.add, "Add"),
    (operator.sub, "Sub"),
    (operator.mul, "Mul"),
    (operator.floordiv, "FloorDiv"),
    (operator.mod, "Mod"),
):
    REGISTRY.register(target, arithmetic(op))


@converts(operator.neg)
def neg(a: Value, *, meta_outputs: TensorSpec) -> Value:
    if meta_outputs.dtype != INT64:
        raise UnsupportedConversion("floating-point arithmetic of the host")
    return ge.Neg(a)


DOUBLE = DataType.DT_DOUBLE


@converts(operator.truediv)
def truediv(a: Any, b: Any, *, meta_outputs: TensorSpec) -> Value:
    """a / b"""
    if meta_outputs.dtype != DOUBLE:
        raise UnsupportedConversion("a quotient that is no float")
    return ge.RealDiv(to(a, DOUBLE), to(b, DOUBLE))


def whole(op: str) -> Any:
    """Two integers give an integer."""

    def convert(a: Any, b: Any, *, meta_outputs: TensorSpec) -> Value:
        if meta_outputs.dtype != INT64:
            raise UnsupportedConversion("floating-point arithmetic of the host")
        return getattr(ge, op)(to(a, INT64), to(b, INT64))

    return convert


def rounded(op: str) -> Any:
    """math.floor and math.ceil give an integer."""

    def convert(a: Value) -> Value:
        return ge.Cast(getattr(ge, op)(to(a, DOUBLE)), dst_type=int(INT64))

    return convert


def of_float(op: str, **attrs: Any) -> Any:
    """A float of a number."""

    def convert(a: Any) -> Value:
        return getattr(ge, op)(to(a, DOUBLE), **attrs)

    return convert


@converts(torch.sym_float)
def sym_float(a: Any) -> Value:
    """float(a)"""
    return to(a, DOUBLE)


@converts(torch.sym_sum)
def sym_sum(args: Any, *, meta_outputs: TensorSpec) -> Value:
    """a + b + …, of a list"""
    if not isinstance(args, Value) or meta_outputs.dtype != INT64:
        raise UnsupportedConversion("a sum of fixed numbers")
    return ge.ReduceSum(args, [0])


REGISTRY.register(torch._sym_sqrt, of_float("Sqrt"))  # type: ignore[attr-defined]
REGISTRY.register(torch._sym_log2, of_float("Log", base=2.0))  # type: ignore[attr-defined]
WHOLE: dict[Any, str] = {operator.pow: "Pow", torch.sym_max: "Maximum", torch.sym_min: "Minimum"}
ROUNDED: dict[Any, str] = {math.floor: "Floor", math.ceil: "Ceil"}
for target, op in WHOLE.items():
    REGISTRY.register(target, whole(op))
for target, op in ROUNDED.items():
    REGISTRY.register(target, rounded(op))
