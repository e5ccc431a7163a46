"""Padding: reductions over axes, softmax."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.analysis.padding.facts import (
    INFINITY,
    Fact,
    Facts,
    PaddingView,
    UnsupportedPadding,
    aligned,
    rule,
    whole_axes,
)

NEUTRAL = {
    "ReduceSum": 0,
    "ReduceNansum": 0,
    "ReduceProd": 1,
    "ReduceMax": -INFINITY,
    "ReduceMin": INFINITY,
    "ReduceAny": 0,
    "ReduceAll": 1,
    "ReduceLogSumExp": -INFINITY,
}


@rule(*NEUTRAL, "ReduceMean", "ReduceMeanWithCast")
def reduces(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, view.numbers("axes")), view.attr("keep_dims"))]


@rule("ReduceVar", "ReduceStdV2")
def variance(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, tuple(view.attr("dim"))), view.attr("keepdim"))] * 2


@rule("ReduceStdWithMean")
def deviation(view: PaddingView) -> Facts:
    """The mean comes with it, as large as x."""
    fact = Fact(aligned(view, [view.fact("x"), view.fact("mean")]))
    return [reduced(view, fact, whole_axes(fact, tuple(view.attr("dim"))), view.attr("keepdim"))]


@rule("LpNormV2")
def norm(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, tuple(view.attr("axes"))), view.attr("keepdim"))]


def reduced(view: PaddingView, fact: Fact, axes: Sequence[int], keep: bool) -> Fact:
    over = set(axes) or set(range(fact.rank))
    mixed = [a for a in over if a < fact.rank and view.carries(fact.axes[a])]
    neutral = NEUTRAL.get(view.node.op)
    if mixed and (neutral is None or len(mixed) > 1 or fact.padded(mixed[0]) != neutral):
        raise UnsupportedPadding(f"reduces over {view.symbol}")
    if mixed:
        view.keep_order()
    if keep:
        return Fact(tuple(() if i in over else f for i, f in enumerate(fact.axes)))
    return Fact(tuple(f for i, f in enumerate(fact.axes) if i not in over))


@rule("SoftmaxV2", "LogSoftmaxV2")
def softmax(view: PaddingView) -> Facts:
    fact = view.walk.of(next(iter(view.node.values())))
    axes = whole_axes(fact, tuple(view.attr("axes")))
    mixed = [a for a in axes if view.carries(fact.axes[a])]
    if mixed and (len(mixed) > 1 or fact.padded(mixed[0]) != -INFINITY):
        raise UnsupportedPadding(f"divides by a sum over {view.symbol}")
    if mixed:
        view.keep_order()
    after = 0.0 if view.node.op == "SoftmaxV2" else -INFINITY
    return [Fact(fact.axes, dict.fromkeys(mixed, after))]
