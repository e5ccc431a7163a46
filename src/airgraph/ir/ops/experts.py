"""Mixtures of experts: rows in groups, each multiplied with a matrix of its own, and how many rows a group has."""

from __future__ import annotations

from airgraph.errors import VerifyError
from airgraph.ir.ops.table import NodeView, define
from airgraph.ir.types import TensorType


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
# How many elements lie in each of `bins` equal parts of [min, max]; those outside are not counted.
define("Histogram", "x", lambda view: view.result(view.dtype("x"), (view.attr("bins"),)), bins=100, min=0.0, max=0.0)
