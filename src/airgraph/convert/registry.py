"""Which function turns which FX target into GE nodes.

    @converts(aten.addmm.default)
    def addmm(self, mat1, mat2, *, beta=1, alpha=1, meta_outputs):
        '''addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor'''
        ...

A converter is called with the arguments of the ATen op, tensors replaced by graph values. It returns one value for
each output. If it has a parameter `meta_outputs` it also gets what FX knows of the outputs (`TensorSpec`, nested as they
are). A later registration for the same target wins; a user's always wins over ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from airgraph.errors import Unsupported
from airgraph.ir.types import DataType, Dim

Target = Any  # an OpOverload, a higher-order op or a Python function


class UnsupportedConversion(Unsupported):
    """Raised by a converter for arguments it does not cover. PyTorch then runs the op; the reason goes into the journal."""


@dataclass(frozen=True)
class TensorSpec:
    """What FX knows of one output of the op being converted."""

    dtype: DataType
    rank: int
    symsize: tuple[Dim, ...]
    place: str
    order: tuple[int, ...] | None = None  # its dimensions as they lie in memory, the outermost first; None: with gaps

    @property
    def size(self) -> list[int]:
        if not all(isinstance(d, int) for d in self.symsize):
            raise AssertionError(f"Trying get size() from dynamic spec {list(self.symsize)} is not allowed")
        return list(self.symsize)


@dataclass(frozen=True)
class Converter:
    target: Target
    function: Callable[..., Any]
    user: bool = False
    cases: tuple[Any, ...] = ()  # samples of supported inputs, as TorchAir's `declare_supported` lists them

    @cached_property
    def wants_meta(self) -> bool:
        return "meta_outputs" in inspect.signature(self.function).parameters


@dataclass
class Registry:
    """Target → converter. An empty one makes every op a call into PyTorch."""

    converters: dict[Target, Converter] = field(default_factory=dict)

    def register(self, target: Target, function: Callable[..., Any], *, user: bool = False) -> None:
        self.converters[target] = Converter(target, function, user)

    def find(self, target: Target) -> Converter | None:
        """By the target itself, or by its name: ops of other libraries exist only once those are imported."""
        return self.converters.get(target) or self.converters.get(str(target))


REGISTRY = Registry()
EMPTY = Registry()


def converts(*targets: Target) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For our own converters."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            REGISTRY.register(target, function)
        return function

    return register


def register_converter(target: Target) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register your own converter for an ATen or custom op.

    @airgraph.register_converter(torch.ops.mylib.scale.default)
    def scale(x, factor, *, meta_outputs):
        return ge.Mul(x, ge.Const(factor, dtype=x.dtype))
    """
    if not (callable(target) or isinstance(target, str)):
        raise TypeError(f"a converter is registered for an operator such as torch.ops.aten.add.Tensor, not {target!r}")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REGISTRY.register(target, function, user=True)
        return function

    return register
