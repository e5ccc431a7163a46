"""Limits, replacements of special numbers, interpolation."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.families.arithmetic import clamp
from airgraph.convert.promote import TORCH_TYPES, promoted, real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten


@converts(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(self: Value, max: Any, *, meta_outputs: TensorSpec) -> Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return clamp(self, None, max, meta_outputs=meta_outputs)


@converts(aten.clamp_min.Tensor)
def clamp_min(self: Value, min: Any, *, meta_outputs: TensorSpec) -> Value:
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
