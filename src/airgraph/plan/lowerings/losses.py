"""Losses and their gradients."""

from __future__ import annotations

from airgraph.plan.index import same
from airgraph.plan.lowerings.core import BF16, HALF, NoFormula, Use, lowers
from airgraph.plan.lowerings.formulas import below, choose, floats_only, mean, size_of, wide
from airgraph.plan.tensors import Tensor, const, point, reduce


def reduced_loss(use: Use, each: Tensor) -> Tensor:
    how = use.attr("reduction")
    if how == "none" or not each.shape:
        return each
    if any(same(s, 0) for s in each.shape):
        raise NoFormula("of nothing")
    axes = list(range(len(each.shape)))
    return mean(each, axes, False) if how == "mean" else reduce("sum", each, axes, False)


def loss_factor(use: Use, x: Tensor) -> Tensor:
    """What the gradient of each element is multiplied with because of the reduction."""
    one = const(1.0, wide(use.dtype))
    if use.attr("reduction") != "mean":
        return one
    return point("div", (one, size_of(x, range(len(x.shape)), one.dtype)), one.dtype)


@lowers("MseLoss", "SmoothL1LossV2", "HuberLoss")
def distance_loss(use: Use) -> Tensor:
    f, op = floats_only(use), use.node.op
    d = f("sub", use["predict"], use["label"])
    if op == "MseLoss":
        return reduced_loss(use, f("mul", d, d))
    z, edge = f("abs", d), float(use.attr("sigma" if op == "SmoothL1LossV2" else "delta"))
    if op == "HuberLoss":
        far = f("mul", edge, f("sub", z, 0.5 * edge))
        return reduced_loss(use, choose(below(z, edge, "le"), f("mul", f("mul", z, z), 0.5), far))
    if edge == 0:
        return reduced_loss(use, z)
    return reduced_loss(
        use, choose(below(z, edge), f("div", f("mul", f("mul", z, z), 0.5), edge), f("sub", z, 0.5 * edge))
    )


@lowers("MseLossGrad", "SmoothL1LossGradV2", "HuberLossGrad")
def distance_gradient(use: Use) -> Tensor:
    f, op, x = floats_only(use), use.node.op, use["predict"]
    d = f("sub", x, use["label"])
    g = f("mul", use["dout"], loss_factor(use, x))
    if op == "MseLossGrad":
        return f("mul", f("mul", d, 2.0), g)
    edge = float(use.attr("sigma" if op == "SmoothL1LossGradV2" else "delta"))
    slope = f("sign", d) if op == "SmoothL1LossGradV2" else f("mul", f("sign", d), edge)
    if edge == 0:
        return f("mul", slope, g)
    near = f("div", d, edge) if op == "SmoothL1LossGradV2" else d
    return f("mul", choose(below(f("abs", d), edge, "gt"), slope, near), g)


@lowers("BinaryCrossEntropy")
def binary_cross_entropy(use: Use) -> Tensor:
    f, x, y = floats_only(use), use["x"], use["y"]
    high, low = f("max", f("log", x), -100.0), f("max", f("log1p", f("neg", x)), -100.0)
    each = f("sub", f("mul", f("sub", y, 1.0), low), f("mul", y, high))
    return reduced_loss(use, f("mul", each, use["weight"]) if use.has("weight") else each)


@lowers("BinaryCrossEntropyGrad")
def binary_cross_entropy_gradient(use: Use) -> Tensor:
    f, x, y = floats_only(use), use["x"], use["y"]
    spread = f("max", f("mul", f("sub", 1.0, x), x), 1e-12)
    each = f("div", f("mul", use["grad_output"], f("sub", x, y)), spread)
    each = f("mul", each, use["weight"]) if use.has("weight") else each
    return f("mul", each, loss_factor(use, x))


@lowers("SigmoidCrossEntropyWithLogitsV2")
def logits_cross_entropy(use: Use) -> Tensor:
    f, x, y = floats_only(use), use["predict"], use["target"]
    if use.dtype in (HALF, BF16):
        raise NoFormula("of halves, which eager rounds on the way")
    log_s = f("sub", f("min", x, 0.0), f("log1p", f("exp", f("neg", f("abs", x)))))
    if use.has("pos_weight"):
        log_s = f("mul", f("add", f("mul", f("sub", use["pos_weight"], 1.0), y), 1.0), log_s)
    each = f("sub", f("mul", f("sub", 1.0, y), x), log_s)
    return reduced_loss(use, f("mul", each, use["weight"]) if use.has("weight") else each)
