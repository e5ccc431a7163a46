"""Fused optimizers of torch_npu that PyTorch does not have: Lamb, AdamP, BERT's Adam, and RMSprop in TensorFlow's order.

Lamb        Adam's step without bias correction, scaled per tensor by |weight| (at most 10) / |step|
AdamP       Adam, whose step loses its part along the weight where gradient and weight are nearly orthogonal
BertAdam    Adam without bias correction, decoupled decay, gradients clipped together, a schedule of its own
RMSpropTF   squares begin at 1, eps inside the root, the learning rate inside the momentum
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu.optim.base import NpuFusedOptimizerBase


class OwnOptimizer(NpuFusedOptimizerBase, torch.optim.Optimizer):
    """An optimizer by its rule for one tensor, `update`; the norm of all gradients may be asked for before."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                if p.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            scale = self.gradient_scale(given, group)
            for p in given:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                self.update(p, p.grad if scale == 1 else p.grad * scale, state, group)
        return loss

    def gradient_scale(self, params: list[Tensor], group: dict[str, Any]) -> float:
        """What the gradients of a group are multiplied by."""
        return 1.0

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


def moments(p: Tensor, grad: Tensor, state: dict[str, Any], betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Running averages of a gradient and its square."""
    first = state.setdefault("exp_avg", torch.zeros_like(p))
    second = state.setdefault("exp_avg_sq", torch.zeros_like(p))
    first.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    second.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    return first, second


def check_rates(lr: float, eps: float, **betas: float) -> None:
    if lr < 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if eps < 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for name, beta in betas.items():
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid {name} parameter: {beta}")


def norm_of(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.float().square().sum()) for t in tensors))


class NpuFusedLamb(OwnOptimizer):
    """`adam=True`: without the scaling. `use_global_grad_norm`: gradients are divided by the norm of all, if above 1."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
    ) -> None:
        check_rates(lr, eps, beta1=betas[0], beta2=betas[1])
        self.adam, self.use_global_grad_norm = adam, use_global_grad_norm
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def gradient_scale(self, params: list[Tensor], group: dict[str, Any]) -> float:
        if not self.use_global_grad_norm:
            return 1.0
        every = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        return 1.0 / max(norm_of(every), 1.0)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = moments(p, grad, state, group["betas"])
        change = (first / (second.sqrt() + group["eps"])).add(p, alpha=group["weight_decay"])
        weight, length = min(norm_of([p]), 10.0), norm_of([change])
        trust = 1.0 if self.adam or not weight or not length else weight / length
        p.add_(change, alpha=-group["lr"] * trust)


class NpuFusedAdamP(OwnOptimizer):
    """`delta`: below this cosine (for a vector of one element) two vectors are nearly orthogonal. `wd_ratio`: what weight
    decay is scaled by then."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
    ) -> None:
        named = {"delta": delta, "wd_ratio": wd_ratio, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **named})

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        first, second = moments(p, grad, state, group["betas"])
        root = second.sqrt() / math.sqrt(1 - beta2 ** state["step"]) + eps
        change = (beta1 * first + (1 - beta1) * grad if group["nesterov"] else first) / root
        decay = 1.0
        if p.dim() > 1:
            for rows in (p.shape[0], 1):  # each channel, then the whole
                if (projected := self.projected(p, grad, change, rows, group)) is not None:
                    change, decay = projected, group["wd_ratio"]
                    break
        p.mul_(1 - group["lr"] * group["weight_decay"] * decay)
        p.add_(change, alpha=-group["lr"] / (1 - beta1 ** state["step"]))

    def projected(self, p: Tensor, grad: Tensor, change: Tensor, rows: int, group: dict[str, Any]) -> Tensor | None:
        """The change without its part along the weight; None where gradient and weight are not nearly orthogonal."""
        w, g, c = (t.reshape(rows, -1) for t in (p, grad, change))
        length = w.norm(dim=1, keepdim=True) + group["eps"]
        cosine = (w * g).sum(1, keepdim=True).abs() / length / (g.norm(dim=1, keepdim=True) + group["eps"])
        if float(cosine.max()) >= group["delta"] / math.sqrt(w.shape[1]):
            return None
        unit = w / length
        return (c - unit * (unit * c).sum(1, keepdim=True)).view_as(p)


def after_warmup(kind: str, x: float, warmup: float) -> float:
    """The factor of the learning rate where a share x of all steps is done."""
    if x < warmup:
        return x / warmup
    match kind:
        case "warmup_cosine":
            return 0.5 * (1.0 + math.cos(math.pi * x))
        case "warmup_linear":
            return max((x - 1.0) / (warmup - 1.0), 0.0)
        case "warmup_poly":
            return (1.0 - x) ** 0.5
    return 1.0


class NpuFusedBertAdam(OwnOptimizer):
    """`warmup`: a share of `t_total` steps; -1 for none. `max_grad_norm`: of the gradients of a group; -1 for any."""

    def __init__(
        self,
        params: Any,
        lr: float,
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.999,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
    ) -> None:
        check_rates(lr, e, b1=b1, b2=b2)
        if warmup != -1 and not 0.0 <= warmup < 1.0:
            raise ValueError(f"Invalid warmup: {warmup}")
        if schedule not in ("warmup_cosine", "warmup_constant", "warmup_linear", "warmup_poly"):
            raise ValueError(f"Invalid schedule parameter: {schedule}")
        named = {"warmup": warmup, "t_total": t_total, "schedule": schedule, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "b1": b1, "b2": b2, "e": e, "max_grad_norm": max_grad_norm, **named})

    def gradient_scale(self, params: list[Tensor], group: dict[str, Any]) -> float:
        most = group["max_grad_norm"]
        return min(most / (norm_of([p.grad for p in params if p.grad is not None]) + 1e-6), 1.0) if most > 0 else 1.0

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = moments(p, grad, state, (group["b1"], group["b2"]))
        change = first / (second.sqrt() + group["e"]) + group["weight_decay"] * p
        done, total = state["step"] - 1, group["t_total"]
        factor = after_warmup(group["schedule"], done / total, group["warmup"]) if total != -1 else 1.0
        p.add_(change, alpha=-group["lr"] * factor)


class NpuFusedRMSpropTF(OwnOptimizer):
    """`decoupled_decay`: the weight itself decays, not by way of its gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
    ) -> None:
        check_rates(lr, eps)
        for name, value in (("momentum", momentum), ("weight_decay", weight_decay), ("alpha", alpha)):
            if value < 0.0:
                raise ValueError(f"Invalid {name} value: {value}")
        named = {"decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum, "centered": centered}
        more = {"weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, **more, **named})

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["decoupled_decay"]:
            p.mul_(1 - group["weight_decay"])
        else:
            grad = grad.add(p, alpha=group["weight_decay"])
        square = state.setdefault("square_avg", torch.ones_like(p))
        square.lerp_(grad.square(), 1 - group["alpha"])
        variance = square
        if group["centered"]:
            mean = state.setdefault("grad_avg", torch.zeros_like(p))
            mean.lerp_(grad, 1 - group["alpha"])
            variance = square - mean.square()
        change = grad / (variance + group["eps"]).sqrt()
        lr, momentum = group["lr"], group["momentum"]
        if not momentum:
            p.add_(change, alpha=-lr)
            return
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        buffer.mul_(momentum).add_(change, alpha=lr if group["lr_in_momentum"] else 1.0)
        p.add_(buffer, alpha=-1.0 if group["lr_in_momentum"] else -lr)
