"""Padding: copies, casts, writes."""

from __future__ import annotations

import math
from collections.abc import Callable

from airgraph.analysis.padding.elementwise import each_element
from airgraph.analysis.padding.facts import Fact, Facts, Number, PaddingView, UnsupportedPadding, rule
from airgraph.ir.types import DataType


@rule("Identity", "TensorMove", "Cast")
def same(view: PaddingView) -> Facts:
    fact = view.fact("x")
    if view.node.op != "Cast":
        return [fact]
    convert = number_as(DataType(view.attr("dst_type")))
    pad = {axis: convert(n) for axis, n in fact.pad.items()}
    place = fact.place if view.node.output.dtype in EXACT else None
    return [Fact(fact.axes, pad, place, None if fact.fill is None else convert(fact.fill))]


# Types that hold an index as it is.
EXACT = (DataType.DT_INT32, DataType.DT_INT64, DataType.DT_FLOAT, DataType.DT_DOUBLE)


def number_as(dtype: DataType) -> Callable[[Number], Number]:
    if dtype == DataType.DT_BOOL:
        return bool
    return (lambda n: int(n) if math.isfinite(n) else n) if dtype.is_int else float


@rule("Assign")
def assign(view: PaddingView) -> Facts:
    raise UnsupportedPadding(f"writes to an argument that has {view.symbol}")


rule("Bitcast")(each_element)


@rule("aten._assert_tensor_metadata.default")
def nothing(view: PaddingView) -> Facts:
    return []
