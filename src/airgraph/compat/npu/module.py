"""`torch.npu`: what scripts and PyTorch itself ask of a device module.

This module *is* `torch.npu` once `install()` has run. A family of functions has a file of its own (`streams`,
`random`, `graphs`) and is named here; add new families in the same way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.compat.npu import graphs, state, streams  # noqa: F401 - torch.npu.graphs and torch.npu.streams
from airgraph.compat.npu.graphed import make_graphed_callables
from airgraph.compat.npu.graphs import NPUGraph, graph, graph_pool_handle, is_current_stream_capturing
from airgraph.compat.npu.handlers import NpuGraphOpHandler, register_npu_graph_handler
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.compat.npu.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from airgraph.compat.npu.streams import (
    Event,
    ExternalEvent,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)
from airgraph.compat.npu.update import (
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
)

__all__ = [
    "Event",
    "ExternalEvent",
    "NPUGraph",
    "NpuGraphOpHandler",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "graph",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "register_npu_graph_handler",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

DEVICE_NAME = "airgraph emulated NPU"
_initialized = True  # activation checkpointing looks at this before it asks for the state of the generator


# Is there one, and which.


def is_available() -> bool:
    return state.current() is not None


def is_initialized() -> bool:
    return is_available()


def init() -> None:
    """Nothing to start."""


def _lazy_init() -> None:
    """Nothing to start."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return state.DEVICE_COUNT if is_available() else 0


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    state.device_index(device)


class device:
    """`with torch.npu.device(0):`; there is one device, so only the index is checked."""

    def __init__(self, device: Any) -> None:
        self.idx = state.device_index(device)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


class device_of(device):
    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == DEVICE_TYPE else None)


# What it is.


@dataclass(frozen=True)
class DeviceProperties:
    """The host machine, told in the words of an NPU."""

    name: str
    total_memory: int
    multi_processor_count: int
    cube_core_num: int
    vector_core_num: int
    major: int = 0
    minor: int = 0


def get_device_name(device: Any = None) -> str:
    state.device_index(device)
    return DEVICE_NAME


def get_device_properties(device: Any = None) -> DeviceProperties:
    state.device_index(device)
    cores = torch.get_num_threads()
    return DeviceProperties(DEVICE_NAME, mem_get_info()[1], cores, cores, cores)


def get_device_capability(device: Any = None) -> None:
    """None, as on an NPU: capabilities are an idea of CUDA's."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# Memory. On a CUDA host the allocator knows; on a CPU host nobody counts, and 0 says so.


def _on_cuda(name: str, otherwise: int = 0) -> int:
    host = state.host_device()
    return getattr(torch.cuda, name)(host) if host.type == "cuda" else otherwise


def memory_allocated(device: Any = None) -> int:
    return _on_cuda("memory_allocated")


def max_memory_allocated(device: Any = None) -> int:
    return _on_cuda("max_memory_allocated")


def memory_reserved(device: Any = None) -> int:
    return _on_cuda("memory_reserved")


def max_memory_reserved(device: Any = None) -> int:
    return _on_cuda("max_memory_reserved")


def reset_peak_memory_stats(device: Any = None) -> None:
    _on_cuda("reset_peak_memory_stats")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes, of the GPU or of the machine."""
    host = state.host_device()
    if host.type == "cuda":
        return torch.cuda.mem_get_info(host)
    return _machine_memory()


def _machine_memory() -> tuple[int, int]:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError):
        return 0, 0  # not every system tells


def empty_cache() -> None:
    if state.host_device().type == "cuda":
        torch.cuda.empty_cache()
