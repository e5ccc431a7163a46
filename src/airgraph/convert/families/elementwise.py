"""Functions of single elements: arithmetic, comparison, logic, bits, selection, special functions."""

from __future__ import annotations

import math
from typing import Any

import torch

from airgraph.convert.chip import newer
from airgraph.convert.promote import common_type, promoted, real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType
from airgraph.torch_types import TORCH_TYPES

aten, prims = torch.ops.aten, torch.ops.prims
UNARY = {
    aten.abs.default: "Abs",
    aten.acos.default: "Acos",
    aten.acosh.default: "Acosh",
    aten.asin.default: "Asin",
    aten.asinh.default: "Asinh",
    aten.atan.default: "Atan",
    aten.atanh.default: "Atanh",
    aten.ceil.default: "Ceil",
    aten.cos.default: "Cos",
    aten.cosh.default: "Cosh",
    aten.erf.default: "Erf",
    aten.erfc.default: "Erfc",
    aten.erfinv.default: "Erfinv",
    aten.exp.default: "Exp",
    aten.expm1.default: "Expm1",
    aten.floor.default: "Floor",
    aten.log.default: "Log",
    aten.log1p.default: "Log1p",
    aten.neg.default: "Neg",
    aten.reciprocal.default: "Reciprocal",
    aten.round.default: "Round",
    aten.rsqrt.default: "Rsqrt",
    aten.sign.default: "Sign",
    aten.sin.default: "Sin",
    aten.sinh.default: "Sinh",
    aten.sqrt.default: "Sqrt",
    aten.tan.default: "Tan",
    aten.tanh.default: "Tanh",
    aten.trunc.default: "Trunc",
}
BINARY = {
    aten.atan2.default: "Atan2",
    aten.div.Scalar: "RealDiv",
    aten.div.Tensor: "RealDiv",
    aten.floor_divide.default: "FloorDiv",
    aten.maximum.default: "Maximum",
    aten.mul.Scalar: "Mul",
    aten.pow.Scalar: "Pow",
    aten.pow.Tensor_Scalar: "Pow",
    aten.pow.Tensor_Tensor: "Pow",
    aten.remainder.Scalar: "FloorMod",
    aten.remainder.Scalar_Tensor: "FloorMod",
    aten.remainder.Tensor: "FloorMod",
}
COMPARE = {
    aten.eq.Scalar: "Equal",
    aten.eq.Tensor: "Equal",
    aten.ge.Scalar: "GreaterEqual",
    aten.ge.Tensor: "GreaterEqual",
    aten.gt.Scalar: "Greater",
    aten.gt.Tensor: "Greater",
    aten.le.Scalar: "LessEqual",
    aten.le.Tensor: "LessEqual",
    aten.lt.Scalar: "Less",
    aten.lt.Tensor: "Less",
    aten.ne.Scalar: "NotEqual",
    aten.ne.Tensor: "NotEqual",
}
TESTS = {aten.isinf.default: "IsInf", aten.isnan.default: "IsNan"}
# Logical op on truth values, bitwise op on integers.
LOGIC = {
    aten.bitwise_and.Scalar: ("LogicalAnd", "BitwiseAnd"),
    aten.bitwise_and.Scalar_Tensor: ("LogicalAnd", "BitwiseAnd"),
    aten.bitwise_and.Tensor: ("LogicalAnd", "BitwiseAnd"),
    aten.bitwise_or.Scalar: ("LogicalOr", "BitwiseOr"),
    aten.bitwise_or.Scalar_Tensor: ("LogicalOr", "BitwiseOr"),
    aten.bitwise_or.Tensor: ("LogicalOr", "BitwiseOr"),
    aten.bitwise_xor.Scalar: ("LogicalXor", "BitwiseXor"),
    aten.bitwise_xor.Scalar_Tensor: ("LogicalXor", "BitwiseXor"),
    aten.bitwise_xor.Tensor: ("LogicalXor", "BitwiseXor"),
    aten.logical_and.default: ("LogicalAnd", None),
    aten.logical_or.default: ("LogicalOr", None),
    aten.logical_xor.default: ("LogicalXor", None),
}
HALVES = (DataType.DT_FLOAT16, DataType.DT_BF16)
# The types for which newer chips have these ops.
AXPY = (DataType.DT_FLOAT, *HALVES)
AXPY_V2 = (DataType.DT_INT8, DataType.DT_INT32, DataType.DT_INT64)
LARGEST: dict[DataType, float] = {
    dtype: torch.iinfo(torch_type).max for dtype, torch_type in TORCH_TYPES.items() if dtype.is_int
}
LARGEST |= dict.fromkeys((*AXPY, DataType.DT_DOUBLE), float("inf"))


