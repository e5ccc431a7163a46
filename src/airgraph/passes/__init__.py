"""Graph → graph. `PASSES` is the order, once through; `run_passes` runs it and tells the journal what each one did."""

from __future__ import annotations

from collections.abc import Callable

from airgraph.ir.graph import Graph
from airgraph.ir.verify import verify
from airgraph.journal import Journal
from airgraph.passes import cleanup, simplify
from airgraph.passes.result import Pass, PassResult

# Once through is enough: no pass leaves work for one before it.
PASSES: dict[str, Pass] = {
    "constant_folding": cleanup.constant_folding,
    "noops": simplify.noops,
    "views": simplify.views,
    "matmul_transposes": simplify.matmul_transposes,
    "common_subexpressions": cleanup.common_subexpressions,
    "dead_code": cleanup.dead_code,
    "dead_inputs": cleanup.dead_inputs,
}
# Names for several passes at once, for switching them off.
FAMILIES: dict[str, tuple[str, ...]] = {"fusion": ("matmul_transposes",)}


def run_passes(graph: Graph, journal: Journal, *, off: tuple[str, ...] = (), check: bool = False,
               observe: Callable[[str, Graph], None] | None = None) -> Graph:  # fmt: skip
    """Every pass that is not switched off. `observe(name, graph)` is called after each that changed something."""
    skipped = {name for wish in off for name in FAMILIES.get(wish, (wish,))}
    for name, run in PASSES.items():
        if name in skipped:
            continue
        with journal.stage(name) as stage:
            result = run(graph)
            stage.notes += result.notes
        if check:
            verify(graph, name)
        if observe and result.changed:
            observe(name, graph)
    return graph


__all__ = ["FAMILIES", "PASSES", "Pass", "PassResult", "run_passes"]
