"""Which loops become the epilogue of a matrix product or a convolution: what is done with each element of its result.

    0 gemm t0 = x[0, 16, 1] @ w[0, 1, 16] + b[1] for batch 1, m 5, n 32, k 16
    0 then o0<5, o1<32
        t1[32*o0 + o1] = relu(t0[32*o0 + o1])

The product and its epilogue are one step: every thread applies it to its own share of the result, right behind the
product, without a barrier, and in place (t0 lies in the memory of t1). A loop can be an epilogue if it reads a product in
float32 that nothing else reads, at the element that it writes, and stores one float32 tensor as the product would. What
else it reads (a residual) must be there before the product, and be no product itself: threads would wait for each other
between the two. Sums along rows cannot be part of it: no thread has a whole row.

    3 conv t3 = t2[2880, 1, 320, 32], w[32, 1, 0, 0] for n 2, c 32, … oh 9, ow 10 channels_last
    3 then o0<5760
        t4[o0] = relu(add(t3[o0], t2[o0]))

The rows of a convolution with channels last are its pixels, the columns its channels. Its kernel calls the epilogue for
every block of pixels, which is then in the caches. An epilogue that does not depend on the channel has one loop, over
elements. What it reads may be made by anything before the convolution; small loops that stand between the two, as those
that prepare a batch norm, move in front of it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

from airgraph.ir.types import DataType, Dim
from airgraph.plan.collapse import collapsed, renamed
from airgraph.plan.functions import cost
from airgraph.plan.index import Affine, Var, expand, same, strides_of, volume
from airgraph.plan.kernels import Domain, Kernel, Part
from airgraph.plan.nest import schedule
from airgraph.plan.operands import is_contiguous
from airgraph.plan.steps import Allocation, ConvStep, GemmStep, LoopStep, Step, step_reads, step_writes
from airgraph.plan.target import Target
from airgraph.plan.tensors import Tensor

Host = GemmStep | ConvStep
SMALL = 1 << 14  # elements of a tensor that may wait in the caches for its reader


def fuse_epilogues(
    steps: Sequence[Step], allocations: MutableMapping[int, Allocation], made_by: Mapping[int, int], target: Target
) -> list[Step]:
    """The steps with loops made epilogues of the products before them; `made_by`: which step makes a tensor, by id."""
    if target.conv_epilogues:
        steps, made_by = prepared_first(steps, allocations, made_by)
    readers: dict[int, int] = {}
    for step in steps:
        for id_ in {t.id for t in step_reads(step)}:
            readers[id_] = readers.get(id_, 0) + 1
    kept: list[Step] = []
    for step in steps:
        host = host_of(step, steps, made_by, target) if isinstance(step, LoopStep) else None
        if host is None or readers[host.out.id] > 1 or not in_arena(allocations[host.out.id]):
            kept.append(step)
            continue
        assert isinstance(step, LoopStep)
        epilogue = as_epilogue(step, host, allocations, target)
        if epilogue is None:
            kept.append(step)
            continue
        host.epilogue, own = epilogue, allocations[step.roots[0].id]
        allocations[host.out.id] = replace(own, tensor=host.out, strides=strides_of(host.out.shape), alias=own)
    return kept


def waits(step: Step, made_by: Mapping[int, int]) -> set[int]:
    """The numbers of the steps that it reads from; -1 for what is there from the start."""
    return {made_by.get(t.id, -1) for t in step_reads(step)}


def host_of(loop: LoopStep, steps: Sequence[Step], made_by: Mapping[int, int], target: Target) -> Host | None:
    """The last step that the loop waits for, if that can have an epilogue: all else it reads is there before."""
    needed = waits(loop, made_by)
    last = steps[max(needed)] if max(needed, default=-1) >= 0 else None
    match last:
        case ConvStep(last=True, epilogue=None) if target.conv_epilogues:
            return last
        case GemmStep(ends=None, epilogue=None) if target.epilogues:
            products = [i for i in needed if i >= 0 and isinstance(steps[i], GemmStep)]
            return last if len(products) == 1 else None
    return None


def prepared_first(
    steps: Sequence[Step], allocations: Mapping[int, Allocation], made_by: Mapping[int, int]
) -> tuple[list[Step], dict[int, int]]:
    """Loops between a convolution and its reader that do not need it, but that the reader needs, stand in front of it.
    Small ones that need arguments only stand in front of everything, so that threads meet once for all of them: a
    MobileNetV3 has 46 batch norms to prepare."""
    before: dict[int, int] = {}  # loop → the convolution, or 0
    loops = {i: step for i, step in enumerate(steps) if isinstance(step, LoopStep)}
    if any(isinstance(step, ConvStep) for step in steps):
        small = (i for i, loop in loops.items() if is_small(loop))
        before = {i: 0 for i in small if could_stand_before(i, 0, steps, allocations, made_by)}
    for step in loops.values():
        needed = waits(step, made_by)
        conv = max((i for i in needed if i >= 0 and isinstance(steps[i], ConvStep)), default=-1)
        behind = sorted(i for i in needed if i > conv >= 0)
        if behind and all(could_stand_before(i, conv, steps, allocations, made_by) for i in behind):
            before |= {i: min(conv, before.get(i, conv)) for i in behind}
    order = sorted(range(len(steps)), key=lambda i: (before.get(i, i), i not in before, i))
    place = {old: new for new, old in enumerate(order)}
    return [steps[i] for i in order], {id_: place[i] for id_, i in made_by.items()}


def is_small(loop: LoopStep) -> bool:
    sizes = [volume(t.shape) for t in loop.roots]
    return all(isinstance(n, int) and n <= SMALL for n in sizes)


def could_stand_before(
    number: int, conv: int, steps: Sequence[Step], allocations: Mapping[int, Allocation], made_by: Mapping[int, int]
) -> bool:
    """Whether a loop makes memory of its own from what is there before the convolution, and nothing changes that."""
    loop = steps[number]
    if not isinstance(loop, LoopStep) or loop.sequential or not all(in_arena(allocations[t.id]) for t in loop.roots):
        return False
    early = all(i < conv for i in waits(loop, made_by))
    return early and not overwritten(loop, steps[conv:number], allocations)


def overwritten(loop: LoopStep, between: Sequence[Step], allocations: Mapping[int, Allocation]) -> bool:
    """Whether one of the steps in between writes to memory that the loop reads."""

    def memory(t: Tensor) -> int:
        place = allocations[t.id]
        return id(place.alias or place)

    return not {memory(t) for t in step_reads(loop)}.isdisjoint(memory(t) for s in between for t in step_writes(s))


def in_arena(place: Allocation) -> bool:
    return place.kind == "arena" and place.alias is None


def stores_one(loop: LoopStep, allocations: Mapping[int, Allocation]) -> bool:
    """One float32 tensor, contiguous, in memory of its own."""
    if loop.sequential or len(loop.roots) != 1 or len(loop.kernel.parts) != 1:
        return False
    (t,) = loop.roots
    place = allocations[t.id]
    own = place.kind in ("arena", "output") and place.alias is None and same(place.offset, 0)
    return own and t.dtype == DataType.DT_FLOAT and is_contiguous(t.shape, place.strides)


def as_epilogue(loop: LoopStep, host: Host, allocations: Mapping[int, Allocation], target: Target) -> LoopStep | None:
    m, n = rows_and_columns(host)
    if host.out.dtype != DataType.DT_FLOAT or not stores_one(loop, allocations):
        return None
    if isinstance(host, ConvStep):
        part = over_elements(loop.kernel.parts[0], m, n) or by_rows_and_columns(loop.kernel.parts[0], m, n)
    else:
        part = of_product(loop, host, target)
    if part is None or len(part.stores) != 1 or part.stores[0].picks:
        return None
    (store,), loads = part.stores, [e for e in part.exprs() if e.op == "load"]
    in_place = all(e.at == store.at for e in loads if e.source is host.out)
    element = (
        Affine.of(part.outer[0]) * n + Affine.of(part.outer[1]) if len(part.outer) == 2 else Affine.of(*part.outer)
    )
    vectorised = schedule(part, target, merge=False).outer == tuple(part.outer)
    if not (in_place and store.at == element and vectorised) or any(e.picks for e in loads):
        return None
    return LoopStep(loop.roots, Kernel([part]), Domain(tuple(v.size for v in part.outer)))


def rows_and_columns(host: Host) -> tuple[Dim, Dim]:
    if isinstance(host, GemmStep):
        return host.sizes.m, host.sizes.n
    return host.sizes.n * host.sizes.oh * host.sizes.ow, host.sizes.o


def of_product(loop: LoopStep, product: GemmStep, target: Target) -> Part | None:
    """The loop's part, where it pays to have it as the epilogue of a matrix product."""
    batch, m, n, _ = product.sizes
    if not isinstance(n, int) or n < target.epilogue_columns or not same(batch, 1):
        return None
    part = by_rows_and_columns(loop.kernel.parts[0], m, n)
    return part if part is not None and sum(cost(e.op) for e in part.exprs()) <= target.epilogues else None


