"""Tensors made from a size and a few numbers."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.engine.meanings.table import Meaning, Tensor, torch_type


def arranged(start: Any, limit: Any, delta: Any, *, is_closed: bool, dtype: int, device: torch.device) -> Tensor:
    return torch.arange(start, limit, delta, dtype=torch_type(dtype), device=device)


def spaced(start: Any, stop: Any, num: int, *, dtype: int, device: torch.device) -> Tensor:
    return torch.linspace(start, stop, num, dtype=torch_type(dtype), device=device)


def identity(
    *, num_rows: int, num_columns: int, batch_shape: tuple[int, ...], dtype: int, device: torch.device
) -> Tensor:
    return torch.eye(num_rows, num_columns, dtype=torch_type(dtype), device=device)


CREATION: dict[str, Meaning] = {
    "Range": arranged,
    "LinSpace": spaced,
    "Eye": identity,
    "Empty": lambda shape, dtype, init, device: torch.zeros(shape, dtype=torch_type(dtype), device=device),
    "ZerosLike": torch.zeros_like,
    "OnesLike": torch.ones_like,
}
