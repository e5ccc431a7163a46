"""Padding: tensors made from a size and a few numbers."""

from __future__ import annotations

from airgraph.analysis.padding.facts import Fact, Facts, PaddingView, UnsupportedPadding, has, plain, rule


@rule("Range")
def counted(view: PaddingView) -> Facts:
    start, delta = view.numbers("start"), view.numbers("delta")
    if has((start, delta), view.symbol):
        raise UnsupportedPadding(f"begins or steps by a number computed from {view.symbol}")
    axes = plain(view.node.output.type.shape)
    if any(map(view.carries, axes)):
        view.keep_order()
    return [Fact(axes, place=(0, start) if delta == 1 and start is not None else None)]


@rule("Fill")
def fill(view: PaddingView) -> Facts:
    return [Fact(plain(view.node.output.type.shape), fill=view.fact("value").fill)]


@rule("Empty")
def empty(view: PaddingView) -> Facts:
    return [Fact(plain(view.node.output.type.shape), fill=0)]


@rule("ZerosLike", "OnesLike")
def filled_like(view: PaddingView) -> Facts:
    return [Fact(view.fact("x").axes, fill=0 if view.node.op == "ZerosLike" else 1)]
