"""Activations and their gradients."""

from __future__ import annotations

import math

import numpy as np

from airgraph.plan.lowerings.core import BOOL, DOUBLE, FLOAT, FLOATS, UnsupportedLowering, Use, lowers
from airgraph.plan.lowerings.formulas import below, both, choose, floats_only, number_of, widened
from airgraph.plan.tensors import Tensor, concat, const, part, point

SIXTH = float(np.float32(1) / np.float32(6))  # PyTorch has it in single precision for doubles too


@lowers("Swish")
def swish(use: Use) -> Tensor:
    f = floats_only(use)
    return f("mul", use.x, f("sigmoid", use.x))


@lowers("Gelu")
def gelu(use: Use) -> Tensor:
    f, x = floats_only(use), use.x
    if use.attr("approximate") == "tanh":
        inner = f("mul", math.sqrt(2 / math.pi), f("add", x, f("mul", 0.044715, f("mul", f("mul", x, x), x))))
        return f("mul", f("mul", 0.5, x), f("add", 1.0, f("tanh", inner)))
    return f("mul", f("mul", x, 0.5), f("add", 1.0, f("erf", f("mul", x, math.sqrt(0.5)))))


@lowers("GeluGrad")
def gelu_gradient(use: Use) -> Tensor:
    f, dy, x = floats_only(use), use["dy"], use["x"]
    if use.attr("approximate") == "tanh":
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
def leaky_relu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use.x)
    return choose(point("gt", (x, const(0.0, x.dtype)), BOOL), x, f("mul", x, float(use.attr("negative_slope"))))


@lowers("ReluGrad", "ThresholdGradV2D")
def relu_gradient(use: Use) -> Tensor:
    """0 where the feature is at most the threshold; NaN lets the gradient through, as in PyTorch."""
    x, g = use["features"], use["gradients"]
    if x.dtype not in FLOATS or g.dtype not in FLOATS:
        raise UnsupportedLowering("of whole numbers")
    threshold = use.attr("threshold") if use.node.op == "ThresholdGradV2D" else 0.0
    below = point("le", (x, const(float(threshold or 0.0), x.dtype)), BOOL)
    return choose(below, const(0.0, g.dtype), g)


@lowers("SigmoidGrad")
def sigmoid_gradient(use: Use) -> Tensor:
    f, y = floats_only(use), use["y"]
    return f("mul", f("mul", use["dy"], f("sub", 1.0, y)), y)


@lowers("TanhGrad")
def tanh_gradient(use: Use) -> Tensor:
    f, y = floats_only(use), use["y"]
    return f("mul", use["dy"], f("sub", 1.0, f("mul", y, y)))


@lowers("SiluGrad")
def silu_gradient(use: Use) -> Tensor:
    f, x = floats_only(use), use["x"]
    s = f("sigmoid", x)
    return f("mul", f("mul", use["dy"], s), f("add", 1.0, f("mul", x, f("sub", 1.0, s))))


@lowers("HardSwish")
def hard_swish(use: Use) -> Tensor:
    f, x = floats_only(use), use.x
    return f("div", f("mul", x, f("min", f("max", f("add", x, 3.0), 0.0), 6.0)), 6.0)


@lowers("HardSigmoid")
def hard_sigmoid(use: Use) -> Tensor:
    f = floats_only(use)
    return f("div", f("min", f("max", f("add", use.x, 3.0), 0.0), 6.0), 6.0)


@lowers("Elu", "CeluV2")
def elu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use.x)
    alpha, scale, inside = float(use.attr("alpha")), 1.0, 1.0
    if use.node.op == "Elu":
        scale, inside = float(use.attr("scale")), float(use.attr("input_scale"))
    elif alpha:
        inside = 1 / alpha
    else:
        raise UnsupportedLowering("with alpha 0")
    return choose(below(x, 0.0), f("mul", f("expm1", f("mul", x, inside)), alpha * scale), f("mul", x, scale))


@lowers("EluGradV2")
def elu_gradient(use: Use) -> Tensor:
    f, x, g = floats_only(use), widened(use["activations"]), use["grads"]
    scale, inside = float(use.attr("scale")), float(use.attr("input_scale"))
    factor = float(use.attr("alpha")) * scale
    slope = f("add", x, factor) if use.attr("is_result") else f("mul", f("exp", f("mul", x, inside)), factor)
    return choose(below(x, 0.0, "le"), f("mul", f("mul", g, inside), slope), f("mul", g, scale))


