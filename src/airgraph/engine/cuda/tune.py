"""Which configuration of a kernel is the fastest on this GPU: timed at the first call, with `autotune`.

    tuner = KernelTuner(journal, device)
    tuner.expect(sources, value)                         what nobody has timed before begins to compile
    tuner.chosen(source, value, tensors)                 the fastest of its configurations

A source offers others like itself (`alternatives`): other tiles, warps, rows per program, blocks of a cache. Each is
launched on copies of what the kernel reads and writes, with the GPU's caches emptied before, and between two events. The
compilation cache keeps the times by the kernel's text, its sizes and the GPU. The first set of sizes decides for all. When
BUDGET_S is used up, the rest of a program's kernels stay as the rules have them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from airgraph.disk_cache import Key, open_cache
from airgraph.engine.cuda.compile import DriverKernels, pointers, request, variant
from airgraph.engine.cuda.cubins import key_of
from airgraph.engine.cuda.kernel_source import KernelSource, Value
from airgraph.journal import Journal

BUDGET_S = 30.0  # for all kernels of a program: compiling and timing
ROUNDS = 9  # the fastest of so many launches counts: a host that is late only ever adds
FASTER = 0.95  # of the time by rule: what gains less is not worth another kernel
FLUSHED = 256 << 20  # bytes that are written to empty the caches
LARGEST = 4 << 30  # bytes of the tensors of a kernel that is timed
KIND = "tuning"


class Clock(Protocol):
    """Compiles and times kernels."""

    name: str  # of the GPU

    def expect(self, source: KernelSource) -> None:
        """It will be timed: compiling may begin."""

    def seconds(
        self, sources: Sequence[KernelSource], value: Value, tensors: Sequence[torch.Tensor]
    ) -> list[float | None]:
        """Of a launch of each; None for one that cannot be compiled."""


@dataclass(frozen=True)
class Timed:
    """The seconds of each configuration, the one by rule first; None for one that cannot be compiled."""

    seconds: Sequence[float | None]

    @property
    def best(self) -> int:
        first = self.seconds[0]
        known = [(s, i) for i, s in enumerate(self.seconds) if s is not None]
        if first is None or not known:
            return 0
        least, number = min(known)
        return number if least < FASTER * first else 0


class KernelTuner:
    """Chooses for one program; the journal hears of it."""

    def __init__(self, journal: Journal, clock: Clock, budget: float = BUDGET_S) -> None:
        self.journal, self.clock, self.budget = journal, clock, budget
        self.known: dict[KernelSource, KernelSource] = {}
        self.families: dict[KernelSource, list[KernelSource]] = {}
        self.told: set[str] = set()

    def every(self, source: KernelSource) -> list[KernelSource]:
        """The configurations of a kernel, the one by rule first."""
        if source not in self.families:
            self.families[source] = [source, *source.alternatives()]
        return self.families[source]

    def expect(self, sources: Sequence[KernelSource], value: Value) -> None:
        for source in sources:
            every = self.every(source)
            if len(every) > 1 and remembered(self.key(every, value)) is None:
                for one in every[1:]:
                    self.clock.expect(one)

    def key(self, every: Sequence[KernelSource], value: Value) -> Key:
        source = every[0]
        text = json.dumps([source.text, source.signature, source.constants, source.warps])
        sizes = [source.numbers(value), source.grid(value), *(value(e) for e in source.elements)]
        return key_of(
            {
                "kernel": text,
                "configurations": json.dumps([[o.constants, o.warps, o.text == source.text] for o in every]),
                "sizes": json.dumps(sizes),
                "gpu": self.clock.name,
            }
        )

    def chosen(self, source: KernelSource, value: Value, tensors: Sequence[torch.Tensor]) -> KernelSource:
        found = self.known.get(source)
        if found is None:
            found = self.known[source] = self.best(source, value, tensors)
        return found

    def best(self, source: KernelSource, value: Value, tensors: Sequence[torch.Tensor]) -> KernelSource:
        every = self.every(source)
        if len(every) == 1 or not source.grid(value):
            return source
        key = self.key(every, value)
        with self.journal.stage("tune") as stage:
            times, before = remembered(key), True
            if times is None:
                refusal = "the budget is used up" if self.budget <= 0 else too_large(tensors)
                if refusal is not None:
                    stage.notes.append(f"{title(source)}: not timed, {refusal}")
                    return source
                before, start = False, time.perf_counter()
                times = Timed(self.clock.seconds(every, value, tensors))
                self.budget -= time.perf_counter() - start
                open_cache().put(KIND, key, json.dumps(times.seconds).encode())
            if key.digest not in self.told:  # once for equal kernels of many layers
                self.told.add(key.digest)
                stage.notes.append(note(every, times) + (" (timed before)" if before else ""))
        if not stage.notes:
            self.journal.stages.remove(stage)
        if times.best:
            self.journal.counters["tuned kernels"] += 1
        return every[times.best]


def remembered(key: Key) -> Timed | None:
    data = open_cache().get(KIND, key)
    return None if data is None else Timed(json.loads(data))


def too_large(tensors: Sequence[torch.Tensor]) -> str | None:
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return f"its tensors have {sum(held.values())} bytes" if sum(held.values()) > LARGEST else None


def title(source: KernelSource) -> str:
    """`VectorSource ROWS 4, TILE 2048, 4 warps`"""
    return f"{type(source).__name__} {configuration(source)}"


def configuration(source: KernelSource) -> str:
    shown = [f"{name} {number}" for name, number in source.constants.items() if type(number) is int]
    return ", ".join([*shown, f"{source.warps} warps"])


def note(every: Sequence[KernelSource], times: Timed) -> str:
    first, best = times.seconds[0], times.seconds[times.best]
    if first is None or best is None:
        return f"{title(every[0])}: cannot be timed"
    if not times.best:
        return f"{title(every[0])}: stays, {first * 1e6:.1f} µs, the best of {len(every)}"
    found = configuration(every[times.best])
    gain = f"{best * 1e6:.1f} µs, {first / best:.2f} times as fast, the best of {len(every)}"
    return f"{title(every[0])} {first * 1e6:.1f} µs: {found} {gain}"


class GpuClock:
    """Times kernels on one GPU."""

    def __init__(self, kernels: DriverKernels) -> None:
        self.kernels, self.device = kernels, kernels.device
        self.name = torch.cuda.get_device_name(self.device)
        self.pending: list[Future[Any]] = []

    @cached_property
    def flush(self) -> torch.Tensor:
        return torch.empty(FLUSHED, dtype=torch.uint8, device=self.device)

    def expect(self, source: KernelSource) -> None:
        self.pending.append(self.compiling(source))

    def compiling(self, source: KernelSource) -> Future[Any]:
        return request(variant(source, (True,) * pointers(source), wide=False), self.kernels.capability)

    def seconds(
        self, sources: Sequence[KernelSource], value: Value, tensors: Sequence[torch.Tensor]
    ) -> list[float | None]:
        for future in (*self.pending, *map(self.compiling, sources)):
            future.exception()  # wait for all: threads that compile keep the host from launching in time
        self.pending.clear()
        copies = own_memory(tensors)
        launches = [
            self.bound(source, value) if self.compiling(source).exception() is None else None for source in sources
        ]
        found: list[list[float]] = [[] for _ in sources]
        for launch in launches:
            if launch is not None:
                launch(copies)
        for _ in range(ROUNDS):
            for launch, times in zip(launches, found):
                if launch is not None:
                    times.append(self.once(launch, copies))
        return [min(times) if times else None for times in found]

    def bound(self, source: KernelSource, value: Value) -> Callable[[Sequence[torch.Tensor]], None]:
        return self.kernels.bind(source, source.numbers(value), source.grid(value), wide=False)

    def once(self, launch: Callable[[Sequence[torch.Tensor]], None], tensors: Sequence[torch.Tensor]) -> float:
        """(The GPU still writes `flush` while the rest is queued, so that nothing waits for the host.)"""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        launch(tensors)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def own_memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of whole storages: tensors that share one still do."""
    storages: dict[int, torch.Tensor] = {}
    result = []
    for t in tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
            storages[storage.data_ptr()] = whole.clone()
        copy = storages[storage.data_ptr()].untyped_storage()
        result.append(
            torch.empty(0, dtype=t.dtype, device=t.device).set_(copy, t.storage_offset(), t.shape, t.stride())
        )
    return result
