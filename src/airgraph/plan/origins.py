"""Which nodes of the graph a step of the plan does: for profiles and reports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from airgraph.ir.graph import Node, Note
from airgraph.plan.steps import CallStep, Plan, Step, step_reads, step_writes
from airgraph.plan.tensors import Tensor


def nodes_of(plan: Plan, step: Step) -> list[Node]:
    """In the order of the graph; none for a plan that was read back from text."""
    if isinstance(step, CallStep):
        return [step.node]
    written, reads = {t.id for t in step_writes(step)}, {t.id for t in step_reads(step)}
    found: dict[Node, None] = {}
    waiting, seen = [*step_writes(step)], set[int]()
    while waiting:
        t = waiting.pop()
        in_memory = t.id in reads or (t.id in plan.allocations and t.id not in written)
        if t.id not in seen and not in_memory:
            seen.add(t.id)
            node = maker(plan, t)
            if node is not None:
                found[node] = None
            waiting += t.inputs
    return sorted(found, key=lambda node: plan.order.get(node, 0))


def maker(plan: Plan, t: Tensor) -> Node | None:
    """The node whose formula has this tensor. Tensors are numbered as they are made, node after node."""
    at = bisect_right(plan.makers, t.id, key=lambda pair: pair[0]) - 1
    return plan.makers[at][1] if at >= 0 else None


def notes_of(plan: Plan, nodes: Iterable[Node]) -> list[Note]:
    """The FX nodes behind these."""
    notes = plan.graph.notes
    return [notes[number] for number in dict.fromkeys(node.note for node in nodes if 0 <= node.note < len(notes))]


def title(plan: Plan, step: Step) -> str:
    """`MatMulV2+Relu layers.0`: what a step does, and for which module."""
    nodes = nodes_of(plan, step)
    ops = list(dict.fromkeys(node.op for node in nodes)) or [type(step).__name__.removesuffix("Step").lower()]
    shown = "+".join(ops[:4]) + ("+…" if len(ops) > 4 else "")
    modules = [note.module for note in notes_of(plan, nodes) if note.module]
    return f"{shown} {modules[-1]}" if modules else shown
