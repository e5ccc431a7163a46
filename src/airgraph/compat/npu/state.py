"""What is installed in this process. A process has one kind of `npu`, because PyTorch has one PrivateUse1, and one or
several devices of it, npu:0, npu:1, …, all of which compute on the same host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from airgraph.errors import CompatError

if TYPE_CHECKING:
    from airgraph.compat.npu.dispatch import Host
    from airgraph.compat.npu.guard import DeviceCountGuard

MOST_DEVICES = 64


@dataclass
class Emulation:
    """The installed devices: who computes for them, and what was registered and must be taken back."""

    host: Host
    count: int = 1
    guard: DeviceCountGuard | None = None  # with several devices: who knows which one is current
    libraries: list[torch.library.Library] = field(default_factory=list)


_emulation: Emulation | None = None


def current() -> Emulation | None:
    return _emulation


def change(emulation: Emulation | None) -> None:
    global _emulation
    _emulation = emulation


def installed() -> Emulation:
    if _emulation is None:
        raise CompatError(
            "the emulated npu is not installed", hint="import airgraph.compat.npu and call install() before using it"
        )
    return _emulation


def host_device() -> torch.device:
    """Where the emulated devices compute."""
    return installed().host.device


# Several devices.


def device_count() -> int:
    return 0 if _emulation is None else _emulation.count


def current_device() -> int:
    """The device that is meant where none is named; each thread has its own."""
    if _emulation is None or _emulation.guard is None:
        return 0
    return torch.accelerator.current_device_index()  # Dynamo knows this one, and guards what it gives


def set_device(index: int) -> None:
    if _emulation is not None and _emulation.guard is not None and index != current_device():
        _emulation.guard.change(index)


def device_index(which: Any) -> int:
    """The index that `which` (an int, a string, a device) names, if there is such a device; for None the current one."""
    if isinstance(which, str):
        which = torch.device(which)
    index = which.index if isinstance(which, torch.device) else which
    if index is None or index == -1:
        return current_device()
    count = max(device_count(), 1)
    if not 0 <= index < count:
        raise CompatError(
            f"there is no device npu:{index}; the emulation has {count}",
            hint=f"AIRGRAPH_NPU_DEVICES={index + 1} in the environment, or install(devices={index + 1})"
            if 0 <= index < MOST_DEVICES
            else "npu:0",
        )
    return index
