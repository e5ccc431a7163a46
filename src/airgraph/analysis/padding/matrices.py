"""Padding: matrix products."""

from __future__ import annotations

from airgraph.analysis.padding.facts import Fact, Facts, PaddingView, UnsupportedPadding, aligned, coarse, rule


@rule("MatMul", "MatMulV2", "BatchMatMul")
def product(view: PaddingView) -> Facts:
    x1, x2 = view.fact("x1"), view.fact("x2")
    word = "adj" if view.node.op == "BatchMatMul" else "transpose"
    n, k1 = (-1, -2) if view.attr(f"{word}_x1") else (-2, -1)
    k2, m = (-1, -2) if view.attr(f"{word}_x2") else (-2, -1)
    if view.carries(x1.axes[k1]) or view.carries(x2.axes[k2]):
        silent = 0 in (x1.padded(x1.rank + k1), x2.padded(x2.rank + k2))
        if not silent or coarse(view, x1.axes[k1]) != coarse(view, x2.axes[k2]):
            raise UnsupportedPadding(f"sums over {view.symbol}")
        view.keep_order()
    batch = aligned(view, [Fact(x1.axes[:-2]), Fact(x2.axes[:-2])])
    result = Fact((*batch, x1.axes[n], x2.axes[m]))
    bias = view.given("bias") if view.node.op != "BatchMatMul" else None
    return [result if bias is None else Fact(aligned(view, [result, view.walk.of(bias)]))]
