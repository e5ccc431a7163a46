"""Products of matrices and vectors, in groups too, and distances between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.table import Meaning, Tensor


def matmul(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None = None,
    offset_w: Tensor | None = None,
    *,
    transpose_x1: bool,
    transpose_x2: bool,
    offset_x: int = 0,
) -> Tensor:
    x1 = x1.mT if transpose_x1 else x1
    x2 = x2.mT if transpose_x2 else x2
    return torch.mm(x1, x2) if bias is None else torch.addmm(bias, x1, x2)


def grouped_matmul(x: Sequence[Tensor], weight: Sequence[Tensor], *rest: Any, **attrs: int) -> Tensor:
    (rows,), (matrices,), ends = x, weight, rest[-2]
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    if rows.is_meta:
        return out
    start = 0
    for matrix, end in zip(matrices, ends.tolist()):
        out[start:end] = rows[start:end] @ matrix
        start = end
    return out


aten = torch.ops.aten
MATRICES: dict[str, Meaning] = {
    "Dot": torch.dot,
    "MatMul": matmul,
    "MatMulV2": matmul,
    "BatchMatMul": lambda x1, x2, adj_x1, adj_x2: torch.bmm(x1.mT if adj_x1 else x1, x2.mT if adj_x2 else x2),
    "GroupedMatmul": grouped_matmul,
    "Cdist": lambda x1, x2, p: aten._cdist_forward(x1, x2, p, None),
    "CdistGrad": lambda grad, x1, x2, cdist, p: aten._cdist_backward(
        grad.contiguous(), x1.contiguous(), x2.contiguous(), p, cdist.contiguous()
    ),
}
