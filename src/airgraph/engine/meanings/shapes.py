"""Views, slices, joins, windows, diagonals and rolls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from airgraph.engine.meanings.table import Meaning, Tensor, torch_type


def strided_slice(
    x: Tensor, begin: Sequence[int], end: Sequence[int], axes: Sequence[int], strides: Sequence[int], **masks: int
) -> Tensor:
    index = [slice(None)] * x.ndim
    for axis, *bound in zip(axes, begin, end, strides):
        index[axis] = slice(*bound)
    return x[tuple(index)]


def squeeze(x: Tensor, axis: Sequence[int]) -> Tensor:
    return x.squeeze(tuple(axis)) if axis else x.squeeze()


def unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(a % (x.ndim + len(axes)) for a in axes):
        x = x.unsqueeze(axis)
    return x


def split(x: Tensor, sizes: Sequence[int], dim: int, num_split: int) -> Sequence[Tensor]:
    rest = x.shape[dim] - sum(s for s in sizes if s != -1)
    return torch.split(x, [rest if s == -1 else s for s in sizes], dim)


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


SHAPES: dict[str, Meaning] = {
    "ReduceProdD": lambda x, axes: x.prod(),
    "Shape": lambda x, dtype: torch.tensor(x.shape, dtype=torch_type(dtype)),
    "Gather": lambda x, indices, **_: x[indices],
    "Pack": lambda x, N, axis: torch.stack(x, axis),
    "Reshape": lambda x, shape, **_: x.reshape(shape),
    "Transpose": lambda x, perm: x.permute(perm),
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "ExpandDims": lambda x, axis: x.unsqueeze(axis),
    "BroadcastTo": lambda x, shape: x.expand(shape),
    "Expand": lambda x, shape: x.expand(shape),
    "StridedSliceV2": strided_slice,
    "ConcatV2": lambda x, dim, N: torch.cat(x, dim),
    "SplitV": split,
    "Unpack": lambda x, num, axis: torch.unbind(x, axis),
    "Tile": lambda x, multiples: x.repeat(multiples),
    "ReverseV2": lambda x, axis: torch.flip(x, axis),
    "Tril": lambda x, diagonal: torch.tril(x, diagonal),
    "Triu": lambda x, diagonal: torch.triu(x, diagonal),
    "AsStrided": as_strided,
    "ViewCopy": view_copy,
    "MatrixDiagPartV2": lambda x, k, padding: torch.diagonal(x, k, -2, -1),
    "MatrixDiagV2": lambda diagonal, k, rows, columns, padding: torch.diag_embed(diagonal, k, -2, -1),
    "MatrixSetDiagV2": lambda x, diagonal, k: torch.diagonal_scatter(x, diagonal, k, -2, -1),
    "Trace": torch.trace,
    "Roll": lambda x, shifts, dims: torch.roll(x, tuple(shifts), tuple(dims)),
}
