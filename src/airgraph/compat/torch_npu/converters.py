"""The fused ops that have a GE op here, or are a few of them: those are fused with what is around them like PyTorch's own.

    npu_rms_norm      RmsNorm                   npu_gelu          Gelu
    npu_add_rms_norm  AddRmsNorm                npu_fast_gelu     Mul, Sigmoid, Mul
    npu_rotary_mul    RotaryMul                 npu_swiglu        SplitV, Swish, Mul

Arithmetic that the op does in float32 is in float32 here too, between casts. Calls that such a GE op does not cover are
their formulas in a program, like all other ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from airgraph.capture.inlining import add_formula
from airgraph.compat.torch_npu.references import FUNCTIONS
from airgraph.convert.promote import to
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, register_converter
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

npu = torch.ops.npu
FLOAT = DataType.DT_FLOAT


@register_converter(npu.npu_rms_norm.default)
def rms_norm(self: Value, gamma: Value, epsilon: float = 1e-6) -> list[Value]:
    """npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"""
    if gamma.type.rank != 1:
        raise UnsupportedConversion("RmsNorm is over the last axis")
    if gamma.dtype != self.dtype:
        raise UnsupportedConversion("RmsNorm computes in one type, and gamma has another")
    outputs: list[Value] = ge.RmsNorm(self, gamma, epsilon=epsilon)
    return outputs


@register_converter(npu.npu_add_rms_norm.default)
def add_rms_norm(x1: Value, x2: Value, gamma: Value, epsilon: float = 1e-6) -> list[Value]:
    """npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)"""
    if not (x1.type.rank == x2.type.rank and gamma.type.rank == 1 and x1.dtype == x2.dtype == gamma.dtype):
        raise UnsupportedConversion("AddRmsNorm is over the last axis, and computes in one type")
    outputs: list[Value] = ge.AddRmsNorm(x1, x2, gamma, epsilon=epsilon)
    return outputs


@register_converter(npu.npu_add_rms_norm_v2_functional.default)
def add_rms_norm_v2(x1: Value, x2: Value, gamma: Value, epsilon: float = 1e-6) -> list[Value]:
    """npu_add_rms_norm_v2_functional(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)
    -> (Tensor, Tensor, Tensor)"""
    y, rstd, x = add_rms_norm(x1, x2, gamma, epsilon)
    return [rstd, y, x]


@register_converter(npu.npu_gelu.default)
def gelu(self: Value, *, approximate: str = "none") -> Any:
    """npu_gelu(Tensor self, *, str approximate='none') -> Tensor"""
    return ge.Gelu(self, approximate=approximate)


@register_converter(npu.npu_fast_gelu.default)
def fast_gelu(self: Value) -> Value:
    """npu_fast_gelu(Tensor self) -> Tensor"""
    x = to(self, FLOAT)
    return to(ge.Mul(x, ge.Sigmoid(ge.Mul(x, to(1.702, FLOAT)))), self.dtype)


@register_converter(npu.npu_swiglu.default)
def swiglu(self: Value, dim: int = -1, *, meta_outputs: TensorSpec) -> Value:
    """npu_swiglu(Tensor self, int dim=-1) -> Tensor"""
    half = meta_outputs.symsize[dim]
    if not isinstance(half, int):
        raise UnsupportedConversion("the size of a half is symbolic")
    gate, up = ge.SplitV(self, [half, half], dim % meta_outputs.rank, num_split=2)
    return to(ge.Mul(ge.Swish(to(gate, FLOAT), scale=1.0), to(up, FLOAT)), self.dtype)


@register_converter(npu.npu_rotary_mul.default)
def rotary_mul(self: Value, r1: Value, r2: Value, rotary_mode: str = "half") -> Value:
    """npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor"""
    if rotary_mode != "half":
        raise UnsupportedConversion("RotaryMul turns halves")
    return to(ge.RotaryMul(to(self, FLOAT), to(r1, FLOAT), to(r2, FLOAT)), self.dtype)


def is_rms_norm(x: torch.Tensor, gamma: torch.Tensor) -> bool:
    """Whether GE's RmsNorm is meant: over the last axis, and of one type."""
    return gamma.dim() == 1 and gamma.dtype == x.dtype


BEYOND: dict[str, Callable[..., bool]] = {  # calls that the GE op does not cover
    "npu_rms_norm": lambda x, gamma, *_, **__: not is_rms_norm(x, gamma),
    "npu_add_rms_norm": lambda x1, x2, gamma, *_, **__: not is_rms_norm(x1, gamma),
    "npu_add_rms_norm_v2_functional": lambda x1, x2, gamma, *_, **__: not is_rms_norm(x1, gamma),
    "npu_rotary_mul": lambda x, r1, r2, rotary_mode="half": rotary_mode != "half",
}
for name, where in BEYOND.items():
    add_formula(getattr(npu, name).default, FUNCTIONS[name], where)
