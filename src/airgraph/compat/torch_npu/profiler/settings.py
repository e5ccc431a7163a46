"""What torch_npu's profiler may be asked to measure on the chip."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any


class ProfilerLevel(Enum):
    """How much of the chip's work is written down."""

    Level_none = "Level_none"
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"


class AiCMetrics(Enum):
    """Counters of the chip's AI Cores."""

    PipeUtilization = "ACL_AICORE_PIPE_UTILIZATION"
    ArithmeticUtilization = "ACL_AICORE_ARITHMETIC_UTILIZATION"
    Memory = "ACL_AICORE_MEMORY_BANDWIDTH"
    MemoryL0 = "ACL_AICORE_L0B_AND_WIDTH"
    MemoryUB = "ACL_AICORE_MEMORY_UB"
    ResourceConflictRatio = "ACL_AICORE_RESOURCE_CONFLICT_RATIO"
    L2Cache = "ACL_AICORE_L2_CACHE"
    MemoryAccess = "ACL_AICORE_MEMORY_ACCESS"
    AiCoreNone = "ACL_AICORE_NONE"


class ExportType(Enum):
    """The form of results; here they are text."""

    Text = "text"
    Db = "db"


class HostSystem(Enum):
    """What of the host is watched."""

    CPU = "cpu"
    MEM = "mem"
    DISK = "disk"
    NETWORK = "network"
    OSRT = "osrt"


def supported_profiler_level() -> set[ProfilerLevel]:
    return set(ProfilerLevel)


def supported_ai_core_metrics() -> set[AiCMetrics]:
    return set(AiCMetrics)


def supported_export_type() -> set[ExportType]:
    return set(ExportType)


class _ExperimentalConfig:
    """The `experimental_config` of a profile: checked, shown in profiler_info.json, and of no effect off the chip."""

    def __init__(
        self,
        profiler_level: ProfilerLevel = ProfilerLevel.Level0,
        aic_metrics: AiCMetrics = AiCMetrics.AiCoreNone,
        l2_cache: bool = False,
        record_op_args: bool = False,
        msprof_tx: bool = False,
        data_simplification: bool = True,
        op_attr: bool = False,
        export_type: ExportType | Sequence[ExportType] | None = None,
        gc_detect_threshold: float | None = None,
        host_sys: Sequence[HostSystem] | None = None,
        mstx: bool = False,
        mstx_domain_include: Sequence[str] | None = None,
        mstx_domain_exclude: Sequence[str] | None = None,
        sys_io: bool = False,
        sys_interconnection: bool = False,
    ) -> None:
        for name, value, kind in (
            ("profiler_level", profiler_level, ProfilerLevel),
            ("aic_metrics", aic_metrics, AiCMetrics),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a torch_npu.profiler.{kind.__name__}, got {type(value).__name__}")
        if profiler_level not in (ProfilerLevel.Level0, ProfilerLevel.Level_none) and (
            aic_metrics is AiCMetrics.AiCoreNone
        ):
            aic_metrics = AiCMetrics.PipeUtilization
        types = [export_type] if isinstance(export_type, ExportType) else export_type or [ExportType.Text]
        self.given: dict[str, Any] = {
            "profiler_level": profiler_level.value,
            "aic_metrics": aic_metrics.value,
            "l2_cache": l2_cache,
            "record_op_args": record_op_args,
            "msprof_tx": msprof_tx or mstx,
            "data_simplification": data_simplification,
            "op_attr": op_attr,
            "export_type": [kind.value for kind in types],
            "gc_detect_threshold": gc_detect_threshold,
            "host_sys": [system.value for system in host_sys or ()],
            "mstx_domain_include": list(mstx_domain_include or ()),
            "mstx_domain_exclude": list(mstx_domain_exclude or ()),
            "sys_io": sys_io,
            "sys_interconnection": sys_interconnection,
        }

    @property
    def measures_the_chip(self) -> bool:
        wanted = ("l2_cache", "record_op_args", "sys_io", "sys_interconnection")
        return self.given["aic_metrics"] != AiCMetrics.AiCoreNone.value or any(self.given[name] for name in wanted)
