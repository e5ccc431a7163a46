"""Random numbers. A compiled graph draws what eager draws after the same `torch.manual_seed`."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.numbers import number
from airgraph.convert.promote import real
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType
from airgraph.torch_types import TORCH_TYPES

aten = torch.ops.aten
BOOL, INT64 = DataType.DT_BOOL, DataType.DT_INT64


# -- what can be drawn ----------------------------------------------------------------------------------------------
def in_order(*tensors: Value) -> None:
    """PyTorch draws in the order of memory, so which element gets which number depends on strides. Where at most one
    dimension has more than one element there is no other order than that of a contiguous tensor."""
    for x in tensors:
        if not x.dense and (x.type.shape is None or sum(d != 1 for d in x.type.shape) > 1):
            raise UnsupportedConversion("the numbers depend on the strides of the argument")


def laid_out(spec: TensorSpec) -> dict[str, Any]:
    """For a result that lies in memory in another order than its dimensions: the engine draws into such memory too."""
    if spec.order is None:
        raise UnsupportedConversion("the result does not fill its memory")
    large = [d for d in spec.order if spec.symsize[d] != 1]
    return {} if large == sorted(large) else {"order": list(spec.order)}


def options(spec: TensorSpec, generator: Any = None, pin_memory: Any = None, **others: Any) -> dict[str, Any]:
    """Type and place of the result; `others` (dtype, layout, device) are in it already."""
    if generator is not None or pin_memory:
        raise UnsupportedConversion("a generator of its own, or pinned memory")
    if spec.dtype not in TORCH_TYPES or spec.dtype.is_complex:
        raise UnsupportedConversion("complex and special element types are left to PyTorch")
    return {"dtype": int(spec.dtype), "place": spec.place}


def constant(*numbers: Any) -> list[float]:
    if not all(isinstance(n, int | float) for n in numbers):
        raise UnsupportedConversion("a symbolic parameter of the distribution")
    return [float(n) for n in numbers]


def shape_of(x: Value) -> Value:
    return ge.Shape(x, dtype=int(INT64))


# -- from a size ----------------------------------------------------------------------------------------------------
@converts(aten.rand.default)
def rand(size: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """rand(SymInt[] size, *, ScalarType? dtype=None, …) -> Tensor"""
    return ge.StatelessRandomUniformV2(size, **options(meta_outputs, **how))


@converts(aten.randn.default)
def randn(size: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """randn(SymInt[] size, *, ScalarType? dtype=None, …) -> Tensor"""
    return ge.StatelessRandomNormalV2(size, **options(meta_outputs, **how))


@converts(aten.normal.float_float)
def normal_of_size(mean: Any, std: Any, size: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """normal.float_float(float mean, float std, SymInt[] size, *, …) -> Tensor"""
    mean, std = constant(mean, std)
    return ge.StatelessRandomNormalV2(size, mean=mean, std=std, **options(meta_outputs, **how))


@converts(aten.randint.low)
def randint_low(low: Any, high: Any, size: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """randint.low(SymInt low, SymInt high, SymInt[] size, *, ScalarType? dtype=long, …) -> Tensor"""
    return ge.StatelessRandomUniformInt(size, None, low, high, **options(meta_outputs, **how))


@converts(aten.randint.default)
def randint(high: Any, size: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """randint(SymInt high, SymInt[] size, *, ScalarType? dtype=long, …) -> Tensor"""
    return randint_low(0, high, size, meta_outputs=meta_outputs, **how)


@converts(aten.randperm.default)
def randperm(n: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """randperm(SymInt n, *, ScalarType? dtype=long, …) -> Tensor"""
    return ge.StatelessRandperm(n, **options(meta_outputs, **how))


# -- like a tensor --------------------------------------------------------------------------------------------------
@converts(aten.rand_like.default)
def rand_like(self: Value, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """rand_like(Tensor self, *, ScalarType? dtype=None, …) -> Tensor"""
    return ge.StatelessRandomUniformV2(shape_of(self), **options(meta_outputs, **how), **laid_out(meta_outputs))


@converts(aten.randn_like.default)
def randn_like(self: Value, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """randn_like(Tensor self, *, ScalarType? dtype=None, …) -> Tensor"""
    return ge.StatelessRandomNormalV2(shape_of(self), **options(meta_outputs, **how), **laid_out(meta_outputs))


@converts(aten.randint_like.default)
def randint_like(self: Value, high: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """randint_like(Tensor self, SymInt high, *, ScalarType? dtype=None, …) -> Tensor"""
    return randint_like_low(self, 0, high, meta_outputs=meta_outputs, **how)


@converts(aten.randint_like.low_dtype)
def randint_like_low(self: Value, low: Any, high: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """randint_like.low_dtype(Tensor self, SymInt low, SymInt high, *, ScalarType? dtype=None, …) -> Tensor"""
    how = {**options(meta_outputs, **how), **laid_out(meta_outputs)}
    return ge.StatelessRandomUniformInt(shape_of(self), None, low, high, **how)


@converts(aten.uniform.default)
def uniform(self: Value, low: Any = 0.0, high: Any = 1.0, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """uniform(Tensor self, float from=0, float to=1, *, Generator? generator=None) -> Tensor"""
    low, high = constant(low, high)
    how = {**options(meta_outputs, **how), **laid_out(meta_outputs)}
    return ge.StatelessRandomUniformV2(shape_of(self), minval=low, maxval=high, **how)


@converts(aten.normal_functional.default)
def normal(self: Value, mean: Any = 0.0, std: Any = 1.0, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """normal_functional(Tensor self, float mean=0, float std=1, *, Generator? generator=None) -> Tensor"""
    mean, std = constant(mean, std)
    how = {**options(meta_outputs, **how), **laid_out(meta_outputs)}
    return ge.StatelessRandomNormalV2(shape_of(self), mean=mean, std=std, **how)


# -- with parameters from tensors -----------------------------------------------------------------------------------
@converts(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal_of_tensors(mean: Any, std: Any = 1.0, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """normal.Tensor_float(Tensor mean, float std=1, *, Generator? generator=None) -> Tensor"""
    options(meta_outputs, **how)
    tensors = {k: x for k, x in (("mean", mean), ("std", std)) if isinstance(x, Value) and x.known is None}
    if any(x.dtype != meta_outputs.dtype for x in tensors.values()):
        raise UnsupportedConversion("tensors of several types")
    loc = {} if "mean" in tensors else {"loc": constant(mean)[0]}
    scale = {} if "std" in tensors else {"scale": constant(std)[0]}
    return ge.Normal(**tensors, **loc, **scale)


@converts(aten.bernoulli.default)
def bernoulli(self: Value, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """bernoulli(Tensor self, *, Generator? generator=None) -> Tensor"""
    if self.type.place != "CPU":  # on the host the result decides the order, and it is contiguous
        in_order(self)
    return ge.StatelessBernoulli(shape_of(self), self, **options(meta_outputs, **how))


@converts(aten.bernoulli.p)
def bernoulli_p(self: Value, p: Any, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor: contiguous, whatever self is"""
    (p,) = constant(p)
    return ge.StatelessBernoulli(shape_of(self), p=p, **options(meta_outputs, **how))


