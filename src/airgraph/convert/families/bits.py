"""Bitwise and logical ops, shifts."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.families.arithmetic import logic
from airgraph.convert.promote import promoted
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten

# Logical op on truth values, bitwise op on integers.
LOGIC = {
    aten.bitwise_and.Scalar: ("LogicalAnd", "BitwiseAnd"),
    aten.bitwise_and.Scalar_Tensor: ("LogicalAnd", "BitwiseAnd"),
    aten.bitwise_or.Scalar: ("LogicalOr", "BitwiseOr"),
    aten.bitwise_or.Scalar_Tensor: ("LogicalOr", "BitwiseOr"),
    aten.bitwise_xor.Scalar: ("LogicalXor", "BitwiseXor"),
    aten.bitwise_xor.Scalar_Tensor: ("LogicalXor", "BitwiseXor"),
    aten.bitwise_xor.Tensor: ("LogicalXor", "BitwiseXor"),
}
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


for target, ops in LOGIC.items():
    REGISTRY.register(target, logic(*ops))
for target, op in SHIFTS.items():
    REGISTRY.register(target, shift(op))
REGISTRY.register(aten.logical_xor.default, logic("LogicalXor", None))
