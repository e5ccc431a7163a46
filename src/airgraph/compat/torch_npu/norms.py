"""`npu_rms_norm` and `npu_add_rms_norm`: x / sqrt(mean(x²) + ε) · γ, in float32 up to the product with γ.

    y, rstd = torch_npu.npu_rms_norm(x, gamma, epsilon=1e-6)
    y, rstd, x = torch_npu.npu_add_rms_norm(x1, x2, gamma)          x = x1 + x2

The mean is over the last axes, as many as γ has; `rstd` is 1 / sqrt(mean(x²) + ε) in float32, with those axes of size 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, reference


@reference("npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    check("npu_rms_norm", x, gamma)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(normed_axes(gamma), keepdim=True) + epsilon)
    return ((wide * rstd).to(x.dtype) * gamma).to(x.dtype), rstd


@reference("npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)")
def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    check("npu_rms_norm_backward", x, gamma)
    unit = x.float() * rstd
    given = dy.float()
    scaled = given * gamma.float()
    dx = (scaled - unit * (scaled * unit).mean(normed_axes(gamma), keepdim=True)) * rstd
    return dx.to(x.dtype), (given * unit).reshape(-1, *gamma.shape).sum(0)


@reference("npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    same = x1.shape == x2.shape and x1.dtype == x2.dtype
    need(
        same, "npu_add_rms_norm", f"x1 {list(x1.shape)} {x1.dtype} and x2 {list(x2.shape)} {x2.dtype} have to be alike"
    )
    x = x1 + x2
    return (*npu_rms_norm(x, gamma, epsilon), x)


@reference(
    "npu_add_rms_norm_v2_functional(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The results in another order: 1 / sqrt(…) first."""
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, x


def normed_axes(gamma: Tensor) -> list[int]:
    return [*range(-gamma.dim(), 0)]


def check(op: str, x: Tensor, gamma: Tensor) -> None:
    need_types(op, FLOATS, self=x, gamma=gamma)
    need(0 < gamma.dim() <= x.dim(), op, f"gamma has {gamma.dim()} axes, and self {x.dim()}")
    need(
        x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        op,
        f"gamma {list(gamma.shape)} does not fit the last axes of self {list(x.shape)}",
    )


# Gradients. `rstd` is there for the backward op, and has none.


def keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def norm_gradient(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*npu_rms_norm_backward(dy, *ctx.saved_tensors), None)


def keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, rstd, x = output
    ctx.save_for_backward(x, inputs[2], rstd)
    ctx.mark_non_differentiable(rstd)


def add_norm_gradient(ctx: Any, dy: Tensor, _: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    through, dgamma = npu_rms_norm_backward(dy, *ctx.saved_tensors)
    both = through + dx
    return both, both, dgamma, None


torch.library.register_autograd("npu::npu_rms_norm", norm_gradient, setup_context=keep_norm)
torch.library.register_autograd("npu::npu_add_rms_norm", add_norm_gradient, setup_context=keep_add_norm)


@reference("batch_norm_reduce(Tensor input, float eps) -> (Tensor, Tensor)", opened=True)
def batch_norm_reduce(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum and the sum of squares of each channel, in float32."""
    need(x.dim() == 4, "batch_norm_reduce", f"input has {x.dim()} axes, and has to have 4")
    wide = x.float()
    return wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3))


@reference(
    "batch_norm_gather_stats_update(Tensor input, Tensor mean, Tensor invstd, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum, float eps, Tensor counts) -> (Tensor, Tensor)",
    opened=True,
)
def batch_norm_gather_stats_update(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """`mean` and `invstd` are the sums and the sums of squares of all ranks, [ranks, channels]: as the op has it. The
    running variance is the unbiased one."""
    total = counts.float().sum()
    middle = mean.float().sum(0) / total
    variance = invstd.float().sum(0) / total - middle.square()
    for running, new in ((running_mean, middle), (running_var, variance * (total / (total - 1)))):
        if running is not None:
            running.copy_(running.float() * (1 - momentum) + new * momentum)
    return middle.to(mean.dtype), torch.rsqrt(variance + eps).to(mean.dtype)
