"""The part of a graph that running its plan takes, and how it is kept.

    part = running_graph(plan, boundary)             inputs, calls into PyTorch with what they read, results
    data, arrays = write_graph(part, writer)         JSON, and the bytes of its constants
    graph = read_graph(data, arrays, reader)         the same part again, checked

The other nodes are fused into loops, and the plan says what those compute. Of the graph only their results are needed,
where a call or the caller reads them: for these there is a node `Computed` without inputs, which has the name of the node
that computes it. The part of a part is that part.

A GraphDef (ir/stored.py) of the whole graph takes seven times as long to read: 14.0 ms instead of 1.9 for a Llama of four
layers with dynamic sizes, of whose 298 nodes 118 stay. The checks are the same: ops are those of the table, what a node
reads is computed before it, and attributes are values of the kinds that ir/exact.py lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from airgraph.errors import AirgraphError, VerifyError
from airgraph.ir.boundary import Boundary, NumberIn
from airgraph.ir.exact import PLAIN, DataReader, DataWriter, checked_numbers, shown
from airgraph.ir.ge import nested_tuple
from airgraph.ir.graph import Graph, Input, Node, Note, Value
from airgraph.ir.ops import OPS
from airgraph.ir.ops.table import refuse_text
from airgraph.ir.proto import raw_bytes
from airgraph.ir.stored import array_of
from airgraph.ir.symbols import symbols_in
from airgraph.ir.types import DataType, TensorType
from airgraph.plan.steps import CallStep, Plan

COMPUTED = "Computed"
SIGNATURE = ("input_names", "output_names")  # of an op that is not in the table
MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


# -- choosing -------------------------------------------------------------------------------------------------------
def running_graph(plan: Plan, boundary: Boundary) -> Graph:
    """A graph of its own: the nodes that are needed, in their order, each behind the results of loops that it reads."""
    graph, kept = plan.graph, needed_nodes(plan, boundary)
    part, copies, notes = Graph(graph.name), dict[Value, Value](), dict[int, int]()

    def add(node: Node, op: str, inputs: list[Input], attrs: dict[str, Any]) -> None:
        control = [part.node(n.name) for n in node.control if n in kept]
        new = part.add(op, inputs, attrs, [v.type for v in node.outputs], control=control, name=node.name)
        new.note = notes.get(node.note, -1)
        for old, copy in zip(node.outputs, new.outputs):
            copy.known = old.known
            copies[old] = copy

    for node in graph.nodes:
        if node not in kept:
            continue
        for value in node.values():
            if value not in copies:
                names = tuple(f"y{i}" for i in range(len(value.node.outputs)))
                add(value.node, COMPUTED, [], {"input_names": (), "output_names": names})
        if 0 <= node.note < len(graph.notes) and node.note not in notes:
            notes[node.note] = len(part.notes)
            part.notes.append(graph.notes[node.note])
        add(node, node.op, [mapped(entry, copies) for entry in node.inputs], node.attrs)
    part.names = {n.name: graph.names[n.name] for n in part.inputs if n.name in graph.names}
    return part


def mapped(entry: Input, copies: dict[Value, Value]) -> Input:
    if isinstance(entry, tuple):
        return tuple([copies[v] for v in entry])
    return None if entry is None else copies[entry]


def needed_nodes(plan: Plan, boundary: Boundary) -> set[Node]:
    called = {step.node for step in plan.steps if isinstance(step, CallStep)}
    numbers, symbols = free_numbers(plan.graph, boundary)
    found = called | {user for node in numbers for user in node.output.users}
    for node in plan.graph.nodes:
        if node.op in ("Data", "NetOutput", "AtenCall") or mentions(node, symbols):
            found.add(node)
    found |= {p.source.node for p in plan.allocations.values() if p.kind in ("const", "call")}
    return found | {v.node for n in found for v in n.values() if v.node.op == "Const"}


def free_numbers(graph: Graph, boundary: Boundary) -> tuple[list[Node], set[Any]]:
    """Numbers among the arguments that are no size of another one, and their symbols: what reads them decides whether a
    program is captured again for each of their values (runtime/numbers.py)."""
    sizes = symbols_in([node.output.type.shape for node in graph.inputs])
    exprs = {a.name: a.expr for a in boundary.arguments if isinstance(a, NumberIn)}
    free = {name: symbols for name, expr in exprs.items() if not (symbols := symbols_in([expr])) or symbols - sizes}
    return [node for node in graph.inputs if node.name in free], set().union(*free.values()) - sizes


def mentions(node: Node, symbols: set[Any]) -> bool:
    """Its sizes, or numbers that it reads or gives, depend on one of them."""
    if not symbols:
        return False
    values = [*node.values(), *node.outputs]
    every = [*(v.known for v in values), *(v.type.shape for v in node.outputs), node.attrs.get("strides")]
    return not symbols.isdisjoint(symbols_in(every))


# -- writing --------------------------------------------------------------------------------------------------------
def write_graph(graph: Graph, writer: DataWriter) -> tuple[dict[str, Any], bytes]:
    """What JSON holds, and the bytes of constants one after the other. Symbols go into the writer's table."""
    numbers: dict[Value, int] = {}
    places: dict[Node, int] = {}
    types: dict[TensorType, int] = {}
    arrays = bytearray()
    rows = []
    for node in graph.nodes:
        given = [numbered(entry, numbers) for entry in node.inputs]
        outputs = [types.setdefault(v.type, len(types)) for v in node.outputs]
        row: list[Any] = [node.op, node.name, given, write_attrs(node, writer, arrays), outputs, node.note]
        known = [None if node.op == "Const" else writer.data(v.known) for v in node.outputs]
        if node.control or any(k is not None for k in known):
            row += [known, [places[n] for n in node.control]]
        rows.append(row)
        places[node] = len(places)
        for v in node.outputs:
            numbers[v] = len(numbers)
    sizes = [None if t.shape is None else [writer.data(d) for d in t.shape] for t in types]
    return {
        "name": graph.name,
        "types": [[int(t.dtype), t.place, shape] for t, shape in zip(types, sizes)],
        "notes": [[note.file, note.code, note.module] for note in graph.notes],
        "nodes": rows,
        "names": graph.names,
    }, bytes(arrays)


