"""Devices that are emulated on another one.

A tensor of an emulated device shares its memory with a tensor of the device that computes. A program swaps the one for
the other once, at its boundary; nothing in between knows about the emulation. Whoever provides such a device (compat.npu)
registers an adapter for its type; there is none by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceAdapter:
    """How tensors of one device type are seen on the device that computes, and back. Both directions share memory."""

    type: str
    host: torch.device
    to_host: Callable[[torch.Tensor], torch.Tensor]
    from_host: Callable[[torch.Tensor, torch.device], torch.Tensor]
    # What a graph of host tensors calls in place of an op or of a sub-graph; most stay as they are.
    host_op: Callable[[Any, torch.fx.Node], Any]


_ADAPTERS: dict[str, DeviceAdapter] = {}


def register_adapter(adapter: DeviceAdapter) -> None:
    _ADAPTERS[adapter.type] = adapter


def remove_adapter(device_type: str) -> None:
    _ADAPTERS.pop(device_type, None)


def adapter_for(device: torch.device) -> DeviceAdapter | None:
    """The adapter of an emulated device, or None for a device that computes itself."""
    return _ADAPTERS.get(device.type)


def host_op(op: Any, node: torch.fx.Node) -> Any:
    """What runs `op` in a program: an emulated device may have kernels that only it can call."""
    for adapter in _ADAPTERS.values():
        op = adapter.host_op(op, node)
    return op


def computing_device(device: torch.device) -> torch.device:
    """Where work for `device` is really done."""
    adapter = adapter_for(device)
    return adapter.host if adapter else device
