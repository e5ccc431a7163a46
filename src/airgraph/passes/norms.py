"""Normalisations that were written out: LayerNorm, RMSNorm, softmax."""

from __future__ import annotations

from airgraph.ir import ge
from airgraph.ir.graph import Node, Value
from airgraph.ir.types import DataType, TensorType
from airgraph.passes.rewrite import Either, P, Rule, RulePass, UnsupportedRewrite, constant_number, no
from airgraph.passes.shapes import axis_of, last_axes, rounds


def mean(x: object, axes: str) -> P:
    return P("ReduceMean", x, axes, keep_dims=True)


# -- softmax --------------------------------------------------------------------------------------------------------
# e / ReduceSum(e) with e = Exp(x - ReduceMax(x)) → SoftmaxV2(x)
PEAK = Either(
    P("ReduceMax", "x", "axes", keep_dims=True), P("ArgMaxWithValue", "x", bind="peak", index=1, keep_dims=True)
)
POWERS = P("Exp", P("Sub", "x", PEAK))


def softmax(
    node: Node, x: Value, total: Value, axes: Value | None = None, peak: Value | None = None
) -> Value | UnsupportedRewrite | None:
    over = axis_of(total.known, x.rank)
    first = axis_of(axes.known if axes else (peak.node.attrs["dimension"],) if peak else None, x.rank)
    if over is None or first is None:
        return None
    if over != first:
        return no("the sum and the maximum are along different axes", over, first)
    return rounds(x) or ge.SoftmaxV2(x, axes=[-1 if over == x.rank - 1 else over])


# -- layer norm -----------------------------------------------------------------------------------------------------
# (x - μ) / √(v + ε), with μ = ReduceMean(x) and v = ReduceMean((x - μ)²) or the variance → LayerNormV4(x)
CENTERED = P("Sub", "x", mean("x", "axes"))
VARIANCE = Either(
    mean(Either(P("Pow", CENTERED, 2), P("Mul", CENTERED, CENTERED)), "again"),
    P("ReduceVar", "x", bind="variance", correction=0, keepdim=True),
)
SHIFTED = P("Add", VARIANCE, "eps")
NORMAL = Either(P("RealDiv", CENTERED, P("Sqrt", SHIFTED)), P("Mul", CENTERED, P("Rsqrt", SHIFTED)))


def layer_norm(
    node: Node, x: Value, axes: Value, eps: Value, again: Value | None = None, variance: Value | None = None
) -> Value | UnsupportedRewrite | None:
    count = last_axes(axes.known, x.rank)
    over = tuple(variance.node.attrs.get("dim", ())) if variance else again.known if again else None
    if count is None or last_axes(over, x.rank) != count:
        return no("the mean and the variance are not over the same last axes")
    epsilon, sizes = constant_number(eps), (x.type.shape or ())[x.rank - count :]
    if epsilon is None:
        return no("epsilon is not a constant", eps.node.name)
    if not all(isinstance(size, int) for size in sizes):
        return no("the normalized sizes are symbolic", *sizes)
    return rounds(x) or norm_of(x, sizes, None, None, epsilon)


def norm_of(x: Value, sizes: tuple[int, ...], gamma: Value | None, beta: Value | None, epsilon: float) -> Value:
    outputs: list[Value] = ge.LayerNormV4(x, list(sizes), gamma, beta, epsilon=epsilon)
    shape = (*(x.type.shape or ())[: x.rank - len(sizes)], *[1] * len(sizes))
    for value in outputs[1:]:
        value.type = TensorType(value.dtype, shape, x.type.place)
    outputs[0].type = x.type
    return outputs[0]


# Mul(LayerNormV4(x), γ) → LayerNormV4(x, γ);  Add(LayerNormV4(x, γ), β) → LayerNormV4(x, γ, β)
def normed(gamma: str | None) -> P:
    return P("LayerNormV4", "x", "sizes", gamma, None, bind="norm")


def with_weight(
    node: Node, x: Value, sizes: Value, norm: Value, weight: Value, gamma: Value | None = None
) -> Value | None:
    fits = weight.type.shape == sizes.known and weight.dtype == x.dtype
    if not fits or rounds(x) or not isinstance(sizes.known, tuple):
        return None
    epsilon = norm.node.attrs.get("epsilon", 1e-5)
    return norm_of(x, sizes.known, gamma or weight, weight if gamma else None, epsilon)


# -- RMS norm -------------------------------------------------------------------------------------------------------
# γ · (x · Rsqrt(ReduceMean(x²) + ε)) → RmsNorm(x, γ)
# γ · Cast(w · Rsqrt(ReduceMean(w²) + ε)) with w = Cast(x) to float32, and back to x's own type → RmsNorm(x, γ)
MEAN_SQUARE = P("Add", mean(Either(P("Pow", "x", 2), P("Mul", "x", "x")), "axes"), "eps")
SCALED = (P("Mul", "x", P("Rsqrt", MEAN_SQUARE)), P("RealDiv", "x", P("Sqrt", MEAN_SQUARE)))
RMS = P("Mul", "gamma", Either(*SCALED, P("Cast", Either(*SCALED), bind="narrow")))


def rms_norm(
    node: Node, x: Value, gamma: Value, axes: Value, eps: Value, narrow: Value | None = None
) -> Value | UnsupportedRewrite | None:
    if axis_of(axes.known, x.rank) != x.rank - 1 or gamma.rank != 1:
        return None
    if gamma.type.shape != (x.type.shape or ())[-1:]:
        return no("the weight does not have the normalized size", gamma.type, x.type)
    epsilon = constant_number(eps)
    if epsilon is None:
        return no("epsilon is not a constant", eps.node.name)
    source = widened(x, narrow)
    if source is None or gamma.dtype != source.dtype:
        return no("the types in between are not those of RmsNorm", x.dtype.name, gamma.dtype.name)
    outputs: list[Value] = ge.RmsNorm(source, gamma, epsilon=epsilon)
    return outputs[0]


def widened(x: Value, narrow: Value | None) -> Value | None:
    """What RmsNorm reads so that it computes with x; None where it would round at other places."""
    if narrow is None:
        return None if rounds(x) else x
    if x.node.op != "Cast" or x.node.control or x.dtype != DataType.DT_FLOAT:
        return None
    (source,) = x.node.values()
    return source if source.dtype == narrow.dtype and source.dtype.is_float else None


TOTAL = P("ReduceSum", POWERS, "total", keep_dims=True)
softmax_pass = RulePass((Rule("softmax", P("RealDiv", POWERS, TOTAL), softmax, private=True),))
layer_norm_pass = RulePass(
    (
        Rule("layer_norm", NORMAL, layer_norm, private=True),
        Rule("layer_norm_weight", P("Mul", normed(None), "weight"), with_weight, private=True),
        Rule("layer_norm_bias", P("Add", normed("gamma"), "weight"), with_weight, private=True),
    )
)
rms_norm_pass = RulePass((Rule("rms_norm", RMS, rms_norm, private=True),))
