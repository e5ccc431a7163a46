"""Padding: normalisations."""

from __future__ import annotations

from airgraph.analysis.padding.facts import Fact, Facts, PaddingView, UnsupportedPadding, aligned, plain, rule
from airgraph.analysis.padding.shared import first_axis


@rule("LayerNormV4")
def layer_norm(view: PaddingView) -> Facts:
    fact, sizes = view.fact("x"), view.numbers("normalized_shape")
    if not isinstance(sizes, tuple):
        raise UnsupportedPadding("normalises axes that are not known when compiling")
    return normalised(view, fact, fact.rank - len(sizes))


@rule("RmsNorm")
def rms_norm(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return normalised(view, fact, fact.rank - 1)


@rule("AddRmsNorm")
def add_rms_norm(view: PaddingView) -> Facts:
    total = Fact(aligned(view, [view.fact("x1"), view.fact("x2")]))
    return [*normalised(view, total, total.rank - 1)[:2], total]


def normalised(view: PaddingView, fact: Fact, first: int) -> Facts:
    if any(map(view.carries, fact.axes[first:])):
        raise UnsupportedPadding(f"normalises over {view.symbol}")
    rows = Fact((*fact.axes[:first], *[()] * (fact.rank - first)))
    return [Fact(fact.axes), rows, rows]


@rule("BNInfer", "BatchNormV3")
def batch_norm(view: PaddingView) -> Facts:
    if view.node.op == "BatchNormV3" and view.attr("is_training"):
        raise UnsupportedPadding(f"in training takes its mean over all rows of {view.symbol}")
    fact = view.fact("x")
    if fact.rank > 1 and view.carries(fact.axes[1]):
        raise UnsupportedPadding(f"has {view.symbol} as its channels")
    return [Fact(fact.axes), *[Fact(plain(v.type.shape)) if v.users else None for v in view.node.outputs[1:]]]


rule("GroupNorm", "GroupNormV2")(first_axis)
