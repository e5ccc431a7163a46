"""Windows, diagonals, rolls and other readings of the same elements."""

from __future__ import annotations

from airgraph.ir.ops.rules import MaybeShape, like
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType, dim


def windows(view: NodeView) -> list[TensorType]:
    size = view.numbers("size")
    return view.result(view.dtype("x"), tuple(map(dim, size)) if isinstance(size, tuple) else None)


def diagonal(view: NodeView) -> MaybeShape:
    shape, k = view.shape("input"), view.numbers("k")
    if shape is None or not all(isinstance(n, int) for n in (*shape[-2:], k)):
        return None
    rows, columns = shape[-2:]
    return (*shape[:-2], max(0, min(rows + min(k, 0), columns - max(k, 0))))


def embedded(view: NodeView) -> MaybeShape:
    shape, k = view.shape("diagonal"), view.numbers("k")
    if shape is None or not isinstance(k, int):
        return None
    side = dim(shape[-1] + abs(k))
    return (*shape[:-1], side, side)


# AsStrided counts in a contiguous x, as all values of a graph are.
define("AsStrided", "x size# stride# storage_offset#", windows)
define(
    "ViewCopy",
    "dst dst_size# dst_stride# dst_storage_offset# src src_size# src_stride# src_storage_offset#",
    like("dst"),
)
define(
    "MatrixDiagPartV2",
    "input k# padding_value",
    lambda view: view.result(view.dtype("input"), diagonal(view)),
    outputs="diagonal",
)
define(
    "MatrixDiagV2",
    "diagonal k# num_rows# num_cols# padding_value",
    lambda view: view.result(view.dtype("diagonal"), embedded(view)),
    outputs="output",
)
define("MatrixSetDiagV2", "input diagonal k#", like("input"), outputs="output")
define("Trace", "x", lambda view: view.result(view.dtype("x"), ()))
define("Roll", "x", like(), shifts=REQUIRED, dims=())
define("Bitcast", "x", lambda view: view.result(DataType(view.attr("type")), view.shape("x")), type=REQUIRED)
