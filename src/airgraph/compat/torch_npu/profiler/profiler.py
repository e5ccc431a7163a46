"""A profile, and where its results go.

    RESULT/<worker>_<time>_ascend_pt/
        profiler_info.json                            the settings
        ASCEND_PROFILER_OUTPUT/trace_view.json        the trace: Perfetto (ui.perfetto.dev) and chrome://tracing open it
        ASCEND_PROFILER_OUTPUT/operator_details.csv   a row for each op: how often, how long

The chip's own tables (kernel_details.csv, l2_cache.csv, …) are not written.
"""

from __future__ import annotations

import csv
import json
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from airgraph.compat.npu import state
from airgraph.compat.torch_npu.profiler.settings import _ExperimentalConfig

OUTPUT = "ASCEND_PROFILER_OUTPUT"
COLUMNS = {
    "Name": lambda e: e.key,
    "Input Shapes": lambda e: str(e.input_shapes) if e.input_shapes else "",
    "Count": lambda e: e.count,
    "Host Self Duration(us)": lambda e: round(e.self_cpu_time_total, 3),
    "Host Total Duration(us)": lambda e: round(e.cpu_time_total, 3),
    "Device Self Duration(us)": lambda e: round(e.self_device_time_total, 3),
    "Device Total Duration(us)": lambda e: round(e.device_time_total, 3),
}


class ProfilerActivity(Enum):
    """What is profiled: PyTorch's ops, and the device's work, which is the host's here."""

    CPU = "CPU"
    NPU = "NPU"


def supported_activities() -> set[ProfilerActivity]:
    return set(ProfilerActivity)


class profile(torch.profiler.profile):
    """`torch_npu.profiler.profile(activities=, schedule=, on_trace_ready=, …)`: torch.profiler's, for the host's work."""

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: _ExperimentalConfig | None = None,
        use_cuda: bool | None = None,
        custom_trace_id_callback: Callable[[], str] | None = None,
    ) -> None:
        settings = experimental_config or _ExperimentalConfig()
        if not isinstance(settings, _ExperimentalConfig):
            raise TypeError(
                f"experimental_config must be a torch_npu.profiler._ExperimentalConfig, got {type(settings).__name__}"
            )
        if settings.measures_the_chip:
            warnings.warn(
                "torch_npu.profiler: metrics of AI Cores and caches are the chip's, and are not measured here",
                stacklevel=2,
            )
        wanted = tuple(ProfilerActivity if activities is None else activities)
        self.npu_info: dict[str, Any] = {
            "activities": [f"ProfilerActivity.{activity.name}" for activity in wanted],
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
            "with_modules": with_modules,
            "experimental_config": settings.given,
        }
        super().__init__(
            activities=_torch_activities(wanted),
            schedule=schedule,
            on_trace_ready=on_trace_ready,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            with_modules=with_modules,
        )
        self.is_running = False

    def start(self) -> None:
        super().start()
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False
        super().stop()

    def step(self) -> None:
        """The next step of the schedule. Behind the end of the profile, where documented scripts have it too, nothing:
        PyTorch would write a trace that is gone."""
        if self.is_running:
            super().step()


_KinetoProfile = profile  # the same without a schedule, by start() and stop()


def _torch_activities(wanted: Sequence[ProfilerActivity]) -> list[torch.profiler.ProfilerActivity]:
    """Work of the device is done by the host: on a CPU it is in the trace of the CPU, whichever was wanted."""
    found = [torch.profiler.ProfilerActivity.CPU]
    if ProfilerActivity.NPU in wanted and state.host_device().type == "cuda":
        found.append(torch.profiler.ProfilerActivity.CUDA)
    return found


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[profile], None]:
    """What to do with a finished trace: a folder of its own below `dir_name`, the current folder without one.

    With `analyse_flag=False` there is the trace alone, without the table of ops. `async_mode` changes nothing: the table
    is written in a moment.
    """
    root = Path(dir_name or os.environ.get("ASCEND_WORK_PATH") or ".")

    def write(finished: profile) -> None:
        worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"
        folder = root / f"{worker}_{datetime.now().strftime('%Y%m%d%H%M%S%f')[:-3]}_ascend_pt"
        (folder / OUTPUT).mkdir(parents=True)
        info = {"config": getattr(finished, "npu_info", {}), "torch_version": torch.__version__}
        (folder / "profiler_info.json").write_text(json.dumps(info, indent=4), encoding="utf-8")
        finished.export_chrome_trace(str(folder / OUTPUT / "trace_view.json"))
        if analyse_flag:
            _write_operators(finished, folder / OUTPUT / "operator_details.csv")

    return write


def _write_operators(finished: profile, path: Path) -> None:
    events = finished.key_averages(group_by_input_shape=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows([column(event) for column in COLUMNS.values()] for event in events)


def analyse(profiler_path: str, *args: Any, **kwargs: Any) -> None:
    """Nothing is left to do: results are complete when they are written. A folder without any is an error."""
    if not list(Path(profiler_path).glob(f"**/{OUTPUT}/trace_view.json")):
        raise RuntimeError(f"no trace of torch_npu.profiler below {profiler_path}")
