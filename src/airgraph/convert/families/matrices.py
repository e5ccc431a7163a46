"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import real, to
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
HALVES = (DataType.DT_FLOAT16, DataType.DT_BF16)
ROUNDED_ONCE = "in half precision PyTorch rounds once, after the sum"


@converts(aten.mm.default)
def mm(self: Value, mat2: Value) -> Value:
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    real(self, mat2)
    return ge.MatMul(self, mat2, None)


@converts(aten.bmm.default)
def bmm(self: Value, mat2: Value) -> Value:
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    real(self, mat2)
    return ge.BatchMatMul(self, mat2)


@converts(aten.addmm.default)
def addmm(self: Value, mat1: Value, mat2: Value, *, beta: Any = 1, alpha: Any = 1, meta_outputs: TensorSpec) -> Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    real(self, mat1, mat2)
    if meta_outputs.dtype in HALVES:
        if (beta, alpha) != (1, 1):
            raise UnsupportedConversion(ROUNDED_ONCE)
        return ge.MatMulV2(mat1, mat2, self, None)
    product = ge.Mul(ge.MatMulV2(mat1, mat2, None, None), to(alpha, meta_outputs.dtype))
    return ge.Add(product, scaled(self, beta, meta_outputs))


@converts(aten.baddbmm.default)
def baddbmm(
    self: Value, batch1: Value, batch2: Value, *, beta: Any = 1, alpha: Any = 1, meta_outputs: TensorSpec
) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    real(self, batch1, batch2)
    if meta_outputs.dtype in HALVES:
        raise UnsupportedConversion(ROUNDED_ONCE)
    product = ge.Mul(ge.BatchMatMul(batch1, batch2), to(alpha, meta_outputs.dtype))
    return ge.Add(product, scaled(self, beta, meta_outputs))


def scaled(x: Value, beta: Any, meta: TensorSpec) -> Value:
    """beta = 0 means that x is not looked at, not even where it is NaN."""
    if isinstance(beta, int | float) and beta == 1:
        return x
    if isinstance(beta, int | float) and beta == 0:
        return ge.ZerosLike(x)
    return ge.Mul(x, to(beta, meta.dtype))
