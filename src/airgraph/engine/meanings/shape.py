"""Views, parts, joins."""

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


def gather(x: Tensor, indices: Tensor, axis: int, **_: int) -> Tensor:
    """index_select for a list of indices; a scalar index takes the axis away."""
    if indices.ndim == 0 and indices.device.type == "cpu":
        return x.select(axis, int(indices))
    picked = x.index_select(axis, indices.reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def squeeze(x: Tensor, axis: Sequence[int]) -> Tensor:
    return x.squeeze(tuple(axis)) if axis else x.squeeze()


def unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(a % (x.ndim + len(axes)) for a in axes):
        x = x.unsqueeze(axis)
    return x


def split(x: Tensor, sizes: Sequence[int], dim: int, num_split: int) -> Sequence[Tensor]:
    rest = x.shape[dim] - sum(s for s in sizes if s != -1)
    return torch.split(x, [rest if s == -1 else s for s in sizes], dim)


SHAPE: dict[str, Meaning] = {
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
    "GatherV2": gather,
    "GatherElements": lambda x, index, dim: torch.gather(x, dim, index),
    "NonZero": lambda x, transpose: torch.nonzero(x),
    "MaskedSelect": torch.masked_select,
    "ConcatV2": lambda x, dim, N: torch.cat(x, dim),
    "SplitV": split,
    "Unpack": lambda x, num, axis: torch.unbind(x, axis),
    "Tile": lambda x, multiples: x.repeat(multiples),
    "ReverseV2": lambda x, axis: torch.flip(x, axis),
    "Tril": lambda x, diagonal: torch.tril(x, diagonal),
    "Triu": lambda x, diagonal: torch.triu(x, diagonal),
    "Empty": lambda shape, dtype, init, device: torch.zeros(shape, dtype=torch_type(dtype), device=device),
    "ZerosLike": torch.zeros_like,
    "OnesLike": torch.ones_like,
}
