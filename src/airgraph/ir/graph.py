"""The graph: nodes in execution order, each with inputs, attributes and outputs.

    Graph ── Node ── Value : TensorType
    node.inputs : one entry for each input of the op: Value | None (optional, not given) | tuple of Values (dynamic)
    node.control: nodes that must have run before, without handing over a value
    node.marks  : what the scope it was made in says of it, for the hardware: `_user_stream_label` and the like
    value.known : the value itself where it is known when compiling: a number, a symbolic expression, or nested tuples
                  of them. Shapes flow through the graph this way, so that nothing has to be run to know a size.

The order of `graph.nodes` is a valid order of execution; passes keep it so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from airgraph.errors import VerifyError
from airgraph.ir.types import DataType, Dim, TensorType


class Value:
    """One output of a node."""

    __slots__ = ("dense", "index", "known", "node", "type", "users")

    def __init__(self, node: Node, index: int, type: TensorType, known: Any = None) -> None:
        self.node = node
        self.index = index
        self.type = type
        self.known = known
        self.dense = False  # while converting: FX lays this value out contiguously (strides are no matter of the graph)
        self.users: dict[Node, None] = {}  # in the order they came; kept by Graph

    @property
    def tensor(self) -> str:
        """The name GE uses for an edge: `Mul_1:0`."""
        return f"{self.node.name}:{self.index}"

    @property
    def variable(self) -> str:
        """The name dumps use: `Mul_1_0`; always a name of Python's, whatever the node is called."""
        word = re.sub(r"\W", "_", self.tensor)
        return f"_{word}" if word[0].isdigit() else word

    @property
    def dtype(self) -> DataType:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return -1 if self.type.shape is None else len(self.type.shape)

    @property
    def symsize(self) -> tuple[Dim, ...] | None:
        return self.type.shape

    def __repr__(self) -> str:
        return f"Tensor({self.tensor}, dtype={self.dtype.name}, size={self.type.printed_shape()})"


Input = Value | None | tuple[Value, ...]
UNMARKED = ("Data", "Const", "NetOutput")
STREAM = "_user_stream_label"  # the mark of the stream that a node runs on


@dataclass(frozen=True)
class Note:
    """The FX node something was made from: the user's line (None where unknown) and the FX code, as dumps print them, and
    the path of the module it belongs to."""

    file: str | None
    code: str
    module: str = ""

    @property
    def fx_name(self) -> str:
        """`mul_8` of `mul_8: torch.float32[2]cpu = …`, `split` of `split = …`."""
        return self.code.split(" ", 1)[0].rstrip(":")


@dataclass(eq=False)
class Node:
    """One op of a graph: what it reads (`inputs`, by the slots of the op table), its attributes, and its results."""

    op: str
    name: str
    inputs: tuple[Input, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Value, ...] = ()
    control: tuple[Node, ...] = ()
    note: int = -1  # index into graph.notes of the FX node that was being converted; -1: none
    marks: dict[str, Any] = field(default_factory=dict)

    def values(self) -> Iterator[Value]:
        """Every value this node reads."""
        for entry in self.inputs:
            if isinstance(entry, tuple):
                yield from entry
            elif entry is not None:
                yield entry

    @property
    def output(self) -> Value:
        return self.outputs[0]

    def __repr__(self) -> str:
        return f"{self.op}({self.name})"


def stream_of(node: Node) -> Any:
    return node.marks.get(STREAM)


