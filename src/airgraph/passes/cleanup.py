"""Dead code, equal nodes, constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import sympy

from airgraph.ir import ge
from airgraph.ir.graph import Graph, Input, Node, Value
from airgraph.ir.ops import row
from airgraph.passes.liveness import pure, unread
from airgraph.passes.result import PassResult
from airgraph.passes.rewrite import attr_key, constant_number


def dead_code(graph: Graph) -> PassResult:
    """A node nobody reads and that does nothing else goes.

    Shape = ge.Shape(x)          ⟶   (gone)
    y = ge.Mul(x, x)                 y = ge.Mul(x, x)
    """
    gone = unread(graph)
    graph.erase(list(gone))
    return PassResult(bool(gone), [f"dropped {n.name}" for n in gone if n.op != "Const"])


def fulfilled_waits(graph: Graph) -> None:
    """For an engine that runs the nodes in their order: whatever a node waits for is past when its turn comes. One that
    only computes need not say so, and can then be fused like any other. (No pass of the list: dumps show who waits.)

    y = ge.Mul(x, x, dependencies=[a])   ⟶   y = ge.Mul(x, x)
    """
    for node in graph.nodes:
        if pure(node):
            node.control = ()
    dead_code(graph)


def dead_inputs(graph: Graph) -> PassResult:
    """An input nobody reads goes, and the others are renumbered. (The caller still passes it; the program drops it.)"""
    waited_for = {c for node in graph.nodes for c in node.control}
    gone = [node for node in graph.inputs if not node.output.users and node not in waited_for]
    graph.erase(gone)
    if gone:
        for index, node in enumerate(sorted(graph.inputs, key=lambda node: node.attrs["index"])):
            node.attrs["index"] = index
    return PassResult(bool(gone), [f"dropped input {n.name}" for n in gone])


def common_subexpressions(graph: Graph) -> PassResult:
    """Two equal pure nodes are one.

    a = ge.Exp(x); b = ge.Exp(x); ge.Add(a, b)   ⟶   a = ge.Exp(x); ge.Add(a, a)
    """
    seen: dict[tuple[Any, ...], list[Node]] = {}
    merged: list[tuple[Node, Node]] = []
    for node in list(graph.nodes):
        if not pure(node) or node.control or not any(v.users for v in node.outputs):
            continue
        alike = seen.setdefault(key(node), [])
        first = next((other for other in alike if equal(node, other)), None)
        if first is None:
            alike.append(node)
            continue
        for old, new in zip(node.outputs, first.outputs):
            graph.replace(old, new)
        merged.append((node, first))
    return PassResult(bool(merged), [f"{n.name} = {first.name}" for n, first in merged if n.op != "Const"])


def key(node: Node) -> tuple[Any, ...]:
    """Equal nodes have equal keys; that two nodes have one is quickly told, and mostly enough to tell them apart."""
    if node.op == "Const":
        return (attr_key(node.attrs["value"]), node.output.dtype)
    return (node.op, *(tuple(map(id, e)) if isinstance(e, tuple) else id(e) for e in node.inputs))


def equal(a: Node, b: Node) -> bool:
    types = all(v.type == w.type for v, w in zip(a.outputs, b.outputs)) and len(a.outputs) == len(b.outputs)
    return (
        types
        and a.attrs.keys() == b.attrs.keys()
        and all(attr_key(a.attrs[k]) == attr_key(b.attrs[k]) for k in a.attrs)
    )


# Op → which number an input is where the model has no parameter for it.
NEUTRAL = {
    "GroupNorm": {"gamma": 1, "beta": 0},
    "GroupNormV2": {"gamma": 1, "beta": 0},
    "GroupNormGrad": {"gamma": 1},
    "LayerNormGradV3": {"gamma": 1},
    "BNInfer": {"scale": 1, "offset": 0},
    "BatchNormV3": {"weight": 1, "bias": 0},
    "BatchNormGradV3": {"weight": 1},
    "NLLLossGrad": {"weight": 1},
}


def missing_parameters(graph: Graph) -> PassResult:
    """Ones that multiply and zeros that are added are no parameters. PyTorch's kernels round in fewer places without them.

    ge.GroupNorm(x, ge.Fill(4, 1.0), ge.Fill(4, 0.0))   ⟶   ge.GroupNorm(x, None, None)
    """
    notes: list[str] = []
    for node in graph.nodes:
        op = row(node) if node.op in NEUTRAL else None
        if op is None:
            continue
        gone = [name for name, number in NEUTRAL[node.op].items() if is_filled(node.inputs[op.slot(name)], number)]
        if gone:
            inputs = [None if slot.name in gone else entry for slot, entry in zip(op.slots, node.inputs)]
            graph.set_inputs(node, inputs)
            notes.append(f"{node.name} without {', '.join(gone)}")
    return PassResult(bool(notes), notes)


def is_filled(entry: Input, number: int) -> bool:
    if not isinstance(entry, Value) or entry.node.op != "Fill" or entry.node.control:
        return False
    content = entry.node.inputs[1]
    return isinstance(content, Value) and constant_number(content) == number


def constant_folding(graph: Graph) -> PassResult:
    """A size that is a plain number is a constant.

    ge.Gather(ge.Shape(x), 0)   ⟶   4        where x is [4, 8]
    """
    notes: list[str] = []
    with ge.building(graph), graph.editing():
        for node in list(graph.nodes):
            if node.op == "Const" or not pure(node) or node.control or not is_size(node):
                continue
            with graph.before(node):
                made = ge.constant(node.output.known, node.output.dtype, place=node.output.type.place)
            graph.replace(node.output, made)
            notes.append(f"{node.name} = {made.node.attrs['value']}")
    return PassResult(bool(notes), notes)


def is_size(node: Node) -> bool:
    """Its one output is read, and all of it is known."""
    if len(node.outputs) != 1 or not node.output.users or not numeric(node.output.known):
        return False
    return np.shape(node.output.known) == node.output.type.shape


def numeric(known: Any) -> bool:
    if isinstance(known, tuple):
        return all(map(numeric, known))
    return isinstance(known, int) and not isinstance(known, sympy.Basic)
