"""`torch.npu`: what scripts and PyTorch itself ask of a device module.

This module *is* `torch.npu` once `install()` has run. A family of functions has a file of its own (`streams`,
`random`, `graphs`) and is named here; add new families in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from airgraph.compat.npu import amp, graphs, random, state, streams  # noqa: F401 - torch.npu.graphs and so on
from airgraph.compat.npu import usage as memory
from airgraph.compat.npu.amp import get_autocast_dtype, is_autocast_enabled, set_autocast_dtype, set_autocast_enabled
from airgraph.compat.npu.chip_only import (
    host_empty_cache,
    ipc_collect,
    missing,
    super_kernel_scope_begin,
    super_kernel_scope_end,
)
from airgraph.compat.npu.graphed import make_graphed_callables
from airgraph.compat.npu.graphs import NPUGraph, graph, graph_pool_handle, is_current_stream_capturing
from airgraph.compat.npu.handlers import NpuGraphOpHandler, register_npu_graph_handler
from airgraph.compat.npu.limits import (
    get_device_limit,
    get_stream_limit,
    reset_stream_limit,
    set_device_limit,
    set_stream_limit,
)
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
from airgraph.compat.npu.settings import config, conv, is_jit_compile_false, matmul, set_compile_mode, set_option
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
from airgraph.compat.npu.usage import (
    empty_cache,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
)

__all__ = [
    "Event",
    "ExternalEvent",
    "NPUGraph",
    "NpuGraphOpHandler",
    "Stream",
    "StreamContext",
    "amp",
    "config",
    "conv",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_autocast_dtype",
    "get_device_capability",
    "get_device_limit",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "get_stream_limit",
    "graph",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "host_empty_cache",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_autocast_enabled",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_jit_compile_false",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "matmul",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "random",
    "register_npu_graph_handler",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "reset_stream_limit",
    "seed",
    "seed_all",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "set_compile_mode",
    "set_device",
    "set_device_limit",
    "set_option",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_stream_limit",
    "stream",
    "super_kernel_scope_begin",
    "super_kernel_scope_end",
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
    return state.device_count()


def current_device() -> int:
    """The device that `device="npu"` means, in this thread."""
    return state.current_device()


def set_device(device: Any) -> None:
    """Make a device current in this thread; a negative one changes nothing."""
    state.set_device(state.device_index(device))


def exchange_device(device: int) -> int:
    """Make a device current and give the one that was; -1 is both "no device" and the answer to it."""
    if device < 0:
        return -1
    before = state.current_device()
    set_device(device)
    return before


class device:
    """`with torch.npu.device(1):` makes that device current inside; None and -1 change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = state.device_index(device)

    def __enter__(self) -> None:
        self.prev_idx = state.current_device()
        state.set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        state.set_device(self.prev_idx)


class device_of(device):
    """`with torch.npu.device_of(x):` makes the device of a tensor current; one of another kind changes nothing."""

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


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(random.generators())
    raise missing(name)
