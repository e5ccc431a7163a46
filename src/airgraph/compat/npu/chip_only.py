"""Functions of `torch.npu` that speak to the chip, or to its allocator: some are calls without effect, others are missing
for a reason, which the error says."""

from __future__ import annotations

import warnings
from typing import Any

from airgraph.errors import CompatError

CHIP = "it reads or controls the chip itself"
ALLOCATOR = "tensors are the host's: there is no caching allocator of the device to ask or to set"
MISSING = {
    **dict.fromkeys(
        (
            "utilization",
            "stress_detect",
            "restart_device",
            "stop_device",
            "check_uce_in_memory",
            "set_dump",
            "init_dump",
            "finalize_dump",
            "set_aoe",
            "set_op_timeout_ms",
            "set_deterministic_level",
            "current_blas_handle",
            "npurt",
        ),
        CHIP,
    ),
    **dict.fromkeys(
        (
            "MemPool",
            "use_mem_pool",
            "memory_snapshot",
            "host_memory_stats",
            "caching_allocator_alloc",
            "caching_allocator_delete",
            "set_per_process_memory_fraction",
        ),
        ALLOCATOR,
    ),
    "ExternalStream": "streams of the chip's runtime do not exist here: use torch.npu.Stream",
    "SyncLaunchStream": "every op completes before the next begins: use torch.npu.Stream",
    "mstx": "marks go into the chip's profile: use torch.profiler.record_function",
    "profiler": "use torch_npu.profiler",
}


def missing(name: str) -> AttributeError:
    """The error for a name that `torch.npu` has not; AttributeError, so that `hasattr` answers."""
    why = f": {MISSING[name]}" if name in MISSING else ""
    return AttributeError(f"module 'torch.npu' has no attribute {name!r}{why}")


def host_empty_cache() -> None:
    """Nothing of the host's memory is cached."""


def ipc_collect() -> None:
    """No memory is shared between processes by handles."""


def super_kernel_scope_begin(scope_name: str) -> None:
    """The ops from here to `super_kernel_scope_end` of the same name form one kernel on the chip."""
    _without_effect(scope_name)


def super_kernel_scope_end(scope_name: str) -> None:
    """The end of the scope."""
    _without_effect(scope_name)


def super_kernel_optimize(optimize_options: dict[str, Any] | None = None, debug_options: Any = None) -> None:
    """What `NPUGraph.super_kernel_optimize` checks and says."""
    for name, given in (("optimize_options", optimize_options), ("debug_options", debug_options)):
        if given is not None and not isinstance(given, dict):
            raise TypeError(f"{name} must be a dict, got {type(given).__name__}")
    warn()


def _without_effect(scope_name: str) -> None:
    if not isinstance(scope_name, str) or not scope_name:
        raise CompatError(f"scope_name must be a string that is not empty, got {scope_name!r}")
    warn()


def warn() -> None:
    warnings.warn("super kernels have no effect here: ops are fused by airgraph's own rules", stacklevel=4)
