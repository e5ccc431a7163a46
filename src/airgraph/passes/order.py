"""The order in which the nodes of a graph run, as GE's strategies have it.

    BFS    breadth first: of the nodes that may run, the one that became ready first
    DFS    depth first: of the nodes that may run, the one that became ready last
    RDFS   depth first from the results: what a result needs, right before it

Two things hold in every order. Nodes that act on the world, or that may (a call into PyTorch draws random numbers, or
talks to other processes), keep theirs; and a node runs after those it waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from airgraph.ir.graph import UNMARKED, Graph, Node
from airgraph.ir.ops import row

Sort = Callable[[Sequence[Node], Mapping[Node, Sequence[Node]]], Iterator[Node]]


def reorder(graph: Graph, strategy: str) -> None:
    """Inputs and constants first, in their order; then the others in the order of the strategy."""
    sort = STRATEGIES.get(strategy)
    if sort is None:
        return
    first = [node for node in graph.nodes if node.op in UNMARKED and node.op != "NetOutput"]
    rest = [node for node in graph.nodes if node.op not in UNMARKED]
    graph.nodes = [*first, *sort(rest, needs(rest)), graph.net_output]


def needs(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """What each node waits for, among these."""
    known = set(nodes)
    found: dict[Node, list[Node]] = {}
    acting: Node | None = None
    for node in nodes:
        before = [*(value.node for value in node.values()), *node.control]
        if acts(node):
            before += [acting] if acting is not None else []
            acting = node
        found[node] = [other for other in dict.fromkeys(before) if other in known]
    return found


def acts(node: Node) -> bool:
    op = row(node)
    return op is None or not op.is_pure or node.op == "AtenCall"


def forwards(nodes: Sequence[Node], needed: Mapping[Node, Sequence[Node]], newest_first: bool) -> Iterator[Node]:
    open_ends = {node: len(needed[node]) for node in nodes}
    readers: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for before in needed[node]:
            readers[before].append(node)
    ready = deque(node for node in nodes if not open_ends[node])
    while ready:
        node = ready.popleft()
        yield node
        for reader in readers[node]:
            open_ends[reader] -= 1
        freed = [reader for reader in readers[node] if not open_ends[reader]]
        if newest_first:
            ready.extendleft(reversed(freed))
        else:
            ready.extend(freed)


def breadth_first(nodes: Sequence[Node], needed: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    return forwards(nodes, needed, newest_first=False)


def depth_first(nodes: Sequence[Node], needed: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    return forwards(nodes, needed, newest_first=True)


def from_results(nodes: Sequence[Node], needed: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    read = {before for node in nodes for before in needed[node]}
    stack = [node for node in reversed(nodes) if node not in read]
    seen: set[Node] = set()
    while stack:
        node = stack[-1]
        missing = [before for before in needed[node] if before not in seen]
        if missing:
            stack.append(missing[0])
            continue
        stack.pop()
        if node not in seen:
            seen.add(node)
            yield node


STRATEGIES: dict[str, Sort] = {"BFS": breadth_first, "DFS": depth_first, "RDFS": from_results}
