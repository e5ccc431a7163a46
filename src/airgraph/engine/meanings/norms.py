"""Normalisations: PyTorch's own ops. The statistics of a forward pass may come back in the type of another device's
kernel; the gradient's kernel gets them in its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from airgraph.engine.meanings.layouts import dense, on_dense
from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten


def or_empty(results: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Nothing as a tensor without elements: every output of a node is a tensor."""
    return [like.new_empty(0) if result is None else result for result in results]


def statistics(x: Tensor, weight: Tensor | None, *numbers: Tensor | None) -> list[Tensor | None]:
    """In the type the kernel works with: float32 where half inputs meet float32 weights, and on accelerators."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    wide = half and (x.device.type != "cpu" or (weight is not None and weight.dtype == torch.float32))
    dtype = torch.float32 if wide else x.dtype
    return [None if n is None else n.to(dtype) for n in numbers]


def layer_norm_gradient(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    shape: Sequence[int],
    output_mask: Sequence[bool],
) -> list[Tensor]:
    mean, rstd = statistics(x, gamma, mean, rstd)  # type: ignore[assignment]
    return or_empty(aten.native_layer_norm_backward(dy, x, shape, mean, rstd, gamma, beta, output_mask), x)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> list[Tensor]:
    """As models write it out: halves in float32 up to the product with gamma."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return [gamma * (wide * rstd).to(x.dtype), rstd]


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> list[Tensor]:
    x = x1 + x2
    return [*rms_norm(x, gamma, epsilon), x]


def group_sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], prod(x.shape[2:])


def group_norm(x: Tensor, gamma: Tensor | None, beta: Tensor | None, num_groups: int, eps: float) -> Any:
    return aten.native_group_norm(x, gamma, beta, *group_sizes(x), num_groups, eps)


def group_norm_with_variance(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, num_groups: int, eps: float
) -> list[Tensor]:
    """The kernel gives 1/√(variance + ε). In double the variance of that gives the same number again."""
    y, mean, rstd = group_norm(x, gamma, beta, num_groups, eps)
    half = x.dtype in (torch.float16, torch.bfloat16)
    variance = rstd.double().pow(-2) - eps
    return [y, mean, variance.to(torch.float32 if half else x.dtype)]


def group_norm_gradient(
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    num_groups: int,
    output_mask: Sequence[bool],
) -> list[Tensor]:
    dtype = x.dtype if gamma is None else gamma.dtype  # float32 for half inputs is what only other norms take
    mean, rstd = mean.to(dtype), rstd.to(dtype)
    grads = aten.native_group_norm_backward(dy, x, mean, rstd, gamma, *group_sizes(x), num_groups, output_mask)
    return or_empty(grads, x)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    epsilon: float,
    momentum: float,
    is_training: bool,
) -> list[Tensor]:
    if running_mean is None or running_var is None:
        y, mean, rstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, is_training, momentum, epsilon)
        return [y, x.new_empty(0), x.new_empty(0), mean, rstd]
    y, mean, rstd, *running = aten._native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, is_training, momentum, epsilon
    )
    return [y, *running, mean, rstd]


def batch_norm_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    is_training: bool,
    epsilon: float,
    output_mask: Sequence[bool],
) -> list[Tensor]:
    save_mean, save_rstd = statistics(x, weight, save_mean, save_rstd)
    return or_empty(
        aten.native_batch_norm_backward(
            dy, x, weight, running_mean, running_var, save_mean, save_rstd, is_training, epsilon, output_mask
        ),
        x,
    )


def batch_norm_elements_gradient(dy: Tensor, x: Tensor, *numbers: Tensor) -> Tensor:
    """By PyTorch's kernel, which takes one number for each channel, and sums with a count where these are means."""
    if not x.numel():
        return torch.empty_like(x)
    channels = [t.transpose(0, 1).flatten(1)[:, 0].contiguous() for t in numbers]
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return aten.batch_norm_backward_elemt(dense(dy), dense(x), *channels, one)


NORMS: dict[str, Meaning] = {
    "LayerNormV4": lambda x, shape, gamma, beta, epsilon: aten.native_layer_norm(x, shape, gamma, beta, epsilon),
    "LayerNormGradV3": layer_norm_gradient,
    "RmsNorm": rms_norm,
    "AddRmsNorm": add_rms_norm,
    "GroupNorm": group_norm_with_variance,
    "GroupNormV2": group_norm,
    "GroupNormGrad": group_norm_gradient,
    "BatchNormV3": batch_norm,
    "BNInfer": lambda x, scale, offset, mean, variance, epsilon: aten._native_batch_norm_legit_no_training(
        x, scale, offset, mean, variance, 0.0, epsilon
    )[0],
    "SyncBatchNormBackwardReduce": lambda dy, x, mean, invstd, weight, **wanted: or_empty(
        aten.batch_norm_backward_reduce.default(dy, x, mean, invstd, weight, **wanted), x
    ),
    "BatchNormGradV3": batch_norm_gradient,
}
NORMS = {name: on_dense(meaning) for name, meaning in NORMS.items()}
NORMS["SyncBatchNormBackwardElemt"] = batch_norm_elements_gradient
