"""Matrix products, reductions, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from airgraph.engine.meanings.table import Meaning, Tensor, torch_type


def matmul(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None = None,
    offset_w: Tensor | None = None,
    *,
    transpose_x1: bool,
    transpose_x2: bool,
    offset_x: int = 0,
) -> Tensor:
    x1 = x1.mT if transpose_x1 else x1
    x2 = x2.mT if transpose_x2 else x2
    return torch.mm(x1, x2) if bias is None else torch.addmm(bias, x1, x2)


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


MATH: dict[str, Meaning] = {
    "MatMul": matmul,
    "MatMulV2": matmul,
    "BatchMatMul": lambda x1, x2, adj_x1, adj_x2: torch.bmm(x1.mT if adj_x1 else x1, x2.mT if adj_x2 else x2),
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
}
