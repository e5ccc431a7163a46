"""Windows, diagonals, rolls and other readings of the same elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from airgraph.engine.meanings.table import Meaning, Tensor, torch_type


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    x = x.contiguous()
    return x.as_strided(size, stride, x.storage_offset() + offset)


def view_copy(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    src: Tensor,
    src_size: Sequence[int],
    src_stride: Sequence[int],
    src_offset: int,
) -> Tensor:
    part = as_strided(src, src_size, src_stride, src_offset)
    return torch.as_strided_scatter(x.contiguous().clone(), part, size, stride, offset)


STRIDED: dict[str, Meaning] = {
    "AsStrided": as_strided,
    "ViewCopy": view_copy,
    "MatrixDiagPartV2": lambda x, k, padding: torch.diagonal(x, k, -2, -1),
    "MatrixDiagV2": lambda diagonal, k, rows, columns, padding: torch.diag_embed(diagonal, k, -2, -1),
    "MatrixSetDiagV2": lambda x, diagonal, k: torch.diagonal_scatter(x, diagonal, k, -2, -1),
    "Trace": torch.trace,
    "Roll": lambda x, shifts, dims: torch.roll(x, tuple(shifts), tuple(dims)),
    "Bitcast": lambda x, type: x.view(torch_type(type)),
}
