"""`torch.accelerator`: the functions that PyTorch answers from a device's C++ allocator and guard.

A backend written in Python has neither, so these end in errors; while the emulation is installed they are those of
`torch.npu`. The others (`is_available`, `device_count`, `current_accelerator`, …) work by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from airgraph.compat.npu import streams, usage

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "current_stream": streams.current_stream,
    "set_stream": streams.set_stream,
    "synchronize": streams.synchronize,
    "empty_cache": usage.empty_cache,
    "get_memory_info": usage.mem_get_info,
    "max_memory_allocated": usage.max_memory_allocated,
    "max_memory_reserved": usage.max_memory_reserved,
    "memory_allocated": usage.memory_allocated,
    "memory_reserved": usage.memory_reserved,
    "memory_stats": usage.memory_stats,
    "reset_peak_memory_stats": usage.reset_peak_memory_stats,
}
_before: list[tuple[Any, str, Any]] = []


def install() -> None:
    for owner in (torch.accelerator, torch.accelerator.memory):
        for name, function in FUNCTIONS.items():
            if name in vars(owner):  # not every version has all of them
                _before.append((owner, name, vars(owner)[name]))
                setattr(owner, name, named(function))


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as an object of its own: Dynamo tells functions of `torch` apart by which object they are."""

    @functools.wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return same


def uninstall() -> None:
    while _before:
        owner, name, function = _before.pop()
        setattr(owner, name, function)
