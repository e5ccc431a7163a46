"""Sorting, the indices of extremes, scans, search."""

from __future__ import annotations

from airgraph.ir.ops.rules import axes_of, like, reduced
from airgraph.ir.ops.table import REQUIRED, NodeView, TypeRule, define
from airgraph.ir.types import DataType, TensorType, dim

INT32, INT64 = DataType.DT_INT32, DataType.DT_INT64


def sorted_types(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    return [*view.result(view.dtype("x"), shape), *view.result(DataType(view.attr("y2_dtype")), shape)]


def top(view: NodeView) -> list[TensorType]:
    shape, k = view.shape("x"), view.numbers("k")
    axes = None if shape is None else axes_of(view.attr("dim"), len(shape))
    if shape is not None and axes is not None:
        shape = None if k is None else tuple(dim(k) if i in axes else d for i, d in enumerate(shape))
    return [*view.result(view.dtype("x"), shape), *view.result(DataType(view.attr("indices_dtype")), shape)]


def place_of_extreme(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    axes = None if shape is None else axes_of(view.numbers("dimension"), len(shape))
    return view.result(DataType(view.attr("dtype")), reduced(shape, axes, False))


def extreme_and_place(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    axes = None if shape is None else axes_of(view.attr("dimension"), len(shape))
    shape = reduced(shape, axes, view.attr("keep_dims"))
    return [*view.result(INT32, shape), *view.result(view.dtype("x"), shape)]


def running(view: NodeView) -> list[TensorType]:
    return [*view.result(view.dtype("x"), view.shape("x")), *view.result(INT64, view.shape("x"))]


def found(view: NodeView) -> list[TensorType]:
    return view.result(DataType(view.attr("dtype")), view.shape("values"))


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
