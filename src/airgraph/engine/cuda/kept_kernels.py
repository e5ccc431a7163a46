"""Kernels of a program that was kept: what each is launched on, and the digest of its compiled code.

    table = launch_table(executable)          lists of numbers, names and sizes, to be kept beside the text of the plan
    read_launches(table, plan)                the groups of steps that were launched together, with their kernels

A program that is read from a file launches its kernels without reading, scheduling and rendering the loops they are of.
Their source is rendered where it is needed: the compiled code is gone, memory is not aligned, or indices need 64 bits. Only
a file that is trusted may say which code belongs to which loop, as it may bring code along.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airgraph.engine.cuda.kernel_source import KernelSource, Value
from airgraph.engine.cuda.order import LaunchGroup, merged
from airgraph.engine.cuda.products import RowProducts
from airgraph.engine.cuda.render import Merged, Source, render
from airgraph.engine.cuda.tiles import Tile
from airgraph.errors import VerifyError
from airgraph.ir.exact import checked_numbers
from airgraph.ir.types import Dim
from airgraph.plan.nest import Nest
from airgraph.plan.steps import CallStep, ConvStep, GemmStep, LoopStep, Plan
from airgraph.plan.tensors import Tensor

if TYPE_CHECKING:
    from airgraph.engine.cuda.executable import CudaExecutable


@dataclass(frozen=True, eq=False)
class KeptSource:
    """A kernel (a KernelSource) whose compiled code is known by its digest. `launched`: its tensors and sizes, without its
    text. It is number `number` of the kernels of `loops`."""

    digest: str
    launched: Source | Merged
    loops: Sequence[LoopStep]
    number: int

    @cached_property
    def rendered(self) -> KernelSource:
        known: dict[Nest, Source] = {}
        found = merged([render(nest, known) for loop in self.loops for nest in loop.nests])[self.number]
        assert found.tensors == self.tensors, "a loop is rendered as it was when its kernel was compiled"
        return found

    @property
    def text(self) -> str:
        return self.rendered.text

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.launched.tensors

    @property
    def signature(self) -> dict[str, str]:
        return self.launched.signature

    @property
    def constants(self) -> dict[str, Any]:
        return self.launched.constants

    @property
    def sizes(self) -> tuple[Dim, ...]:
        return self.launched.sizes

    @property
    def elements(self) -> tuple[Dim, ...]:
        return self.launched.elements

    @property
    def warps(self) -> int:
        return self.launched.warps

    @property
    def fuses(self) -> bool:
        return self.launched.fuses

    @property
    def checks(self) -> bool:
        return self.launched.checks

    def numbers(self, value: Value) -> list[int]:
        return self.launched.numbers(value)

    def grid(self, value: Value) -> int:
        return self.launched.grid(value)

    def alternatives(self) -> Sequence[KernelSource]:
        return self.rendered.alternatives()


# -- writing ------------------------------------------------------------------------------------------------------------
def launch_table(executable: CudaExecutable) -> Any:
    """[the kernels, without their tensors; the groups]. None where a group is more than loops, products of few rows or a
    single step, or where kernels have no digests."""
    digest = getattr(executable.kernels, "digest", None)
    if digest is None:
        return None
    plan = executable.plan
    steps = {id(step): i for i, step in enumerate(plan.steps)}
    tensors = {id_: i for i, id_ in enumerate(plan.allocations)}
    kernels: list[Any] = []

    def kernel(source: KernelSource) -> list[Any]:
        made: Any = source.launched if isinstance(source, KeptSource) else source
        parts = made.sources if isinstance(made, Merged) else [made]
        found = [digest(source), [*map(part_data, parts)]]
        if found not in kernels:
            kernels.append(found)
        return [kernels.index(found), [tensors[t.id] for t in source.tensors]]

    groups: list[Any] = []
    for group in executable.groups:
        match group.units:
            case [LoopStep(), *_]:
                numbers, roots = [steps[id(step)] for step in group.units], [tensors[t.id] for t in group.roots]
                groups.append(["loops", numbers, roots, [*map(kernel, group.sources)]])
            case [RowProducts() as unit]:
                around = [None if s is None else steps[id(s)] for s in (unit.prologue, unit.epilogue)]
                groups.append(["products", [steps[id(p)] for p in unit.products], *around])
            case [unit] if id(unit) in steps:
                groups.append(["step", steps[id(unit)]])
            case _:
                return None
    return [kernels, groups]


def part_data(s: Source) -> list[Any]:
    return [len(s.tensors), [*s.sizes], s.programs, s.row, [*astuple(s.tile)], s.checks, [*s.elements]]


# -- reading ------------------------------------------------------------------------------------------------------------
def read_launches(table: Any, plan: Plan) -> list[LaunchGroup]:
    try:
        return LaunchReader(table, plan).groups()
    except (IndexError, TypeError, ValueError) as error:
        raise VerifyError(f"what a program launches cannot be read: {error}") from error


class LaunchReader:
    """Reads what `launch_table` wrote, for the plan that it was of."""

    def __init__(self, table: Any, plan: Plan) -> None:
        self.steps: list[Any] = plan.steps
        self.tensors = [place.tensor for place in plan.allocations.values()]
        kernels, self.table = table
        self.kernels = [(digest, [self.part(*part) for part in parts]) for digest, parts in kernels]

    def part(self, count: int, sizes: Any, programs: Dim, row: Dim, tile: Any, checks: bool, elements: Any) -> Any:
        """How many tensors it has, and a kernel without them."""
        checked_numbers([sizes, programs, row, elements], list)
        shape = Tile(*tile)
        if shape.x < 1 or shape.warps < 1 or (shape.blocks and shape.r < 1):
            raise VerifyError(f"{tile} is no tile")
        return count, Source("", (), tuple(sizes), programs, row, shape, checks, tuple(elements))

    def groups(self) -> list[LaunchGroup]:
        return [self.group(*described) for described in self.table]

    def group(self, kind: str, *described: Any) -> LaunchGroup:
        if kind == "step":
            return LaunchGroup([self.step(CallStep | ConvStep, *described)])
        if kind == "products":
            numbers, *around = described
            prologue, epilogue = (None if i is None else self.step(LoopStep, i) for i in around)
            products = tuple(self.step(GemmStep, i) for i in numbers)
            return LaunchGroup([RowProducts(products, prologue, epilogue)])
        numbers, roots, kernels = described
        loops = [self.step(LoopStep, i) for i in numbers]
        sources = [self.source(loops, i, *found) for i, found in enumerate(kernels)]
        return LaunchGroup([*loops], sources, [self.tensors[i] for i in roots])

    def step(self, kind: Any, number: int) -> Any:
        found = self.steps[number]
        if not isinstance(found, kind):
            raise VerifyError(f"step {number} of the plan is not launched like this")
        return found

    def source(self, loops: Sequence[LoopStep], number: int, kernel: int, tensors: Sequence[int]) -> KeptSource:
        digest, parts = self.kernels[kernel]
        found, given = [], iter([self.tensors[i] for i in tensors])
        for count, part in parts:
            found.append(replace(part, tensors=tuple(itertools.islice(given, count))))
        return KeptSource(digest, Merged(tuple(found)) if len(found) > 1 else found[0], loops, number)
