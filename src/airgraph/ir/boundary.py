"""The edge between a graph and its caller: what comes in, what goes out, and what aliases what.

Values inside a graph are logically contiguous and have no addresses. PyTorch's have strides, share memory and are
written to; all of that is recorded here, once, from what FX knows, and put right by the program that runs the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from airgraph.ir.types import Dim, TensorType


@dataclass(frozen=True)
class TensorIn:
    """A tensor argument. `name` is the Data node it feeds."""

    name: str
    type: TensorType
    strides: tuple[Dim, ...]
    device: str


@dataclass(frozen=True)
class NumberIn:
    """An int, float or bool argument; `expr` is the symbol it gives a value to, or None."""

    name: str
    expr: Any
    kind: type


@dataclass(frozen=True)
class ObjectIn:
    """Anything else: handed on as it is."""

    name: str


Argument = TensorIn | NumberIn | ObjectIn


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie, counted (in elements) from the first element of what it is a view of."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = 0


@dataclass(frozen=True)
class Fresh:
    """Memory of its own: the graph's output number `index`, laid out as FX recorded it, or (None) as PyTorch made it."""

    index: int
    layout: Layout | None
    device: str


@dataclass(frozen=True)
class OfInput:
    """A view of an argument, or the argument `itself`: the very object, since a jagged tensor's sizes are known by its
    offsets' identity."""

    argument: int
    layout: Layout
    dtype: int
    itself: bool = False


@dataclass(frozen=True)
class OfOutput:
    """A view of the graph's output number `index`, which itself has the strides `base`."""

    index: int
    base: tuple[Dim, ...]
    layout: Layout
    dtype: int
    device: str


@dataclass(frozen=True)
class Number:
    """A size or another symbolic number, computed from the symbols."""

    expr: Any


@dataclass(frozen=True)
class Plain:
    """A value known when compiling, None for the most part."""

    value: Any


Result = Fresh | OfInput | OfOutput | Number | Plain


@dataclass
class Boundary:
    arguments: list[Argument] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # what users call an argument, where that is known


# -- symbols --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SymbolSource:
    """Where a symbol has its value from: a size or a stride of an argument (less `offset`, divided by `factor`), or a
    number."""

    symbol: Any
    argument: int
    kind: str  # size | stride | number
    axis: int = 0
    factor: int = 1
    offset: int = 0

    @property
    def plain(self) -> bool:
        return (self.factor, self.offset) == (1, 0)

    def value(self, given: int) -> int:
        return (given - self.offset) // self.factor


def symbol_sources(arguments: Sequence[Argument]) -> list[SymbolSource]:
    """One for each symbol that the arguments tell: a size where there is one, else a number, else a stride."""
    found: dict[Any, SymbolSource] = {}
    tensors = [(i, a) for i, a in enumerate(arguments) if isinstance(a, TensorIn)]
    for i, a in tensors:
        add_sources(found, i, "size", a.type.shape or ())
    for i, number in enumerate(arguments):
        if isinstance(number, NumberIn) and number.kind is not float and getattr(number.expr, "is_Symbol", False):
            found.setdefault(number.expr, SymbolSource(number.expr, i, "number"))
    for i, a in tensors:
        add_sources(found, i, "stride", a.strides)
    return list(found.values())


def add_sources(found: dict[Any, SymbolSource], argument: int, kind: str, dims: Sequence[Dim]) -> None:
    """A symbol, or a multiple of one and a number more; from a plain symbol rather than from an expression."""
    for axis, size in enumerate(dims):
        if not isinstance(size, int):
            offset, multiple = size.as_coeff_Add()
            factor, rest = multiple.as_coeff_Mul()
            known = found.get(rest)
            if not (rest.is_Symbol and factor.is_Integer and offset.is_Integer):
                continue
            source = SymbolSource(rest, argument, kind, axis, int(factor), int(offset))
            if known is None or (source.plain and not known.plain):
                found[rest] = source