@converts(aten.bernoulli.Tensor)
def bernoulli_tensor(self: Value, p: Value, *, meta_outputs: TensorSpec, **how: Any) -> Value:
    """bernoulli.Tensor(Tensor self, Tensor p, *, Generator? generator=None) -> Tensor"""
    in_order(self, p)
    return ge.StatelessBernoulli(shape_of(self), p, **options(meta_outputs, **how))


@converts(aten.multinomial.default)
def multinomial(
    self: Value, num_samples: Any, replacement: bool = False, *, meta_outputs: TensorSpec, **how: Any
) -> Value:
    """multinomial(Tensor self, SymInt num_samples, bool replacement=False, *, Generator? generator=None) -> Tensor"""
    options(meta_outputs, **how)
    if not isinstance(num_samples, int):
        raise UnsupportedConversion("a symbolic number of samples")
    if not replacement or num_samples == 1 or self.type.place != "CPU":
        in_order(self)
    return ge.MultinomialWithReplacement(self, numsamples=num_samples, replacement=replacement)


# -- dropout --------------------------------------------------------------------------------------------------------
@converts(aten.native_dropout.default)
def native_dropout(input: Value, p: Any, train: bool | None, *, meta_outputs: list[TensorSpec]) -> list[Value]:
    """native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)"""
    real(input)
    if meta_outputs[1].dtype != BOOL or 0 in meta_outputs[0].symsize:
        raise UnsupportedConversion("a mask that is none: nothing is dropped of an empty tensor")
    if train is False:
        return [ge.Identity(input), ge.Fill(shape_of(input), ge.Const(True, dtype=int(BOOL)), place=input.type.place)]
    return ge.DropOutV3(input, None, number(p), **laid_out(meta_outputs[1]))


@converts(aten.native_dropout_backward.default)
def native_dropout_backward(grad_output: Value, mask: Value, scale: Any, *, meta_outputs: TensorSpec) -> Value:
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    real(grad_output)
    if mask.dtype != BOOL or grad_output.dtype != meta_outputs.dtype:
        raise UnsupportedConversion("a mask or gradient of another type")
    (scale,) = constant(scale)
    return ge.DropOutDoMask(grad_output, mask, number(1.0 / scale if scale else 0.0), scale=scale)
