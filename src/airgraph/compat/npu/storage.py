"""Storages of `npu` outside of tensors: copying them (deepcopy), moving them, loading them from a file.

PyTorch makes a storage by asking the device's allocator, which a Python backend cannot provide. Every storage of ours
comes from a host tensor instead; the three places where PyTorch would ask the allocator are given that way to make
one.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from airgraph.compat.npu import memory, state
from airgraph.compat.npu.memory import DEVICE_TYPE

_clone = torch.UntypedStorage.clone
_ADDED = ("clone", DEVICE_TYPE, f"is_{DEVICE_TYPE}")
_loader_registered = False


def install() -> None:
    # They shadow what the base class has, and are deleted again.
    setattr(torch.UntypedStorage, "clone", clone)  # noqa: B010 - mypy does not allow the assignment
    setattr(torch.UntypedStorage, DEVICE_TYPE, to_npu)
    setattr(torch.UntypedStorage, f"is_{DEVICE_TYPE}", property(lambda self: self.device.type == DEVICE_TYPE))
    _register_loader()


def uninstall() -> None:
    for name in _ADDED:
        if name in vars(torch.UntypedStorage):
            delattr(torch.UntypedStorage, name)


def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    return to_npu(self, self.device, copy=True) if self.device.type == DEVICE_TYPE else _clone(self)


def to_npu(
    self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False, *, copy: bool = False
) -> torch.UntypedStorage:
    """This storage on a device, the current one if none is named; itself if it is there already, unless a copy is asked
    for."""
    index = state.device_index(device)
    if self.device == torch.device(DEVICE_TYPE, index) and not copy:
        return self
    source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
    made = torch.empty(self.nbytes(), dtype=torch.uint8, device=state.host_device())
    return memory.from_host(made, index).copy_(source).untyped_storage()


def _register_loader() -> None:
    """Teach torch.load the locations "npu", "npu:0" and so on. PyTorch has no way to forget it, so it is done once."""
    global _loader_registered
    if not _loader_registered:
        torch.serialization.register_package(5, _location, _load)
        _loader_registered = True


def _location(storage: Any) -> str | None:
    return str(storage.device) if storage.device.type == DEVICE_TYPE else None


def _load(storage: Any, location: str) -> torch.UntypedStorage | None:
    if not re.fullmatch(rf"{DEVICE_TYPE}(:\d+)?", location):
        return None
    return to_npu(storage, location)
