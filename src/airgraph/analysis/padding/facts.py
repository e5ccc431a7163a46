"""What the analysis of `padding` knows of a value, and what a rule sees of its node.

A rule gets a `PaddingView` and returns a `Fact` for each output (None for one nobody reads), or raises
`UnsupportedPadding` with the reason. `RULES` has them by the name of the op; what is not in it is refused wherever the
size comes near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy

from airgraph.errors import Unsupported
from airgraph.ir.graph import Node
from airgraph.ir.ops import OPS, NodeView
from airgraph.ir.ops.rules import axes_of
from airgraph.ir.types import DataType, Dim

if TYPE_CHECKING:
    from airgraph.analysis.padding.proof import Walk

Number = bool | int | float
Factors = tuple[Dim, ...]
INFINITY = float("inf")


class UnsupportedPadding(Unsupported):
    """Why the node at hand does not commute with cutting."""


@dataclass(frozen=True)
class Fact:
    """What is known of a value. `axes`: for each axis the sizes whose product it is, the outermost first."""

    axes: tuple[Factors, ...]
    pad: Mapping[int, Number] = field(default_factory=dict)  # axis → what stands in its added part
    place: tuple[int, Dim] | None = None  # each element is its index along this axis, plus this number
    fill: Number | None = None  # every element is this number

    @property
    def rank(self) -> int:
        return len(self.axes)

    def padded(self, axis: int) -> Number | None:
        return self.pad.get(axis, self.fill)


Facts = Sequence[Fact | None]
Rule = Callable[["PaddingView"], Facts]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


class PaddingView(NodeView[Fact]):
    """One node, as its rule sees it, and the walk it is met on."""

    def __init__(self, walk: Walk, node: Node) -> None:
        super().__init__(OPS[node.op], node.inputs, node.attrs, walk.of, node)
        self.walk = walk

    def fact(self, name: str) -> Fact:
        if not self.has(name):
            raise UnsupportedPadding(f"has no input {name}")
        return self[name]

    def numbers(self, name: str) -> Any:
        return super().numbers(name) if self.has(name) else None

    def carries(self, factors: Sequence[Dim]) -> bool:
        return self.walk.carries(factors)

    def carrying(self, fact: Fact) -> list[int]:
        return [i for i, f in enumerate(fact.axes) if self.carries(f)]

    def keep_order(self) -> None:
        """From here on only the first rows may be kept, not any rows."""
        self.walk.ordered = self.walk.ordered or self.name

    @property
    def name(self) -> str:
        return str(self.node.attrs["target"]) if self.node.op == "AtenCall" else self.node.op

    @property
    def symbol(self) -> Any:
        return self.walk.symbol


def has(thing: Any, symbol: Any) -> bool:
    """Whether a size, or one of several, contains the symbol."""
    if isinstance(thing, tuple | list):
        return any(has(t, symbol) for t in thing)
    return isinstance(thing, sympy.Basic) and symbol in thing.free_symbols


def plain(shape: Sequence[Dim] | None) -> tuple[Factors, ...]:
    if shape is None:
        raise UnsupportedPadding("reads a value of unknown rank")
    return tuple(() if d == 1 else (d,) for d in shape)


def numel_of(factors: Factors) -> Dim:
    total: Dim = 1
    for f in factors:
        total = total * f
    return total


def whole_axes(fact: Fact, numbers: Any) -> list[int]:
    axes = axes_of(numbers if not isinstance(numbers, list) else tuple(numbers), fact.rank)
    if axes is None:
        raise UnsupportedPadding("works along axes that are not known when compiling")
    return axes


def aligned(view: PaddingView, facts: Sequence[Fact]) -> tuple[Factors, ...]:
    """The axes of values that are broadcast against each other, from the last on."""
    rank = max((f.rank for f in facts), default=0)
    return tuple(
        aligned_axis(view, [f.axes[i - rank + f.rank] for f in facts if i - rank + f.rank >= 0]) for i in range(rank)
    )


def aligned_axis(view: PaddingView, entries: Sequence[Factors]) -> Factors:
    wide = {coarse(view, e): e for e in entries if e}
    if not any(map(view.carries, wide)):
        return next(iter(wide.values()), ())
    if len(wide) > 1:
        first, second, *_ = wide.values()
        raise UnsupportedPadding(f"meets {view.symbol} with {shown(first)} against {shown(second)}")
    return next(iter(wide.values()))


def coarse(view: PaddingView, factors: Factors) -> Factors:
    """The factors with those beside each other taken together that are not the size: (s, 2, 2) and (s, 4) are the same."""
    found: list[Dim] = []
    for factor in factors:
        if found and not view.carries((factor,)) and not view.carries(found[-1:]):
            found[-1] = found[-1] * factor
        else:
            found.append(factor)
    return tuple(found)


def shown(factors: Factors) -> str:
    return " * ".join(map(str, factors)) or "1"


def uniform(content: Any, dtype: DataType) -> Number | None:
    """The one number a constant consists of. (Types NumPy lacks are kept as bits.)"""
    if isinstance(content, np.ndarray):
        if not (
            dtype.is_int or dtype in (DataType.DT_BOOL, DataType.DT_FLOAT, DataType.DT_DOUBLE, DataType.DT_FLOAT16)
        ):
            return None
        content = content.ravel().tolist()
    flat = list(flattened(content))
    if not flat or isinstance(flat[0], str | complex) or any(x != flat[0] for x in flat):
        return None
    number: Number = flat[0]
    return number


def flattened(content: Any) -> Iterator[Any]:
    if isinstance(content, list | tuple):
        for item in content:
            yield from flattened(item)
    else:
        yield content
