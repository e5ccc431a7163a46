"""Elements read and written by index or by mask; embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.elementwise import number
from airgraph.engine.meanings.layouts import on_dense
from airgraph.engine.meanings.shapes import strided_slice
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


def gather(x: Tensor, indices: Tensor, axis: int, **_: int) -> Tensor:
    """index_select for a list of indices; a scalar index takes the axis away."""
    if indices.ndim == 0 and indices.device.type == "cpu":
        return x.select(axis, int(indices))
    picked = x.index_select(axis, indices.reshape(-1))
    return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def embedding_gradient(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    return aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
    forward_only: bool,
    **attrs: Any,
) -> Any:
    call = aten._embedding_bag_forward_only if forward_only else aten._embedding_bag
    return call(weight, indices, offsets, mode=MODES[mode], per_sample_weights=per_sample_weights, **attrs)


INDEXING: dict[str, Meaning] = {
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
    "GatherV2": gather,
    "GatherElements": lambda x, index, dim: torch.gather(x, dim, index),
    "NonZero": lambda x, transpose: torch.nonzero(x),
    "MaskedSelect": torch.masked_select,
    "EmbeddingDenseGrad": embedding_gradient,
    "EmbeddingBag": on_dense(embedding_bag),
}
MODES = {"sum": 0, "mean": 1, "max": 2}
