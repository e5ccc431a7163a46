"""`torch_npu.profiler`: torch.profiler, with torch_npu's names, settings and folders.

    with torch_npu.profiler.profile(
        activities=[torch_npu.profiler.ProfilerActivity.CPU, torch_npu.profiler.ProfilerActivity.NPU],
        schedule=torch_npu.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=torch_npu.profiler.tensorboard_trace_handler("./result"),
    ) as prof:
        for batch in batches:
            train(batch)
            prof.step()

The host computes, so its times are what is measured: those of a CPU, or of a GPU with host="cuda". What only the chip
has (AI Core metrics, caches, its tasks) is taken as a setting and measured by nobody; one warning says so.
"""

from __future__ import annotations

from torch.profiler import ProfilerAction, schedule

from airgraph.compat.torch_npu.profiler import dynamic_profile
from airgraph.compat.torch_npu.profiler.profiler import (
    ProfilerActivity,
    _KinetoProfile,
    analyse,
    profile,
    supported_activities,
    tensorboard_trace_handler,
)
from airgraph.compat.torch_npu.profiler.settings import (
    AiCMetrics,
    ExportType,
    HostSystem,
    ProfilerLevel,
    _ExperimentalConfig,
    supported_ai_core_metrics,
    supported_export_type,
    supported_profiler_level,
)

__all__ = [
    "AiCMetrics",
    "ExportType",
    "HostSystem",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerLevel",
    "_ExperimentalConfig",
    "_KinetoProfile",
    "analyse",
    "dynamic_profile",
    "profile",
    "schedule",
    "supported_activities",
    "supported_ai_core_metrics",
    "supported_export_type",
    "supported_profiler_level",
    "tensorboard_trace_handler",
]