def numbered(entry: Input, numbers: dict[Value, int]) -> Any:
    if isinstance(entry, tuple):
        return [numbers[v] for v in entry]
    return None if entry is None else numbers[entry]


def write_attrs(node: Node, writer: DataWriter, arrays: bytearray) -> dict[str, Any]:
    found = {}
    for name, value in node.attrs.items():
        if node.op == "Const" and isinstance(value, np.ndarray):
            data = raw_bytes(value, node.output.dtype)
            found[name] = {"bytes": [len(arrays), len(data)]}
            arrays += data
        else:
            found[name] = writer.data(value)
    return found


# -- reading --------------------------------------------------------------------------------------------------------
def read_graph(data: Any, arrays: bytes, reader: DataReader) -> Graph:
    """What `write_graph` wrote, checked. An error names the op."""
    try:
        rows = data["nodes"]
        graph = GraphReader(data, arrays, reader)
    except MALFORMED as error:
        raise VerifyError(f"a graph is not described as it should be: {error!r}") from error
    for row in rows:
        try:
            graph.add(*row)
        except AirgraphError as error:
            raise VerifyError(error.what, where={**place_of(row), **error.where}, hint=error.hint) from error
        except MALFORMED as error:
            # What JSON holds may have any shape: what does not have the expected one ends here.
            raise VerifyError(f"an op is not described as it should be: {error!r}", where=place_of(row)) from error
    return graph.graph


def place_of(row: Any) -> dict[str, str]:
    op, name = row[:2] if isinstance(row, list) and len(row) > 1 else ("?", "?")
    return {"op": f"{shown(name)[1:-1]} ({shown(op)[1:-1]})"}