def halves_of(x: Tensor, axis: int) -> list[Tensor]:
    size = x.shape[axis]
    if not isinstance(size, int) or size % 2:
        raise UnsupportedLowering("of a symbolic size")
    return [part(x, axis, start, size // 2) for start in (0, size // 2)]


@lowers("GLU")
def glu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use.x)
    a, b = halves_of(x, use.attr("dim") % len(x.shape))
    return f("mul", a, f("sigmoid", b))


@lowers("GLUGrad")
def glu_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), use["y_grad"], widened(use["x"])
    axis = use.attr("dim") % len(x.shape)
    a, b = halves_of(x, axis)
    s = f("sigmoid", b)
    return concat([f("mul", s, g), f("mul", f("mul", f("mul", f("sub", 1.0, s), s), g), a)], axis)


@lowers("HardSwishGrad")
def hard_swish_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), widened(use["grad"]), widened(use["x"])
    middle = f("mul", g, f("add", f("div", x, 3.0), 0.5))
    return choose(below(x, -3.0, "le"), const(0.0, g.dtype), choose(below(x, 3.0, "ge"), g, middle))


@lowers("HardSigmoidGrad")
def hard_sigmoid_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), use["grads"], widened(use["input_x"])
    return choose(both(below(x, -3.0, "gt"), below(x, 3.0)), f("mul", g, SIXTH), const(0.0, x.dtype))


@lowers("HardtanhGrad")
def hard_tanh_gradient(use: Use) -> Tensor:
    x, g = use["result"], use["grad"]
    if x.dtype not in FLOATS or g.dtype != x.dtype:
        raise UnsupportedLowering("of whole numbers")
    return choose(both(below(x, use.attr("min_val"), "gt"), below(x, use.attr("max_val"))), g, const(0.0, g.dtype))


@lowers("SoftShrinkGrad", "HardShrinkGrad")
def shrink_gradient(use: Use) -> Tensor:
    g, x = (use.of(v) for v in use.node.values())
    limit = float(use.attr("lambd"))
    if x.dtype not in (FLOAT, DOUBLE) or g.dtype != x.dtype:
        raise UnsupportedLowering("of halves")
    return choose(point("or", (below(x, -limit), below(x, limit, "gt")), BOOL), g, const(0.0, g.dtype))


@lowers("Mish")
def mish(use: Use) -> Tensor:
    f, x = floats_only(use), use.x
    return f("mul", x, f("tanh", f("log1p", f("exp", x))))


@lowers("MishGrad")
def mish_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), use["grad"], use["x"]
    t, s = f("tanh", f("log1p", f("exp", x))), f("sigmoid", x)
    return f("mul", g, f("add", t, f("mul", f("mul", x, s), f("sub", 1.0, f("mul", t, t)))))


@lowers("LogSigmoid")
def log_sigmoid(use: Use) -> list[Tensor]:
    f, x = floats_only(use), use.x
    if use.node.outputs[1].type.shape != use.shape:
        raise UnsupportedLowering("without its buffer")
    near_zero = f("exp", f("neg", f("abs", x)))
    return [f("sub", f("min", x, 0.0), f("log1p", near_zero)), near_zero]


@lowers("LogSigmoidGrad")
def log_sigmoid_gradient(use: Use) -> Tensor:
    f, g, x, e = floats_only(use), use["grads"], widened(use["features"]), use["buffer"]
    if e.shape != x.shape:
        raise UnsupportedLowering("without its buffer")
    part = f("div", e, f("add", 1.0, e))
    return f("mul", g, choose(below(x, 0.0), f("sub", 1.0, part), part))


@lowers("PRelu")
def parametric_relu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use["x"])
    return choose(below(x, 0.0, "gt"), x, f("mul", use["weight"], x))


@lowers("LeakyReluGrad")
def leaky_relu_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), widened(use["gradients"]), widened(use["features"])
    return choose(below(x, 0.0, "gt"), g, f("mul", g, float(use.attr("negative_slope"))))


@lowers("SoftplusV2")
def softplus(use: Use) -> Tensor:
    f, x, beta = floats_only(use), widened(use.x), float(use.attr("beta"))
    scaled = f("mul", x, beta)
    return choose(below(scaled, use.attr("threshold"), "gt"), x, f("div", f("log1p", f("exp", scaled)), beta))


@lowers("SoftplusV2Grad")
def softplus_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), widened(use["input_gradients"]), widened(use["input_features"])
    scaled = f("mul", x, float(use.attr("beta")))
    e = f("exp", scaled)
    return choose(below(scaled, use.attr("threshold"), "gt"), g, f("div", f("mul", g, e), f("add", e, 1.0)))


@lowers("ThresholdV2")
def threshold(use: Use) -> Tensor:
    x, bound, value = use["x"], number_of(use["threshold"]), number_of(use["value"])
    if x.dtype not in (FLOAT, DOUBLE) or bound is None or value is None:
        raise UnsupportedLowering("of halves or whole numbers")
    return choose(below(x, bound, "le"), const(float(value), x.dtype), x)
