"""Tensors made from a size and a few numbers."""

from __future__ import annotations

from typing import Any

from airgraph.ir.ops.rules import shaped
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType, dim

FLOAT, INT64 = DataType.DT_FLOAT, DataType.DT_INT64


def arranged(view: NodeView) -> list[TensorType]:
    """As many as fit below the limit; counted here for whole numbers only."""
    names = ("start", "limit", "delta")
    bounds: list[Any] = [view.numbers(name) if view.dtype(name).is_int else None for name in names]
    start, limit, delta = bounds
    shape = None
    if all(isinstance(n, int) for n in bounds) and delta != 0:
        shape = (len(range(*bounds)),)
    elif delta == 1 and start is not None and limit is not None:
        shape = (dim(limit - start),)
    return [TensorType(DataType(view.attr("dtype")), shape, view.attr("place"))]


def spaced(view: NodeView) -> list[TensorType]:
    count = view.numbers("num")
    shape = None if count is None else (dim(count),)
    return [TensorType(DataType(view.attr("dtype")), shape, view.attr("place"))]


def identity(view: NodeView) -> list[TensorType]:
    rows, columns = view.attr("num_rows"), view.attr("num_columns")
    return [TensorType(DataType(view.attr("dtype")), (rows, columns), view.attr("place"))]


# Bounds arrive as numbers with all their digits, so that the sequence is PyTorch's to the last one.
define("Range", "start# limit# delta#", arranged, is_closed=False, dtype=INT64, place="NPU")
define("LinSpace", "start# stop# num#", spaced, dtype=FLOAT, place="NPU")
define("Eye", "", identity, num_rows=REQUIRED, num_columns=REQUIRED, batch_shape=(), dtype=FLOAT, place="NPU")


def filled(view: NodeView) -> list[TensorType]:
    """One number stands for one dimension."""
    dims = view.numbers("dims")
    if dims is None:
        return [TensorType(view.dtype("value"), None, view.attr("place"))]
    shape = tuple(map(dim, dims if isinstance(dims, tuple) else (dims,)))
    return [TensorType(view.dtype("value"), shape, view.attr("place"))]


def unfilled(view: NodeView) -> list[TensorType]:
    dims = view.numbers("shape")
    shape = tuple(map(dim, dims)) if isinstance(dims, tuple) else None
    return [TensorType(DataType(view.attr("dtype")), shape, view.attr("place"))]


define("Fill", "dims# value", filled, place="NPU")
# Zeros, asked for (`init`) or not: what runs twice gives the same twice.
define("Empty", "shape#", unfilled, dtype=REQUIRED, init=False, place="NPU")
define("ZerosLike", "x", shaped(lambda c: c.shape("x")))
define("OnesLike", "x", shaped(lambda c: c.shape("x")))
