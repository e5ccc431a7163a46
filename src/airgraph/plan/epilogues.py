"""Which loops become the epilogue of a matrix product: what is done with each element of its result.

    0 gemm t0 = x[0, 16, 1] @ w[0, 1, 16] + b[1] for batch 1, m 5, n 32, k 16
    0 then o0<5, o1<32
        t1[32*o0 + o1] = relu(t0[32*o0 + o1])

The product and its epilogue are one step: every thread applies it to its own share of the result, right behind the
product, without a barrier, and in place (t0 lies in the memory of t1). A loop can be an epilogue if it reads a product
that nothing else reads, at the element that it writes, and stores one float32 tensor as the product would. What else it
reads (a residual) must be there before the product, and be no product itself: threads would wait for each other between
the two. Sums along rows cannot be part of it: no thread has a whole row.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

from airgraph.ir.types import DataType, Dim
from airgraph.plan.collapse import collapsed, renamed
from airgraph.plan.functions import cost
from airgraph.plan.index import Affine, Var, expand, same, strides_of
from airgraph.plan.kernels import Domain, Kernel, Part
from airgraph.plan.nest import schedule
from airgraph.plan.operands import is_contiguous
from airgraph.plan.steps import Allocation, GemmStep, LoopStep, Step, step_reads
from airgraph.plan.target import Target


def fuse_epilogues(
    steps: Sequence[Step], allocations: MutableMapping[int, Allocation], made_by: Mapping[int, int], target: Target
) -> list[Step]:
    """The steps with loops made epilogues of the products before them; `made_by`: which step makes a tensor, by id."""
    readers: dict[int, int] = {}
    for step in steps:
        for id_ in {t.id for t in step_reads(step)}:
            readers[id_] = readers.get(id_, 0) + 1
    kept: list[Step] = []
    for step in steps:
        product = ended_product(step, steps, made_by) if isinstance(step, LoopStep) else None
        if product is None or readers[product.out.id] > 1 or not in_arena(allocations[product.out.id]):
            kept.append(step)
            continue
        assert isinstance(step, LoopStep)
        epilogue = as_epilogue(step, product, allocations, target)
        if epilogue is None:
            kept.append(step)
            continue
        product.epilogue, own = epilogue, allocations[step.roots[0].id]
        allocations[product.out.id] = replace(own, tensor=product.out, strides=strides_of(product.out.shape), alias=own)
    return kept


def ended_product(loop: LoopStep, steps: Sequence[Step], made_by: Mapping[int, int]) -> GemmStep | None:
    """The last step that the loop waits for, if that is a product: all else it reads is there before."""
    waits = {made_by.get(t.id, -1) for t in step_reads(loop)}
    products = [steps[i] for i in waits if i >= 0 and isinstance(steps[i], GemmStep)]
    if len(products) != 1 or products[0] is not steps[max(waits)]:
        return None
    (product,) = products
    return product if isinstance(product, GemmStep) and product.ends is None else None


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


def as_epilogue(
    loop: LoopStep, product: GemmStep, allocations: Mapping[int, Allocation], target: Target
) -> LoopStep | None:
    batch, m, n, _ = product.sizes
    if not isinstance(n, int) or n < target.epilogue_columns or not same(batch, 1):
        return None
    if product.epilogue is not None or not stores_one(loop, allocations):
        return None
    part = by_rows_and_columns(loop.kernel.parts[0], m, n)
    if part is None or len(part.stores) != 1 or part.stores[0].picks:
        return None
    if sum(cost(e.op) for e in part.exprs()) > target.epilogues:
        return None
    (store,), loads = part.stores, [e for e in part.exprs() if e.op == "load"]
    in_place = all(e.at == store.at for e in loads if e.source is product.out)
    row, column = part.outer
    whole = store.at == Affine.of(row) * n + Affine.of(column)
    vectorised = schedule(part, target, merge=False).outer == (row, column)
    if not (in_place and whole and vectorised) or any(e.picks for e in loads):
        return None
    return LoopStep(loop.roots, Kernel([part]), Domain((m, n)))


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
        elif isinstance(step, GemmStep):
            for loop in (step.prologue, step.epilogue):
                if loop is not None:
                    loop.nests = [schedule(p, target, merge=False) for p in loop.kernel.parts]
