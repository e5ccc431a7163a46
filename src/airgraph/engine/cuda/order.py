"""Which steps of a plan are launched together.

    rotary(q)   k = x Wk   rotary(k)   v = x Wv   write(v)    →    k │ v │ rotary(q), rotary(k), write(v)

In a CUDA graph every launch costs a microsecond or two, as much as a small kernel takes. So a small loop moves up to the
last group of small loops behind everything it depends on, and the group is one kernel (render.Merged). (To the first one,
all weights of a convolutional network that need another layout would be copied before its first layer.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from airgraph.engine.cuda.kernel_source import KernelSource
from airgraph.engine.cuda.products import Unit, reads_of, writes_of
from airgraph.engine.cuda.render import Merged, Source
from airgraph.plan.index import expand
from airgraph.plan.steps import CallStep, LoopStep
from airgraph.plan.tensors import Tensor

SMALL = 1 << 25  # elements that a loop runs over
PROGRAMS = 1 << 14
MOST = 16  # kernels in one


@dataclass(eq=False)
class LaunchGroup:
    """Steps that are launched together, more than one only where all are small loops. Of loops: their kernels, and what
    they write."""

    units: list[Unit]
    sources: Sequence[KernelSource] = ()
    roots: Sequence[Tensor] = ()

    @property
    def reads(self) -> list[Tensor]:
        """As contiguous memory: calls of PyTorch see tensors as they are."""
        if self.sources:
            return [t for source in self.sources for t in source.tensors if t not in self.roots]
        return [t for unit in self.units if not isinstance(unit, CallStep) for t in reads_of(unit)]


@dataclass(eq=False)
class OpenGroup:
    """While groups are found. `open`: small loops may join."""

    steps: list[Unit]
    open: bool
    kernels: int = 0


@dataclass
class Uses:
    """The last group that wrote to some memory, and the last that read it."""

    written: int = -1
    read: int = -1


def grouped(
    steps: Sequence[Unit], sources: dict[LoopStep, list[Source]], home: Callable[[Tensor], int]
) -> list[LaunchGroup]:
    """`sources`: the kernels of each loop. `home`: a key of the memory that a tensor is in."""
    groups: list[OpenGroup] = []
    memory: dict[int, Uses] = {}
    for step in steps:
        reads = {home(t) for t in reads_of(step)}
        writes = {home(t) for t in writes_of(step)}
        uses = {key: memory.setdefault(key, Uses()) for key in reads | writes}
        after = max([uses[k].written for k in uses] + [uses[k].read for k in writes], default=-1)
        at = place(groups, step, sources, after)
        for key in reads:
            uses[key].read = max(uses[key].read, at)
        for key in writes:
            uses[key].written = max(uses[key].written, at)
    return [launched(group.steps, sources) for group in groups]


def launched(units: list[Unit], sources: dict[LoopStep, list[Source]]) -> LaunchGroup:
    loops = [unit for unit in units if isinstance(unit, LoopStep)]
    if not loops:
        return LaunchGroup(units)
    assert len(loops) == len(units), "other steps are launched alone"
    parts = [source for loop in loops for source in sources[loop]]
    return LaunchGroup(units, merged(parts), [t for loop in loops for t in loop.roots])


def merged(parts: Sequence[Source]) -> list[KernelSource]:
    """Kernels of loops that are launched together."""
    return [Merged(tuple(parts))] if 1 < len(parts) <= MOST else [*parts]


def place(groups: list[OpenGroup], step: Unit, sources: dict[LoopStep, list[Source]], after: int) -> int:
    """Put the step into a group behind number `after`; gives the number of that group."""
    kernels = sources.get(step, []) if isinstance(step, LoopStep) else []
    small = bool(kernels) and all(map(is_small, kernels))
    if small:
        for number in reversed(range(after + 1, len(groups))):
            group = groups[number]
            if group.open and group.kernels + len(kernels) <= MOST:
                group.steps.append(step)
                group.kernels += len(kernels)
                return number
    groups.append(OpenGroup([step], small, len(kernels)))
    return len(groups) - 1


def is_small(source: Source) -> bool:
    outer, inner = expand(source.programs), expand(source.row)
    if not isinstance(outer, int) or not isinstance(inner, int):
        return False
    return outer * max(inner, 1) <= SMALL and -(-outer // source.tile.x) <= PROGRAMS
