"""What must hold of every graph. `verify(graph)` raises on the first thing that does not."""

from __future__ import annotations

from collections.abc import Callable

from airgraph.errors import AirgraphError, VerifyError
from airgraph.ir.graph import Graph, Node
from airgraph.ir.ops import REQUIRED, row, typed
from airgraph.ir.text import call_text, targets
from airgraph.ir.types import TensorType


def verify(graph: Graph, stage: str = "") -> None:
    names: set[str] = set()
    seen: set[Node] = set()
    for node in graph.nodes:
        problem = problem_of(node, names, seen)
        if problem:
            raise VerifyError(problem, where={**({"after": stage} if stage else {}), **place(graph, node)})
        names.add(node.name)
        seen.add(node)
    if graph.nodes and graph.net_output is not graph.nodes[-1]:
        raise VerifyError("NetOutput is not the last node", where={"graph": graph.name})


Rule = Callable[[Node, set[str], set[Node]], str | None]


def problem_of(node: Node, names: set[str], seen: set[Node]) -> str | None:
    """What the first rule that is broken has against a node; a type rule that refuses its inputs says it by raising."""
    try:
        for rule in RULES:
            problem = rule(node, names, seen)
            if problem:
                return problem
    except AirgraphError as error:
        return error.what
    return None


def place(graph: Graph, node: Node) -> dict[str, str]:
    """The graph line and the user's line of a node, for errors."""
    try:
        where = {"graph": f"{targets(node)} = {call_text(node)}"}
    except (KeyError, IndexError):  # it lacks what a line is made of
        where = {"graph": f"{node.name} = {node.op}"}
    if 0 <= node.note < len(graph.notes) and graph.notes[node.note].file:
        where["from"] = str(graph.notes[node.note].file)
    return where


def unique_name(node: Node, names: set[str], seen: set[Node]) -> str | None:
    return f"two nodes are called {node.name!r}" if node.name in names else None


def reads_earlier(node: Node, names: set[str], seen: set[Node]) -> str | None:
    """The order of the list is an order of execution."""
    for value in node.values():
        if value.node not in seen:
            return f"{node.name} reads {value.tensor}, which is not computed before it"
        if node not in value.users:
            return f"{value.tensor} does not know that {node.name} reads it"
    late = [c.name for c in node.control if c not in seen]
    return f"{node.name} waits for {late[0]}, which does not run before it" if late else None


def readers_read(node: Node, names: set[str], seen: set[Node]) -> str | None:
    """Who is on the list of readers reads; passes go by that list."""
    for value in node.outputs:
        for user in value.users:
            if all(v is not value for v in user.values()):
                return f"{value.tensor} lists {user.name} as a reader, which does not read it"
    return None


def known_attributes(node: Node, names: set[str], seen: set[Node]) -> str | None:
    op = row(node)
    if op is None:
        return None if "output_names" in node.attrs else f"there is no op {node.op!r} in the table"
    extra = [name for name in node.attrs if name not in op.attrs]
    if extra:
        return f"{node.op} has no attribute {extra[0]!r}"
    missing = [name for name, default in op.attrs.items() if default is REQUIRED and name not in node.attrs]
    return f"{node.op} needs the attribute {missing[0]!r}" if missing else None


def inputs_fit(node: Node, names: set[str], seen: set[Node]) -> str | None:
    op = row(node)
    if op is None:
        return None
    if len(node.inputs) != len(op.slots):
        return f"{node.op} takes {len(op.slots)} inputs, this one has {len(node.inputs)}"
    for slot, entry in zip(op.slots, node.inputs):
        if isinstance(entry, tuple) != slot.dynamic or (entry is None and not slot.optional):
            return f"input {slot.name!r} of {node.op} is {entry!r}"
    return None


def types_follow(node: Node, names: set[str], seen: set[Node]) -> str | None:
    """The type rule of the op gives the types the outputs carry."""
    op = row(node)
    if op is None or op.infer is None:
        return None
    expected = op.infer(typed(op, node.inputs, node.attrs))
    if len(expected) != len(node.outputs):
        return f"{node.op} has {len(expected)} outputs, this one has {len(node.outputs)}"
    for value, wanted in zip(node.outputs, expected):
        if not agree(value.type, wanted):
            return f"{value.tensor} is {value.type}, but its inputs make it {wanted}"
    return None


def agree(a: TensorType, b: TensorType) -> bool:
    """Equal where both are known. Two different symbolic sizes may be equal: PyTorch's guards decide that, not we."""
    if a.dtype != b.dtype:
        return False
    if a.shape is None or b.shape is None:
        return True
    if len(a.shape) != len(b.shape):
        return False
    return all(x == y or not (isinstance(x, int) and isinstance(y, int)) for x, y in zip(a.shape, b.shape))


RULES: tuple[Rule, ...] = (unique_name, reads_earlier, readers_read, known_attributes, inputs_fit, types_follow)
