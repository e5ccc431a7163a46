"""Sequences of numbers and other tensors made from a few numbers, and complex numbers from pairs of real ones."""

from __future__ import annotations

from typing import Any

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import broadcast, like
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType, dim

FLOAT, INT64 = DataType.DT_FLOAT, DataType.DT_INT64
PAIRS = {
    DataType.DT_FLOAT16: DataType.DT_COMPLEX32,
    DataType.DT_FLOAT: DataType.DT_COMPLEX64,
    DataType.DT_DOUBLE: DataType.DT_COMPLEX128,
}
PARTS = {pair: part for part, pair in PAIRS.items()}


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


def joined(view: NodeView) -> list[TensorType]:
    part = view.dtype("real")
    if part not in PAIRS or view.dtype("imag") != part:
        raise VerifyError(f"there are no complex numbers of {part.name} and {view.dtype('imag').name}")
    return broadcast("real", "imag", dtype=PAIRS[part])(view)  # type: ignore[return-value]


def part(view: NodeView) -> list[TensorType]:
    if view.dtype("input") not in PARTS:
        raise VerifyError(f"{view.dtype('input').name} is not complex")
    return view.result(PARTS[view.dtype("input")], view.shape("input"))


# Bounds arrive as numbers with all their digits, so that the sequence is PyTorch's to the last one.
define("Range", "start# limit# delta#", arranged, is_closed=False, dtype=INT64, place="NPU")
define("LinSpace", "start# stop# num#", spaced, dtype=FLOAT, place="NPU")
define("Eye", "", identity, num_rows=REQUIRED, num_columns=REQUIRED, batch_shape=(), dtype=FLOAT, place="NPU")
define("Complex", "real imag", joined)
define("Real", "input", part)
define("FFT", "x", like(), dims=REQUIRED, normalization=0, forward=True)
define("Imag", "input", part)
