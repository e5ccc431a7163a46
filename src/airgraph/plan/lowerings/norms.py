"""Normalisations and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.plan.index import count, expand, same
from airgraph.plan.lowerings.formulas import functions_in, mean, size_of, total, widened
from airgraph.plan.lowerings.table import BF16, FLOATS, HALF, LoweringView, UnsupportedLowering, known, lowers
from airgraph.plan.tensors import VIEWS, Tensor, cast, const, cut, point, reduce, reshape


def across(t: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, beside x: [n, channels, …]."""
    return reshape(cast(t, x.dtype), (x.shape[1], *(1,) * (len(x.shape) - 2)))


def without_ones(x: Tensor) -> Tensor:
    """[n, channels, 1, 1] as [n, channels]: loops go over the channels then, not over the one element of each."""
    kept = [size for i, size in enumerate(x.shape) if i < 2 or not same(size, 1)]
    return x if len(kept) == len(x.shape) else reshape(x, kept)


@lowers("LayerNormV4")
def layer_norm(view: LoweringView) -> list[Tensor]:
    x = widened(view["x"])
    axes = list(range(len(x.shape) - len(known(view, "normalized_shape")), len(x.shape)))
    if x.dtype not in FLOATS or any(same(s, 0) for s in x.shape):
        raise UnsupportedLowering("of nothing")
    average = mean(x, axes, True)
    d = point("sub", (x, average), x.dtype)
    var = mean(point("mul", (d, d), x.dtype), axes, True)
    rstd = point("rsqrt", (point("add", (var, const(float(view.attr("epsilon")), x.dtype)), x.dtype),), x.dtype)
    y = point("mul", (d, rstd), x.dtype)
    if view.has("gamma"):
        y = point("mul", (y, widened(view["gamma"])), x.dtype)
    if view.has("beta"):
        y = point("add", (y, widened(view["beta"])), x.dtype)
    return [y, average, rstd]


@lowers("LayerNormGradV3")
def layer_norm_gradient(view: LoweringView) -> list[Tensor | None]:
    dy, x, gamma = widened(view["dy"]), widened(view["x"]), view.has("gamma")
    mean_, rstd = (cast(view[n], x.dtype) for n in ("mean", "rstd"))
    rank = len(x.shape)
    axes = list(range(rank - len(known(view, "normalized_shape")), rank))
    rows = list(range(axes[0]))
    wanted = list(view.attr("output_mask"))
    if not rows or any(same(s, 0) for s in x.shape) or x.dtype not in FLOATS:
        raise UnsupportedLowering("of one row")
    f = functions_in(x.dtype)
    normal = f("mul", f("sub", x, mean_), rstd)
    g = f("mul", dy, widened(view["gamma"])) if gamma else dy
    n = size_of(x, axes, x.dtype)
    inner = f(
        "sub", f("sub", g, f("div", total(g, axes), n)), f("mul", normal, f("div", total(f("mul", g, normal), axes), n))
    )
    empty = const(0.0, x.dtype, (0,))
    return [
        f("mul", inner, rstd) if wanted[0] else empty,
        total(f("mul", dy, normal), rows, keep=False) if wanted[1] else empty,
        total(dy, rows, keep=False) if wanted[2] else empty,
    ]


@lowers("RmsNorm")
def rms_norm(view: LoweringView) -> list[Tensor]:
    return normed(view["x"], view)


@lowers("AddRmsNorm")
def add_rms_norm(view: LoweringView) -> list[Tensor]:
    """The sum is rounded to its own type before it is normed."""
    a, b = widened(view["x1"]), widened(view["x2"])
    x = cast(point("add", (a, b), a.dtype), view["x1"].dtype)
    return [*normed(x, view), x]


def normed(own: Tensor, view: LoweringView) -> list[Tensor]:
    x = widened(own)
    axes = list(range(len(x.shape) - len(view["gamma"].shape), len(x.shape)))
    var = mean(point("mul", (x, x), x.dtype), axes, True)
    rstd = point("rsqrt", (point("add", (var, const(float(view.attr("epsilon")), x.dtype)), x.dtype),), x.dtype)
    y = cast(point("mul", (x, rstd), x.dtype), own.dtype)
    return [point("mul", (widened(view["gamma"]), cast(y, x.dtype)), x.dtype), rstd]


@lowers("BNInfer")
def batch_norm_inference(view: LoweringView) -> Tensor:
    return by_numbers(view, "scale", "offset", "mean", "variance")


def by_numbers(view: LoweringView, scale: str, offset: str, mean: str, variance: str) -> Tensor:
    """x · k + (offset - mean · k) with k = scale / √(variance + ε), as PyTorch's CPU kernels do: two numbers for each
    channel."""
    x = without_ones(widened(view["x"]))
    if x.dtype not in FLOATS:
        raise UnsupportedLowering("of whole numbers")
    f = functions_in(x.dtype)
    rstd = f("rsqrt", f("add", across(view[variance], x), float(view.attr("epsilon"))))
    factor = f("mul", rstd, across(view[scale], x)) if view.has(scale) else rstd
    shift = f("mul", across(view[mean], x), factor)
    y = f("mul", x, factor)
    y = f("add", y, f("sub", across(view[offset], x), shift)) if view.has(offset) else f("sub", y, shift)
    return reshape(y, view.result_shape)


