"""Who is read, and by whom: what a pass may drop, and whom it must count when it asks who else reads a value."""

from __future__ import annotations

from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import row


def pure(node: Node) -> bool:
    op = row(node)
    return op is not None and op.is_pure


def unread(graph: Graph) -> dict[Node, None]:
    """Nodes that do nothing but compute what nobody reads; readers come before what they read."""
    waited_for: set[Node] = set()  # by nodes that stay
    gone: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        if node not in waited_for and gone.keys() >= {u for v in node.outputs for u in v.users} and pure(node):
            gone[node] = None
        else:
            waited_for.update(node.control)
    return gone


class Liveness:
    """The same while a graph is rewritten. What was replaced stays in the graph until `dead_code`, but counts no more."""

    def __init__(self, graph: Graph) -> None:
        self.dead = unread(graph)
        self.waited_for = {c for node in graph.nodes if node not in self.dead for c in node.control}

    def readers(self, value: Value) -> list[Node]:
        return [user for user in value.users if user not in self.dead]

    def is_read(self, node: Node) -> bool:
        for value in node.outputs:
            for user in value.users:
                if user not in self.dead:
                    return True
        return False

    def drop(self, node: Node) -> None:
        """`node` lost a reader; so may have what it reads."""
        rest = [node]
        while rest:
            at = rest.pop()
            if at not in self.dead and at not in self.waited_for and pure(at) and not self.is_read(at):
                self.dead[at] = None
                rest += [value.node for value in at.values()]
