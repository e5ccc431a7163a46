"""Variances, norms, sums of a special kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from airgraph.engine.meanings.math import reduce
from airgraph.engine.meanings.table import Meaning, Tensor


def spread(alone: Callable[..., Any], with_mean: Callable[..., Any]) -> Meaning:
    def meaning(x: Tensor, dim: Sequence[int], correction: int, keepdim: bool, is_mean_out: bool) -> Sequence[Tensor]:
        axes = tuple(dim) or None
        if is_mean_out:
            return with_mean(x, axes, correction=correction, keepdim=keepdim)
        return alone(x, axes, correction=correction, keepdim=keepdim), x.new_empty(0)

    return meaning


def deviation(x: Tensor, mean: Tensor, dim: Sequence[int], correction: int, keepdim: bool) -> Tensor:
    """The mean is x's own; PyTorch finds it with more digits than it is given with."""
    return torch.std(x, tuple(dim) or None, correction=correction, keepdim=keepdim)


def norm(x: Tensor, p: float, axes: Sequence[int], keepdim: bool, epsilon: float) -> Tensor:
    return torch.linalg.vector_norm(x, p, tuple(axes) or None, keepdim)


def log_sum_exp(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.log(torch.sum(torch.exp(x), axes, keepdim=keepdim))


STATISTICS: dict[str, Meaning] = {
    "ReduceVar": spread(torch.var, torch.var_mean),
    "ReduceStdV2": spread(torch.std, torch.std_mean),
    "ReduceStdWithMean": deviation,
    "LpNormV2": norm,
    "ReduceLogSumExp": reduce(log_sum_exp),
    "ReduceNansum": reduce(torch.nansum),
}
