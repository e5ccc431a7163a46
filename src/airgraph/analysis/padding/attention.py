"""Padding: attention."""

from __future__ import annotations

from dataclasses import replace

from airgraph.analysis.padding.facts import (
    INFINITY,
    Fact,
    Facts,
    PaddingView,
    UnsupportedPadding,
    aligned,
    aligned_axis,
    rule,
)
from airgraph.ir.types import DataType


@rule("FlashAttentionScore", "FusedAttentionScore")
def attention(view: PaddingView) -> Facts:
    q, k, v = (view.fact(name) for name in ("query", "key", "value"))
    if any(view.carries(f.axes[axis]) for f in (q, k, v) for axis in (1, 3)):
        raise UnsupportedPadding(f"has {view.symbol} as its heads")
    rows = aligned_axis(view, [f.axes[0] for f in (q, k, v)])
    if view.given("atten_mask") is not None:
        aligned(view, [Fact((rows, (), q.axes[2], k.axes[2])), replace(view.fact("atten_mask"))])
    if view.carries(k.axes[2]) or view.carries(v.axes[2]):
        check_keys(view, q, k, v)
    lse = view.node.outputs[1]
    if lse.users and lse.type.rank != 3:
        raise UnsupportedPadding("returns sums in an order of its own")
    sums = Fact((rows, q.axes[1], q.axes[2])) if lse.users else None
    return [Fact((rows, q.axes[1], q.axes[2], v.axes[3])), sums]


def check_keys(view: PaddingView, q: Fact, k: Fact, v: Fact) -> None:
    """Added keys must be out of sight: they come after every true query, or a mask hides them."""
    if k.axes[2] != v.axes[2]:
        raise UnsupportedPadding(f"has keys and values of several sizes of {view.symbol}")
    mask = view.given("atten_mask")
    if mask is not None:
        hidden = False if mask.dtype == DataType.DT_BOOL else -INFINITY
        found = view.walk.of(mask).padded(view.walk.of(mask).rank - 1)
        if found is not None and found == hidden:
            return view.keep_order()
    if not view.attr("is_causal") or q.axes[2] != k.axes[2]:
        raise UnsupportedPadding(
            f"sees all keys of {view.symbol}: neither is it causal nor is its mask known to hide added ones"
        )
    return view.keep_order()
