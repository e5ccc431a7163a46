"""Sizes and the arithmetic Python does with them."""

from __future__ import annotations

import operator
from typing import Any

import torch

from airgraph.convert.promote import to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
INT64 = DataType.DT_INT64


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
