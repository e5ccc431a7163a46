"""Rewrite rules: a pattern, what replaces it, and a reason when it does not apply.

    # Transpose(Transpose(x, p), q) → Transpose(x, p∘q)
    Rule("compose_transposes", P("Transpose", P("Transpose", X, "p"), "q"), compose)

A pattern names an op and its inputs; a string binds whatever value stands there, under that name. The replacement gets
what was bound and the matched node; it gives back the new value, None where there is nothing to do, or `no("reason")`
where something stands in the way that a reader of the journal would want to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from airgraph.ir import ge
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import row


@dataclass(frozen=True)
class P:
    """An op with these inputs; further inputs of the node may be anything."""

    op: str | tuple[str, ...]
    inputs: tuple[Any, ...]

    def __init__(self, op: str | tuple[str, ...], *inputs: Any) -> None:
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "inputs", inputs)


@dataclass(frozen=True)
class No:
    reason: str


def no(reason: str, *about: Any) -> No:
    return No(f"{reason}: {', '.join(map(str, about))}" if about else reason)


@dataclass(frozen=True)
class Rule:
    name: str
    pattern: P
    replace: Callable[..., Value | No | None]


def match(pattern: P, node: Node, bound: dict[str, Value] | None = None) -> dict[str, Value] | None:
    """The bindings, or None. A node that waits for another is never part of a match: the waiting would be lost."""
    ops = (pattern.op,) if isinstance(pattern.op, str) else pattern.op
    if node.op not in ops or node.control or row(node) is None or len(node.inputs) < len(pattern.inputs):
        return None
    bound = {} if bound is None else bound
    for wanted, entry in zip(pattern.inputs, node.inputs):
        if not isinstance(entry, Value):
            return None
        if isinstance(wanted, P):
            if entry.index or match(wanted, entry.node, bound) is None:
                return None
        elif bound.setdefault(wanted, entry) is not entry:
            return None
    return bound


def apply(graph: Graph, rules: Sequence[Rule]) -> tuple[int, list[str]]:
    """Every rule wherever it fits, until none does. Gives the number of rewrites and a note for each and each refusal."""
    notes: list[str] = []
    count = 0
    queue = list(graph.nodes)
    with ge.building(graph):
        while queue:
            node = queue.pop(0)
            for rule in rules:
                new = attempt(graph, rule, node, notes)
                if new is not None:
                    count += 1
                    queue += [new.node, *new.users]
                    break
    return count, list(dict.fromkeys(notes))  # a refused node is looked at again when its neighbours change


def attempt(graph: Graph, rule: Rule, node: Node, notes: list[str]) -> Value | None:
    if not node.outputs or not node.output.users:
        return None
    bound = match(rule.pattern, node)
    if bound is None:
        return None
    there = {v.node for v in bound.values()}
    with graph.before(node):
        new = rule.replace(node=node, **bound)
    if new is None:
        return None
    if isinstance(new, No):
        notes.append(f"{rule.name} refused {node.name}: {new.reason}")
        return None
    graph.replace(node.output, new)
    if new.node in there:
        notes.append(f"{rule.name}: {node.name} → {new.node.name}")
        return new
    new.type, new.known = node.output.type, node.output.known  # FX's symbols, not those a type rule would choose
    if new.node.op == node.op:
        node.name, new.node.name = new.node.name, node.name  # what was `MatMul` stays `MatMul`
    notes.append(f"{rule.name}: {new.node.name}")
    return new
