"""Products of matrices and vectors, in groups too, and distances between rows."""

from __future__ import annotations

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import broadcast_shapes, like, matmul
from airgraph.ir.ops.table import NodeView, define
from airgraph.ir.types import TensorType

define("Dot", "input_x input_y", lambda view: view.result(view.dtype("input_x"), ()), outputs="output")
define(
    "MatMul", "x1 x2 bias?", matmul("x1", "x2", "transpose_x1", "transpose_x2"), transpose_x1=False, transpose_x2=False
)
define("BatchMatMul", "x1 x2", matmul("x1", "x2", "adj_x1", "adj_x2"), adj_x1=False, adj_x2=False)
define(
    "MatMulV2",
    "x1 x2 bias? offset_w?",
    matmul("x1", "x2", "transpose_x1", "transpose_x2"),
    transpose_x1=False,
    transpose_x2=False,
    offset_x=0,
)


def grouped(view: NodeView) -> list[TensorType]:
    (x,), (weight,) = view.values("x"), view.values("weight")
    rows, matrices, ends = x.type.shape, weight.type.shape, view.shape("group_list")
    if rows is None or matrices is None or ends is None:
        return view.result(x.dtype, None)
    if (len(rows), len(matrices), len(ends)) != (2, 3, 1):
        raise VerifyError(
            f"GroupedMatmul takes x[m, k], weight[g, k, n] and group_list[g], not {rows}, {matrices}, {ends}"
        )
    return view.result(x.dtype, (rows[0], matrices[2]))


# Rows of x up to group_list[0] with weight[0], from there to group_list[1] with weight[1], …; zeros behind the last group.
define(
    "GroupedMatmul",
    "x* weight* bias* scale* offset* antiquant_scale* antiquant_offset* group_list? per_token_scale?",
    grouped,
    split_item=3,
    group_type=0,
    group_list_type=0,
)


def distances(view: NodeView) -> list[TensorType]:
    a, b = view.shape("x1"), view.shape("x2")
    batch = None if a is None or b is None else broadcast_shapes([a[:-2], b[:-2]])
    return view.result(view.dtype("x1"), None if a is None or b is None or batch is None else (*batch, a[-2], b[-2]))


define("Cdist", "x1 x2", distances, p=2.0)
define("CdistGrad", "grad x1 x2 cdist", like("x1"), p=2.0)
