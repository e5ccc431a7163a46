"""Padding: views, parts, joins and picking by index. Where a size goes, and whether its rows can still be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from airgraph.analysis.padding.facts import (
    Fact,
    Facts,
    PaddingView,
    UnsupportedPadding,
    aligned,
    has,
    numel_of,
    plain,
    rule,
    shown,
    whole_axes,
)
from airgraph.analysis.padding.shared import along
from airgraph.ir.graph import Value
from airgraph.ir.types import Dim


# -- views ----------------------------------------------------------------------------------------------------------
def moved(fact: Fact, axes: Sequence[int | None]) -> Fact:
    """`axes`: for each new axis the old one it is, or None for a new axis of size 1."""
    new = {old: i for i, old in enumerate(axes) if old is not None}
    place = None if fact.place is None or fact.place[0] not in new else (new[fact.place[0]], fact.place[1])
    pad = {new[old]: n for old, n in fact.pad.items() if old in new}
    return Fact(tuple(() if a is None else fact.axes[a] for a in axes), pad, place, fact.fill)


@rule("Transpose")
def transpose(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [moved(fact, whole_axes(fact, view.numbers("perm")))]


@rule("Unsqueeze", "ExpandDims")
def unsqueeze(view: PaddingView) -> Facts:
    fact = view.fact("x")
    numbers = view.attr("axes") if view.node.op == "Unsqueeze" else (view.numbers("axis"),)
    rank = fact.rank + len(numbers)
    at = {int(a) % rank for a in numbers}
    rest = iter(range(fact.rank))
    return [moved(fact, [None if i in at else next(rest) for i in range(rank)])]


@rule("Squeeze")
def squeeze(view: PaddingView) -> Facts:
    fact = view.fact("x")
    gone = {a % fact.rank for a in view.attr("axis")} or {i for i, f in enumerate(fact.axes) if not f}
    return [moved(fact, [i for i in range(fact.rank) if i not in gone])]


@rule("BroadcastTo", "Expand")
def broadcast(view: PaddingView) -> Facts:
    fact = view.fact("x")
    shape = view.node.output.type.shape
    if shape is None:
        raise UnsupportedPadding("is broadcast to a size that is not known when compiling")
    lead = len(shape) - fact.rank
    whole = moved(fact, [*[None] * lead, *range(fact.rank)])
    axes = tuple(f or plain((d,))[0] for f, d in zip(whole.axes, shape))
    return [replace(whole, axes=axes)]


@rule("Tile")
def tile(view: PaddingView) -> Facts:
    fact, times = view.fact("x"), view.numbers("multiples")
    if not isinstance(times, tuple):
        raise UnsupportedPadding("is repeated a number of times that is not known when compiling")
    whole = moved(fact, [*[None] * (len(times) - fact.rank), *range(fact.rank)])
    times = (1,) * (whole.rank - len(times)) + times
    for factors, count in zip(whole.axes, times):
        if view.carries(factors) and count != 1:
            raise UnsupportedPadding(f"repeats {view.symbol}")
    return [Fact(tuple(f if n == 1 else (n, *f) for f, n in zip(whole.axes, times)), fill=fact.fill)]


@rule("Reshape")
def reshape(view: PaddingView) -> Facts:
    fact, shape = view.fact("x"), view.node.output.type.shape
    if shape is None:
        raise UnsupportedPadding("has a shape that is not known when compiling")
    source = [(axis, f) for axis, factors in enumerate(fact.axes) for f in factors]
    groups = [take(view, source, d) for d in shape]
    axes = tuple(tuple(f for _, f in group) for group in groups)
    if source or any(sum(view.carries((f,)) for f in factors) > 1 for factors in axes):
        raise UnsupportedPadding(f"flattens {view.symbol} so that its rows cannot be told apart")
    home = {axis: i for i, group in enumerate(groups) for axis, f in group if view.carries((f,))}
    pad = {home[axis]: n for axis, n in fact.pad.items() if axis in home}
    unmerged = {group[0][0]: i for i, group in enumerate(groups) if len(group) == 1}
    kept = fact.place is not None and len(fact.axes[fact.place[0]]) == 1 and fact.place[0] in unmerged
    place = (unmerged[fact.place[0]], fact.place[1]) if kept and fact.place else None
    if place is not None and axes[place[0]] != fact.axes[fact.place[0]]:  # type: ignore[index]
        place = None
    return [Fact(axes, pad, place, fact.fill)]


def take(view: PaddingView, source: list[tuple[int, Dim]], size: Dim) -> list[tuple[int, Dim]]:
    """The next factors whose product is `size`; a plain number among them may be split."""
    group: list[tuple[int, Dim]] = []
    while size != 1:
        if not source:
            raise UnsupportedPadding(f"changes sizes in a way {view.symbol} cannot be followed through")
        axis, factor = source[0]
        rest = quotient(size, factor)
        if rest is not None:
            group.append(source.pop(0))
            size = rest
        elif isinstance(factor, int) and isinstance(size, int) and size and factor % size == 0:
            source[0] = (axis, factor // size)
            group.append((axis, size))
            size = 1
        else:
            raise UnsupportedPadding(
                f"flattens or splits {shown((factor,))} so that the rows of {view.symbol} cannot be told apart"
            )
    return group


def quotient(size: Dim, factor: Dim) -> Dim | None:
    if isinstance(size, int) and isinstance(factor, int):
        return size // factor if factor and size % factor == 0 else None
    result = sympy.cancel(sympy.sympify(size) / factor)
    if result.as_numer_denom()[1] != 1:
        return None
    return int(result) if result.is_Integer else result


# -- parts ----------------------------------------------------------------------------------------------------------
@rule("StridedSliceV2")
def strided_slice(view: PaddingView) -> Facts:
    fact = view.fact("x")
    bounds = [view.numbers(name) for name in ("begin", "end", "strides")]
    if not all(isinstance(b, tuple) for b in bounds):
        raise UnsupportedPadding("is cut at places that are not known when compiling")
    for axis, begin, end, step in zip(whole_axes(fact, view.numbers("axes")), *bounds):
        fact = cut_axis(view, fact, axis, begin, end, step)
    return [fact]


@rule("aten.slice.Tensor")
def slice_call(view: PaddingView) -> Facts:
    x, axis, begin, end, step = [*arguments(view), *[None] * 4][:5]
    fact = view.walk.of(x)
    return [cut_axis(view, fact, int(axis or 0) % fact.rank, begin or 0, 2**63 - 1 if end is None else end, step or 1)]


def cut_axis(view: PaddingView, fact: Fact, axis: int, begin: Any, end: Any, step: Any) -> Fact:
    """Element i is element begin + i · step: where it ends does not matter, where it begins must not depend on the size."""
    size = numel_of(fact.axes[axis])
    if has((begin, step), view.symbol):
        raise UnsupportedPadding(f"begins at a place computed from {view.symbol}")
    if begin == 0 and step == 1 and (end == size or (isinstance(end, int) and end >= 2**62)):
        return fact
    if view.carries(fact.axes[axis]):
        if not sympy.sympify(begin).is_nonnegative:
            raise UnsupportedPadding(f"counts rows from the end of {view.symbol}")
        if len(fact.axes[axis]) > 1:
            raise UnsupportedPadding(f"cuts {view.symbol} while it is flattened with another dimension")
        view.keep_order()
    shape = view.node.output.type.shape
    if shape is not None:
        new = shape[axis]
    elif begin >= 0 and step == 1 and isinstance(end, int) and end >= 2**62:
        new = size - begin
    else:
        raise UnsupportedPadding("gives a size that is not known when compiling")
    beyond = sympy.sympify(begin + new * step - size).is_nonnegative  # what is added here was added there
    pad = {a: n for a, n in fact.pad.items() if a != axis or (beyond and has(new, view.symbol))}
    place = fact.place if fact.place and (fact.place[0] != axis or step == 1) else None
    if place and place[0] == axis:
        place = (axis, place[1] + begin)
    return Fact((*fact.axes[:axis], *plain((new,)), *fact.axes[axis + 1 :]), pad, place, fact.fill)


def arguments(view: PaddingView) -> list[Any]:
    """Of a call into PyTorch: tensors as values, numbers as what is known of them."""
    values = list(view.node.values())
    found = [values[int(a[1:])] if isinstance(a, str) and a.startswith("%") else a for a in view.node.attrs["args"]]
    return [a.known if isinstance(a, Value) and a.known is not None else a for a in found]


@rule("SplitV")
def split(view: PaddingView) -> Facts:
    fact = view.fact("x")
    (axis,) = whole_axes(fact, view.numbers("split_dim"))
    if view.carries(fact.axes[axis]):
        raise UnsupportedPadding(f"splits {view.symbol}")
    return [parts(fact, v, axis) for v in view.node.outputs]


def parts(fact: Fact, value: Value, axis: int) -> Fact | None:
    if not value.users:
        return None
    shape = value.type.shape
    if shape is None:
        raise UnsupportedPadding("gives parts of unknown size")
    return Fact((*fact.axes[:axis], *plain((shape[axis],)), *fact.axes[axis + 1 :]), fact.pad)


@rule("Unpack")
def unpack(view: PaddingView) -> Facts:
    fact = view.fact("x")
    (axis,) = whole_axes(fact, view.attr("axis"))
    if view.carries(fact.axes[axis]):
        raise UnsupportedPadding(f"takes {view.symbol} apart")
    return [moved(fact, [i for i in range(fact.rank) if i != axis])] * len(view.node.outputs)


@rule("ConcatV2")
def concat(view: PaddingView) -> Facts:
    facts = view.many("x")
    (axis,) = whole_axes(facts[0], view.numbers("concat_dim"))
    others = aligned(view, [Fact((*f.axes[:axis], (), *f.axes[axis + 1 :])) for f in facts])
    sizes = [f.axes[axis] for f in facts]
    if any(map(view.carries, sizes)):
        if any(map(view.carries, sizes[:-1])):
            raise UnsupportedPadding(f"puts something behind the rows of {view.symbol}")
        if len(sizes) > 1:
            view.keep_order()
    total = sizes[0] if len(sizes) == 1 else plain((sum(map(numel_of, sizes)),))[0]
    pad = {axis: facts[-1].pad[axis]} if axis in facts[-1].pad else {}
    pad |= {
        a: facts[0].pad[a] for a in facts[0].pad if a != axis and all(f.pad.get(a) == facts[0].pad[a] for f in facts)
    }
    return [Fact((*others[:axis], total, *others[axis + 1 :]), pad)]


@rule("Pack")
def pack(view: PaddingView) -> Facts:
    facts = view.many("x")
    axes = aligned(view, facts)
    at = view.attr("axis") % (len(axes) + 1)
    return [Fact((*axes[:at], *plain((len(facts),)), *axes[at:]))]


@rule("Tril", "Triu")
def triangle(view: PaddingView) -> Facts:
    """Element (i, j) stays if j <= i + diagonal (Tril) or j >= i + diagonal (Triu), else it is 0."""
    fact, diagonal = view.fact("x"), view.attr("diagonal")
    i, j = fact.rank - 2, fact.rank - 1
    if not view.carrying(fact):
        return [replace(fact, fill=None)]
    if {i, j} & set(view.carrying(fact)):
        view.keep_order()
    pad = {axis: n for axis, n in fact.pad.items() if n == 0}  # what is cut away is 0
    # In the added part of j, with i a true row, j - i is 1 + size_j - size_i at least.
    least = 1 + numel_of(fact.axes[j]) - numel_of(fact.axes[i]) - diagonal
    if view.carries(fact.axes[j]):
        cut_away = view.node.op == "Tril" and sympy.sympify(least - 1).is_nonnegative  # j > i + diagonal
        stays = view.node.op == "Triu" and sympy.sympify(least).is_nonnegative  # j >= i + diagonal
        number = 0 if cut_away else fact.padded(j) if stays else None
        if number is not None:
            pad[j] = number
    return [Fact(fact.axes, pad)]


along("ReverseV2", axes="axis", word="turns round")
along("Roll", axes="dims", word="rolls")
