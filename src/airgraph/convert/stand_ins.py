"""PyTorch's calls in place of what a user's converter emits without there being a kernel for it.

    dumps show   y = ge.custom_op("MyScale", inputs={"x": x}, …)       what is emitted, as it would be on the chip
    what runs is y = ge.AtenCall([x], target="mylib.scale.default", …)

The graph is made with the one; the other is kept beside it, and takes its place once the dump is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airgraph.ir.graph import Graph, Node, Value


@dataclass(frozen=True)
class CallStandIn:
    """One op of the user's. `call` is not among the graph's nodes yet, although it reads values of the graph."""

    emitted: Sequence[Node]
    call: Sequence[Node]  # the AtenCall, and what is made for it
    results: Sequence[tuple[Value, Value]]  # of what is emitted, and of the call


def take_places(graph: Graph, stand_ins: Sequence[CallStandIn]) -> None:
    """Every call takes the place of what it stands in for: for its readers, and for those that wait for it."""
    for stand_in in stand_ins:
        at = graph.nodes.index(stand_in.emitted[0])
        graph.nodes[at:at] = stand_in.call
        for emitted, result in stand_in.results:
            graph.replace(emitted, result)
            leave_as_it_is(graph, result)
        for node in graph.nodes:
            if any(before in stand_in.emitted for before in node.control):
                waits = (stand_in.call[-1] if before in stand_in.emitted else before for before in node.control)
                node.control = tuple(dict.fromkeys(waits))
        graph.erase(stand_in.emitted)


def leave_as_it_is(graph: Graph, result: Value) -> None:
    """What a graph returns is cast to the type FX says it has; what PyTorch returns, has it."""
    casts = [n for n in result.users if n.op == "Cast" and n.output.dtype == result.dtype]
    for cast in casts:
        if all(reader.op == "NetOutput" for reader in cast.output.users):
            graph.replace(cast.output, result)
            graph.erase([cast])
