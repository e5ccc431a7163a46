"""`torch.Generator(device="npu")`: a generator of the host that says it is the device's.

PyTorch asks a backend written in Python for no generator, so the class `torch.Generator` is replaced while the
emulation is installed, by one that makes ours for `npu` and PyTorch's for every other device. As everywhere
(`random`), a seed gives the numbers that the host gives for it.
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.compat.npu import state
from airgraph.compat.npu.memory import DEVICE_TYPE

_Plain = torch.Generator


class NpuGenerator(_Plain):
    """A generator of the host, for tensors of one device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE_TYPE, addresses.get(address(self), 0))

    def clone_state(self) -> NpuGenerator:
        return _restored(self.get_state(), self.device.index)

    def __reduce__(self) -> Any:
        return _restored, (self.get_state(), self.device.index)


addresses: dict[int, int] = {}  # → the index of the device


def make(index: int = 0) -> NpuGenerator:
    made = _Plain.__new__(NpuGenerator, device=state.host_device())  # type: ignore[call-arg]
    addresses[address(made)] = index
    return made


def _restored(state: torch.Tensor, index: int = 0) -> NpuGenerator:
    made = make(index)
    made.set_state(state)
    return made


class _Kind(type(_Plain)):  # type: ignore[misc]
    """Every generator is a `torch.Generator`, whichever class of that name made it."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Plain)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _Plain)


class Generator(_Plain, metaclass=_Kind):
    def __new__(cls, device: Any = "cpu") -> Any:
        device = torch.device(device)
        if device.type != DEVICE_TYPE:
            plain = _Plain(device)
            addresses.pop(address(plain), None)  # one of ours that is gone may have been there
            return plain
        return make(state.device_index(device))


def install() -> None:
    setattr(torch, "Generator", Generator)  # noqa: B010 - mypy does not allow the assignment


def uninstall() -> None:
    if torch.Generator is Generator:
        setattr(torch, "Generator", _Plain)  # noqa: B010


def address(generator: Any) -> int:
    return generator._cdata