def unary(op: str) -> Any:
    def convert(self: Value, *, meta_outputs: TensorSpec) -> Value:
        return getattr(ge, op)(*promoted(self, dtype=meta_outputs.dtype))

    return convert


def binary(op: str) -> Any:
    def convert(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
        return getattr(ge, op)(*promoted(self, other, dtype=meta_outputs.dtype))

    return convert


def compare(op: str) -> Any:
    def convert(self: Value, other: Any) -> Value:
        return getattr(ge, op)(*promoted(self, other, dtype=common_type(self, other)))

    return convert


def test(op: str) -> Any:
    def convert(self: Value) -> Value:
        real(self)
        return getattr(ge, op)(self)

    return convert


def logic(truth: str, bits: str | None) -> Any:
    def convert(self: Value, other: Value, *, meta_outputs: TensorSpec) -> Value:
        op = truth if meta_outputs.dtype == DataType.DT_BOOL or bits is None else bits
        return getattr(ge, op)(*promoted(self, other, dtype=meta_outputs.dtype))

    return convert


for table, make in ((UNARY, unary), (BINARY, binary), (COMPARE, compare), (TESTS, test)):
    for target, op in table.items():
        REGISTRY.register(target, make(op))
for target, ops in LOGIC.items():
    REGISTRY.register(target, logic(*ops))


@converts(aten.add.Tensor, aten.add.Scalar)
def add(self: Value, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    self, other = promoted(self, other, dtype=meta_outputs.dtype)
    if isinstance(alpha, int | float) and alpha == 1:
        return ge.Add(self, other)
    return ge.AxpyV2(self, other, to(alpha, meta_outputs.dtype))


@converts(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Value, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    self, other = promoted(self, other, dtype=meta_outputs.dtype)
    if not (isinstance(alpha, int | float) and alpha == 1):
        other = ge.Mul(other, to(alpha, meta_outputs.dtype))
    return ge.Sub(self, other)


@converts(aten.rsub.Tensor)
def rsub(self: Value, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    """rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return sub(other, self, alpha, meta_outputs=meta_outputs)


@converts(aten.rsub.Scalar)
def rsub_number(self: Value, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    dtype = meta_outputs.dtype
    if not newer():
        return ge.Sxpy(*promoted(other, self, alpha, dtype=dtype))
    if dtype in AXPY and isinstance(alpha, int | float):
        return ge.Axpy(*promoted(other, self, dtype=dtype), alpha=-alpha)
    if dtype in AXPY_V2:
        other, self, alpha = promoted(other, self, alpha, dtype=dtype)
        return ge.AxpyV2(other, self, ge.Mul(alpha, to(-1, dtype)))
    other, self, alpha = promoted(other, self, alpha, dtype=dtype)
    return ge.Sub(other, ge.Mul(self, alpha))


@converts(aten.mul.Tensor)
def mul(self: Value, other: Any, *, meta_outputs: TensorSpec) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    if self.dtype == meta_outputs.dtype and self.dtype in HALVES and isinstance(other, int | float):
        return ge.Muls(self, value=other)
    return ge.Mul(*promoted(self, other, dtype=meta_outputs.dtype))


@converts(aten.minimum.default)
def minimum(self: Value, other: Value, *, meta_outputs: TensorSpec) -> Value:
    """minimum(Tensor self, Tensor other) -> Tensor: of truth values, their product"""
    op = ge.Mul if meta_outputs.dtype == DataType.DT_BOOL else ge.Minimum
    return op(*promoted(self, other, dtype=meta_outputs.dtype))


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(self: Value, other: Any, *, rounding_mode: str | None, meta_outputs: TensorSpec) -> Value:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    self, other = promoted(self, other, dtype=meta_outputs.dtype)
    if rounding_mode == "floor":
        return ge.FloorDiv(self, other)
    if not meta_outputs.dtype.is_float:
        raise UnsupportedConversion("integer division that rounds to zero")
    quotient = ge.RealDiv(self, other)
    return ge.Trunc(quotient) if rounding_mode == "trunc" else quotient


@converts(aten.logical_not.default)
def logical_not(self: Value) -> Value:
    """logical_not(Tensor self) -> Tensor"""
    return ge.LogicalNot(*promoted(self, dtype=DataType.DT_BOOL))


@converts(aten.bitwise_not.default)
def bitwise_not(self: Value) -> Value:
    """bitwise_not(Tensor self) -> Tensor"""
    return ge.LogicalNot(self) if self.dtype == DataType.DT_BOOL else ge.Invert(self)


@converts(aten.where.self)
def where(condition: Value, self: Value, other: Value, *, meta_outputs: TensorSpec) -> Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    then, otherwise = promoted(self, other, dtype=meta_outputs.dtype)
    return ge.SelectV2(to(condition, DataType.DT_BOOL), then, otherwise)


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self: Value, mask: Value, value: Any, *, meta_outputs: TensorSpec) -> Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    self, value = promoted(self, value, dtype=meta_outputs.dtype)
    return ge.MaskedFill(self, mask, value)


@converts(aten.clamp.default, aten.clamp.Tensor)
def clamp(self: Value, min: Any = None, max: Any = None, *, meta_outputs: TensorSpec) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    dtype = meta_outputs.dtype
    (x,) = promoted(self, dtype=dtype)
    if min is not None and max is not None:
        return ge.ClipByValueV2(x, *promoted(min, max, dtype=dtype))
    return ge.Maximum(x, to(min, dtype)) if min is not None else ge.Minimum(x, to(max, dtype))


@converts(aten.clamp_min.default)
def clamp_min(self: Value, min: Any, *, meta_outputs: TensorSpec) -> Value:
    """clamp_min(Tensor self, Scalar min) -> Tensor. Of 0 and -0 eager takes 0: Maximum does, ClipByValueV2 does not."""
    dtype = meta_outputs.dtype
    if not isinstance(min, int | float) or min == 0 or dtype not in LARGEST:
        return clamp(self, min, None, meta_outputs=meta_outputs)
    return ge.ClipByValueV2(*promoted(self, min, LARGEST[dtype], dtype=dtype))


@converts(aten.addcmul.default)
def addcmul(self: Value, t1: Value, t2: Value, *, value: Any = 1, meta_outputs: TensorSpec) -> Value:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return ge.Addcmul(*promoted(self, t1, t2, value, dtype=meta_outputs.dtype))


@converts(aten.addcdiv.default)
def addcdiv(self: Value, t1: Value, t2: Value, *, value: Any = 1, meta_outputs: TensorSpec) -> Value:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return ge.Addcdiv(*promoted(self, t1, t2, value, dtype=meta_outputs.dtype))


SHIFTS = {
    aten.__lshift__.Scalar: "LeftShift",
    aten.__lshift__.Tensor: "LeftShift",
    aten.__rshift__.Scalar: "RightShift",
    aten.__rshift__.Tensor: "RightShift",
    aten.bitwise_left_shift.Scalar_Tensor: "LeftShift",
    aten.bitwise_left_shift.Tensor: "LeftShift",
    aten.bitwise_left_shift.Tensor_Scalar: "LeftShift",
    aten.bitwise_right_shift.Scalar_Tensor: "RightShift",
    aten.bitwise_right_shift.Tensor: "RightShift",
    aten.bitwise_right_shift.Tensor_Scalar: "RightShift",
}


def shift(op: str) -> Any:
    def convert(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
        if not meta_outputs.dtype.is_int:
            raise UnsupportedConversion("a shift of something that is no integer")
        return getattr(ge, op)(*promoted(self, other, dtype=meta_outputs.dtype))

    return convert


for target, op in SHIFTS.items():
    REGISTRY.register(target, shift(op))


@converts(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(self: Value, max: Any, *, meta_outputs: TensorSpec) -> Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return clamp(self, None, max, meta_outputs=meta_outputs)


@converts(aten.clamp_min.Tensor)
def clamp_min_tensor(self: Value, min: Any, *, meta_outputs: TensorSpec) -> Value:
    """clamp_min.Tensor(Tensor self, Tensor min) -> Tensor"""
    return clamp(self, min, None, meta_outputs=meta_outputs)


@converts(aten.nan_to_num.default)
def nan_to_num(self: Value, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Value:
    """nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor"""
    real(self)
    if not all(n is None or isinstance(n, int | float) for n in (nan, posinf, neginf)):
        raise UnsupportedConversion("a replacement that is not a constant")
    if not self.dtype.is_float:
        return ge.Identity(self)
    limits = torch.finfo(TORCH_TYPES[self.dtype])
    low, high = limits.min if neginf is None else neginf, limits.max if posinf is None else posinf
    return ge.NanToNum(self, nan=float(nan or 0.0), posinf=float(high), neginf=float(low))


@converts(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(self: Value, end: Value, weight: Any, *, meta_outputs: TensorSpec) -> Value:
    """lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor"""
    return ge.Lerp(*promoted(self, end, weight, dtype=meta_outputs.dtype))


def infinite(sign: float) -> Any:
    """isposinf, isneginf"""

    def convert(self: Value) -> Value:
        real(self)
        if not self.dtype.is_float:
            return ge.ZerosLike(to(self, DataType.DT_BOOL))
        return ge.Equal(self, to(sign * float("inf"), self.dtype))

    return convert


def known_number(op: str) -> Any:
    """fmax, fmin: a NaN gives way to the other number."""

    def convert(self: Value, other: Value, *, meta_outputs: TensorSpec) -> Value:
        a, b = promoted(self, other, dtype=meta_outputs.dtype)
        if not meta_outputs.dtype.is_float:
            return getattr(ge, op)(a, b)
        return ge.SelectV2(ge.IsNan(a), b, ge.SelectV2(ge.IsNan(b), a, getattr(ge, op)(a, b)))

    return convert


REGISTRY.register(aten.isposinf.default, infinite(1.0))
REGISTRY.register(aten.isneginf.default, infinite(-1.0))
REGISTRY.register(aten.fmax.default, known_number("Maximum"))
REGISTRY.register(aten.fmin.default, known_number("Minimum"))
SPECIAL_UNARY = {
    aten.digamma.default: "Digamma",
    aten.exp2.default: "Exp2",
    aten.i0.default: "BesselI0",
    aten.lgamma.default: "Lgamma",
    aten.sgn.default: "Sign",
    aten.sinc.default: "Sinc",
    aten.special_bessel_j0.default: "BesselJ0",
    aten.special_bessel_j1.default: "BesselJ1",
    aten.special_bessel_y0.default: "BesselY0",
    aten.special_bessel_y1.default: "BesselY1",
    aten.special_i0e.default: "BesselI0e",
    aten.special_i1.default: "BesselI1",
    aten.special_i1e.default: "BesselI1e",
    aten.special_modified_bessel_k0.default: "BesselK0",
    aten.special_modified_bessel_k1.default: "BesselK1",
    aten.special_ndtri.default: "Ndtri",
}
SPECIAL_BINARY = {
    aten.floor_divide.Scalar: "FloorDiv",
    aten.fmod.Scalar: "TruncateMod",
    aten.fmod.Tensor: "TruncateMod",
    aten.gcd.default: "Gcd",
    aten.hypot.default: "Hypot",
    aten.igamma.default: "Igamma",
    aten.igammac.default: "Igammac",
    aten.nextafter.default: "NextAfter",
    aten.special_zeta.default: "Zeta",
    aten.special_zeta.other_scalar: "Zeta",
    aten.special_zeta.self_scalar: "Zeta",
    aten.xlogy.Scalar_Other: "Xlogy",
    aten.xlogy.Scalar_Self: "Xlogy",
    aten.xlogy.Tensor: "Xlogy",
}
BASES = {aten.log2.default: 2.0, aten.log10.default: 10.0}
DEGREES = {aten.deg2rad.default: math.pi / 180, aten.rad2deg.default: 180 / math.pi}


def logarithm(base: float) -> Any:
    def convert(self: Value, *, meta_outputs: TensorSpec) -> Value:
        return ge.Log(*promoted(self, dtype=meta_outputs.dtype), base=base)

    return convert


def multiple(factor: float) -> Any:
    def convert(self: Value, *, meta_outputs: TensorSpec) -> Value:
        return ge.Mul(*promoted(self, factor, dtype=meta_outputs.dtype))

    return convert


for target, op in SPECIAL_UNARY.items():
    REGISTRY.register(target, unary(op))
for target, op in SPECIAL_BINARY.items():
    REGISTRY.register(target, binary(op))
for target, base in BASES.items():
    REGISTRY.register(target, logarithm(base))
for target, factor in DEGREES.items():
    REGISTRY.register(target, multiple(factor))


@converts(aten.frac.default)
def frac(self: Value, *, meta_outputs: TensorSpec) -> Value:
    """frac(Tensor self) -> Tensor"""
    (x,) = promoted(self, dtype=meta_outputs.dtype)
    return ge.Sub(x, ge.Trunc(x))


@converts(aten.logit.default)
def logit(self: Value, eps: Any = None, *, meta_outputs: TensorSpec) -> Value:
    """logit(Tensor self, float? eps=None) -> Tensor"""
    if eps is not None and (not isinstance(eps, int | float) or eps < 0):
        raise UnsupportedConversion("eps is not a constant, or negative")
    return ge.Logit(*promoted(self, dtype=meta_outputs.dtype), eps=-1.0 if eps is None else float(eps))


@converts(aten.relu.default)
def relu(self: Value) -> Value:
    """relu(Tensor self) -> Tensor"""
    return ge.Relu(self)


@converts(aten.sigmoid.default)
def sigmoid(self: Value, *, meta_outputs: TensorSpec) -> Value:
    """sigmoid(Tensor self) -> Tensor"""
    real(self)
    return ge.Sigmoid(self if self.dtype == meta_outputs.dtype else ge.Cast(self, dst_type=int(meta_outputs.dtype)))
