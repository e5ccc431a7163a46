"""Special functions of mathematics, logarithms, remainders."""

from __future__ import annotations

import math
from typing import Any

import torch

from airgraph.convert.families.arithmetic import binary, unary
from airgraph.convert.families.creation import full
from airgraph.convert.promote import promoted
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten

UNARY = {
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
BINARY = {
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


for target, op in UNARY.items():
    REGISTRY.register(target, unary(op))
for target, op in BINARY.items():
    REGISTRY.register(target, binary(op))
for target, base in BASES.items():
    REGISTRY.register(target, logarithm(base))
for target, factor in DEGREES.items():
    REGISTRY.register(target, multiple(factor))


@converts(aten._efficientzerotensor.default)
def zero_tensor(size: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    """_efficientzerotensor(SymInt[] size, *, …) -> Tensor: a gradient that is zero everywhere, such as that of sgn"""
    return full(size, 0, meta_outputs=meta_outputs, **options)


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
