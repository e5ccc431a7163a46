"""What every fused optimizer of torch_npu has."""

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
