"""When the memory of each tensor is in use, and where threads have to wait for each other.

Steps are counted. All threads go through the steps in order and share the work of each; a step that is too small for that
is done by one thread, which does all such steps. Threads wait for each other (a barrier) only where a step meets memory
that another thread may still be at, so between two barriers a shared step may be at work at any time.

Whether a step is small can depend on sizes. What is decided here holds for all sizes: a step counts as done by one thread
only where that is sure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Access:
    """A step, as far as memory is concerned; slots stand for memory."""

    reads: frozenset[int]
    writes: frozenset[int]
    origin: Any  # steps of one origin do not disturb each other
    call: bool = False  # of the library: nothing else runs meanwhile
    single: bool = False  # one thread does it, whatever the sizes


class Span(NamedTuple):
    """From the first step to the last."""

    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """`starts`: for each step the first one behind the last barrier (or call). `waits`: steps with a barrier behind."""

    accesses: Sequence[Access]
    starts: list[int]
    waits: frozenset[int]

    def span(self, i: int) -> Span:
        """When step i may be at work. One that a single thread does: in its turn, as that thread does all of these."""
        if self.accesses[i].single:
            return Span(i, i)
        return Span(self.starts[i], self.end(i))

    def end(self, i: int) -> int:
        """The last step before the next barrier."""
        while i + 1 < len(self.starts) and self.starts[i + 1] == self.starts[i]:
            i += 1
        return i

    def text(self) -> str:
        lines = []
        for i, access in enumerate(self.accesses):
            who = "call" if access.call else "single" if access.single else "shared"
            reads, writes = (" ".join(map(str, sorted(slots))) or "-" for slots in (access.reads, access.writes))
            lines.append(f"{i} {who}: {reads} -> {writes}")
            lines += ["barrier"] if i in self.waits else []
        return "\n".join(lines)


def timeline(accesses: Sequence[Access]) -> Timeline:
    starts: list[int] = []
    waits: set[int] = set()
    since = 0
    for i, access in enumerate(accesses):
        if access.call or (i and accesses[i - 1].call):  # threads meet there anyway
            since = i
        elif any(disturbs(access, accesses[j]) for j in range(since, i)):
            waits.add(i - 1)
            since = i
        starts.append(since)
    return Timeline(accesses, starts, frozenset(waits))


def disturbs(access: Access, before: Access) -> bool:
    """Whether all threads must be done with `before` when one of them begins with `access`."""
    if before.origin is access.origin or (access.single and before.single):
        return False
    return bool(access.reads & before.writes or access.writes & (before.writes | before.reads))


@dataclass
class Lifetimes:
    """For each slot when it is in use, and which tensors may lie over which: (a result, what it is written over)."""

    spans: dict[int, Span]
    over: list[tuple[int, int]]

    def text(self) -> str:
        lines = [f"{slot}: {first}-{last}" for slot, (first, last) in sorted(self.spans.items())]
        return "\n".join([*lines, *(f"{t} over {x}" for t, x in self.over)])


def lifetimes(
    time: Timeline,
    slots: Collection[int],
    overwrites: Mapping[Any, Iterable[tuple[int, int]]],
    outputs: Collection[int],
) -> Lifetimes:
    """Of `slots`, those in `outputs` to the end. `overwrites`: (a result, what it may be written over) by origin."""
    uses: dict[int, list[tuple[Span, Any]]] = {}
    own: dict[Any, Span] = {}
    for i, access in enumerate(time.accesses):
        span = time.span(i)
        begin, end = own.get(access.origin, span)
        own[access.origin] = Span(min(begin, span.first), max(end, span.last))
        for slot in access.reads | access.writes:
            if slot in slots:
                uses.setdefault(slot, []).append((span, access.origin))
    spans = {s: Span(min(u.first for u, _ in at), max(u.last for u, _ in at)) for s, at in uses.items()}
    over = []
    for origin, pairs in overwrites.items():
        for t, x in pairs:
            if t in uses and x in uses:
                dies = all(o is origin or u.last < own[origin].first for u, o in uses[x])
                born = all(o is origin or u.first > own[origin].last for u, o in uses[t])
                if dies and born:
                    over.append((t, x))
    spans |= {s: Span(spans[s].first, len(time.accesses)) for s in outputs if s in spans}
    return Lifetimes(spans, over)
