"""`torch_npu.optim`: the fused optimizers, which are PyTorch's own with all tensors of a group in one call.

    optimizer = torch_npu.optim.NpuFusedAdamW(model.parameters(), lr=1e-3)

NpuFusedAdamP, NpuFusedLamb, NpuFusedBertAdam and NpuFusedRMSpropTF are not there.
"""

from __future__ import annotations

from typing import Any

import torch


class NpuFusedOptimizerBase:
    """What a fused optimizer has beside PyTorch's: the norm of all gradients, clipped in one go."""

    param_groups: list[dict[str, Any]]

    def clip_optimizer_grad_norm_fused_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; returns the norm before."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


class NpuFusedAdam(NpuFusedOptimizerBase, torch.optim.Adam):
    """torch.optim.Adam."""

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **kwargs: Any
    ) -> None:
        super().__init__(params, lr, betas, eps, foreach=True, **kwargs)


class NpuFusedAdamW(NpuFusedOptimizerBase, torch.optim.AdamW):
    """torch.optim.AdamW."""

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **kwargs: Any
    ) -> None:
        super().__init__(params, lr, betas, eps, foreach=True, **kwargs)


class NpuFusedSGD(NpuFusedOptimizerBase, torch.optim.SGD):
    """torch.optim.SGD."""

    def __init__(self, params: Any, lr: Any, momentum: float = 0, dampening: float = 0, **kwargs: Any) -> None:
        super().__init__(params, lr, momentum, dampening, foreach=True, **kwargs)


class NpuFusedAdadelta(NpuFusedOptimizerBase, torch.optim.Adadelta):
    """torch.optim.Adadelta."""

    def __init__(self, params: Any, lr: Any = 1.0, rho: float = 0.9, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(params, lr, rho, eps, foreach=True, **kwargs)


class NpuFusedRMSprop(NpuFusedOptimizerBase, torch.optim.RMSprop):
    """torch.optim.RMSprop."""

    def __init__(self, params: Any, lr: Any = 1e-2, alpha: float = 0.99, eps: float = 1e-8, **kwargs: Any) -> None:
        super().__init__(params, lr, alpha, eps, foreach=True, **kwargs)


__all__ = [
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamW",
    "NpuFusedOptimizerBase",
    "NpuFusedRMSprop",
    "NpuFusedSGD",
]
