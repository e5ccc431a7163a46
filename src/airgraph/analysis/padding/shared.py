"""Rules that several families share."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.analysis.padding.facts import (
    Fact,
    Facts,
    PaddingView,
    UnsupportedPadding,
    numel_of,
    plain,
    rule,
    whole_axes,
)
from airgraph.ir.graph import Value
from airgraph.ir.ops import OPS


def along(*names: str, slot: str = "x", axes: str, word: str) -> None:
    """Ops that may work along any axis but this one; `axes` is an attribute or an index input."""

    def keeps(view: PaddingView) -> Facts:
        fact = view.fact(slot)
        given = view.node.attrs.get(axes, OPS[view.node.op].attrs.get(axes))
        numbers = given if axes in OPS[view.node.op].attrs else view.numbers(axes)
        over = whole_axes(fact, numbers) if numbers not in ((), []) else list(range(fact.rank))
        if any(a < fact.rank and view.carries(fact.axes[a]) for a in over):
            raise UnsupportedPadding(f"{word} {view.symbol}")
        return [kept_or_typed(view, fact, v, over) for v in view.node.outputs]

    rule(*names)(keeps)


def kept_or_typed(view: PaddingView, fact: Fact, value: Value, over: Sequence[int]) -> Fact:
    """As before, but for the axes the op works along, whose sizes may be others now."""
    shape = value.type.shape
    return Fact(tuple(f if i not in over or shape is None else plain((shape[i],))[0] for i, f in enumerate(fact.axes)))


def first_axis(view: PaddingView) -> Facts:
    """Images, one by one: nothing but the first axis of `x` and of what goes with it may be the size."""
    op = OPS[view.node.op]
    given = [
        (s.name, view.walk.of(v)) for s, v in zip(op.slots, view.node.inputs) if isinstance(v, Value) and not s.index
    ]
    rows = next(f.axes[0] for name, f in given if name == "x")
    for name, fact in given:
        wrong = view.carrying(fact)
        if any(wrong) or (wrong and (name not in ("x", "grid") or fact.axes[0] != rows)):
            raise UnsupportedPadding(f"works along {view.symbol} in its input {name}")
    facts: list[Fact | None] = []
    for value in view.node.outputs:
        axes = plain(value.type.shape) if value.users else ()
        if axes and (numel_of(axes[0]) != numel_of(rows) or any(map(view.carries, axes[1:]))):
            raise UnsupportedPadding(f"changes the size {view.symbol}")
        facts.append(Fact((rows, *axes[1:])) if axes else None)
    return facts
