"""A call of PyTorch as a tape: the dispatcher calls that the meaning of a node makes.

    TopKV2(x, 2, largest=True, ...)   →   %0, %1 = aten::topk(x, 2, -1, True, True)

A tape holds for every set of sizes: its numbers are expressions. `record.py` makes tapes, `calls.py` makes words of them,
which native code (`dispatch.py`) reads. What cannot be a tape is an `UnsupportedCall`; then
Python does the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from airgraph.errors import Unsupported
from airgraph.ir.types import Dim
from airgraph.plan.tensors import Tensor

# c10::ScalarType's numbers, which are the C ABI's as well
DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}


class UnsupportedCall(Unsupported):
    """Python has to do this step; the text says why."""


# -- operands -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Word:
    """A whole number, perhaps an expression; also a bool, a type, a device, and 0 for None."""

    value: Dim


@dataclass(frozen=True, eq=False)
class Real:
    value: float


@dataclass(frozen=True, eq=False)
class Text:
    value: str


@dataclass(frozen=True, eq=False)
class Maybe:
    """An argument that might have been None."""

    inner: Operand


@dataclass(frozen=True, eq=False)
class Items:
    inner: tuple[Operand, ...]


@dataclass(frozen=True, eq=False)
class View:
    """A tensor over memory of the plan, which begins `offset` elements behind that of `base`."""

    base: Tensor
    offset: Dim
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: torch.dtype
    whole: bool = False  # all of what a call of PyTorch made


@dataclass(frozen=True, eq=False)
class Laid:
    """What `view` shows, with other strides: what PyTorch made before, if it lies so, else a copy."""

    view: View
    strides: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class Fixed:
    """A constant."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Register:
    """A tensor made earlier on this tape. Borrowed: it may share memory with an operand."""

    number: int
    borrowed: bool = False


Operand = Word | Real | Text | Maybe | Items | View | Laid | Fixed | Register


@dataclass
class Returned:
    """Where results of a call go: a tensor into a register, a list of tensors into `count` of them from there."""

    register: int
    count: int = 1
    is_list: bool = False


@dataclass(eq=False)
class Noted:
    """One call of the dispatcher."""

    op: OpOverload
    operands: list[Operand]
    by_autograd: bool = False
    returns: list[Returned | None] = field(default_factory=list)  # None: no tensor

    @property
    def name(self) -> str:
        overload = self.op._overloadname
        return self.op._schema.name + ("" if overload == "default" else f".{overload}")


@dataclass(eq=False)
class Tape:
    calls: list[Noted]
    registers: int
    results: list[int]  # a register for each result of the node
    typed: bool = False  # they get the types the graph says, whatever PyTorch gives

    def operands(self) -> Iterator[Operand]:
        return (inner for c in self.calls for o in c.operands for inner in parts(o))

    def dims(self) -> Iterator[Dim]:
        """Every number whose value depends on the sizes."""
        for operand in self.operands():
            match operand:
                case Word(value):
                    yield value
                case View():
                    yield from (operand.offset, *operand.shape, *operand.strides)
                case Laid(view, strides):
                    yield from (view.offset, *view.shape, *view.strides, *strides)

    def text(self) -> str:
        return ", ".join(c.name for c in self.calls)


def parts(operand: Operand) -> Iterator[Operand]:
    """The operand, and what is in it."""
    yield operand
    match operand:
        case Maybe(inner):
            yield from parts(inner)
        case Items(items):
            for item in items:
                yield from parts(item)
