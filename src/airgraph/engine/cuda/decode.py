"""Attention of one token together with the loops in front of it.

    q = rotary(x)   k = rotary(y)   keys[slot] = k   values[slot] = v   attention(q, keys, values)    →    one kernel

`with_caches` finds them: the loop that makes the queries, and those that write the new token's keys and values into their
slot of a cache. attention.py renders the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from airgraph.ir.types import Dim
from airgraph.plan.index import Affine, Var, expand, same
from airgraph.plan.kernels import Part, Store
from airgraph.plan.steps import AttentionStep, LoopStep, Matrix, Step, step_reads, step_writes
from airgraph.plan.tensors import Expr, Tensor

NARROWEST = 16  # elements of a head that are multiplied at once


@dataclass(frozen=True)
class HeadLoop:
    """A part of a loop over batch, heads and elements of heads: which of its variables is which ("b", "h", "d")."""

    part: Part
    names: dict[Var, str]

    @property
    def store(self) -> Store:
        return self.part.stores[0]


@dataclass(frozen=True, eq=False)
class CacheWrite:
    """What writes keys or values of the new token into their slot. `made`: the loop that computes them, if it is fused."""

    step: LoopStep
    loops: tuple[HeadLoop, ...]
    made: LoopStep | None = None
    making: tuple[HeadLoop, ...] = ()

    @property
    def slot(self) -> Expr:
        return self.loops[0].store.numbers[0]


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """An attention step and the loops that its kernel does first."""

    attention: AttentionStep
    query: LoopStep | None = None
    querying: tuple[HeadLoop, ...] = ()
    keys: CacheWrite | None = None
    values: CacheWrite | None = None

    @property
    def caches(self) -> list[CacheWrite]:
        return [c for c in (self.keys, self.values) if c is not None]

    @cached_property
    def parts(self) -> list[Step]:
        loops = [self.query, *(s for c in self.caches for s in (c.made, c.step))]
        return [*(s for s in loops if s is not None), self.attention]

    @property
    def writes(self) -> list[Tensor]:
        return [self.attention.out, *(t for c in self.caches for t in c.step.roots)]

    @property
    def reads(self) -> list[Tensor]:
        own = {t.id for part in self.parts for t in step_writes(part)}
        return [t for part in self.parts for t in step_reads(part) if t.id not in own]

    @property
    def pieces(self) -> int:
        """Into how many a head is divided: rotary embeddings compute its halves by different formulas."""
        loops = [self.querying, *(found for c in self.caches for found in (c.loops, c.making))]
        return max(1, *(len(found) for found in loops))


def with_caches(
    steps: Sequence[Step], inner: Callable[[Tensor], bool], home: Callable[[Tensor], int]
) -> list[Step | DecodeAttention]:
    """The steps with every attention step as a unit. `inner`: nothing outside of the graph sees a tensor; `home`: a key of
    the memory it is in."""
    finder = LoopFinder(steps, inner, home)
    units = {i: finder.unit(i, step) for i, step in enumerate(steps) if isinstance(step, AttentionStep)}
    gone = {id(part) for unit in units.values() for part in unit.parts}
    return [units.get(i, step) for i, step in enumerate(steps) if i in units or id(step) not in gone]


class LoopFinder:
    """Which loops the kernel of an attention step can do, by who reads and makes what."""

    def __init__(self, steps: Sequence[Step], inner: Callable[[Tensor], bool], home: Callable[[Tensor], int]) -> None:
        self.steps, self.inner, self.home = steps, inner, home
        self.numbers = {id(step): i for i, step in enumerate(steps)}
        self.reads = [{home(t) for t in step_reads(step)} for step in steps]
        self.writes = [{home(t) for t in step_writes(step)} for step in steps]

    def unit(self, number: int, step: AttentionStep) -> DecodeAttention:
        batch, heads, depth = step.sizes.batch, step.sizes.heads, step.sizes.depth
        query, querying = self.maker(step.q.tensor, number, step.q.strides, (batch, heads), step.q.offset, depth)
        keys, values = (self.cache(number, step, m) for m in (step.k, step.v))
        if keys is None or values is None or not self.together(keys, values):
            keys = values = None
        unit = DecodeAttention(step, query, querying, keys, values)
        moved = {self.numbers[id(part)] for part in unit.parts}
        if all(self.can_move(i, number, moved) for i in moved) and self.even(unit):
            return unit
        return DecodeAttention(step)

    def even(self, unit: DecodeAttention) -> bool:
        depth, pieces = unit.attention.sizes.depth, unit.pieces
        return isinstance(depth, int) and depth // pieces >= min(NARROWEST, depth)

    def together(self, keys: CacheWrite, values: CacheWrite) -> bool:
        """Two caches, not one that is read as both."""
        return self.home(keys.step.roots[0]) != self.home(values.step.roots[0])

    def can_move(self, number: int, to: int, moved: set[int]) -> bool:
        """Nothing in between makes what it reads, or sees what it writes."""
        between = [i for i in range(number + 1, to) if i not in moved]
        reads, writes = self.reads[number], self.writes[number]
        return not any(self.writes[i] & (reads | writes) or self.reads[i] & writes for i in between)

    def loop_before(self, number: int, t: Tensor) -> LoopStep | None:
        """The last step that writes into this memory, if it is a loop that makes nothing else."""
        made = [i for i in range(number) if self.home(t) in self.writes[i]]
        step = self.steps[made[-1]] if made else None
        plain = isinstance(step, LoopStep) and len(step.roots) == 1 and all(not p.inner for p in step.kernel.parts)
        return step if isinstance(step, LoopStep) and plain else None

    def maker(
        self, t: Tensor, number: int, strides: Sequence[Dim], sizes: tuple[Dim, Dim], offset: Dim, depth: Dim
    ) -> tuple[LoopStep | None, tuple[HeadLoop, ...]]:
        """The loop that makes a tensor which only step `number` reads."""
        loop = self.loop_before(number, t)
        readers = {i for i, reads in enumerate(self.reads) if self.home(t) in reads}
        if loop is None or not self.inner(t) or readers != {number} or loop.sequential:
            return None, ()
        found = head_loops(loop, strides, sizes, offset, depth)
        return (loop, found) if found else (None, ())

    def cache(self, number: int, step: AttentionStep, m: Matrix) -> CacheWrite | None:
        """The loop that writes one slot of a cache in every batch and head."""
        batch, _, kv_heads, _, slots, depth, _ = step.sizes
        loop = self.loop_before(number, m.tensor)
        if loop is None or self.inner(m.tensor) or not same(m.strides[3], 1):
            return None
        loops = head_loops(loop, m.strides, (batch, kv_heads), m.offset, depth)
        for found in loops:
            numbers, picks = found.store.numbers, found.store.picks
            if len(picks) != 1 or not same(picks[0].stride, m.strides[2]) or not same(picks[0].size, slots):
                return None
            if any(found.names.get(v) != "b" for v in numbers[0].vars) or numbers != loops[0].store.numbers:
                return None
        return self.with_maker(CacheWrite(loop, loops), step) if loops else None

    def with_maker(self, write: CacheWrite, step: AttentionStep) -> CacheWrite:
        """With the loop that computes what is written, if the write is its only reader and reads it as it was made."""
        batch, _, kv_heads, _, _, depth, _ = step.sizes
        if len(write.loops) != 1:
            return write
        (loop,) = write.loops
        number = self.numbers[id(write.step)]
        for e in loop.part.exprs():
            if e.op == "load" and e.at is not None and not e.picks and self.inner(e.source):
                steps = {name: coefficient(e.at, loop.names, name) for name in "bhd"}
                if not same(steps["d"], 1):
                    continue
                strides = (steps["b"], steps["h"])
                made, making = self.maker(e.source, number, strides, (batch, kv_heads), e.at.const, depth)
                if made is not None:
                    return CacheWrite(write.step, write.loops, made, making)
        return write


def coefficient(at: Affine, names: dict[Var, str], name: str) -> Dim:
    return next((c for v, c in at.terms if names.get(v) == name), 0)


def head_loops(
    step: LoopStep, strides: Sequence[Dim], sizes: tuple[Dim, Dim], offset: Dim, depth: Dim
) -> tuple[HeadLoop, ...]:
    """The parts of a loop over heads that lie in memory with these strides (batch, head), in the order of the elements that
    they compute: all, or a half each. None where the loop is another."""
    parts = step.kernel.parts
    if len(parts) > 2 or not isinstance(depth, int) or depth % len(parts):
        return ()
    width = depth // len(parts)
    found = []
    for i, part in enumerate(parts):
        names = named(part, strides, sizes, width)
        if names is None or len(part.stores) != 1 or not same(part.stores[0].at.const, offset + i * width):
            return ()
        found.append(HeadLoop(part, names))
    return tuple(found)


def named(part: Part, strides: Sequence[Dim], sizes: tuple[Dim, Dim], width: int) -> dict[Var, str] | None:
    at = part.stores[0].at
    wanted = [("d", 1, width), ("h", strides[1], sizes[1]), ("b", strides[0], sizes[0])]
    wanted = [(name, step, size) for name, step, size in wanted if not same(size, 1)]
    names: dict[Var, str] = {}
    for name, step, size in wanted:
        match = [v for v, c in at.terms if v not in names and same(c, step) and same(v.size, size)]
        if len(match) != 1:
            return None
        names[match[0]] = name
    others = [v for v in (*part.outer, *at.vars()) if v not in names and not same(expand(v.size), 1)]
    return None if others or part.inner else names
