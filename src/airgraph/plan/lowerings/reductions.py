"""Reductions, and softmax with its gradients."""

from __future__ import annotations

import math

from airgraph.ir.types import Dim
from airgraph.plan.index import count, expand, same
from airgraph.plan.lowerings.formulas import below, both, choose, floats_only, mean, total, truth, wide, widened
from airgraph.plan.lowerings.table import (
    BOOL,
    FLOATS,
    INTS,
    NUMBERS,
    LoweringView,
    UnsupportedLowering,
    first,
    known,
    lowers,
)
from airgraph.plan.tensors import Tensor, cast, const, iota, point, reduce, reshape

BINS = 64  # of a histogram


def axes_of(view: LoweringView, name: str = "axes") -> list[int]:
    axes = known(view, name)
    axes = axes if isinstance(axes, tuple) else (axes,)
    rank = len(first(view).shape)
    return [a % rank for a in axes] if rank and axes else list(range(rank))


@lowers("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceAll", "ReduceAny")
def reduction(view: LoweringView) -> Tensor:
    x, axes, keep, op = first(view), axes_of(view), bool(view.attr("keep_dims")), view.node.op
    if not axes:
        return first(view)
    if op in ("ReduceAll", "ReduceAny"):
        return reduce("and" if op == "ReduceAll" else "or", truth(x), axes, keep)
    if x.dtype not in NUMBERS or view.result_dtype not in NUMBERS:
        raise UnsupportedLowering("of truth values")
    if any(same(x.shape[a], 0) for a in axes):
        raise UnsupportedLowering("of nothing")
    x = widened(cast(x, view.result_dtype) if view.result_dtype in INTS else x)
    if op == "ReduceMean":
        if x.dtype not in FLOATS:
            raise UnsupportedLowering("of whole numbers")
        return mean(x, axes, keep)
    return reduce({"ReduceSum": "sum", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod"}[op], x, axes, keep)


@lowers("ReduceVar", "ReduceStdV2")
def variance(view: LoweringView) -> list[Tensor]:
    x, axes, keep = widened(first(view)), list(view.attr("dim") or ()), bool(view.attr("keepdim"))
    if x.dtype not in FLOATS or not x.shape:
        raise UnsupportedLowering("of a scalar")
    axes = [a % len(x.shape) for a in axes] or list(range(len(x.shape)))
    average = mean(x, axes, True)
    d = point("sub", (x, average), x.dtype)
    n: Dim = 1
    for a in axes:
        n = expand(n * x.shape[a])
    correction = view.attr("correction")
    if not isinstance(n, int) or not isinstance(correction, int) or n - correction <= 0:
        raise UnsupportedLowering("with a symbolic or empty count")
    var = point(
        "div", (total(point("mul", (d, d), x.dtype), axes, keep), const(float(n - correction), x.dtype)), x.dtype
    )
    if view.node.op == "ReduceStdV2":
        var = point("sqrt", (var,), x.dtype)
    return [var, mean(x, axes, keep)]


@lowers("ReduceStdWithMean")
def deviation(view: LoweringView) -> Tensor:
    """√((Σd² - (Σd)² / n) / (n - correction)) with d = x - mean: the second sum takes out what rounding did to the mean."""
    f, x = floats_only(view), widened(view["x"])
    axes, keep = [a % len(x.shape) for a in view.attr("dim")] or list(range(len(x.shape))), bool(view.attr("keepdim"))
    n, correction = count([x.shape[a] for a in axes]), view.attr("correction")
    if not isinstance(n, int) or n - correction <= 0:
        raise UnsupportedLowering("with a symbolic or empty count")
    d = f("sub", x, view["mean"])
    rest, squares = total(d, axes, keep), total(f("mul", d, d), axes, keep)
    spread = f("sub", squares, f("div", f("mul", rest, rest), float(n)))
    return f("sqrt", f("div", f("max", spread, 0.0), float(n - correction)))


@lowers("ReduceMeanWithCast")
def mean_with_cast(view: LoweringView) -> Tensor:
    if view.result_dtype not in FLOATS or first(view).dtype not in NUMBERS:
        raise UnsupportedLowering("of whole numbers")
    x, axes = cast(first(view), wide(view.result_dtype)), axes_of(view)
    return mean(x, axes, bool(view.attr("keep_dims"))) if axes else x


@lowers("ReduceNansum", "LpNormV2")
def special_sum(view: LoweringView) -> Tensor:
    x, op = widened(first(view)), view.node.op
    if x.dtype not in FLOATS or not x.shape or any(same(s, 0) for s in x.shape):
        raise UnsupportedLowering("of whole numbers, a scalar or nothing")
    if op == "ReduceNansum":
        present = choose(point("is_nan", (x,), BOOL), const(0.0, x.dtype), x)
        return reduce("sum", present, axes_of(view), bool(view.attr("keep_dims")))
    axes = [a % len(x.shape) for a in view.attr("axes")] or list(range(len(x.shape)))
    keep, p, size = bool(view.attr("keepdim")), float(view.attr("p")), point("abs", (x,), x.dtype)
    if p in (math.inf, -math.inf):
        return reduce("max" if p > 0 else "min", size, axes, keep)
    if p == 1:
        return reduce("sum", size, axes, keep)
    if p == 2:
        return point("sqrt", (reduce("sum", point("mul", (x, x), x.dtype), axes, keep),), x.dtype)
    raise UnsupportedLowering("of another power")


@lowers("Histogram")
def histogram(view: LoweringView) -> Tensor:
    """For each bin a sum over all elements, which pays as long as there are few: experts, not grey levels."""
    f, bins, low, high = floats_only(view), view.attr("bins"), view.attr("min"), view.attr("max")
    x = first(view)
    if bins > BINS or not x.shape or any(same(s, 0) for s in x.shape):
        raise UnsupportedLowering("of many bins, or of nothing")
    x = reshape(x, (1, count(x.shape)))
    at = f("floor", f("div", f("mul", f("sub", x, low), float(bins)), f("sub", high, low)))
    bin = cast(iota((bins, 1), 0, 0, 1), x.dtype)
    inside = both(below(x, low, "ge"), below(x, high, "le"))
    here = both(inside, point("eq", (f("min", at, float(bins - 1)), bin), BOOL))
    return reduce("sum", choose(here, const(1.0, x.dtype), const(0.0, x.dtype)), [1], False)


@lowers("SoftmaxV2", "LogSoftmaxV2")
def softmax(view: LoweringView) -> Tensor:
    x, axes = widened(first(view)), list(view.attr("axes"))
    if not x.shape or x.dtype not in FLOATS:
        raise UnsupportedLowering("of a scalar")
    d = point("sub", (x, reduce("max", x, axes, True)), x.dtype)
    e = point("exp", (d,), x.dtype)
    s = reduce("sum", e, axes, True)
    if view.node.op == "LogSoftmaxV2":
        return point("sub", (d, point("log", (s,), x.dtype)), x.dtype)
    return point("mul", (e, point("reciprocal", (s,), x.dtype)), x.dtype)


@lowers("SoftmaxGrad")
def softmax_gradient(view: LoweringView) -> Tensor:
    y, dy = widened(view["softmax"]), widened(view["grad_softmax"])
    if not y.shape:
        raise UnsupportedLowering("of a scalar")
    s = reduce("sum", point("mul", (y, dy), y.dtype), list(view.attr("axes")), True)
    return point("mul", (point("sub", (dy, s), y.dtype), y), y.dtype)


@lowers("LogSoftmaxGrad")
def log_softmax_gradient(view: LoweringView) -> Tensor:
    y, dy = widened(view["x"]), widened(view["grad"])
    if not y.shape:
        raise UnsupportedLowering("of a scalar")
    s = reduce("sum", dy, list(view.attr("axis")), True)
    return point("sub", (dy, point("mul", (point("exp", (y,), y.dtype), s), y.dtype)), y.dtype)
