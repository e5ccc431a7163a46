"""Padding: sorting, the indices of extremes, scans."""

from __future__ import annotations

from airgraph.analysis.padding.facts import Fact, Facts, PaddingView, UnsupportedPadding, rule, whole_axes
from airgraph.analysis.padding.reductions import reduced
from airgraph.analysis.padding.shared import along


@rule("ArgMaxV2", "ArgMin")
def place_of_extreme(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, view.numbers("dimension")), False)]


@rule("ArgMaxWithValue", "ArgMinWithValue")
def extreme_and_place(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, view.attr("dimension")), view.attr("keep_dims"))] * 2


@rule("Cumsum", "Cumprod")
def running(view: PaddingView) -> Facts:
    """A running total of the first rows is that of the first rows, in whatever way it goes on."""
    fact = view.fact("x")
    for axis in whole_axes(fact, view.numbers("axis")):
        if axis < fact.rank and view.carries(fact.axes[axis]):
            if view.attr("reverse"):
                raise UnsupportedPadding(f"runs over {view.symbol} from its end")
            view.keep_order()
    return [Fact(fact.axes)]


along("Sort", axes="axis", word="sorts")
along("TopKV2", axes="dim", word="picks among")
along("CumulativeLogsumexp", axes="axis", word="runs over")
along("Cummax", axes="dim", word="runs over")
along("Cummin", axes="axis", word="runs over")
