"""Padding: elements read by index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from airgraph.analysis.padding.facts import (
    Fact,
    Facts,
    PaddingView,
    UnsupportedPadding,
    aligned,
    has,
    numel_of,
    rule,
    whole_axes,
)
from airgraph.analysis.padding.shapes import arguments, moved


@rule("GatherV2")
def gather(view: PaddingView) -> Facts:
    """By indices PyTorch does not allow to be negative, so that a true row points to a true row."""
    x, indices = view.fact("x"), view.fact("indices")
    (axis,) = whole_axes(x, view.numbers("axis"))
    if view.carries(x.axes[axis]):
        view.keep_order()
    return [Fact((*x.axes[:axis], *indices.axes, *x.axes[axis + 1 :]))]


@rule("GatherElements")
def gather_elements(view: PaddingView) -> Facts:
    x, index = view.fact("x"), view.fact("index")
    axis = view.attr("dim") % max(x.rank, 1)
    if view.carries(x.axes[axis]):
        view.keep_order()
    for i in range(x.rank):
        if i != axis and x.axes[i] != index.axes[i] and (view.carries(x.axes[i]) or view.carries(index.axes[i])):
            raise UnsupportedPadding(f"picks by an index with other rows of {view.symbol}")
    return [Fact(index.axes)]


@rule("IndexByTensor")
def index(view: PaddingView) -> Facts:
    x, indices, mask = view.fact("x"), view.many("indices"), view.attr("indices_mask")
    at = [i for i, here in enumerate(mask) if here]
    for axis, fact in zip(at, indices):
        if view.carries(x.axes[axis]):
            if not sympy.sympify(-1 if fact.place is None else fact.place[1]).is_nonnegative:
                raise UnsupportedPadding(f"picks by indices that may count from the end of {view.symbol}")
            view.keep_order()
    picked = aligned(view, indices)
    rest = [f for i, f in enumerate(x.axes) if i not in at]
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    pad = {first + to: x.pad[axis] for axis, to in followed(x, at, indices, len(picked))}
    return [Fact((*rest[:first], *picked, *rest[first:]), pad)]


def followed(x: Fact, at: Sequence[int], indices: Sequence[Fact], rank: int) -> Iterator[tuple[int, int]]:
    """(axis, axis of the indices) where the added part of the indices picks the added part of x: mask[arange(s)]."""
    for axis, fact in zip(at, indices):
        if axis in x.pad and fact.place is not None:
            end = numel_of(fact.axes[fact.place[0]]) + fact.place[1]
            if sympy.sympify(end - numel_of(x.axes[axis])).is_nonnegative:
                yield axis, fact.place[0] + rank - fact.rank


@rule("aten.select.int")
def select_call(view: PaddingView) -> Facts:
    x, axis, index = arguments(view)
    fact = view.walk.of(x)
    axis %= fact.rank
    if view.carries(fact.axes[axis]):
        if has(index, view.symbol) or not sympy.sympify(index).is_nonnegative:
            raise UnsupportedPadding(f"takes a row counted from the end of {view.symbol}")
        view.keep_order()
    return [moved(fact, [i for i in range(fact.rank) if i != axis])]