class Graph:
    """Nodes in order, names that are unique, and the notes that say where each came from."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.notes: list[Note] = []
        self.names: dict[str, str] = {}  # what users call an input: `layers.0.weight`, by the name of its Data node
        self.ref_data: set[str] = set()  # names of Data nodes that dumps show as RefData: they are written to
        self.marks: dict[str, Any] = {}  # what new nodes are marked with; constants and inputs belong to no scope
        self.waits: list[Node] = []  # what the next new node waits for
        self.results_wanted = 1  # how many values the converter at work has to give
        self.modules: dict[str, Any] = {}  # sub-graphs and other objects AtenCall nodes hand to their op, by name
        self._names: set[str] = set()
        self._counts: dict[str, int] = {}
        self._at: Node | None = None
        self._ahead: dict[Node, list[Node]] = {}  # new nodes that are to stand before this one
        self._edits = 0

    # -- building ---------------------------------------------------------------------------------------------------
    def unique_name(self, op: str) -> str:
        """`Mul`, then `Mul_1`, `Mul_2`, … past any name that is taken."""
        while True:
            count = self._counts.get(op, 0)
            self._counts[op] = count + 1
            name = f"{op}_{count}" if count else op
            if name not in self._names:
                return name

    def claim(self, name: str) -> str:
        if not name.strip():
            raise VerifyError(f"empty node name {name!r} is not allowed", where={"graph": self.name})
        if name in self._names:
            raise VerifyError(f"duplicated node name {name!r} is not allowed", where={"graph": self.name})
        return name

    def add(
        self,
        op: str,
        inputs: Sequence[Input],
        attrs: dict[str, Any],
        types: Sequence[TensorType],
        *,
        known: Any = None,
        control: Sequence[Node] = (),
        name: str | None = None,
        marks: Mapping[str, Any] | None = None,
    ) -> Node:
        name = self.unique_name(op) if name is None else self.claim(name)
        node = Node(op, name, tuple(inputs), attrs, control=tuple(control))
        self._names.add(node.name)
        for value in node.values():
            value.users[node] = None
        node.outputs = tuple([Value(node, i, t) for i, t in enumerate(types)])
        if known is not None:
            node.output.known = known
        if self._at is None:
            node.note = len(self.notes) - 1
            if node.op not in UNMARKED:
                self._take_marks(node)
            self.nodes.append(node)
        else:
            node.note = self._at.note
            if node.op not in UNMARKED:
                node.marks = dict(self._at.marks)
            self._ahead.setdefault(self._at, []).append(node)
        if marks:
            node.marks |= marks
        return node

    def _take_marks(self, node: Node) -> None:
        node.marks = dict(self.marks)
        if self.waits:
            node.control = tuple(dict.fromkeys((*node.control, *self.waits)))
            self.waits = []

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """New nodes go right before `node`."""
        outer = self.stand_before(node)
        try:
            with self.editing():
                yield
        finally:
            self.stand_before(outer)

    def stand_before(self, node: Node | None) -> Node | None:
        """From now on new nodes go right before `node`, or at the end; returns where they went so far."""
        outer, self._at = self._at, node
        return outer

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Many `before`s: the new nodes take their places in `nodes` together, at the end, in one go over the list."""
        self._edits += 1
        try:
            yield
        finally:
            self._edits -= 1
            if self._ahead and not self._edits:
                self._settle()

    def _settle(self) -> None:
        order: list[Node] = []
        rest = self.nodes[::-1]
        while rest:
            ahead = self._ahead.pop(rest[-1], None)  # these may have others ahead of them in turn
            if ahead:
                rest += reversed(ahead)
            else:
                order.append(rest.pop())
        self.nodes = order

    # -- reading ----------------------------------------------------------------------------------------------------
    def of(self, op: str) -> list[Node]:
        return [node for node in self.nodes if node.op == op]

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise VerifyError(f"there is no node {name!r}", where={"graph": self.name})

    @property
    def inputs(self) -> list[Node]:
        return self.of("Data")

    @property
    def net_output(self) -> Node:
        found = self.of("NetOutput")
        if len(found) != 1:
            raise VerifyError(f"a graph has one NetOutput, this one has {len(found)}", where={"graph": self.name})
        return found[0]

    @property
    def is_static(self) -> bool:
        """All input shapes are fixed. (A symbolic scalar has shape [] and leaves a graph static.)"""
        return all(node.output.type.is_static for node in self.inputs)

    # -- changing ---------------------------------------------------------------------------------------------------
    def replace(self, old: Value, new: Value) -> None:
        """Every reader of `old` reads `new`."""

        def swap(entry: Input) -> Input:
            if isinstance(entry, tuple):
                return tuple(new if v is old else v for v in entry)
            return new if entry is old else entry

        for node in list(old.users):
            self.set_inputs(node, [swap(entry) for entry in node.inputs])

    def set_inputs(self, node: Node, inputs: Sequence[Input]) -> None:
        for value in node.values():
            value.users.pop(node, None)
        node.inputs = tuple(inputs)
        for value in node.values():
            value.users[node] = None

    def erase(self, nodes: Sequence[Node]) -> None:
        """Nodes nobody reads any more; waiting for one of them becomes waiting for what it waited for."""
        gone = set(nodes)

        def waits(control: Sequence[Node]) -> Iterator[Node]:
            for node in control:
                yield from waits(node.control) if node in gone else (node,)

        for node in self.nodes:
            if any(c in gone for c in node.control):
                node.control = tuple(dict.fromkeys(waits(node.control)))
        for node in nodes:
            self.set_inputs(node, ())
        self.nodes = [node for node in self.nodes if node not in gone]
        self._names -= {node.name for node in nodes}
