"""`torch_npu.optim`: the fused optimizers, which are PyTorch's own with all tensors of a group in one call.

    optimizer = torch_npu.optim.NpuFusedAdamW(model.parameters(), lr=1e-3)

Those that PyTorch does not have are in `own`.
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.compat.torch_npu.optim.base import NpuFusedOptimizerBase
from airgraph.compat.torch_npu.optim.own import NpuFusedAdamP, NpuFusedBertAdam, NpuFusedLamb, NpuFusedRMSpropTF


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
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedOptimizerBase",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]
