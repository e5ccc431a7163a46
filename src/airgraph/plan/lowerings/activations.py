"""Activations and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from airgraph.plan.lowerings.formulas import below, both, choose, floats_only, number_of, widened
from airgraph.plan.lowerings.table import BOOL, DOUBLE, FLOAT, FLOATS, LoweringView, UnsupportedLowering, first, lowers
from airgraph.plan.tensors import Tensor, concat, const, part, point

SIXTH = float(np.float32(1) / np.float32(6))  # PyTorch has it in single precision for doubles too


@lowers("Swish")
def swish(view: LoweringView) -> Tensor:
    f = floats_only(view)
    return f("mul", first(view), f("sigmoid", first(view)))


@lowers("Gelu")
def gelu(view: LoweringView) -> Tensor:
    f, x = floats_only(view), first(view)
    if view.attr("approximate") == "tanh":
        inner = f("mul", math.sqrt(2 / math.pi), f("add", x, f("mul", 0.044715, f("mul", f("mul", x, x), x))))
        return f("mul", f("mul", 0.5, x), f("add", 1.0, f("tanh", inner)))
    return f("mul", f("mul", x, 0.5), f("add", 1.0, f("erf", f("mul", x, math.sqrt(0.5)))))


@lowers("GeluGrad")
def gelu_gradient(view: LoweringView) -> Tensor:
    f, dy, x = floats_only(view), view["dy"], view["x"]
    if view.attr("approximate") == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        square = f("mul", x, x)
        t = f("tanh", f("mul", beta, f("add", x, f("mul", kappa, f("mul", square, x)))))
        left = f("mul", 0.5, f("add", 1.0, t))
        slope = f("mul", beta, f("add", 1.0, f("mul", 3 * kappa, square)))
        right = f("mul", f("mul", f("mul", 0.5, x), f("sub", 1.0, f("mul", t, t))), slope)
        return f("mul", dy, f("add", left, right))
    cdf = f("mul", 0.5, f("add", 1.0, f("erf", f("mul", x, math.sqrt(0.5)))))
    pdf = f("mul", 1 / math.sqrt(2 * math.pi), f("exp", f("mul", f("mul", x, x), -0.5)))
    return f("mul", dy, f("add", cdf, f("mul", x, pdf)))


@lowers("LeakyRelu")
def leaky_relu(view: LoweringView) -> Tensor:
    f, x = floats_only(view), widened(first(view))
    return choose(point("gt", (x, const(0.0, x.dtype)), BOOL), x, f("mul", x, float(view.attr("negative_slope"))))


@lowers("ReluGrad", "ThresholdGradV2D")
def relu_gradient(view: LoweringView) -> Tensor:
    """0 where the feature is at most the threshold; NaN lets the gradient through, as in PyTorch."""
    x, g = view["features"], view["gradients"]
    if x.dtype not in FLOATS or g.dtype not in FLOATS:
        raise UnsupportedLowering("of whole numbers")
    threshold = view.attr("threshold") if view.node.op == "ThresholdGradV2D" else 0.0
    below = point("le", (x, const(float(threshold or 0.0), x.dtype)), BOOL)
    return choose(below, const(0.0, g.dtype), g)


@lowers("SigmoidGrad")
def sigmoid_gradient(view: LoweringView) -> Tensor:
    f, y = floats_only(view), view["y"]
    return f("mul", f("mul", view["dy"], f("sub", 1.0, y)), y)


@lowers("TanhGrad")
def tanh_gradient(view: LoweringView) -> Tensor:
    f, y = floats_only(view), view["y"]
    return f("mul", view["dy"], f("sub", 1.0, f("mul", y, y)))


@lowers("SiluGrad")
def silu_gradient(view: LoweringView) -> Tensor:
    f, x = floats_only(view), view["x"]
    s = f("sigmoid", x)
    return f("mul", f("mul", view["dy"], s), f("add", 1.0, f("mul", x, f("sub", 1.0, s))))


@lowers("HardSwish")
def hard_swish(view: LoweringView) -> Tensor:
    f, x = floats_only(view), first(view)
    return f("mul", x, hard_slope(f, x))


@lowers("HardSigmoid")
def hard_sigmoid(view: LoweringView) -> Tensor:
    return hard_slope(floats_only(view), first(view))


def hard_slope(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    """From 0 at -3 to 1 at 3, exactly at both. (Dividing a vector takes several times as long as multiplying it.)"""
    return f("mul", f("min", f("max", f("add", x, 3.0), 0.0), 6.0), 1 / 6)


@lowers("Elu", "CeluV2")
def elu(view: LoweringView) -> Tensor:
    f, x = floats_only(view), widened(first(view))
    alpha, scale, inside = float(view.attr("alpha")), 1.0, 1.0
    if view.node.op == "Elu":
        scale, inside = float(view.attr("scale")), float(view.attr("input_scale"))
    elif alpha:
        inside = 1 / alpha
    else:
        raise UnsupportedLowering("with alpha 0")
    return choose(below(x, 0.0), f("mul", f("expm1", f("mul", x, inside)), alpha * scale), f("mul", x, scale))


@lowers("EluGradV2")
def elu_gradient(view: LoweringView) -> Tensor:
    f, x, g = floats_only(view), widened(view["activations"]), view["grads"]
    scale, inside = float(view.attr("scale")), float(view.attr("input_scale"))
    factor = float(view.attr("alpha")) * scale
    slope = f("add", x, factor) if view.attr("is_result") else f("mul", f("exp", f("mul", x, inside)), factor)
    return choose(below(x, 0.0, "le"), f("mul", f("mul", g, inside), slope), f("mul", g, scale))


def halves_of(x: Tensor, axis: int) -> list[Tensor]:
    size = x.shape[axis]
    if not isinstance(size, int) or size % 2:
        raise UnsupportedLowering("of a symbolic size")
    return [part(x, axis, start, size // 2) for start in (0, size // 2)]


@lowers("GLU")
def glu(view: LoweringView) -> Tensor:
    f, x = floats_only(view), widened(first(view))
    a, b = halves_of(x, view.attr("dim") % len(x.shape))
    return f("mul", a, f("sigmoid", b))


@lowers("GLUGrad")
def glu_gradient(view: LoweringView) -> Tensor:
    f, g, x = floats_only(view), view["y_grad"], widened(view["x"])
    axis = view.attr("dim") % len(x.shape)
    a, b = halves_of(x, axis)
    s = f("sigmoid", b)
    return concat([f("mul", s, g), f("mul", f("mul", f("mul", f("sub", 1.0, s), s), g), a)], axis)


@lowers("HardSwishGrad")
def hard_swish_gradient(view: LoweringView) -> Tensor:
    f, g, x = floats_only(view), widened(view["grad"]), widened(view["x"])
    middle = f("mul", g, f("add", f("div", x, 3.0), 0.5))
    return choose(below(x, -3.0, "le"), const(0.0, g.dtype), choose(below(x, 3.0, "ge"), g, middle))


@lowers("HardSigmoidGrad")
def hard_sigmoid_gradient(view: LoweringView) -> Tensor:
    f, g, x = floats_only(view), view["grads"], widened(view["input_x"])
    return choose(both(below(x, -3.0, "gt"), below(x, 3.0)), f("mul", g, SIXTH), const(0.0, x.dtype))


@lowers("HardtanhGrad")
def hard_tanh_gradient(view: LoweringView) -> Tensor:
    x, g = view["result"], view["grad"]
    if x.dtype not in FLOATS or g.dtype != x.dtype:
        raise UnsupportedLowering("of whole numbers")
    return choose(both(below(x, view.attr("min_val"), "gt"), below(x, view.attr("max_val"))), g, const(0.0, g.dtype))


@lowers("SoftShrinkGrad", "HardShrinkGrad")
def shrink_gradient(view: LoweringView) -> Tensor:
    g, x = (view.of(v) for v in view.node.values())
    limit = float(view.attr("lambd"))
    if x.dtype not in (FLOAT, DOUBLE) or g.dtype != x.dtype:
        raise UnsupportedLowering("of halves")
    return choose(point("or", (below(x, -limit), below(x, limit, "gt")), BOOL), g, const(0.0, g.dtype))


@lowers("Mish")
def mish(view: LoweringView) -> Tensor:
    f, x = floats_only(view), first(view)
    return f("mul", x, f("tanh", f("log1p", f("exp", x))))


@lowers("MishGrad")
def mish_gradient(view: LoweringView) -> Tensor:
    f, g, x = floats_only(view), view["grad"], view["x"]
    t, s = f("tanh", f("log1p", f("exp", x))), f("sigmoid", x)
    return f("mul", g, f("add", t, f("mul", f("mul", x, s), f("sub", 1.0, f("mul", t, t)))))


@lowers("LogSigmoid")
def log_sigmoid(view: LoweringView) -> list[Tensor]:
    f, x = floats_only(view), first(view)
    if view.node.outputs[1].type.shape != view.result_shape:
        raise UnsupportedLowering("without its buffer")
    near_zero = f("exp", f("neg", f("abs", x)))
    return [f("sub", f("min", x, 0.0), f("log1p", near_zero)), near_zero]


@lowers("LogSigmoidGrad")
def log_sigmoid_gradient(view: LoweringView) -> Tensor:
    f, g, x, e = floats_only(view), view["grads"], widened(view["features"]), view["buffer"]
    if e.shape != x.shape:
        raise UnsupportedLowering("without its buffer")
    part = f("div", e, f("add", 1.0, e))
    return f("mul", g, choose(below(x, 0.0), f("sub", 1.0, part), part))


@lowers("PRelu")
def parametric_relu(view: LoweringView) -> Tensor:
    f, x = floats_only(view), widened(view["x"])
    return choose(below(x, 0.0, "gt"), x, f("mul", view["weight"], x))


@lowers("LeakyReluGrad")
def leaky_relu_gradient(view: LoweringView) -> Tensor:
    f, g, x = floats_only(view), widened(view["gradients"]), widened(view["features"])
    return choose(below(x, 0.0, "gt"), g, f("mul", g, float(view.attr("negative_slope"))))


@lowers("SoftplusV2")
def softplus(view: LoweringView) -> Tensor:
    f, x, beta = floats_only(view), widened(first(view)), float(view.attr("beta"))
    scaled = f("mul", x, beta)
    return choose(below(scaled, view.attr("threshold"), "gt"), x, f("div", f("log1p", f("exp", scaled)), beta))


@lowers("SoftplusV2Grad")
def softplus_gradient(view: LoweringView) -> Tensor:
    f, g, x = floats_only(view), widened(view["input_gradients"]), widened(view["input_features"])
    scaled = f("mul", x, float(view.attr("beta")))
    e = f("exp", scaled)
    return choose(below(scaled, view.attr("threshold"), "gt"), g, f("div", f("mul", g, e), f("add", e, 1.0)))


@lowers("ThresholdV2")
def threshold(view: LoweringView) -> Tensor:
    x, bound, value = view["x"], number_of(view["threshold"]), number_of(view["value"])
    if x.dtype not in (FLOAT, DOUBLE) or bound is None or value is None:
        raise UnsupportedLowering("of halves or whole numbers")
    return choose(below(x, bound, "le"), const(float(value), x.dtype), x)
