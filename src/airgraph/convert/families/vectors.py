"""Products with vectors."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.families.matrices import scaled
from airgraph.convert.promote import promoted, real, to
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten


@converts(aten.dot.default)
def dot(self: Value, tensor: Value) -> Value:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    real(self, tensor)
    return ge.Dot(self, tensor)


@converts(aten.mv.default)
def mv(self: Value, vec: Value) -> Value:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    real(self, vec)
    return ge.Squeeze(ge.MatMul(self, ge.Unsqueeze(vec, axes=[1]), None), axis=[1])


@converts(aten.addmv.default)
def addmv(self: Value, mat: Value, vec: Value, *, beta: Any = 1, alpha: Any = 1, meta_outputs: TensorSpec) -> Value:
    """addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    real(self)
    product = ge.Mul(mv(mat, vec), to(alpha, meta_outputs.dtype))
    return ge.Add(product, scaled(self, beta, meta_outputs))


@converts(aten.addr.default)
def addr(self: Value, vec1: Value, vec2: Value, *, beta: Any = 1, alpha: Any = 1, meta_outputs: TensorSpec) -> Value:
    """addr(Tensor self, Tensor vec1, Tensor vec2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    if meta_outputs.dtype == DataType.DT_BOOL:
        raise UnsupportedConversion("truth values")
    x, v1, v2 = promoted(self, vec1, vec2, dtype=meta_outputs.dtype)
    column = ge.Mul(ge.Unsqueeze(v1, axes=[1]), to(alpha, meta_outputs.dtype))
    return ge.Add(scaled(x, beta, meta_outputs), ge.Mul(column, ge.Unsqueeze(v2, axes=[0])))
