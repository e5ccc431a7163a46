"""Sorting, the indices of extremes, scans, search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from airgraph.engine.meanings.table import Meaning, Tensor, torch_type

aten = torch.ops.aten


def sort(x: Tensor, axis: int, descending: bool, stable: bool, y2_dtype: int) -> Sequence[Tensor]:
    return torch.sort(x, dim=axis, descending=descending, stable=stable)


def top(x: Tensor, k: int, sorted: bool, dim: int, largest: bool, indices_dtype: int) -> Sequence[Tensor]:
    return torch.topk(x, k, dim, largest, sorted)


def place(fn: Callable[..., Tensor]) -> Meaning:
    return lambda x, dimension, dtype: fn(x, dimension)


def with_value(fn: Callable[..., Sequence[Tensor]]) -> Meaning:
    def meaning(x: Tensor, dimension: int, keep_dims: bool) -> Sequence[Tensor]:
        values, indices = fn(x, dimension, keepdim=keep_dims)
        return indices, values

    return meaning


def running(fn: Callable[..., Tensor]) -> Meaning:
    return lambda x, axis, exclusive, reverse: fn(x, axis, dtype=x.dtype)


def search(sequence: Tensor, values: Tensor, sorter: Tensor | None, dtype: int, right: bool) -> Tensor:
    small = torch_type(dtype) == torch.int32
    if values.device != sequence.device:  # a number is one of the host
        values = values.to(sequence.device)
    return torch.searchsorted(sequence, values, out_int32=small, right=right, sorter=sorter)


SORTING: dict[str, Meaning] = {
    "Sort": sort,
    "TopKV2": top,
    "ArgMaxV2": place(torch.argmax),
    "ArgMin": place(torch.argmin),
    "ArgMaxWithValue": with_value(torch.max),
    "ArgMinWithValue": with_value(torch.min),
    "Cumsum": running(torch.cumsum),
    "Cumprod": running(torch.cumprod),
    "CumulativeLogsumexp": lambda x, axis, exclusive, reverse: torch.logcumsumexp(x, axis),
    "Cummax": lambda x, dim: torch.cummax(x, dim),
    "Cummin": lambda x, axis: torch.cummin(x, axis),
    "SearchSorted": search,
}
