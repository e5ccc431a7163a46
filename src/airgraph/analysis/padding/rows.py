"""Padding: ops that work along axes (reductions, softmax, norms, sorting), on images, and products with attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from airgraph.analysis.padding.facts import (
    INFINITY,
    Fact,
    Facts,
    PaddingView,
    UnsupportedPadding,
    aligned,
    aligned_axis,
    coarse,
    numel_of,
    plain,
    rule,
    whole_axes,
)
from airgraph.ir.graph import Value
from airgraph.ir.ops import OPS
from airgraph.ir.types import DataType

# -- along axes -----------------------------------------------------------------------------------------------------
NEUTRAL = {
    "ReduceSum": 0,
    "ReduceNansum": 0,
    "ReduceProd": 1,
    "ReduceMax": -INFINITY,
    "ReduceMin": INFINITY,
    "ReduceAny": 0,
    "ReduceAll": 1,
    "ReduceLogSumExp": -INFINITY,
}


@rule(*NEUTRAL, "ReduceMean", "ReduceMeanWithCast")
def reduces(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, view.numbers("axes")), view.attr("keep_dims"))]


@rule("ArgMaxV2", "ArgMin")
def place_of_extreme(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, view.numbers("dimension")), False)]


@rule("ArgMaxWithValue", "ArgMinWithValue")
def extreme_and_place(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, view.attr("dimension")), view.attr("keep_dims"))] * 2


@rule("ReduceVar", "ReduceStdV2")
def variance(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, tuple(view.attr("dim"))), view.attr("keepdim"))] * 2


@rule("ReduceStdWithMean")
def deviation(view: PaddingView) -> Facts:
    """The mean comes with it, as large as x."""
    fact = Fact(aligned(view, [view.fact("x"), view.fact("mean")]))
    return [reduced(view, fact, whole_axes(fact, tuple(view.attr("dim"))), view.attr("keepdim"))]


@rule("LpNormV2")
def norm(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return [reduced(view, fact, whole_axes(fact, tuple(view.attr("axes"))), view.attr("keepdim"))]


def reduced(view: PaddingView, fact: Fact, axes: Sequence[int], keep: bool) -> Fact:
    over = set(axes) or set(range(fact.rank))
    mixed = [a for a in over if a < fact.rank and view.carries(fact.axes[a])]
    neutral = NEUTRAL.get(view.node.op)
    if mixed and (neutral is None or len(mixed) > 1 or fact.padded(mixed[0]) != neutral):
        raise UnsupportedPadding(f"reduces over {view.symbol}")
    if mixed:
        view.keep_order()
    if keep:
        return Fact(tuple(() if i in over else f for i, f in enumerate(fact.axes)))
    return Fact(tuple(f for i, f in enumerate(fact.axes) if i not in over))


@rule("SoftmaxV2", "LogSoftmaxV2")
def softmax(view: PaddingView) -> Facts:
    fact = view.walk.of(next(iter(view.node.values())))
    axes = whole_axes(fact, tuple(view.attr("axes")))
    mixed = [a for a in axes if view.carries(fact.axes[a])]
    if mixed and (len(mixed) > 1 or fact.padded(mixed[0]) != -INFINITY):
        raise UnsupportedPadding(f"divides by a sum over {view.symbol}")
    if mixed:
        view.keep_order()
    after = 0.0 if view.node.op == "SoftmaxV2" else -INFINITY
    return [Fact(fact.axes, dict.fromkeys(mixed, after))]


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


def along(*names: str, slot: str = "x", axes: str, word: str) -> None:
    """Ops that may work along any axis but this one; `axes` is an attribute or an index input."""

    def keeps(view: PaddingView) -> Facts:
        fact = view.fact(slot)
        given = view.node.attrs.get(axes, OPS[view.node.op].attrs.get(axes))
        numbers = given if axes in OPS[view.node.op].attrs else view.numbers(axes)
        over = whole_axes(fact, numbers) if numbers not in ((), []) else list(range(fact.rank))
        if any(a < fact.rank and view.carries(fact.axes[a]) for a in over):
            raise UnsupportedPadding(f"{word} {view.symbol}")
        return [kept_or_typed(view, fact, v, over) for v in view.node.outputs]

    rule(*names)(keeps)


def kept_or_typed(view: PaddingView, fact: Fact, value: Value, over: Sequence[int]) -> Fact:
    """As before, but for the axes the op works along, whose sizes may be others now."""
    shape = value.type.shape
    return Fact(tuple(f if i not in over or shape is None else plain((shape[i],))[0] for i, f in enumerate(fact.axes)))


along("Sort", axes="axis", word="sorts")
along("TopKV2", axes="dim", word="picks among")
along("ReverseV2", axes="axis", word="turns round")
along("Roll", axes="dims", word="rolls")
along("GLU", axes="dim", word="takes halves of")
along("CumulativeLogsumexp", axes="axis", word="runs over")
along("Cummax", axes="dim", word="runs over")
along("Cummin", axes="axis", word="runs over")
along("FFT", axes="dims", word="transforms")


@rule("LayerNormV4")
def layer_norm(view: PaddingView) -> Facts:
    fact, sizes = view.fact("x"), view.numbers("normalized_shape")
    if not isinstance(sizes, tuple):
        raise UnsupportedPadding("normalises axes that are not known when compiling")
    return normalised(view, fact, fact.rank - len(sizes))


@rule("RmsNorm")
def rms_norm(view: PaddingView) -> Facts:
    fact = view.fact("x")
    return normalised(view, fact, fact.rank - 1)


@rule("AddRmsNorm")
def add_rms_norm(view: PaddingView) -> Facts:
    total = Fact(aligned(view, [view.fact("x1"), view.fact("x2")]))
    return [*normalised(view, total, total.rank - 1)[:2], total]


def normalised(view: PaddingView, fact: Fact, first: int) -> Facts:
    if any(map(view.carries, fact.axes[first:])):
        raise UnsupportedPadding(f"normalises over {view.symbol}")
    rows = Fact((*fact.axes[:first], *[()] * (fact.rank - first)))
    return [Fact(fact.axes), rows, rows]


@rule("BNInfer", "BatchNormV3")
def batch_norm(view: PaddingView) -> Facts:
    if view.node.op == "BatchNormV3" and view.attr("is_training"):
        raise UnsupportedPadding(f"in training takes its mean over all rows of {view.symbol}")
    fact = view.fact("x")
    if fact.rank > 1 and view.carries(fact.axes[1]):
        raise UnsupportedPadding(f"has {view.symbol} as its channels")
    return [Fact(fact.axes), *[Fact(plain(v.type.shape)) if v.users else None for v in view.node.outputs[1:]]]


# -- rows are the first axis ----------------------------------------------------------------------------------------
FIRST = """Conv2D Conv3D Conv2DTranspose Conv3DTranspose Convolution MaxPoolWithArgmaxV1 MaxPool3DWithArgmaxV2 AvgPoolV2
    AvgPool3D AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool2d AdaptiveMaxPool3d UpsampleLinear1d UpsampleTrilinear3d
    ResizeNearestNeighborV2 GridSampler2D GridSampler3D PadV3 MirrorPad Im2col Col2im PixelShuffle PixelUnshuffle
    GroupNormV2 GroupNorm"""


@rule(*FIRST.split())
def first_axis(view: PaddingView) -> Facts:
    """Images, one by one: nothing but the first axis of `x` and of what goes with it may be the size."""
    op = OPS[view.node.op]
    given = [
        (s.name, view.walk.of(v)) for s, v in zip(op.slots, view.node.inputs) if isinstance(v, Value) and not s.index
    ]
    rows = next(f.axes[0] for name, f in given if name == "x")
    for name, fact in given:
        wrong = view.carrying(fact)
        if any(wrong) or (wrong and (name not in ("x", "grid") or fact.axes[0] != rows)):
            raise UnsupportedPadding(f"works along {view.symbol} in its input {name}")
    facts: list[Fact | None] = []
    for value in view.node.outputs:
        axes = plain(value.type.shape) if value.users else ()
        if axes and (numel_of(axes[0]) != numel_of(rows) or any(map(view.carries, axes[1:]))):
            raise UnsupportedPadding(f"changes the size {view.symbol}")
        facts.append(Fact((rows, *axes[1:])) if axes else None)
    return facts


# -- matrix products and attention ----------------------------------------------------------------------------------
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
        raise UnsupportedPadding("gives back sums in an order of its own")
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