@lowers("GroupNorm", "GroupNormV2")
def group_norm(view: LoweringView) -> list[Tensor]:
    x, groups = widened(view["x"]), view.attr("num_groups")
    n, c, *rest = x.shape
    if x.dtype not in FLOATS or not isinstance(c, int) or any(same(s, 0) for s in x.shape):
        raise UnsupportedLowering("of nothing, or a symbolic number of channels")
    f = functions_in(x.dtype)
    rows = reshape(x, (n, groups, expand(c // groups * count(rest))))
    average = mean(rows, [2], True)
    d = f("sub", rows, average)
    variance = mean(f("mul", d, d), [2], True)
    rstd = f("rsqrt", f("add", variance, float(view.attr("eps"))))
    y = reshape(f("mul", d, rstd), x.shape)
    if view.has("gamma"):
        y = f("mul", y, across(view["gamma"], x))
    if view.has("beta"):
        y = f("add", y, across(view["beta"], x))
    third = variance if view.node.op == "GroupNorm" else rstd
    return [y, reshape(average, (n, groups)), reshape(third, (n, groups))]


@lowers("BatchNormV3")
def batch_norm(view: LoweringView) -> list[Tensor | None]:
    """With running statistics. In training: mean and variance over all but the channels."""
    x = without_ones(widened(view["x"]))
    if not view.has("running_mean") or not view.has("running_var"):
        raise UnsupportedLowering("without running statistics")
    if not view.attr("is_training"):
        if any(v.users for v in view.node.outputs[1:]):
            raise UnsupportedLowering("with its statistics")
        return [by_numbers(view, "weight", "bias", "running_mean", "running_var"), *[None] * 4]
    if x.dtype not in FLOATS or view["x"].dtype != x.dtype or view["running_mean"].dtype != x.dtype:
        raise UnsupportedLowering("of mixed types, or of halves")
    if len(x.shape) < 2 or not all(isinstance(s, int) and s for s in x.shape):
        raise UnsupportedLowering("of symbolic sizes, or of nothing")
    f = functions_in(x.dtype)
    axes = [i for i in range(len(x.shape)) if i != 1]
    n, c, momentum = count([x.shape[a] for a in axes]), x.shape[1], float(view.attr("momentum"))
    if n == 1:
        raise UnsupportedLowering("of one row")
    average, var = statistics_of_halves(x, axes) if sums_at_once(view, x) else statistics(x, axes)
    d = f("sub", x, average)
    rstd = f("rsqrt", f("add", var, float(view.attr("epsilon"))))
    y = f("mul", d, f("mul", rstd, across(view["weight"], x)) if view.has("weight") else rstd)
    y = f("add", y, across(view["bias"], x)) if view.has("bias") else y
    flat = [reshape(t, (c,)) for t in (average, var, rstd)]
    unbiased = f("mul", flat[1], n / (n - 1))
    running = [
        f("add", f("mul", view[name], 1 - momentum), f("mul", new, momentum))
        for name, new in (("running_mean", flat[0]), ("running_var", unbiased))
    ]
    return [reshape(y, view.result_shape), *running, flat[0], flat[2]]


def statistics(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance."""
    average = mean(x, axes, True)
    d = point("sub", (x, average), x.dtype)
    return average, mean(point("mul", (d, d), x.dtype), axes, True)


def statistics_of_halves(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The same in one pass, from sums of how far elements are from the mean of the first row: what that rounds off in
    float32 is less than halves have. (A single element could be far from all others.) For a GPU, whose kernels share what
    they read."""
    f, last = functions_in(x.dtype), max(axes)
    shape = [1 if i in axes and i != last else s for i, s in enumerate(x.shape)]
    near = mean(cut(x, shape, [0] * len(shape), [1] * len(shape)), (last,), True)
    d, again = f("sub", x, near), f("sub", x, near)  # (what is used twice, and dear, would be given memory)
    far, squares = mean(d, axes, True), mean(f("mul", again, again), axes, True)
    return f("add", near, far), f("max", f("sub", squares, f("mul", far, far)), 0.0)


def sums_at_once(view: LoweringView, x: Tensor) -> bool:
    return next(view.node.values()).type.place == "NPU" and widens_halves(x)


def widens_halves(x: Tensor) -> bool:
    while x.op in VIEWS:
        (x,) = x.inputs
    return x.op == "point" and x.attrs == "cast" and x.inputs[0].dtype in (HALF, BF16)


@lowers("BatchNormGradV3")
def batch_norm_gradient(view: LoweringView) -> list[Tensor]:
    dy, x = without_ones(widened(view["dy"])), without_ones(widened(view["x"]))
    if (
        not view.attr("is_training")
        or not view.has("save_mean")
        or not view.has("save_rstd")
        or x.dtype not in FLOATS
        or dy.dtype != x.dtype
        or len(x.shape) < 2
        or any(same(s, 0) for s in x.shape)
    ):
        raise UnsupportedLowering("other than in training, or of mixed types")
    f = functions_in(x.dtype)
    axes = [i for i in range(len(x.shape)) if i != 1]
    rstd, n = across(view["save_rstd"], x), size_of(x, axes, x.dtype)
    normal = f("mul", f("sub", x, across(view["save_mean"], x)), rstd)
    sum_dy, sum_dot = (reduce("sum", t, axes, False) for t in (dy, f("mul", dy, normal)))
    inner = f("sub", f("sub", dy, f("div", across(sum_dy, x), n)), f("mul", normal, f("div", across(sum_dot, x), n)))
    dx = f("mul", inner, f("mul", rstd, across(view["weight"], x)) if view.has("weight") else rstd)
    empty = const(0.0, x.dtype, (0,))
    results = (reshape(dx, view["x"].shape), sum_dot, sum_dy)
    return [t if wanted else empty for t, wanted in zip(results, view.attr("output_mask"))]
