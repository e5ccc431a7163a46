"""The edge between a graph and its caller: what comes in, what goes out, and what aliases what.

Values inside a graph are logically contiguous and have no addresses. PyTorch's have strides, share memory and are
written to; all of that is recorded here, once, from what FX knows, and put right by the program that runs the graph.
"""

from __future__ import annotations

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
    """A view of an argument (or the argument itself)."""

    argument: int
    layout: Layout
    dtype: int


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
