"""`torch_npu.profiler.dynamic_profile`: profiles of a program that runs already, asked for by a file.

    from torch_npu.profiler import dynamic_profile as dp

    dp.init("profiler_config_path")     # writes profiler_config_path/profiler_config.json, if it is not there
    for batch in batches:
        train(batch)
        dp.step()

Whoever changes profiler_config.json gets a profile from the step on that its `start_step` names (-1: the next one; 0:
none), of `active` steps after `warmup` ones, in the folder `prof_dir`, with the other settings of
`torch_npu.profiler.profile`. `dp.start("profiler_config.json")` begins one at once, by a file of its
own. Nothing here raises an error: profiling must not end a training. What is wrong is said in a warning and in
profiler_config_path/log.

torch_npu has a process of its own that looks at the file; here each step does, which costs one `stat`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import warnings
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import torch
from torch.profiler import schedule

from airgraph.compat.torch_npu.profiler.profiler import ProfilerActivity, profile, tensorboard_trace_handler
from airgraph.compat.torch_npu.profiler.settings import (
    AiCMetrics,
    ExportType,
    HostSystem,
    ProfilerLevel,
    _ExperimentalConfig,
)

__all__ = ["init", "start", "step"]

CONFIG = "profiler_config.json"
AT_ONCE = -1  # as `start_step`
# What the file has to begin with, and what stands for a name that it does not have.
TEMPLATE: dict[str, Any] = {
    "activities": ["CPU", "NPU"],
    "prof_dir": "./",
    "analyse": False,
    "async_mode": False,
    "record_shapes": False,
    "profile_memory": False,
    "with_stack": False,
    "with_flops": False,
    "with_modules": False,
    "active": 1,
    "warmup": 0,
    "start_step": 0,
    "is_rank": False,
    "rank_list": [],
    "experimental_config": {
        "profiler_level": "Level0",
        "aic_metrics": "AiCoreNone",
        "l2_cache": False,
        "op_attr": False,
        "gc_detect_threshold": None,
        "data_simplification": True,
        "record_op_args": False,
        "export_type": ["text"],
        "msprof_tx": False,
        "mstx": False,
        "host_sys": [],
        "mstx_domain_include": [],
        "mstx_domain_exclude": [],
        "sys_io": False,
        "sys_interconnection": False,
    },
}


class DynamicProfile:
    """The profile of a process: the file that asks for it, and how far it is."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.seen: tuple[int, int] | None = None  # the file's time and size when it was read last
        self.wanted: Mapping[str, Any] | None = None  # a profile that waits for its step
        self.running: profile | None = None
        self.left = 0  # steps of it
        self.steps = 0
        self.log = logging.getLogger("DynamicProfiler")

    def init(self, path: str) -> None:
        if self.path is not None:
            self.say("Init dynamic profiling repeatedly")
            return
        folder = Path(path).absolute()
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            self.say(f"The path {path!r} is invalid, and profiler will not be enabled.")
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / CONFIG
        self.write_log(folder / "log")
        if not self.path.exists():
            self.log.info("Create %s default.", CONFIG)
            self.path.write_text(json.dumps(TEMPLATE, indent=4), encoding="utf-8")
        self.seen = stamp(self.path)
        atexit.register(self.finish)

    def write_log(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        name = f"dp_{socket.gethostname()}_{os.getpid()}_rank_{rank()}.log"
        handler = RotatingFileHandler(folder / name, maxBytes=200 * 1024, backupCount=1, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] [%(process)d] %(filename)s: %(message)s"))
        self.log.setLevel(logging.DEBUG)
        self.log.propagate = False
        self.log.addHandler(handler)

    def step(self) -> None:
        self.steps += 1
        if self.path is None:
            if self.steps == 1:
                self.say("dynamic_profile.step() before init(): nothing is profiled")
            self.advance()
            return
        now = stamp(self.path)
        if now is not None and now != self.seen:
            self.seen = now
            self.wanted = self.read(self.path)
        if self.running is not None:
            self.advance()
        elif self.wanted is not None and self.wanted["start_step"] in (AT_ONCE, self.steps):
            self.begin(self.wanted)

    def advance(self) -> None:
        if self.running is None:
            return
        self.running.step()
        self.left -= 1
        if not self.left:
            self.finish()

    def start(self, config_path: str | None) -> None:
        if self.running is not None:
            self.say("Profiler already started. Cannot call start interface while the profiler is active.")
            return
        path = self.path if config_path is None else Path(config_path)
        if config_path is not None and (not Path(config_path).is_file() or Path(config_path).is_symlink()):
            self.say(f"The provided config_path is invalid: {config_path}")
            path = self.path
        if path is None:
            self.say("dynamic_profile.start() needs the file of its settings, or init() before it")
            return
        self.log.info("The start interface profiler enable config path is set to %s", path)
        if (wanted := self.read(path)) is not None:
            self.begin(wanted)

    def read(self, path: Path) -> Mapping[str, Any] | None:
        """The settings of a file, complete; None if this process is not to be profiled by it, or if it is wrong."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            wanted = {**TEMPLATE, **given}
            for name, least in (("active", 1), ("warmup", 0), ("start_step", AT_ONCE)):
                if type(wanted[name]) is not int or wanted[name] < least:
                    self.log.warning("Invalid parameter %s, reset it to %s.", name, TEMPLATE[name])
                    wanted[name] = TEMPLATE[name]
            if wanted["is_rank"] is True and rank() not in wanted["rank_list"]:
                self.log.warning("Rank %s not in valid rank_list %s!", rank(), wanted["rank_list"])
                return None
            wanted["experimental_config"] = experimental(wanted["experimental_config"] or {})
            wanted["activities"] = [ProfilerActivity[str(name).upper()] for name in wanted["activities"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.say(f"{path} cannot be used: {error!r}")
            return None
        return wanted

    def begin(self, wanted: Mapping[str, Any]) -> None:
        self.wanted = None
        self.left = wanted["active"] + wanted["warmup"]
        self.running = profile(
            activities=wanted["activities"],
            schedule=schedule(wait=0, warmup=wanted["warmup"], active=wanted["active"], repeat=1),
            on_trace_ready=tensorboard_trace_handler(wanted["prof_dir"], analyse_flag=wanted["analyse"] is True),
            experimental_config=wanted["experimental_config"],
            record_shapes=bool(wanted["record_shapes"]),
            profile_memory=bool(wanted["profile_memory"]),
            with_stack=bool(wanted["with_stack"]),
            with_flops=bool(wanted["with_flops"]),
            with_modules=bool(wanted["with_modules"]),
        )
        self.running.start()
        for name, value in (wanted.get("metadata") or {}).items():
            self.running.add_metadata_json(str(name), json.dumps(value))
        self.log.info("Start Dynamic Profiler at %s step.", self.steps)

    def finish(self) -> None:
        """Also at the end of the process, with as many steps as there were."""
        if self.running is None:
            return
        running, self.running = self.running, None
        running.stop()
        if self.left:
            self.say("Profiler stop when process exit, check cfg json active whether over all step!")
        self.log.info("Stop Dynamic Profiler at %s step.", self.steps)

    def say(self, text: str) -> None:
        self.log.warning(text)
        warnings.warn(f"torch_npu.profiler.dynamic_profile: {text}", stacklevel=4)


def stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def rank() -> int:
    """The number of this process among several; -1 where it is alone."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if several else -1


def experimental(given: Mapping[str, Any]) -> _ExperimentalConfig:
    """The settings of the chip, whose enums the file has by their names or, some of them, by their values."""
    named = {**TEMPLATE["experimental_config"], **given}
    kinds = named["export_type"] if isinstance(named["export_type"], list) else [named["export_type"]]
    named["profiler_level"] = ProfilerLevel[named["profiler_level"]]
    named["aic_metrics"] = AiCMetrics[named["aic_metrics"]]
    named["export_type"] = [ExportType(str(kind).lower()) for kind in kinds]
    named["host_sys"] = [HostSystem(str(system).lower()) for system in named["host_sys"] or ()]
    return _ExperimentalConfig(**named)


_process = DynamicProfile()


def init(path: str) -> None:
    """Profiles are asked for by `path`/profiler_config.json from now on."""
    _process.init(path)


def step() -> None:
    """The end of a step, and of the profile if it was the last one of it."""
    _process.step()


def start(config_path: str | None = None) -> None:
    """A profile from here on, by this file; by init's without one."""
    _process.start(config_path)
