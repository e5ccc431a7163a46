"""Padding: ops that work along axes (reductions, softmax, norms, sorting), on images, and products with attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from airgraph.analysis.padding.facts import (
    INFINITY,
    Fact,
    Facts,
    Site,
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
def reduces(site: Site) -> Facts:
    fact = site.fact("x")
    return [reduced(site, fact, whole_axes(fact, site.numbers("axes")), site.attr("keep_dims"))]


@rule("ArgMaxV2", "ArgMin")
def place_of_extreme(site: Site) -> Facts:
    fact = site.fact("x")
    return [reduced(site, fact, whole_axes(fact, site.numbers("dimension")), False)]


@rule("ArgMaxWithValue", "ArgMinWithValue")
def extreme_and_place(site: Site) -> Facts:
    fact = site.fact("x")
    return [reduced(site, fact, whole_axes(fact, site.attr("dimension")), site.attr("keep_dims"))] * 2


@rule("ReduceVar", "ReduceStdV2")
def variance(site: Site) -> Facts:
    fact = site.fact("x")
    return [reduced(site, fact, whole_axes(fact, tuple(site.attr("dim"))), site.attr("keepdim"))] * 2


@rule("ReduceStdWithMean")
def deviation(site: Site) -> Facts:
    """The mean comes with it, as large as x."""
    fact = Fact(aligned(site, [site.fact("x"), site.fact("mean")]))
    return [reduced(site, fact, whole_axes(fact, tuple(site.attr("dim"))), site.attr("keepdim"))]


@rule("LpNormV2")
def norm(site: Site) -> Facts:
    fact = site.fact("x")
    return [reduced(site, fact, whole_axes(fact, tuple(site.attr("axes"))), site.attr("keepdim"))]


def reduced(site: Site, fact: Fact, axes: Sequence[int], keep: bool) -> Fact:
    over = set(axes) or set(range(fact.rank))
    mixed = [a for a in over if a < fact.rank and site.carries(fact.axes[a])]
    neutral = NEUTRAL.get(site.node.op)
    if mixed and (neutral is None or len(mixed) > 1 or fact.padded(mixed[0]) != neutral):
        raise UnsupportedPadding(f"reduces over {site.symbol}")
    if mixed:
        site.keep_order()
    if keep:
        return Fact(tuple(() if i in over else f for i, f in enumerate(fact.axes)))
    return Fact(tuple(f for i, f in enumerate(fact.axes) if i not in over))


@rule("SoftmaxV2", "LogSoftmaxV2")
def softmax(site: Site) -> Facts:
    fact = site.walk.of(next(iter(site.node.values())))
    axes = whole_axes(fact, tuple(site.attr("axes")))
    mixed = [a for a in axes if site.carries(fact.axes[a])]
    if mixed and (len(mixed) > 1 or fact.padded(mixed[0]) != -INFINITY):
        raise UnsupportedPadding(f"divides by a sum over {site.symbol}")
    if mixed:
        site.keep_order()
    after = 0.0 if site.node.op == "SoftmaxV2" else -INFINITY
    return [Fact(fact.axes, dict.fromkeys(mixed, after))]


@rule("Cumsum", "Cumprod")
def running(site: Site) -> Facts:
    """A running total of the first rows is that of the first rows, in whatever way it goes on."""
    fact = site.fact("x")
    for axis in whole_axes(fact, site.numbers("axis")):
        if axis < fact.rank and site.carries(fact.axes[axis]):
            if site.attr("reverse"):
                raise UnsupportedPadding(f"runs over {site.symbol} from its end")
            site.keep_order()
    return [Fact(fact.axes)]


def along(*names: str, slot: str = "x", axes: str, word: str) -> None:
    """Ops that may work along any axis but this one; `axes` is an attribute or an index input."""

    def keeps(site: Site) -> Facts:
        fact = site.fact(slot)
        given = site.node.attrs.get(axes, OPS[site.node.op].attrs.get(axes))
        numbers = given if axes in OPS[site.node.op].attrs else site.numbers(axes)
        over = whole_axes(fact, numbers) if numbers not in ((), []) else list(range(fact.rank))
        if any(a < fact.rank and site.carries(fact.axes[a]) for a in over):
            raise UnsupportedPadding(f"{word} {site.symbol}")
        return [kept_or_typed(site, fact, v, over) for v in site.node.outputs]

    rule(*names)(keeps)


def kept_or_typed(site: Site, fact: Fact, value: Value, over: Sequence[int]) -> Fact:
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
def layer_norm(site: Site) -> Facts:
    fact, sizes = site.fact("x"), site.numbers("normalized_shape")
    if not isinstance(sizes, tuple):
        raise UnsupportedPadding("normalises axes that are not known when compiling")
    return normalised(site, fact, fact.rank - len(sizes))


@rule("RmsNorm")
def rms_norm(site: Site) -> Facts:
    fact = site.fact("x")
    return normalised(site, fact, fact.rank - 1)


def normalised(site: Site, fact: Fact, first: int) -> Facts:
    if any(map(site.carries, fact.axes[first:])):
        raise UnsupportedPadding(f"normalises over {site.symbol}")
    rows = Fact((*fact.axes[:first], *[()] * (fact.rank - first)))
    return [Fact(fact.axes), rows, rows]


@rule("BNInfer", "BatchNormV3")
def batch_norm(site: Site) -> Facts:
    if site.node.op == "BatchNormV3" and site.attr("is_training"):
        raise UnsupportedPadding(f"in training takes its mean over all rows of {site.symbol}")
    fact = site.fact("x")
    if fact.rank > 1 and site.carries(fact.axes[1]):
        raise UnsupportedPadding(f"has {site.symbol} as its channels")
    return [Fact(fact.axes), *[Fact(plain(v.type.shape)) if v.users else None for v in site.node.outputs[1:]]]


# -- rows are the first axis ----------------------------------------------------------------------------------------
FIRST = """Conv2D Conv3D Conv2DTranspose Conv3DTranspose Convolution MaxPoolWithArgmaxV1 MaxPool3DWithArgmaxV2 AvgPoolV2
    AvgPool3D AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool2d AdaptiveMaxPool3d UpsampleLinear1d UpsampleTrilinear3d
    ResizeNearestNeighborV2 GridSampler2D GridSampler3D PadV3 MirrorPad Im2col Col2im PixelShuffle PixelUnshuffle
    GroupNormV2 GroupNorm"""


@rule(*FIRST.split())
def first_axis(site: Site) -> Facts:
    """Images, one by one: nothing but the first axis of `x` and of what goes with it may be the size."""
    op = OPS[site.node.op]
    given = [
        (s.name, site.walk.of(v)) for s, v in zip(op.slots, site.node.inputs) if isinstance(v, Value) and not s.index
    ]
    rows = next(f.axes[0] for name, f in given if name == "x")
    for name, fact in given:
        wrong = site.carrying(fact)
        if any(wrong) or (wrong and (name not in ("x", "grid") or fact.axes[0] != rows)):
            raise UnsupportedPadding(f"works along {site.symbol} in its input {name}")
    facts: list[Fact | None] = []
    for value in site.node.outputs:
        axes = plain(value.type.shape) if value.users else ()
        if axes and (numel_of(axes[0]) != numel_of(rows) or any(map(site.carries, axes[1:]))):
            raise UnsupportedPadding(f"changes the size {site.symbol}")
        facts.append(Fact((rows, *axes[1:])) if axes else None)
    return facts


# -- matrix products and attention ----------------------------------------------------------------------------------
@rule("MatMul", "MatMulV2", "BatchMatMul")
def product(site: Site) -> Facts:
    x1, x2 = site.fact("x1"), site.fact("x2")
    word = "adj" if site.node.op == "BatchMatMul" else "transpose"
    n, k1 = (-1, -2) if site.attr(f"{word}_x1") else (-2, -1)
    k2, m = (-1, -2) if site.attr(f"{word}_x2") else (-2, -1)
    if site.carries(x1.axes[k1]) or site.carries(x2.axes[k2]):
        silent = 0 in (x1.padded(x1.rank + k1), x2.padded(x2.rank + k2))
        if not silent or coarse(site, x1.axes[k1]) != coarse(site, x2.axes[k2]):
            raise UnsupportedPadding(f"sums over {site.symbol}")
        site.keep_order()
    batch = aligned(site, [Fact(x1.axes[:-2]), Fact(x2.axes[:-2])])
    result = Fact((*batch, x1.axes[n], x2.axes[m]))
    bias = site.value("bias") if site.node.op != "BatchMatMul" else None
    return [result if bias is None else Fact(aligned(site, [result, site.walk.of(bias)]))]


@rule("FlashAttentionScore", "FusedAttentionScore")
def attention(site: Site) -> Facts:
    q, k, v = (site.fact(name) for name in ("query", "key", "value"))
    if any(site.carries(f.axes[axis]) for f in (q, k, v) for axis in (1, 3)):
        raise UnsupportedPadding(f"has {site.symbol} as its heads")
    rows = aligned_axis(site, [f.axes[0] for f in (q, k, v)])
    if site.value("atten_mask") is not None:
        aligned(site, [Fact((rows, (), q.axes[2], k.axes[2])), replace(site.fact("atten_mask"))])
    if site.carries(k.axes[2]) or site.carries(v.axes[2]):
        check_keys(site, q, k, v)
    lse = site.node.outputs[1]
    if lse.users and lse.type.rank != 3:
        raise UnsupportedPadding("gives back sums in an order of its own")
    sums = Fact((rows, q.axes[1], q.axes[2])) if lse.users else None
    return [Fact((rows, q.axes[1], q.axes[2], v.axes[3])), sums]


def check_keys(site: Site, q: Fact, k: Fact, v: Fact) -> None:
    """Added keys must be out of sight: they come after every true query, or a mask hides them."""
    if k.axes[2] != v.axes[2]:
        raise UnsupportedPadding(f"has keys and values of several sizes of {site.symbol}")
    mask = site.value("atten_mask")
    if mask is not None:
        hidden = False if mask.dtype == DataType.DT_BOOL else -INFINITY
        found = site.walk.of(mask).padded(site.walk.of(mask).rank - 1)
        if found is not None and found == hidden:
            return site.keep_order()
    if not site.attr("is_causal") or q.axes[2] != k.axes[2]:
        raise UnsupportedPadding(
            f"sees all keys of {site.symbol}: neither is it causal nor is its mask known to hide added ones"
        )
    return site.keep_order()
