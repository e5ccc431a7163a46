"""`torch.npu.amp`: autocast and the scaler of gradients, with the device filled in.

with torch.npu.amp.autocast(dtype=torch.float16):
    loss = model(x).sum()
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from airgraph.compat.npu.memory import DEVICE_TYPE

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.autocast):
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__(DEVICE_TYPE, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        dynamic: bool = True,
    ) -> None:
        """`dynamic=False`, which torch_npu's scaler has beyond PyTorch's, keeps the scale where it starts."""
        super().__init__(DEVICE_TYPE, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._dynamic = dynamic

    def update(self, new_scale: Any = None) -> None:
        if not self._dynamic and new_scale is None:
            new_scale = self.get_scale()
        super().update(new_scale)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=DEVICE_TYPE)
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=DEVICE_TYPE)


# The switches themselves, by the names that torch_npu gives them.


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled(DEVICE_TYPE)


def set_autocast_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled(DEVICE_TYPE, enabled)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_TYPE)


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype(DEVICE_TYPE, dtype)
