"""Sorting, extremes with their places, running totals, search, distances."""

from __future__ import annotations

from airgraph.ir.ops.rules import axes_of, broadcast_shapes, like, reduced
from airgraph.ir.ops.table import REQUIRED, Call, TypeRule, define
from airgraph.ir.types import DataType, TensorType, dim

INT32, INT64 = DataType.DT_INT32, DataType.DT_INT64


def sorted_types(call: Call) -> list[TensorType]:
    shape = call.shape("x")
    return [*call.result(call.dtype("x"), shape), *call.result(DataType(call.attr("y2_dtype")), shape)]


def top(call: Call) -> list[TensorType]:
    shape, k = call.shape("x"), call.numbers("k")
    axes = None if shape is None else axes_of(call.attr("dim"), len(shape))
    if shape is not None and axes is not None:
        shape = None if k is None else tuple(dim(k) if i in axes else d for i, d in enumerate(shape))
    return [*call.result(call.dtype("x"), shape), *call.result(DataType(call.attr("indices_dtype")), shape)]


def place_of_extreme(call: Call) -> list[TensorType]:
    shape = call.shape("x")
    axes = None if shape is None else axes_of(call.numbers("dimension"), len(shape))
    return call.result(DataType(call.attr("dtype")), reduced(shape, axes, False))


def extreme_and_place(call: Call) -> list[TensorType]:
    shape = call.shape("x")
    axes = None if shape is None else axes_of(call.attr("dimension"), len(shape))
    shape = reduced(shape, axes, call.attr("keep_dims"))
    return [*call.result(INT32, shape), *call.result(call.dtype("x"), shape)]


def running(call: Call) -> list[TensorType]:
    return [*call.result(call.dtype("x"), call.shape("x")), *call.result(INT64, call.shape("x"))]


def found(call: Call) -> list[TensorType]:
    return call.result(DataType(call.attr("dtype")), call.shape("values"))


def distances(call: Call) -> list[TensorType]:
    a, b = call.shape("x1"), call.shape("x2")
    batch = None if a is None or b is None else broadcast_shapes([a[:-2], b[:-2]])
    return call.result(call.dtype("x1"), None if a is None or b is None or batch is None else (*batch, a[-2], b[-2]))


same: TypeRule = like()
define("Sort", "x", sorted_types, outputs="y1 y2", axis=-1, descending=False, stable=False, y2_dtype=int(INT32))
define("TopKV2", "x k#", top, outputs="values indices", sorted=True, dim=-1, largest=True, indices_dtype=int(INT32))
define("ArgMaxV2", "x dimension#", place_of_extreme, dtype=int(INT64))
define("ArgMin", "x dimension#", place_of_extreme, dtype=int(INT64))
define("ArgMaxWithValue", "x", extreme_and_place, outputs="indice values", dimension=REQUIRED, keep_dims=False)
define("ArgMinWithValue", "x", extreme_and_place, outputs="indice values", dimension=REQUIRED, keep_dims=False)
for name in ("Cumsum", "Cumprod", "CumulativeLogsumexp"):
    define(name, "x axis#", same, exclusive=False, reverse=False)
define("Cummax", "x", running, outputs="y argmax", dim=REQUIRED)
define("Cummin", "x", running, outputs="y argmin", axis=REQUIRED)
define("SearchSorted", "sorted_sequence values sorter?", found, dtype=int(INT64), right=False)
define("Cdist", "x1 x2", distances, p=2.0)
define("CdistGrad", "grad x1 x2 cdist", like("x1"), p=2.0)
