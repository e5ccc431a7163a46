"""Graph → graph. `PASSES` is the order, once through; `run_passes` runs it and tells the journal what each one did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from airgraph.ir.graph import Graph
from airgraph.ir.verify import verify
from airgraph.journal import Journal
from airgraph.passes import activations, attention, cleanup, linear, norms, simplify
from airgraph.passes.liveness import Liveness
from airgraph.passes.result import Pass, PassResult
from airgraph.passes.rewrite import Rule, RulePass

# Once through is enough: no pass leaves work for one before it.
PASSES: dict[str, Pass] = {
    "constant_folding": cleanup.constant_folding,
    "noops": simplify.noops,
    "missing_parameters": cleanup.missing_parameters,
    "transposed_products": linear.transposed_products,
    "index_updates": simplify.index_updates,
    "views": simplify.views,
    "casts": simplify.casts,
    "softmax": norms.softmax_pass,
    "layer_norm": norms.layer_norm_pass,
    "rms_norm": norms.rms_norm_pass,
    "gelu": activations.gelu,
    "swish": activations.swish,
    "rotary": attention.rotary_pass,
    "attention": attention.attention_pass,
    "matmul_transposes": simplify.matmul_transposes,
    "unit_transposes": simplify.unit_transposes,
    "matmul_bias": linear.matmul_bias,
    "conv_batch_norm": linear.conv_batch_norm,
    "common_subexpressions": cleanup.common_subexpressions,
    "dead_code": cleanup.dead_code,
    "dead_inputs": cleanup.dead_inputs,
}
# Names for several passes at once, for switching them off.
PATTERNS = ("softmax", "layer_norm", "rms_norm", "gelu", "swish", "rotary", "attention")
FAMILIES: dict[str, tuple[str, ...]] = {
    "fusion": (*PATTERNS, "matmul_transposes", "matmul_bias", "conv_batch_norm"),
    "patterns": PATTERNS,
}
# Passes that run only where the caller says that parameters never change.
FROZEN = ("conv_batch_norm",)


def run_passes(
    graph: Graph,
    journal: Journal,
    *,
    off: tuple[str, ...] = (),
    check: bool = False,
    frozen: bool = False,
    observe: Callable[[str, Graph], None] | None = None,
) -> Graph:
    """Every pass that is not switched off. `observe(name, graph)` is called after each that changed something.

    `frozen`: parameters keep their values, so that one may be folded into another.
    """
    skipped = {name for wish in off for name in FAMILIES.get(wish, (wish,))} | set(() if frozen else FROZEN)
    live: Liveness | None = None  # one for all passes made of rules: they keep it up to date
    for name, run in PASSES.items():
        if name in skipped:
            continue
        with journal.stage(name) as stage:
            if isinstance(run, RulePass):
                live = live or Liveness(graph)
                result = run(graph, helpers_of(run, skipped), live)
            else:
                live, result = None, run(graph)
            stage.notes += result.notes
        record(name, result, journal)
        if check:
            verify(graph, name)
        if observe and result.changed:
            observe(name, graph)
    return graph


def helpers_of(run: RulePass, skipped: Collection[str]) -> list[Rule]:
    passes = [PASSES[name] for name in run.helpers if name not in skipped]
    return [rule for helper in passes if isinstance(helper, RulePass) for rule in helper.rules]


def record(name: str, result: PassResult, journal: Journal) -> None:
    """`fired rms_norm/rms_norm` and `refused …` among the journal's counters: what each rule of a pass did."""
    for word, counts in (("fired", result.fired), ("refused", result.refused)):
        journal.counters.update(Counter({f"{word} {name}/{rule}": count for rule, count in counts.items()}))


__all__ = ["FAMILIES", "FROZEN", "PASSES", "Pass", "PassResult", "run_passes"]
