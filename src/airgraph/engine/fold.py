"""What depends on no argument is computed once, when the graph is loaded: masks and positions made from sizes.

The reference engine does it. Short chains of formulas stay in the loops that read them: an index costs less than memory.
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.engine.protocol import Request
from airgraph.engine.reference import ReferenceNodes
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import OPS, row
from airgraph.ir.types import DataType
from airgraph.passes.cleanup import dead_code

LARGEST = 1 << 18  # bytes of a folded value
SHORTEST = 3  # nodes: less is not worth the memory
SKIPPED = (DataType.DT_BF16, DataType.DT_STRING)  # numpy has no such type


def fold(request: Request) -> int:
    """Replace every value that is constant and read by something that is not. Gives their number."""
    graph = request.graph
    depth: dict[Node, int] = dict.fromkeys(graph.of("Const"), 0)
    for node in graph.nodes:
        if foldable(node, depth):
            depth[node] = 1 + sum(depth[v.node] for v in set(node.values()))
    edge = [
        v
        for node in depth
        if depth[node] >= SHORTEST
        for v in node.outputs
        if any(user not in depth for user in v.users)
    ]
    if edge:
        values = computed(request, depth)
        for value in edge:
            replace(graph, value, values[id(value)])
        dead_code(graph)
    return len(edge)


def computed(request: Request, constant: dict[Node, int]) -> dict[int, Any]:
    """The values of these nodes, by id."""
    reference = ReferenceNodes(request.graph, request.device, request.map_device)
    env: dict[int, Any] = dict(reference.constants)
    for node in constant:
        if node.op != "Const":
            env.update({id(v): r for v, r in zip(node.outputs, reference.step(node)(env, {}))})
    return env


def foldable(node: Node, constant: dict[Node, int]) -> bool:
    op = row(node)
    if op is None or not op.is_pure or node.control or node.op in ("Data", "Const", "NetOutput") or not node.outputs:
        return False
    if not all(v.node in constant for v in node.values()):
        return False
    return all(v.type.is_static and v.dtype not in SKIPPED and size(v) <= LARGEST for v in node.outputs)


def size(value: Value) -> int:
    total = 8
    for d in value.type.shape or ():
        total *= d
    return total


def replace(graph: Graph, value: Value, tensor: torch.Tensor) -> None:
    array = tensor.detach().cpu().contiguous().numpy()
    content = array if array.ndim else array.item()
    with graph.before(value.node):
        node = graph.add("Const", [], {**OPS["Const"].attrs, "value": content}, [value.type], known=value.known)
    graph.replace(value, node.output)
