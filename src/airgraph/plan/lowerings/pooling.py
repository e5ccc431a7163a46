"""Pooling: the largest element, or the average, of windows. A window is as many shifted readings as it has elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

from airgraph.ir.types import Dim
from airgraph.plan.lowerings.formulas import functions_in, mean, padded, widened
from airgraph.plan.lowerings.table import BF16, FLOATS, HALF, INT64, LoweringView, UnsupportedLowering, lowers
from airgraph.plan.tensors import Tensor, cast, const, cut, iota, point, reshape

LARGEST = 64  # elements of a window; larger ones are PyTorch's
KINDS = 9  # of windows, by the borders they stick out of: top, bottom, left, right, corners, none


def per_axis(given: Any, count: int, otherwise: Sequence[int] = ()) -> list[int]:
    numbers = list(given) if isinstance(given, Sequence) else [given]
    numbers = numbers or list(otherwise)
    return numbers * count if len(numbers) == 1 else numbers


class Windows:
    """The windows of one pooling over the last axes of x."""

    def __init__(self, view: LoweringView, shape: Sequence[Dim]) -> None:
        self.x, self.shape = widened(view["x"]), tuple(shape)
        count = 3 if "3D" in view.node.op else 2
        self.axes = list(range(len(self.x.shape) - count, len(self.x.shape)))
        self.size = per_axis(view.attr("ksize"), count)
        self.step = per_axis(view.attr("strides"), count, self.size)
        self.pad = per_axis(view.attr("pads"), count)
        self.apart = per_axis(view.attr("dilation") or 1, count)
        sizes = [n for axis in self.axes for n in (self.x.shape[axis], self.shape[axis])]
        if self.x.dtype not in FLOATS or not all(isinstance(n, int) and n for n in sizes):
            raise UnsupportedLowering("of whole numbers, of symbolic sizes or of nothing")
        if math.prod(self.size) > LARGEST:
            raise UnsupportedLowering("with a large window")

    def readings(self, fill: float) -> list[Tensor]:
        """x as the k-th element of every window sees it, for each k.

        Where a window sticks out there is padding. A few kinds of windows at the borders become loops of their own; with
        many kinds x is padded first.
        """
        kinds = [
            len({edge for k in range(size) for edge in self.inside(i, k)} - {0, self.shape[axis]}) + 1
            for i, (axis, size) in enumerate(zip(self.axes, self.size))
        ]
        if math.prod(kinds) > KINDS or sum(n > 1 for n in kinds) > 2:
            return self.readings_of_padded(fill)
        return [self.reading(at, fill) for at in itertools.product(*map(range, self.size))]

    def inside(self, i: int, k: int) -> tuple[int, int]:
        """From which window to which the k-th element along the i-th axis is in x."""
        first, last = self.pad[i] - k * self.apart[i], self.x.shape[self.axes[i]] + self.pad[i] - k * self.apart[i]
        low, high = (min(max(-(-edge // self.step[i]), 0), self.shape[self.axes[i]]) for edge in (first, last))
        return low, high

    def reading(self, at: Sequence[int], fill: float) -> Tensor:
        """What is in x, in steps; then the padding around it."""
        edges = [self.inside(i, k) for i, k in enumerate(at)]
        if any(low >= high for low, high in edges):
            return const(fill, self.x.dtype, self.shape)
        front = len(self.shape) - len(self.axes)
        starts = [
            low * step + k * apart - pad
            for (low, _), k, step, apart, pad in zip(edges, at, self.step, self.apart, self.pad)
        ]
        shape = (*self.shape[:front], *(high - low for low, high in edges))
        x = cut(self.x, shape, [0] * front + starts, [1] * front + self.step)
        for axis, (low, high) in zip(self.axes, edges):
            x = padded(x, axis, low, self.shape[axis] - high, fill)
        return x

    def readings_of_padded(self, fill: float) -> list[Tensor]:
        x, rank = self.x, len(self.shape)
        for axis, size, step, pad, apart in zip(self.axes, self.size, self.step, self.pad, self.apart):
            reach = (self.shape[axis] - 1) * step + (size - 1) * apart + 1
            x = padded(x, axis, pad, max(0, reach - x.shape[axis] - pad), fill)
        steps = [1] * (rank - len(self.axes)) + self.step
        found = []
        for at in itertools.product(*(range(size) for size in self.size)):
            starts = [0] * (rank - len(self.axes)) + [k * apart for k, apart in zip(at, self.apart)]
            found.append(cut(x, self.shape, starts, steps))
        return found

    def counts(self, exclusive: bool) -> Tensor:
        """How many elements each window has; those beyond the padding never count, those in it unless `exclusive`."""
        total = None
        for axis, size, step, pad in zip(self.axes, self.size, self.step, self.pad):
            end = self.x.shape[axis] + (0 if exclusive else pad)
            first = iota(self.shape, axis, -pad, step)
            last = point("min", (iota(self.shape, axis, size - pad, step), const(end, INT64)), INT64)
            if exclusive:
                first = point("max", (first, const(0, INT64)), INT64)
            length = point("sub", (last, first), INT64)
            total = length if total is None else point("mul", (total, length), INT64)
        assert total is not None
        return cast(total, self.x.dtype)


@lowers("MaxPoolWithArgmaxV1", "MaxPool3DWithArgmaxV2")
def max_pool(view: LoweringView) -> list[Tensor | None]:
    if view.node.outputs[1].users:
        raise UnsupportedLowering("with the places of the largest")
    windows = Windows(view, view.result_shape)
    f = functions_in(windows.x.dtype)
    return [fold(lambda a, b: f("max", a, b), windows.readings(-math.inf)), None]


@lowers("AvgPoolV2", "AvgPool3D")
def average_pool(view: LoweringView) -> Tensor:
    windows = Windows(view, view.result_shape)
    f, divisor = functions_in(windows.x.dtype), view.attr("divisor_override")
    total = fold(lambda a, b: f("add", a, b), windows.readings(0.0))
    if divisor:
        return f("div", total, float(divisor))
    whole = not view.attr("ceil_mode") and (not view.attr("exclusive") or not any(windows.pad))
    return f("div", total, float(math.prod(windows.size)) if whole else windows.counts(bool(view.attr("exclusive"))))


@lowers("AdaptiveAvgPool2d", "AdaptiveAvgPool3d")
def adaptive_average(view: LoweringView) -> Tensor:
    """Windows of one size, side by side; others overlap and are PyTorch's."""
    x, count = widened(view["x"]), 3 if "3d" in view.node.op else 2
    if (
        x.dtype not in FLOATS
        or len(view.result_shape) != len(x.shape)
        or (count == 3 and view.result_dtype in (HALF, BF16))
    ):
        raise UnsupportedLowering("of whole numbers, or of halves in volumes, which eager adds up in halves")
    split: list[Dim] = list(x.shape[:-count])
    axes = []
    for old, new in zip(x.shape[-count:], view.result_shape[-count:]):
        if not isinstance(old, int) or not isinstance(new, int) or not new or not old or old % new:
            raise UnsupportedLowering("of windows that overlap, or of symbolic sizes")
        axes.append(len(split) + 1)
        split += [new, old // new]
    return mean(reshape(x, split), axes, False)
