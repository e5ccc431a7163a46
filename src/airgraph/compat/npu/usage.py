"""How much memory npu tensors hold: `torch.npu.memory_allocated()` and its family.

On a CUDA host its allocator knows, if there is one device; the numbers of several devices on one GPU, and all on a CPU
host, we count ourselves: every storage that becomes npu memory is counted for its device when it is made and taken off
when it dies, by a weak reference on it (about 1.5 µs each). Sizes are rounded up to 512 bytes, as the device's
allocator does. What is not seen: the arena of a compiled program, and memory that PyTorch uses inside one op. There is
no cache, so what is reserved is what is allocated.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from airgraph.compat.npu import state

BLOCK = 512


class _Held(weakref.ref):
    """A storage that is alive, and what it counts for."""

    __slots__ = ("size",)
    size: int


class Count:
    """Bytes of all live storages of a device, and the most there were.

    `+=` on an attribute is not interrupted by another thread or by a dying storage: there is no call in it.
    """

    def __init__(self) -> None:
        self.held: set[_Held] = set()
        self.now = 0
        self.peak = 0
        self.made = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        held = _Held(storage, self.drop)
        size = held.size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.held.add(held)
        self.made += 1
        self.now += size
        if self.now > self.peak:
            self.peak = self.now

    def drop(self, held: Any) -> None:
        self.held.discard(held)
        self.now -= held.size


_counts: list[Count] = []


def count(index: int) -> Count:
    """What is counted for npu:`index`."""
    while len(_counts) <= index:
        _counts.append(Count())
    return _counts[index]


def several() -> bool:
    return state.device_count() > 1


def host_is_cuda() -> bool:
    return state.host_device().type == "cuda"


def asked_of_cuda() -> bool:
    return host_is_cuda() and not several()


def memory_allocated(device: Any = None) -> int:
    index = state.device_index(device)
    return torch.cuda.memory_allocated(state.host_device()) if asked_of_cuda() else count(index).now


def max_memory_allocated(device: Any = None) -> int:
    index = state.device_index(device)
    return torch.cuda.max_memory_allocated(state.host_device()) if asked_of_cuda() else count(index).peak


def memory_reserved(device: Any = None) -> int:
    index = state.device_index(device)
    return torch.cuda.memory_reserved(state.host_device()) if asked_of_cuda() else count(index).now


def max_memory_reserved(device: Any = None) -> int:
    index = state.device_index(device)
    return torch.cuda.max_memory_reserved(state.host_device()) if asked_of_cuda() else count(index).peak


# The old names.
memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def reset_peak_memory_stats(device: Any = None) -> None:
    index = state.device_index(device)
    if asked_of_cuda():
        torch.cuda.reset_peak_memory_stats(state.host_device())
    else:
        count(index).peak = count(index).now


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def memory_stats(device: Any = None) -> dict[str, Any]:
    """The figures of PyTorch's allocators, by their names; where we count, those that are known."""
    counted = count(state.device_index(device))
    if asked_of_cuda():
        return torch.cuda.memory_stats(state.host_device())
    held = {"current": counted.now, "peak": counted.peak}
    figures = {f"{kind}_bytes.all.{when}": held[when] for kind in ("allocated", "reserved", "active") for when in held}
    return {**figures, "allocation.all.current": len(counted.held), "allocation.all.allocated": counted.made}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The same as a page to read."""
    if asked_of_cuda():
        return torch.cuda.memory_summary(state.host_device(), abbreviated)
    index = state.device_index(device)
    rows = [f"{name:<32} {value:>16,}" for name, value in memory_stats(device).items()]
    return "\n".join([f"Memory of npu:{index} (emulated: storages that are alive)", *rows])


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes, of the GPU or of the machine."""
    state.device_index(device)
    return torch.cuda.mem_get_info(state.host_device()) if host_is_cuda() else _machine_memory()


def _machine_memory() -> tuple[int, int]:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError):
        return 0, 0  # not every system tells


def empty_cache() -> None:
    if host_is_cuda():
        torch.cuda.empty_cache()
