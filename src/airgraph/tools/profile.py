"""`airgraph profile SCRIPT`: the time of a script by kernel, with the lines and modules the kernels come from.

PyTorch's own profiler does the timing. The native engine's kernels report to it by name (`engine.native.profiled`), so do
PyTorch's ops and, through CUPTI, the kernels of a GPU. This module joins its events with the plans of the programs that
ran: what each kernel is for, the bytes it moves and the operations it does.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from airgraph.compilation import wrapping
from airgraph.config import Config
from airgraph.engine.native.profiled import PREFIX
from airgraph.engine.protocol import Planned
from airgraph.errors import AirgraphError
from airgraph.tools.roofline import MachineSpeed, PlannedKernel, planned_kernels
from airgraph.tools.run import Script, run_script
from airgraph.tools.terminal import console, waiting

ROWS = 30  # kernels shown on a terminal


@dataclass
class KernelTime:
    """A kernel by name: steps that do the same for the same module are one. Times in seconds, of the calling thread."""

    name: str
    device: str
    calls: int = 0
    seconds: float = 0.0
    source: str = ""  # the user's line
    module: str = ""
    bytes: int | None = None  # read and written by a call, on average; None where a size is symbolic
    flops: int | None = None  # of a call of a product, convolution or attention, on average
    dtype: str = "float32"  # of its result

    def rate(self, amount: int | None) -> float | None:
        return amount * self.calls / self.seconds if amount and self.seconds else None


@dataclass
class Profile:
    """What a script spent its time on, the most expensive kernel first."""

    kernels: list[KernelTime]
    machine: MachineSpeed
    seconds: float  # of the whole script
    programs: int = 0
    events: Any = field(default=None, repr=False)  # torch.profiler's

    @property
    def total(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)

    def json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "kernel_seconds": self.total,
            "bandwidth_bytes_per_second": self.machine.bandwidth,
            "peak_flops": self.machine.peak,
            "kernels": [asdict(kernel) for kernel in self.kernels],
        }

    def table(self, rows: int | None = None) -> Table:
        made = Table(box=None, pad_edge=False)
        for name in ("kernel", "calls", "ms", "share", "GB/s", "of peak", "GFLOP/s", "of peak", "line"):
            text = name in ("kernel", "line")
            made.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
        for kernel in self.kernels[:rows]:
            made.add_row(*self.row(kernel))
        return made

    def row(self, kernel: KernelTime) -> Sequence[str]:
        moved, done = kernel.rate(kernel.bytes), kernel.rate(kernel.flops)
        return (
            kernel.name,
            str(kernel.calls),
            f"{kernel.seconds * 1e3:.3f}",
            f"{kernel.seconds / self.total:.1%}" if self.total else "-",
            f"{moved / 1e9:.1f}" if moved else "-",
            f"{moved / self.machine.bandwidth:.0%}" if moved else "-",
            f"{done / 1e9:.1f}" if done else "-",
            f"{done / self.machine.peak_of(kernel.dtype):.0%}" if done else "-",
            kernel.source,
        )


@contextmanager
def profiling() -> Iterator[list[Profile]]:
    """Everything that runs meanwhile, as one profile in the list that is handed out.

    with profiling() as found:
        model(x)
    print(found[0].kernels[0].name)
    """
    programs: list[Any] = []
    gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if gpu else [])]
    found: list[Profile] = []
    start = time.perf_counter()

    def keep(gm: torch.fx.GraphModule, program: Any, config: Config) -> Any:
        programs.append(program)
        return program

    with wrapping(keep), torch.profiler.profile(activities=activities) as events:
        yield found
    seconds = time.perf_counter() - start
    with waiting("reading the events"):
        machine = MachineSpeed("cuda" if gpu else "cpu")
        found.append(Profile(joined(events, programs), machine, seconds, len(programs), events))


def joined(events: Any, programs: Sequence[Any]) -> list[KernelTime]:
    """The events of kernels and of ops inside our programs, with what is known of them."""
    known: defaultdict[str, dict[Any, PlannedKernel]] = defaultdict(dict)
    for program in programs:
        for k in kernels_of(program):
            known[k.name][program.name] = k
    told: defaultdict[tuple[str, str], list[PlannedKernel]] = defaultdict(list)
    times: defaultdict[tuple[str, str], KernelTime] = defaultdict(lambda: KernelTime("", ""))
    for event in events.events():
        cuda = event.device_type == torch.autograd.DeviceType.CUDA
        ours = event.name.startswith(PREFIX)
        if not (cuda or ours or inside_program(event)):
            continue
        name = event.name.removeprefix(PREFIX)
        kernel = times[name, "cuda" if cuda else "cpu"]
        kernel.name, kernel.device = name, "cuda" if cuda else "cpu"
        kernel.calls += 1
        kernel.seconds += (event.device_time_total if cuda else event.cpu_time_total) / 1e6
        graph = graph_of(event)  # None on a GPU: the kernel is any of that name
        told[name, kernel.device] += [k for g, k in known[name].items() if graph in (g, None)]
    for key, of_calls in told.items():
        for k in of_calls[:1]:
            times[key].source, times[key].module, times[key].dtype = k.source, k.module, k.dtype
            times[key].bytes = mean([k.bytes for k in of_calls])
            times[key].flops = mean([k.flops for k in of_calls])
    return sorted(times.values(), key=lambda kernel: -kernel.seconds)


def graph_of(event: Any) -> str | None:
    """The name of the graph that a kernel ran in: kernels of several graphs may have one name, and other sizes."""
    while event is not None and not event.name.startswith(PROGRAMS):
        event = event.cpu_parent
    word = event.name.split()[1] if event is not None else ""
    return word if word.startswith("graph_") else None


def mean(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return round(sum(known) / len(known)) if known and len(known) == len(amounts) else None


def inside_program(event: Any) -> bool:
    """An op of PyTorch's that a program calls; what it calls itself is part of it."""
    parent = event.cpu_parent
    return event.name.startswith("aten::") and parent is not None and parent.name.startswith(PROGRAMS)


