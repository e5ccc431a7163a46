"""The caller's side of an executable that was planned: its arguments, and the symbols they tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from airgraph.engine.protocol import Symbols
from airgraph.engine.strides import copy_strided
from airgraph.ir.boundary import Argument, Boundary, TensorIn
from airgraph.plan.sizes import Sizes, whole
from airgraph.torch_types import TORCH_TYPES


class TakesArguments:
    """`sizes`: its first symbol is the number of threads. `written`: the names of the arguments that the graph writes
    to."""

    boundary: Boundary
    sizes: Sizes
    written: Collection[str]
    local: threading.local

    def fitting(self, args: Sequence[Any], value: Callable[[Any], int]) -> list[Any]:
        """Arguments with the strides the graph was compiled for, in memory of the type it was compiled for."""
        result = list(args)
        for i, (spec, arg) in enumerate(zip(self.boundary.arguments, args)):
            if isinstance(spec, TensorIn) and isinstance(arg, torch.Tensor) and not fits(spec, arg, value):
                plain = arg.detach().as_subclass(torch.Tensor).to(TORCH_TYPES[spec.type.dtype])
                strides = [value(s) for s in spec.strides]
                result[i] = plain if lies_as(plain, strides) else copy_strided(plain, strides)
        return result

    def write_through(self, used: Sequence[Any], given: Sequence[Any]) -> None:
        """What the graph wrote into a copy of an argument belongs to the argument."""
        for spec, mine, theirs in zip(self.boundary.arguments, used, given):
            if spec.name in self.written and mine is not theirs and mine.data_ptr() != theirs.data_ptr():
                theirs.copy_(mine)

    def computes(self, x: Any) -> bool:
        """Whether an expression is a whole number that follows from the arguments."""
        return bool(x.free_symbols <= set(self.sizes.symbols)) and whole(x)

    def learned(self) -> Symbols:
        """Sizes that only running could tell, of this thread's last call."""
        return getattr(self.local, "symbols", {})


def fits(spec: Argument, arg: torch.Tensor, value: Callable[[Any], int]) -> bool:
    """An engine can read it as it is."""
    if not isinstance(spec, TensorIn) or type(arg) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return arg.dtype == TORCH_TYPES[spec.type.dtype] and lies_as(arg, [value(s) for s in spec.strides])


def lies_as(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return 0 in tensor.shape or all(a == b or n <= 1 for a, b, n in zip(tensor.stride(), strides, tensor.shape))
