"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.table import Meaning, Tensor


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


EXPERTS: dict[str, Meaning] = {
    "GroupedMatmul": grouped_matmul,
    "Histogram": lambda x, bins, min, max: torch.histc(x, bins, min, max),
}
