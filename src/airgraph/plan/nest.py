"""Loop nests: how a part of a kernel runs on a target. `schedule` decides; an engine only renders the result.

A softmax over [48, 256], as the text of its nest:

    for o0<48 parallel
      for i0<256 vector 8
        r0 = max(x[256*o0 + i0])
      for i0<256 vector 8
        s0 = exp(sub(x[256*o0 + i0], r0))
        r1 = sum(s0)
      for i0<256 vector 8
        t0[256*o0 + i0] = mul(s0, reciprocal(r1))

Outer loops run in any order and in parallel. For each of their iterations the inner loops run once per stage: a stage
computes the reductions and stores that need nothing but the reductions of earlier stages. An expensive expression that a
later stage needs again is spilled: kept in the thread's scratch memory (`s0` above). Stores of single elements per row
come after all stages. The vectorised loop is an outer one or the innermost inner one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from airgraph.ir.types import DataType, Dim
from airgraph.plan.collapse import collapsed
from airgraph.plan.functions import cost
from airgraph.plan.index import Var, expand, same
from airgraph.plan.kernels import Part, Store
from airgraph.plan.target import Target
from airgraph.plan.tensors import Expr

SPILLED_BYTES = 8  # per element, whatever its type
SUMMED_IN_FLOAT32 = (DataType.DT_FLOAT, DataType.DT_FLOAT16, DataType.DT_BF16)
LONG = 4  # blocks: a sum of more iterations is computed block by block
ALONG = 64  # iterations of a block at least, where it is not a part of one vectorised row


@dataclass(frozen=True)
class Block:
    """So many iterations of this inner loop, each with all of the loops inside it, are summed separately."""

    loop: Var
    iterations: int


@dataclass(frozen=True, eq=False)
class Stage:
    """One pass over the inner loops. In each iteration the stores come first, then the reductions, then the spills."""

    number: int
    stores: tuple[Store, ...]
    reductions: tuple[Expr, ...]
    spills: tuple[Expr, ...]
    blocked: tuple[Expr, ...]  # the reductions that are summed in blocks (`Nest.block`)


@dataclass(frozen=True, eq=False)
class Nest:
    """A part of a kernel with every decision about its loops."""

    target: Target
    exprs: tuple[Expr, ...]  # operands first
    outer: tuple[Var, ...]  # outermost first; the vectorised loop, if it is one of them, last
    inner: tuple[Var, ...]
    vector: Var | None
    stages: tuple[Stage, ...]
    single: tuple[Store, ...]  # one element per iteration of the outer loops, after all stages
    spills: Mapping[int, int]  # id of an expression → its number among the spilled rows
    like: Nest | None = None  # the same on other tensors of the same types and shapes (copies.py)

    @property
    def vector_outside(self) -> bool:
        return self.vector is not None and self.vector not in self.inner

    @cached_property
    def block(self) -> Block | None:
        """Those of `Stage.blocked`."""
        return block_of(self.inner, self.vector, self.target)

    @property
    def parallel(self) -> Var | None:
        """The loop whose iterations are distributed over threads."""
        return self.outer[0] if self.outer else None

    @property
    def jobs(self) -> Dim:
        return self.parallel.size if self.parallel is not None else 1

    @property
    def grain(self) -> int:
        """Threads get multiples of this many iterations of the parallel loop."""
        return self.target.grain if self.parallel is not None and self.parallel is self.vector else 1

    @property
    def row(self) -> Dim:
        """Iterations of the inner loops."""
        return product(self.inner)

    @cached_property
    def cost(self) -> Dim:
        """Of the whole nest, in additions."""
        each = sum(cost(e.op) for e in self.exprs) + len(self.stores)
        return expand(product((*self.outer, *self.inner)) * each)

    @property
    def scratch(self) -> int:
        """Bytes that each thread needs; rows are only spilled where their length is a number."""
        return len(self.spills) * self.row * SPILLED_BYTES if self.spills else 0

    @property
    def stores(self) -> list[Store]:
        return [*(s for stage in self.stages for s in stage.stores), *self.single]

    def order(self) -> list[tuple[int, Store | Expr]]:
        """Stores and reductions in the order in which a row executes them, each with the number of its stage."""
        found: list[tuple[int, Store | Expr]] = []
        for stage in self.stages:
            found += [(stage.number, s) for s in stage.stores]
            found += [(stage.number, e) for e in stage.reductions]
        return found + [(len(self.stages), s) for s in self.single]


def schedule(part: Part, target: Target, merge: bool = True) -> Nest:
    """`merge`: neighbouring loops that run through memory as one become one."""
    part = collapsed(part) if merge else part
    exprs = tuple(part.exprs())
    vector = vector_loop(part, exprs, target)
    full, single = rows_and_singles(part)
    reductions = [e for e in exprs if e.op == "reduce"]
    last = max([e.level - 1 for e in reductions] + [s.value.level for s in full], default=-1)
    spills = spilled(part, exprs, vector, last, target)
    stages = tuple(
        stage(
            number,
            [s for s in full if s.value.level == number],
            [e for e in reductions if e.level - 1 == number],
            [e for e in exprs if e.id in spills and e.level == number],
            block_of(part.inner, vector, target) is not None,
        )
        for number in range(last + 1)
    )
    return Nest(target, exprs, outer_order(part, vector), tuple(part.inner), vector, stages, tuple(single), spills)


def stage(number: int, stores: list[Store], reductions: list[Expr], spills: list[Expr], long: bool) -> Stage:
    blocked = [e for e in reductions if long and e.source == "sum" and e.dtype in SUMMED_IN_FLOAT32]
    return Stage(number, tuple(stores), tuple(reductions), tuple(spills), tuple(blocked))


# -- loops ----------------------------------------------------------------------------------------------------------
def vector_loop(part: Part, exprs: Iterable[Expr], target: Target) -> Var | None:
    """The loop along which most memory accesses are contiguous: the innermost of the row, or any outer one."""
    candidates = [*part.inner[-1:], *reversed(part.outer)]
    if not candidates:
        return None
    accesses = [(e.at, 1) for e in exprs if e.op == "load" and e.at is not None]
    accesses += [(s.at, 2) for s in part.stores]

    def score(v: Var) -> int:
        steps = [(at.coefficient(v), weight) for at, weight in accesses]
        total = sum(w if same(step, 1) else 0 if same(step, 0) else -2 * w for step, w in steps)
        short = isinstance(v.size, int) and v.size < target.lanes
        return total - (1000 if short else 0)

    return max(candidates, key=score)


def outer_order(part: Part, vector: Var | None) -> tuple[Var, ...]:
    """The longest loop outermost, for the threads, unless the first one is long enough; the vectorised loop last."""
    rest = [v for v in part.outer if v is not vector]
    if rest:
        longest = max(rest, key=lambda v: v.size if isinstance(v.size, int) else 1 << 40)
        if isinstance(rest[0].size, int) and rest[0].size >= 8:
            longest = rest[0]
        rest = [longest, *(v for v in rest if v is not longest)]
    return (*rest, *(v for v in part.outer if v is vector))


def rows_and_singles(part: Part) -> tuple[list[Store], list[Store]]:
    """The stores that depend on the inner loops, and those of one element per row."""
    inner = set(part.inner)
    full = [s for s in part.stores if s.value.vars & inner or s.at.vars() & inner]
    return full, [s for s in part.stores if s not in full]


def product(loops: Iterable[Var]) -> Dim:
    total: Dim = 1
    for v in loops:
        total = total * v.size
    return total


def block_of(inner: Sequence[Var], vector: Var | None, target: Target) -> Block | None:
    """A part of a long vectorised row; else as many iterations, of one or of several loops, as there will be blocks: what
    is rounded off grows with the square root of either. None: no long sum."""
    final = inner[-1] if inner else None
    if final is vector and final is not None and not is_short(final, LONG * target.block):
        return Block(final, target.block)
    lengths = {v: expand((v.size + target.lanes - 1) // target.lanes) if v is vector else v.size for v in inner}
    whole = math.prod(lengths.values()) if all(isinstance(n, int) for n in lengths.values()) else None
    if whole is not None and whole <= LONG * ALONG:
        return None
    most, inside = max(ALONG, math.isqrt(whole or 0)), 1
    for v in reversed(inner):
        length = lengths[v]
        if not isinstance(length, int) or inside * length > most:
            return Block(v, max(1, most // inside))
        inside *= length
    return None


def is_short(loop: Var, most: int) -> bool:
    return isinstance(loop.size, int) and loop.size <= most


# -- kept for a later stage -----------------------------------------------------------------------------------------
def spilled(part: Part, exprs: Iterable[Expr], vector: Var | None, last: int, target: Target) -> dict[int, int]:
    """The expressions of the row that a later stage reads instead of computing them again, as far as scratch suffices."""
    row = product(part.inner)
    if last < 1 or not isinstance(row, int) or vector not in part.inner:
        return {}
    inner = set(part.inner)
    needed: dict[int, int] = {}  # id → the last stage that reads it
    for user in exprs:
        for a in user.args:
            needed[a.id] = max(needed.get(a.id, 0), user.level - (user.op == "reduce"))
    spills: dict[int, int] = {}
    costs: dict[int, int] = {}  # of computing it again, from what is loaded, reduced or spilled
    for e in exprs:
        costs[e.id] = cost(e.op) + sum(costs[a.id] for a in e.args if a.vars & inner and e.op != "reduce")
        later = needed.get(e.id, 0) > e.level
        if e.vars & inner and later and costs[e.id] >= target.spill_cost and e.dtype != DataType.DT_BOOL:
            if (len(spills) + 1) * row * SPILLED_BYTES > target.scratch:
                break
            spills[e.id] = len(spills)
            costs[e.id] = 1
    return spills