PROGRAMS = ("airgraph graph_", "npu_fx_compiler")


def kernels_of(program: Any) -> Iterator[PlannedKernel]:
    executable = getattr(program, "executable", None)
    if isinstance(executable, Planned):
        for kernel in planned_kernels(executable.plan):
            yield kernel
            for part in kernel.parts:  # timed beside their step, which has their bytes
                yield replace(kernel, name=f"{kernel.name} ({part})", bytes=None, flops=None)


# -- the command ----------------------------------------------------------------------------------------------------
def profile_script(script: Script, *, trace: str | None = None, json_file: str | None = None) -> int:
    """Run a script as `airgraph run` does, then print where its time went. The exit code is the script's."""
    script.check("profile")
    ended: int | str | None = 0
    with profiling() as found:
        try:
            run_script(script, "profile")
        except SystemExit as stop:
            ended = stop.code
    (profile,) = found
    if trace:
        profile.events.export_chrome_trace(trace)
    if json_file:
        Path(json_file).write_text(json.dumps(profile.json(), indent=2) + "\n", encoding="utf-8")
    code = ended if isinstance(ended, int) else int(ended is not None)
    if not profile.kernels and code:
        return code  # the script failed before a kernel ran, and has said why
    if not profile.kernels:
        raise AirgraphError("no kernel ran: the script compiled nothing with airgraph", hint="airgraph explain SCRIPT")
    page = console()
    page.print(profile.table(ROWS if page.is_terminal else None))
    graphs = "1 graph" if profile.programs == 1 else f"{profile.programs} graphs"
    page.print(
        f"{profile.total * 1e3:.1f} ms in kernels of {graphs}, {profile.seconds:.1f} s in all, compiling"
        f" included; this machine: {profile.machine.bandwidth / 1e9:.1f} GB/s, {profile.machine.peak / 1e9:.1f} GFLOP/s"
    )
    return code
