"""The captured programs of this process: `airgraph.graphs()` lists them, `airgraph.release()` drops them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airgraph.ir.boundary import TensorIn
from airgraph.runtime.arena import arenas
from airgraph.runtime.recording import Recording
from airgraph.runtime.replay import PROGRAMS


@dataclass(frozen=True)
class GraphInfo:
    """One captured program, as `airgraph.graphs()` lists it."""

    name: str
    phase: str
    device: str
    sizes: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    hits: int
    nbytes: int
    last_use: int  # a counter over all replays: the larger, the later
    leased: bool


def graphs() -> list[GraphInfo]:
    """The captured programs, most recently used first."""
    found = [info(r) for p in list(PROGRAMS) for e in list(p.entries.values()) for r in list(e.recordings)]
    return sorted(found, key=lambda g: -g.last_use)


def info(r: Recording) -> GraphInfo:
    p = r.program
    shapes = tuple(
        tuple(p.size(s, dict(r.symbols)) for s in a.type.shape or ()) if isinstance(a, TensorIn) else ()
        for a in p.boundary.arguments
    )
    sizes = {str(k): v for k, v in r.symbols.items()}
    return GraphInfo(p.name, p.journal.phase, str(p.arena.device), sizes, shapes, r.hits, r.nbytes, r.used, r.leased)


def release() -> int:
    """Drop every captured program and its memory; returns their number. Results that you hold keep theirs."""
    count = 0
    for program in list(PROGRAMS):
        with program.arena.lock:
            gone = [r for e in program.entries.values() for r in e.recordings]
            program.forget(gone)
            program.entries.clear()
            count += len(gone)
    for arena in arenas():
        with arena.lock:
            arena.reset()
    return count
