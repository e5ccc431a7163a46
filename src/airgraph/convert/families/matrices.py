"""Products of matrices and vectors, in groups too, and distances between rows."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.promote import promoted, real, to
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


@converts(aten._cdist_forward.default)
def cdist(x1: Value, x2: Value, p: Any, compute_mode: int | None) -> Value:
    """_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor"""
    real(x1, x2)
    if compute_mode not in (None, 0) or not isinstance(p, int | float):
        raise UnsupportedConversion("a way to compute of one's own")
    return ge.Cdist(x1, x2, p=float(p))


@converts(aten._cdist_backward.default)
def cdist_backward(grad: Value, x1: Value, x2: Value, p: Any, cdist: Value) -> Value:
    """_cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor"""
    real(grad, x1, x2)
    if not isinstance(p, int | float) or x1.type.shape is None or x1.rank != x2.rank:
        raise UnsupportedConversion("batches of different rank")
    return to(ge.CdistGrad(grad, x1, x2, cdist, p=float(p)), x1.dtype)


REAL = (DataType.DT_FLOAT, DataType.DT_DOUBLE)


@converts("transformers.grouped_mm_fallback.default")
def grouped_mm_fallback(input: Value, weight: Value, offs: Value) -> Value:
    """grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor

    What transformers calls while a model is compiled that is not bfloat16; aten._grouped_mm is only traced for that type.
    """
    if input.dtype not in REAL or weight.dtype != input.dtype:
        raise UnsupportedConversion("in half precision PyTorch rounds once, after the sum")
    return ge.GroupedMatmul([input], [weight], [], [], [], [], [], offs, None)


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
