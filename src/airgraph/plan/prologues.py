"""Which loops become the prologue of a matrix product: what makes the rows of its first operand.

    0 first o0<900, o1<64
        t0[64*o0 + o1] = relu(x[64*o0 + o1])
    0 gemm t1 = t0[0, 64, 1] @ w[0, 1, 64] for batch 1, m 900, n 24, k 64

The loop and the product are one step. Where threads divide the rows of the product, each makes its rows right before it
multiplies them, and no thread waits for another in between. Where they divide the columns, all of them need all rows: they
share the loop and meet at a barrier, as if it were a step of its own.

A loop can be a prologue if it makes the first operand of one product and nothing else, row by row: element by element or
with reductions along the row. It moves to its product, so no step in between may write what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from airgraph.ir.types import Dim
from airgraph.plan.collapse import collapsed
from airgraph.plan.epilogues import by_rows_and_columns, in_arena, overwritten, stores_one
from airgraph.plan.index import same
from airgraph.plan.kernels import Domain, Kernel, Part
from airgraph.plan.nest import product as iterations
from airgraph.plan.nest import schedule
from airgraph.plan.steps import Allocation, GemmStep, LoopStep, Step, product_reads, step_reads, step_writes
from airgraph.plan.target import Target
from airgraph.plan.tensors import Tensor

TALL = 2  # times as many rows as columns
SHORT = 4  # vectors: a loop over elements runs faster over all of them than over rows that are no longer


def fuse_prologues(steps: Sequence[Step], allocations: Mapping[int, Allocation], target: Target) -> list[Step]:
    """The steps with loops made prologues of the products behind them."""
    readers: dict[int, int] = {}
    makers: dict[int, int] = {}
    for number, step in enumerate(steps):
        for id_ in {t.id for t in step_reads(step)}:
            readers[id_] = readers.get(id_, 0) + 1
        makers |= {t.id: number for t in step_writes(step)}
    gone: set[int] = set()
    for number, step in enumerate(steps):
        if not isinstance(step, GemmStep) or not takes_prologue(step, target):
            continue
        t = step.a.tensor
        loop = steps[made] if (made := makers.get(t.id)) is not None else None
        if made is None or not isinstance(loop, LoopStep) or readers[t.id] > 1 or reads_again(step, t):
            continue
        if not stores_one(loop, allocations) or not in_arena(allocations[t.id]):
            continue
        if overwritten(loop, steps[made + 1 : number], allocations):
            continue
        step.prologue = as_prologue(loop, step, target)
        if step.prologue is not None:
            gone.add(made)
    return [step for number, step in enumerate(steps) if number not in gone]


def takes_prologue(product: GemmStep, target: Target) -> bool:
    """One whose rows threads will probably divide, and whose first operand lies row by row from its beginning on."""
    batch, m, n, k = product.sizes
    narrow = isinstance(n, int) and n <= target.prologue_columns and (not isinstance(m, int) or m >= TALL * n)
    rows = same(product.a.offset, 0) and same(product.a.strides[1], k) and same(product.a.strides[2], 1)
    return narrow and rows and same(batch, 1) and product.ends is None and product.prologue is None


def reads_again(product: GemmStep, t: Tensor) -> bool:
    """Whether the product reads its first operand in another place as well."""
    return sum(x is t for x in product_reads(product)) > 1


def as_prologue(loop: LoopStep, product: GemmStep, target: Target) -> LoopStep | None:
    _, m, _, k = product.sizes
    if not loop.domain.axes and (not isinstance(k, int) or k < SHORT * target.lanes):
        return None
    part = by_rows(loop.kernel.parts[0], m, k)
    if part is None or len(part.stores) != 1 or part.stores[0].picks:
        return None
    row, at = part.outer[0], part.stores[0].at
    whole = same(at.coefficient(row), k) and same(at.const, 0)
    if not whole or schedule(part, target, merge=False).parallel is not row:
        return None
    shape = tuple(v.size for v in (*part.outer, *part.inner))
    return LoopStep(loop.roots, Kernel([part]), Domain(shape, tuple(range(len(part.outer), len(shape)))))


def by_rows(part: Part, m: Dim, k: Dim) -> Part | None:
    """The part with its first loop over the rows of an operand and the others along one, if it runs over them in order."""
    if not part.inner:
        return by_rows_and_columns(part, m, k)
    part = collapsed(part)
    rows = len(part.outer) == 1 and same(part.outer[0].size, m)
    return part if rows and same(iterations(part.inner), k) else None