def over_elements(part: Part, m: Dim, n: Dim) -> Part | None:
    """The part with one loop, if it runs over all elements in order."""
    if part.inner:
        return None
    part = collapsed(part)
    return part if len(part.outer) == 1 and same(part.outer[0].size, expand(m * n)) else None


def by_rows_and_columns(part: Part, m: Dim, n: Dim) -> Part | None:
    """The part with two loops, over the rows and the columns of a product, if it runs over its elements in order."""
    if part.inner:
        return None
    part = collapsed(part)
    row, column = Var(m), Var(n)
    match part.outer:
        case [all_] if same(all_.size, expand(m * n)):
            table = {all_: Affine.of(row) * n + Affine.of(column)}
        case [rows, columns] if same(rows.size, m) and same(columns.size, n):
            table = {rows: Affine.of(row), columns: Affine.of(column)}
        case _:
            return None
    return renamed(part, table, {"outer": [row, column]})


def schedule_loops(steps: Sequence[Step], target: Target) -> None:
    """Decide how each loop runs. Those of a prologue or an epilogue keep a loop over the rows of their product, of which
    each thread has its share."""
    for step in steps:
        if isinstance(step, LoopStep):
            step.nests = [schedule(p, target) for p in step.kernel.parts]
        else:
            for loop in (getattr(step, "prologue", None), getattr(step, "epilogue", None)):
                if loop is not None:
                    loop.nests = [schedule(p, target, merge=False) for p in loop.kernel.parts]
