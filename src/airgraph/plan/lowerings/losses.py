"""Losses and their gradients."""

from __future__ import annotations

from airgraph.plan.index import same
from airgraph.plan.lowerings.formulas import below, both, choose, floats_only, functions_in, mean, size_of, wide
from airgraph.plan.lowerings.table import (
    BF16,
    BOOL,
    DOUBLE,
    FLOAT,
    HALF,
    INT64,
    LoweringView,
    UnsupportedLowering,
    lowers,
)
from airgraph.plan.tensors import Tensor, cast, const, iota, point, reduce, reshape, tensor


def reduced_loss(view: LoweringView, each: Tensor) -> Tensor:
    how = view.attr("reduction")
    if how == "none" or not each.shape:
        return each
    if any(same(s, 0) for s in each.shape):
        raise UnsupportedLowering("of nothing")
    axes = list(range(len(each.shape)))
    return mean(each, axes, False) if how == "mean" else reduce("sum", each, axes, False)


def loss_factor(view: LoweringView, x: Tensor) -> Tensor:
    """What the gradient of each element is multiplied with because of the reduction."""
    one = const(1.0, wide(view.result_dtype))
    if view.attr("reduction") != "mean":
        return one
    return point("div", (one, size_of(x, range(len(x.shape)), one.dtype)), one.dtype)


@lowers("MseLoss", "SmoothL1LossV2", "HuberLoss")
def distance_loss(view: LoweringView) -> Tensor:
    f, op = floats_only(view), view.node.op
    d = f("sub", view["predict"], view["label"])
    if op == "MseLoss":
        return reduced_loss(view, f("mul", d, d))
    z, edge = f("abs", d), float(view.attr("sigma" if op == "SmoothL1LossV2" else "delta"))
    if op == "HuberLoss":
        far = f("mul", edge, f("sub", z, 0.5 * edge))
        return reduced_loss(view, choose(below(z, edge, "le"), f("mul", f("mul", z, z), 0.5), far))
    if edge == 0:
        return reduced_loss(view, z)
    return reduced_loss(
        view, choose(below(z, edge), f("div", f("mul", f("mul", z, z), 0.5), edge), f("sub", z, 0.5 * edge))
    )


@lowers("MseLossGrad", "SmoothL1LossGradV2", "HuberLossGrad")
def distance_gradient(view: LoweringView) -> Tensor:
    f, op, x = floats_only(view), view.node.op, view["predict"]
    d = f("sub", x, view["label"])
    g = f("mul", view["dout"], loss_factor(view, x))
    if op == "MseLossGrad":
        return f("mul", f("mul", d, 2.0), g)
    edge = float(view.attr("sigma" if op == "SmoothL1LossGradV2" else "delta"))
    slope = f("sign", d) if op == "SmoothL1LossGradV2" else f("mul", f("sign", d), edge)
    if edge == 0:
        return f("mul", slope, g)
    near = f("div", d, edge) if op == "SmoothL1LossGradV2" else d
    return f("mul", choose(below(f("abs", d), edge, "gt"), slope, near), g)


@lowers("BinaryCrossEntropy")
def binary_cross_entropy(view: LoweringView) -> Tensor:
    f, x, y = floats_only(view), view["x"], view["y"]
    high, low = f("max", f("log", x), -100.0), f("max", f("log1p", f("neg", x)), -100.0)
    each = f("sub", f("mul", f("sub", y, 1.0), low), f("mul", y, high))
    return reduced_loss(view, f("mul", each, view["weight"]) if view.has("weight") else each)


@lowers("BinaryCrossEntropyGrad")
def binary_cross_entropy_gradient(view: LoweringView) -> Tensor:
    f, x, y = floats_only(view), view["x"], view["y"]
    spread = f("max", f("mul", f("sub", 1.0, x), x), 1e-12)
    each = f("div", f("mul", view["grad_output"], f("sub", x, y)), spread)
    each = f("mul", each, view["weight"]) if view.has("weight") else each
    return f("mul", each, loss_factor(view, x))


@lowers("SigmoidCrossEntropyWithLogitsV2")
def logits_cross_entropy(view: LoweringView) -> Tensor:
    f, x, y = floats_only(view), view["predict"], view["target"]
    if view.result_dtype in (HALF, BF16):
        raise UnsupportedLowering("of halves, which eager rounds on the way")
    log_s = f("sub", f("min", x, 0.0), f("log1p", f("exp", f("neg", f("abs", x)))))
    if view.has("pos_weight"):
        log_s = f("mul", f("add", f("mul", f("sub", view["pos_weight"], 1.0), y), 1.0), log_s)
    each = f("sub", f("mul", f("sub", 1.0, y), x), log_s)
    return reduced_loss(view, f("mul", each, view["weight"]) if view.has("weight") else each)


# -- by class -------------------------------------------------------------------------------------------------------
def classes_of(view: LoweringView) -> tuple[Tensor, Tensor, int, Tensor]:
    """x, the class of each row, the axis of the classes, and which rows count."""
    x, target = view["x"], cast(view["target"], INT64)
    axis = 0 if len(x.shape) == 1 else 1
    if x.dtype not in (FLOAT, DOUBLE) or len(target.shape) != max(len(x.shape) - 1, 0):
        raise UnsupportedLowering("of halves, or of one row with a class in a list")
    if any(same(s, 0) for s in x.shape):
        raise UnsupportedLowering("of nothing")
    ignored = const(int(view.attr("ignore_index")), INT64)
    return x, target, axis, point("ne", (target, ignored), BOOL)


@lowers("NLLLoss")
def class_loss(view: LoweringView) -> list[Tensor]:
    x, target, axis, counts = classes_of(view)
    f, nothing, rank = functions_in(x.dtype), const(0.0, x.dtype), len(target.shape)
    safe = choose(counts, target, const(0, INT64))
    how = tuple(("at", 0, False, 0, rank) if i == axis else i - (i > axis) for i in range(len(x.shape)))
    each = f("neg", tensor("gather", (x, safe), target.shape, x.dtype, how))
    weight = const(1.0, x.dtype)
    if view.has("weight"):
        weight = tensor("gather", (view["weight"], safe), target.shape, x.dtype, (("at", 0, False, 0, rank),))
        each = f("mul", each, weight)
    each = choose(counts, each, nothing)
    if view.attr("reduction") == "none":
        return [each, nothing]
    total = choose(counts, weight, nothing)
    if rank:
        each, total = (reduce("sum", t, range(rank), False) for t in (each, total))
    return [f("div", each, total) if view.attr("reduction") == "mean" else each, total]


@lowers("NLLLossGrad")
def class_gradient(view: LoweringView) -> Tensor:
    x, target, axis, counts = classes_of(view)
    f = functions_in(x.dtype)
    beside = [1 if i == axis else s for i, s in enumerate(x.shape)]
    here = point("eq", (iota(x.shape, axis, 0, 1), reshape(target, beside)), BOOL)
    g = view["y_grad"]
    g = f("neg", reshape(g, beside) if g.shape else g)
    if view.has("weight"):
        g = f("mul", g, reshape(view["weight"], [s if i == axis else 1 for i, s in enumerate(x.shape)]))
    if view.attr("reduction") == "mean":
        g = f("div", g, view["total_weight"])
    return choose(both(here, reshape(counts, beside)), g, const(0.0, x.dtype))
