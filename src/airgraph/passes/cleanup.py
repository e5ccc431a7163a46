"""Dead code, equal nodes, constants."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import sympy

from airgraph.ir import ge
from airgraph.ir.graph import Graph, Node
from airgraph.ir.ops import row
from airgraph.passes.result import PassResult


def pure(node: Node) -> bool:
    op = row(node)
    return op is not None and op.is_pure


def dead_code(graph: Graph) -> PassResult:
    """A node nobody reads and that does nothing else goes.

    Shape = ge.Shape(x)          ⟶   (gone)
    y = ge.Mul(x, x)                 y = ge.Mul(x, x)
    """
    waited_for: set[Node] = set()  # by nodes that stay
    gone: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        if pure(node) and node not in waited_for and all(u in gone for v in node.outputs for u in v.users):
            gone[node] = None
        else:
            waited_for.update(node.control)
    graph.erase(list(gone))
    return PassResult(bool(gone), [f"dropped {n.name}" for n in gone if n.op != "Const"])


def dead_inputs(graph: Graph) -> PassResult:
    """An input nobody reads goes, and the others are counted anew. (The caller still passes it; the program drops it.)"""
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
    seen: dict[str, Node] = {}
    merged: list[tuple[Node, Node]] = []
    for node in list(graph.nodes):
        if not pure(node) or node.control or not any(v.users for v in node.outputs):
            continue
        first = seen.setdefault(key(node), node)
        if first is not node:
            for old, new in zip(node.outputs, first.outputs):
                graph.replace(old, new)
            merged.append((node, first))
    return PassResult(bool(merged), [f"{n.name} = {first.name}" for n, first in merged if n.op != "Const"])


def key(node: Node) -> str:
    inputs = [[id(v) for v in e] if isinstance(e, tuple) else id(e) for e in node.inputs]
    types = [str(v.type) for v in node.outputs]
    array = getattr(node.attrs.get("value"), "tobytes", bytes)()
    return json.dumps([node.op, inputs, types, array.hex(), {k: repr(v) for k, v in node.attrs.items()}])


def constant_folding(graph: Graph) -> PassResult:
    """A size that is a plain number is a constant.

    ge.Gather(ge.Shape(x), 0)   ⟶   4        where x is [4, 8]
    """
    notes: list[str] = []
    with ge.building(graph):
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
