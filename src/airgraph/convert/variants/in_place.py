"""Ops that write to an argument of the graph (writes.py): what the op without the write gives, and the walk assigns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from airgraph.convert.families import activations, elementwise  # noqa: F401  (they register what `OUT` names)
from airgraph.convert.families.elementwise import masked_fill
from airgraph.convert.families.norms import Outputs, batch_norm
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.convert.writes import returned
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
REGISTRY.register(aten.masked_fill_.Scalar, masked_fill)
# The overload with `out` → the one without.
OUT = {
    aten.expm1.out: aten.expm1.default,
    aten.mish.out: aten.mish.default,
    aten.nan_to_num.out: aten.nan_to_num.default,
    aten.log_sigmoid_forward.output: aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.grad_input: aten.log_sigmoid_backward.default,
}


@converts(aten.bitwise_right_shift_.Tensor)
def right_shift_(self: Value, other: Value, *, meta_outputs: TensorSpec) -> Value:
    """bitwise_right_shift_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)"""
    if self.dtype != other.dtype or not self.dtype.is_int or self.dtype == DataType.DT_BOOL:
        raise UnsupportedConversion("a shift of something that is no integer, or by another type")
    return ge.RightShift(self, other)


def into(target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, written to what `out` names, if that is of the type and size of what PyTorch computes."""
    names = list(returned(target))

    def convert(self: Value, *args: Any, meta_outputs: Any, **kwargs: Any) -> Any:
        specs = {"meta_outputs": meta_outputs} if "meta_outputs" in function.__code__.co_varnames else {}
        outs = [kwargs.pop(name) for name in names]
        if any(out.dtype != self.dtype or out.type.shape != self.type.shape for out in outs):
            raise UnsupportedConversion("an output of another type or shape than the input")
        return function(self, *args, **kwargs, **specs)

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    return convert


for target, plain in OUT.items():
    REGISTRY.register(target, into(target, REGISTRY.converters[plain].function))


@converts(aten._native_batch_norm_legit.default)
def batch_norm_(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: Any,
    eps: Any,
    *,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """_native_batch_norm_legit(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, Tensor(b!) running_var,
    bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor): its outputs, then the new running values"""
    types = [v.dtype for v in (input, weight, bias, running_mean, running_var) if v is not None]
    if len(set(types)) > 1:
        raise UnsupportedConversion("parameters of another type than the input")
    running = [TensorSpec(v.dtype, v.rank, v.type.shape or (), v.type.place) for v in (running_mean, running_var)]
    values = (input, weight, bias, running_mean, running_var, training, momentum, eps)
    return batch_norm(*values, meta_outputs=[*meta_outputs, *running])
