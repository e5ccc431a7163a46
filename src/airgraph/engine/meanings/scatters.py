"""Picking by index tensors, and writing a part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from airgraph.engine.meanings.elementwise import number
from airgraph.engine.meanings.shape import strided_slice
from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten


def placed(indices: Sequence[Tensor], mask: Sequence[int]) -> list[Tensor | None]:
    rest = iter(indices)
    return [next(rest) if here else None for here in mask]


def index_add(var: Tensor, indices: Tensor, updates: Tensor, alpha: Tensor | None, axis: int) -> Tensor:
    return torch.index_add(var, axis, indices, updates, alpha=1 if alpha is None else alpha.item())


def scatter(data: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str) -> Tensor:
    match reduction:
        case "add":
            return torch.scatter_add(data, axis, indices, updates)
        case "mul":
            return torch.scatter_reduce(data, axis, indices, updates, "prod")
        case "max" | "min":
            return torch.scatter_reduce(data, axis, indices, updates, f"a{reduction}")
    return torch.scatter(data, axis, indices, updates)


def slice_assign(
    var: Tensor, value: Tensor, begin: Sequence[int], end: Sequence[int], strides: Sequence[int], axes: Sequence[int]
) -> Tensor:
    result = var.clone()
    strided_slice(result, begin, end, axes, strides).copy_(value)
    return result


SCATTERS: dict[str, Meaning] = {
    "IndexByTensor": lambda x, indices, indices_mask: aten.index(x, placed(indices, indices_mask)),
    "IndexPutV2": lambda x, value, mask, strides, indices, accumulate: aten.index_put(
        x, placed(indices, mask), value, accumulate
    ),
    "InplaceIndexAdd": index_add,
    "InplaceUpdate": lambda x, indices, v: torch.index_copy(x, 0, indices, v),
    "IndexFill": lambda x, indices, value, dim: torch.index_fill(x, dim, indices, number(value)),
    "ScatterElements": scatter,
    "StridedSliceAssignV2": slice_assign,
    "MaskedScatter": lambda x, mask, updates: torch.masked_scatter(x, mask, updates),
}
