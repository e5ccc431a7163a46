"""Sequences of numbers, complex numbers."""

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


RANGES: dict[str, Meaning] = {
    "Range": arranged,
    "LinSpace": spaced,
    "Eye": identity,
    "Complex": torch.complex,
    "FFT": lambda x, dims, normalization, forward: torch.ops.aten._fft_c2c(x, dims, normalization, forward),
    "Real": lambda x: torch.real(x).resolve_neg(),
    "Imag": lambda x: torch.imag(x).resolve_neg(),
}
