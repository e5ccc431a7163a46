"""Ops on lists of tensors, as optimisers use them. Each tensor is cast to the type PyTorch computes its result in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.numbers import number, numbers
from airgraph.convert.promote import promoted, real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
Specs = list[TensorSpec]
List = list[Value]
UNARY = {
    aten._foreach_abs: "Abs",
    aten._foreach_acos: "ACos",
    aten._foreach_asin: "ASin",
    aten._foreach_atan: "ATan",
    aten._foreach_cos: "Cos",
    aten._foreach_cosh: "Cosh",
    aten._foreach_erf: "Erf",
    aten._foreach_erfc: "Erfc",
    aten._foreach_exp: "Exp",
    aten._foreach_expm1: "Expm1",
    aten._foreach_log: "Log",
    aten._foreach_log10: "Log10",
    aten._foreach_log1p: "Log1p",
    aten._foreach_log2: "Log2",
    aten._foreach_neg: "Neg",
    aten._foreach_reciprocal: "Reciprocal",
    aten._foreach_sigmoid: "Sigmoid",
    aten._foreach_sign: "Sign",
    aten._foreach_sin: "Sin",
    aten._foreach_sinh: "Sinh",
    aten._foreach_sqrt: "Sqrt",
    aten._foreach_tan: "Tan",
    aten._foreach_tanh: "Tanh",
}
# The number GE has for a way to round.
ROUNDINGS = {
    aten._foreach_floor: 2,
    aten._foreach_ceil: 3,
    aten._foreach_round: 4,
    aten._foreach_trunc: 5,
    aten._foreach_frac: 7,
}
FRACTION = ROUNDINGS[aten._foreach_frac]
# With a list, a number or a list of numbers as the other operand.
BINARY = {
    aten._foreach_clamp_max: "Minimum",  # PyTorch runs the same code for both
    aten._foreach_clamp_min: "Maximum",
    aten._foreach_div: "Div",
    aten._foreach_maximum: "Maximum",
    aten._foreach_minimum: "Minimum",
    aten._foreach_mul: "Mul",
    aten._foreach_pow: "Pow",
}
SUMS = {aten._foreach_add: "Add", aten._foreach_sub: "Sub"}
TERNARY = {aten._foreach_addcdiv: "Addcdiv", aten._foreach_addcmul: "Addcmul"}


def each(xs: Sequence[Any], specs: Specs) -> List:
    """The tensors, cast to the types of the results."""
    return [promoted(x, dtype=spec.dtype)[0] for x, spec in zip(xs, specs, strict=True)]


def unary(op: str) -> Any:
    def convert(self: List, *, meta_outputs: Specs) -> List:
        return getattr(ge, f"Foreach{op}")(each(self, meta_outputs))

    return convert


def rounding(mode: int) -> Any:
    """Whole numbers are round; their fractions are zeros."""

    def convert(self: List, *, meta_outputs: Specs) -> List:
        real(*self)
        broken = [x for x in self if x.dtype.is_float]
        results = iter(ge.ForeachRoundOffNumber(broken, mode_of(mode)) if broken else ())
        return [next(results) if x.dtype.is_float else ge.ZerosLike(x) if mode == FRACTION else x for x in self]

    return convert


def mode_of(mode: int) -> Value:
    modes: Value = ge.Fill(1, ge.Const(mode, dtype=int(DataType.DT_INT8)), place="CPU")
    modes.known = (mode,)
    return modes


def with_list(op: str) -> Any:
    def convert(self: List, other: List, *, meta_outputs: Specs) -> List:
        return getattr(ge, f"Foreach{op}List")(each(self, meta_outputs), each(other, meta_outputs))

    return convert


def with_scaled_list(op: str) -> Any:
    def convert(self: List, other: List, *, alpha: Any = 1, meta_outputs: Specs) -> List:
        lists = each(self, meta_outputs), each(other, meta_outputs)
        return getattr(ge, f"Foreach{op}List")(*lists, number(alpha))

    return convert


def with_number(op: str) -> Any:
    def convert(self: List, scalar: Any, *, meta_outputs: Specs) -> List:
        return getattr(ge, f"Foreach{op}Scalar")(each(self, meta_outputs), number(scalar))

    return convert


def with_numbers(op: str) -> Any:
    def convert(self: List, scalars: Any, *, meta_outputs: Specs) -> List:
        return getattr(ge, f"Foreach{op}ScalarList")(each(self, meta_outputs), numbers(scalars))

    return convert


def in_tensor(scalars: Value) -> Value:
    """A list of numbers in a tensor of the host."""
    if scalars.type.place != "CPU" or scalars.rank != 1:
        raise UnsupportedConversion("numbers that are not in a vector of the host")
    real(scalars)
    return scalars


def products(op: str, factors: Any) -> Any:
    """addcdiv and addcmul; `factors` makes an input of what scales the product."""

    def convert(self: List, tensor1: List, tensor2: List, value: Any = 1, *, meta_outputs: Specs) -> List:
        lists = (each(xs, meta_outputs) for xs in (self, tensor1, tensor2))
        return getattr(ge, f"Foreach{op}")(*lists, factors(value))

    return convert


for packet, op in UNARY.items():
    REGISTRY.register(packet.default, unary(op))
for packet, mode in ROUNDINGS.items():
    REGISTRY.register(packet.default, rounding(mode))
for packet, op in (*BINARY.items(), *SUMS.items()):
    REGISTRY.register(packet.List, with_list(op) if packet in BINARY else with_scaled_list(op))
    REGISTRY.register(packet.Scalar, with_number(op))
    REGISTRY.register(packet.ScalarList, with_numbers(op))
for packet, op in TERNARY.items():
    REGISTRY.register(packet.Scalar, products(f"{op}Scalar", number))
    REGISTRY.register(packet.ScalarList, products(f"{op}ScalarList", numbers))
    REGISTRY.register(packet.Tensor, products(f"{op}List", in_tensor))


@converts(aten._foreach_pow.ScalarAndTensor)
def pow_number(self: Any, exponent: List, *, meta_outputs: Specs) -> List:
    """_foreach_pow.ScalarAndTensor(Scalar self, Tensor[] exponent) -> Tensor[]"""
    base = ge.Fill(1, number(self), place="CPU") if isinstance(self, float) else number(self)
    return ge.ForeachPowScalarAndTensor(base, each(exponent, meta_outputs))


@converts(aten._foreach_lerp.Scalar)
def lerp_number(self: List, tensors1: List, weight: Any, *, meta_outputs: Specs) -> List:
    """_foreach_lerp.Scalar(Tensor[] self, Tensor[] tensors1, Scalar weight) -> Tensor[]"""
    return ge.ForeachLerpScalar(each(self, meta_outputs), each(tensors1, meta_outputs), number(weight))


@converts(aten._foreach_lerp.List)
def lerp_list(self: List, tensors1: List, weights: List, *, meta_outputs: Specs) -> List:
    """_foreach_lerp.List(Tensor[] self, Tensor[] tensors1, Tensor[] weights) -> Tensor[]"""
    return ge.ForeachLerpList(*(each(xs, meta_outputs) for xs in (self, tensors1, weights)))


@converts(aten._foreach_norm.Scalar)
def norm(self: List, ord: Any = 2, dtype: Any = None, *, meta_outputs: Specs) -> List:
    """_foreach_norm.Scalar(Tensor[] self, Scalar ord=2, ScalarType? dtype=None) -> Tensor[]"""
    if any(x.dtype != spec.dtype for x, spec in zip(self, meta_outputs)):
        raise UnsupportedConversion("a norm in another type than its tensor")
    return ge.ForeachNorm(each(self, meta_outputs), number(ord))


@converts(aten._foreach_zero.default)
def zero(self: List) -> List:
    """_foreach_zero(Tensor[] self) -> Tensor[] self_out"""
    real(*self)
    return [ge.ZerosLike(x) for x in self]


@converts(aten._foreach_copy.default)
def copy(self: List, src: List, non_blocking: bool = False, *, meta_outputs: Specs) -> List:
    """_foreach_copy(Tensor[] self, Tensor[] src, bool non_blocking=False) -> Tensor[] self_out"""
    if any(x.type.place != y.type.place or x.type.shape != y.type.shape for x, y in zip(self, src)):
        raise UnsupportedConversion("a copy between devices or shapes")
    real(*self, *src)
    return [ge.Identity(to(y, spec.dtype)) for y, spec in zip(src, meta_outputs)]