class GraphReader:
    """Adds one node after the other."""

    def __init__(self, data: Any, arrays: bytes, reader: DataReader) -> None:
        self.reader, self.arrays = reader, arrays
        self.graph = Graph(str(data["name"]))
        self.graph.names = {text(k): text(v) for k, v in data["names"].items()}
        self.graph.notes = [Note(None if f is None else text(f), text(c), text(m)) for f, c, m in data["notes"]]
        self.types = [self.type(*row) for row in data["types"]]
        self.values: list[Value] = []

    def type(self, number: int, place: Any, shape: Any) -> TensorType:
        if place not in ("CPU", "NPU"):
            raise VerifyError(f"the place of an output is {shown(place)}, not CPU or NPU")
        if shape is None:
            return TensorType(DataType(number), None, place)
        sizes = tuple([self.reader.size(d) for d in shape])
        if any(isinstance(s, int) and s < 0 for s in sizes):
            raise VerifyError(f"the shape of an output is {shown(shape)}")
        return TensorType(DataType(number), sizes, place)

    def add(
        self, op: str, name: str, given: Any, attrs: Any, outputs: Any, note: int, known: Any = (), control: Any = ()
    ) -> None:
        graph, types = self.graph, [self.types[whole(i)] for i in outputs]
        inputs = [self.input(entry) for entry in given]
        found = self.attrs(op, attrs, types)
        check_op(text(op), inputs, found)
        waits = [graph.nodes[whole(i)] for i in control]
        node = graph.add(op, inputs, found, types, control=waits, name=text(name))
        node.note = note if type(note) is int and 0 <= note < len(graph.notes) else -1
        self.values += node.outputs
        if op == "Const":
            value = found["value"]
            plain = isinstance(value, np.ndarray) or not types[0].dtype.is_int
            node.output.known = None if plain else nested_tuple(value)
        for output, data in zip(node.outputs, known):
            output.known = self.reader.known(data) if op != "Const" else output.known

    def input(self, entry: Any) -> Input:
        if isinstance(entry, list):
            return tuple([self.values[whole(i)] for i in entry])
        return None if entry is None else self.values[whole(entry)]

    def attrs(self, op: str, attrs: Any, types: list[TensorType]) -> dict[str, Any]:
        if op == "Const":
            return self.constant(attrs, *types)
        value = self.reader.value
        found = {name: data if type(data) in PLAIN else value(data) for name, data in attrs.items()}
        custom = "output_names" in found
        refuse_text(op, {name: data for name, data in found.items() if name not in SIGNATURE} if custom else found)
        if op == "AtenCall":
            checked_numbers(found.get("strides"), (list, tuple))
        return found

    def constant(self, attrs: Any, type_: TensorType) -> dict[str, Any]:
        given = attrs["value"]
        if isinstance(given, dict) and "bytes" in given:
            start, size = map(whole, given["bytes"])
            value: Any = array_of(type_.dtype, type_.shape or (), self.arrays[start : start + size])
        else:
            value = self.reader.value(given)
            if type_.dtype != DataType.DT_STRING:
                checked_numbers(value, list)
        if np.shape(value) != type_.shape:
            raise VerifyError("its value has another type than its output")
        return {name: value if name == "value" else bool(data) for name, data in attrs.items()}


def check_op(op: str, inputs: list[Input], attrs: dict[str, Any]) -> None:
    row = OPS.get(op)
    if "output_names" in attrs:
        if row is not None and row.infer is None:
            raise VerifyError(f"{op} has inputs and outputs of its own, and this one brings others")
        return
    if row is None:
        raise VerifyError(f"there is no op {shown(op)} in the table", hint="a newer airgraph may know it")
    if len(inputs) != len(row.slots):
        raise VerifyError(f"it has {len(inputs)} inputs, which is not what {op} takes")
    if row.takes_lists and any(isinstance(e, tuple) != s.dynamic for e, s in zip(inputs, row.slots)):
        raise VerifyError(f"one of a list of inputs is missing, or is no input that {op} has")
    if not row.takes_lists and any(isinstance(e, tuple) for e in inputs):
        raise VerifyError(f"it has a list of inputs, which is not what {op} takes")


def whole(number: Any) -> int:
    """A number that counts something: from the end nothing is counted."""
    if type(number) is not int or number < 0:
        raise VerifyError(f"{shown(number)} is no number of anything")
    return number


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise VerifyError(f"{shown(value)} is no text")
    return value
