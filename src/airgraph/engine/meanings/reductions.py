"""Reductions over axes, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from airgraph.engine.meanings.table import Meaning, Tensor, torch_type


def reduce(fn: Callable[..., Tensor]) -> Meaning:
    """No axes: over everything."""
    return lambda x, axes, keep_dims: fn(x, tuple(axes) or tuple(range(x.ndim)), keepdim=keep_dims)


def product(x: Tensor, axes: Sequence[int], keep_dims: bool) -> Tensor:
    """PyTorch multiplies along one axis or over everything; the order of the factors shows in the last digit."""
    if len(axes or range(x.ndim)) == x.ndim:
        whole = torch.prod(x, dtype=x.dtype)
        return whole.reshape((1,) * x.ndim) if keep_dims else whole
    for axis in sorted(axes or range(x.ndim), reverse=True):
        x = torch.prod(x, axis, keepdim=keep_dims, dtype=x.dtype)
    return x


def total(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keepdim, dtype=x.dtype)


def mean_as(x: Tensor, axes: Sequence[int], keep_dims: bool, dtype: int) -> Tensor:
    return torch.mean(x, tuple(axes) or tuple(range(x.ndim)), keepdim=keep_dims, dtype=torch_type(dtype))


def spread(without_mean: Callable[..., Any], with_mean: Callable[..., Any]) -> Meaning:
    def meaning(x: Tensor, dim: Sequence[int], correction: int, keepdim: bool, is_mean_out: bool) -> Sequence[Tensor]:
        axes = tuple(dim) or None
        if is_mean_out:
            return with_mean(x, axes, correction=correction, keepdim=keepdim)
        return without_mean(x, axes, correction=correction, keepdim=keepdim), x.new_empty(0)

    return meaning


def deviation(x: Tensor, mean: Tensor, dim: Sequence[int], correction: int, keepdim: bool) -> Tensor:
    """The mean is x's own; PyTorch finds it with more digits than it is given with."""
    return torch.std(x, tuple(dim) or None, correction=correction, keepdim=keepdim)


def norm(x: Tensor, p: float, axes: Sequence[int], keepdim: bool, epsilon: float) -> Tensor:
    return torch.linalg.vector_norm(x, p, tuple(axes) or None, keepdim)


def log_sum_exp(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.log(torch.sum(torch.exp(x), axes, keepdim=keepdim))


REDUCTIONS: dict[str, Meaning] = {
    "ReduceSum": reduce(total),
    "ReduceMean": reduce(torch.mean),
    "ReduceMeanWithCast": mean_as,
    "ReduceMax": reduce(torch.amax),
    "ReduceMin": reduce(torch.amin),
    "ReduceProd": product,
    "ReduceAll": reduce(torch.all),
    "ReduceAny": reduce(torch.any),
    "SoftmaxV2": lambda x, axes, half_to_float: torch.softmax(x, axes[0]),
    "LogSoftmaxV2": lambda logits, axes: torch.log_softmax(logits, axes[0]),
    "SoftmaxGrad": lambda y, dy, axes: torch.ops.aten._softmax_backward_data(dy, y, axes[0], y.dtype),
    "LogSoftmaxGrad": lambda dy, y, axis: torch.ops.aten._log_softmax_backward_data(dy, y, axis[0], y.dtype),
    "Histogram": lambda x, bins, min, max: torch.histc(x, bins, min, max),
    "ReduceVar": spread(torch.var, torch.var_mean),
    "ReduceStdV2": spread(torch.std, torch.std_mean),
    "ReduceStdWithMean": deviation,
    "LpNormV2": norm,
    "ReduceLogSumExp": reduce(log_sum_exp),
    "ReduceNansum": reduce(torch.nansum),
}
