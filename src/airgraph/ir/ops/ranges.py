"""Sequences of numbers and other tensors made from a few numbers, and complex numbers from pairs of real ones."""

from __future__ import annotations

from typing import Any

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import broadcast, like
from airgraph.ir.ops.table import REQUIRED, Call, define
from airgraph.ir.types import DataType, TensorType, dim

FLOAT, INT64 = DataType.DT_FLOAT, DataType.DT_INT64
PAIRS = {
    DataType.DT_FLOAT16: DataType.DT_COMPLEX32,
    DataType.DT_FLOAT: DataType.DT_COMPLEX64,
    DataType.DT_DOUBLE: DataType.DT_COMPLEX128,
}
PARTS = {pair: part for part, pair in PAIRS.items()}


def arranged(call: Call) -> list[TensorType]:
    """As many as fit below the limit; counted here for whole numbers only."""
    names = ("start", "limit", "delta")
    bounds: list[Any] = [call.numbers(name) if call.dtype(name).is_int else None for name in names]
    start, limit, delta = bounds
    shape = None
    if all(isinstance(n, int) for n in bounds) and delta != 0:
        shape = (len(range(*bounds)),)
    elif delta == 1 and start is not None and limit is not None:
        shape = (dim(limit - start),)
    return [TensorType(DataType(call.attr("dtype")), shape, call.attr("place"))]


def spaced(call: Call) -> list[TensorType]:
    count = call.numbers("num")
    shape = None if count is None else (dim(count),)
    return [TensorType(DataType(call.attr("dtype")), shape, call.attr("place"))]


def identity(call: Call) -> list[TensorType]:
    rows, columns = call.attr("num_rows"), call.attr("num_columns")
    return [TensorType(DataType(call.attr("dtype")), (rows, columns), call.attr("place"))]


def joined(call: Call) -> list[TensorType]:
    part = call.dtype("real")
    if part not in PAIRS or call.dtype("imag") != part:
        raise VerifyError(f"there are no complex numbers of {part.name} and {call.dtype('imag').name}")
    return broadcast("real", "imag", dtype=PAIRS[part])(call)  # type: ignore[return-value]


def part(call: Call) -> list[TensorType]:
    if call.dtype("input") not in PARTS:
        raise VerifyError(f"{call.dtype('input').name} is not complex")
    return call.result(PARTS[call.dtype("input")], call.shape("input"))


# Bounds arrive as numbers with all their digits, so that the sequence is PyTorch's to the last one.
define("Range", "start# limit# delta#", arranged, is_closed=False, dtype=INT64, place="NPU")
define("LinSpace", "start# stop# num#", spaced, dtype=FLOAT, place="NPU")
define("Eye", "", identity, num_rows=REQUIRED, num_columns=REQUIRED, batch_shape=(), dtype=FLOAT, place="NPU")
define("Complex", "real imag", joined)
define("Real", "input", part)
define("FFT", "x", like(), dims=REQUIRED, normalization=0, forward=True)
define("Imag", "input", part)
