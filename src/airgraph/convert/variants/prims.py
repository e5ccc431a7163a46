"""PyTorch's primitive ops, which some of its decompositions end in. They are ATen's with operands of one type."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.families.elementwise import binary, compare, unary
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

prims = torch.ops.prims
UNARY = {
    prims.abs.default: "Abs",
    prims.ceil.default: "Ceil",
    prims.cos.default: "Cos",
    prims.erf.default: "Erf",
    prims.exp.default: "Exp",
    prims.floor.default: "Floor",
    prims.log.default: "Log",
    prims.neg.default: "Neg",
    prims.round.default: "Round",
    prims.rsqrt.default: "Rsqrt",
    prims.sin.default: "Sin",
    prims.sqrt.default: "Sqrt",
    prims.tanh.default: "Tanh",
    prims.trunc.default: "Trunc",
}
BINARY = {
    prims.add.default: "Add",
    prims.maximum.default: "Maximum",
    prims.minimum.default: "Minimum",
    prims.mul.default: "Mul",
    prims.sub.default: "Sub",
}
COMPARE = {
    prims.eq.default: "Equal",
    prims.ge.default: "GreaterEqual",
    prims.gt.default: "Greater",
    prims.le.default: "LessEqual",
    prims.lt.default: "Less",
    prims.ne.default: "NotEqual",
}
REDUCTIONS = {prims.amax.default: "ReduceMax", prims.amin.default: "ReduceMin", prims.sum.default: "ReduceSum"}


def reduction(op: str) -> Any:
    def convert(inp: Value, dims: Any, *, output_dtype: Any = None, meta_outputs: TensorSpec) -> Value:
        if not inp.dtype.is_float or meta_outputs.dtype != inp.dtype or not dims:
            raise UnsupportedConversion("no axes, or a result of another type")
        return getattr(ge, op)(inp, list(dims), keep_dims=False)

    return convert


for table, make in ((UNARY, unary), (BINARY, binary), (COMPARE, compare), (REDUCTIONS, reduction)):
    for target, op in table.items():
        REGISTRY.register(target, make(op))


@converts(prims.where.default)
def where(pred: Value, a: Value, b: Value) -> Value:
    """where(Tensor pred, Tensor a, Tensor b) -> Tensor"""
    if a.dtype != b.dtype:
        raise UnsupportedConversion("operands of several types")
    return ge.SelectV2(pred, a, b)
