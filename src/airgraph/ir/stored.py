"""A graph as a GraphDef that can be read back exactly.

    message = write_graph(graph, writer)      what `to_proto` makes of it, and an attribute `_airgraph` on some ops
    graph = read_graph(message, reader)       the same graph again

GE's fields hold most of a graph. What they have no place for is in `_airgraph`, as JSON: symbolic sizes (-1 to GE), an
attribute of type double (float to GE), the digits of a constant (rounded to its type for GE), which values are known.
Only that: everything else is read from GE's own fields. What is read is checked as a graph made here would be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from airgraph.errors import AirgraphError, VerifyError
from airgraph.ir.attr import KINDS
from airgraph.ir.exact import DataReader, DataWriter, checked_numbers, shown
from airgraph.ir.ge import nested_tuple
from airgraph.ir.graph import Graph, Input, Node, Note, Value
from airgraph.ir.ops import OPS, REQUIRED, Op
from airgraph.ir.ops.table import refuse_text
from airgraph.ir.proto import BITS, BYTES, DTYPES, LIST_LISTS, raw_bytes, to_proto
from airgraph.ir.types import DataType, Dim, TensorType
from airgraph.ir.verify import verify

EXTRA = "_airgraph"
OURS = {
    "_input_name_key",
    "_input_name_value",
    "_output_name_key",
    "_output_name_value",
    "_fx_code",
    "_source",
    "_source_name",
    "_module",
    "_readable_value",
    EXTRA,
}
LIST_FIELDS = ("", "s", "i", "f", "b", "", "", "", "", "", "dt")  # of AttrDef.ListValue, by ListValueType
ATTR_OF_KIND = {kind.ge_kind: kind for kind in KINDS.values()}


# -- writing --------------------------------------------------------------------------------------------------------
def write_graph(graph: Graph, writer: DataWriter) -> Any:
    """A ge.proto.GraphDef. The symbols of the graph go into the writer's table, which must be kept beside it."""
    message = to_proto(graph)
    for op, node in zip(message.op, graph.nodes):
        put_extra(op, {key: value for key, value in extra_of(op, node, writer).items() if value})
    return message


def put_extra(op: Any, extra: dict[str, Any]) -> None:
    if extra:
        op.attr[EXTRA].s = json.dumps({**read_extra(op), **extra}, ensure_ascii=False).encode()


def extra_of(op: Any, node: Node, writer: DataWriter) -> dict[str, Any]:
    types = [v.type for v in node.outputs]
    shapes = [[writer.data(d) for d in t.shape] if t.shape is not None and not t.is_static else None for t in types]
    known = [None if node.op == "Const" else writer.data(v.known) for v in node.outputs]
    extra: dict[str, Any] = {
        "shapes": shapes if any(s is not None for s in shapes) else None,
        "known": known if any(k is not None for k in known) else None,
    }
    if node.op == "Const":
        value = node.attrs["value"]
        extra["number"] = None if isinstance(value, np.ndarray) else [writer.data(value)]
        return {**extra, "literal": node.attrs.get("literal", False)}
    if "output_names" in node.attrs:
        signature = {key: writer.data(node.attrs[key]) for key in ("input_names", "output_names")}
        counts = [len(entry) if isinstance(entry, tuple) else None for entry in node.inputs]
        extra |= {"custom": {**signature, "counts": counts}}
    return {**extra, **attribute_extra(op, node, writer)}


def attribute_extra(op: Any, node: Node, writer: DataWriter) -> dict[str, Any]:
    """Attributes that GE's fields would return otherwise than they are, and those that only look not given."""
    custom = "output_names" in node.attrs
    row = None if custom else OPS[node.op]
    again = read_attrs(op, row, {})
    given = {k: v for k, v in node.attrs.items() if not custom or k not in ("input_names", "output_names")}
    exact = {name: value for name, value in given.items() if name not in again or not same(again[name], value)}
    absent = [name for name in again if name not in given]
    found = [*(name for name in again if name in given), *(name for name in exact if name not in again)]
    return {
        "exact": {name: writer.data(value) for name, value in exact.items()},
        "absent": absent,
        "order": list(given) if found != list(given) else None,
    }


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same kind: 1, 1.0 and True are not the same attribute."""
    if type(a) is type(b) and type(a) in (bool, int, str):
        return bool(a == b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return isinstance(a, list) == isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    numbers = [bool, float]
    return [isinstance(a, n) for n in numbers] == [isinstance(b, n) for n in numbers] and bool(a == b)


# -- reading --------------------------------------------------------------------------------------------------------
def read_graph(message: Any, reader: DataReader) -> Graph:
    """The graph of a GraphDef that `write_graph` made, checked. An error names the op."""
    graph = Graph(message.name or "graph")
    values: dict[str, Value] = {}
    types: dict[tuple[Any, ...], TensorType] = {}
    for op in message.op:
        try:
            node = add_node(graph, op, values, types, reader)
        except AirgraphError as error:
            raise VerifyError(error.what, where={**place_of(op), **error.where}, hint=error.hint) from error
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            # What JSON holds may have any shape: what does not have the expected one ends here.
            raise VerifyError(f"an op is not described as it should be: {error!r}", where=place_of(op)) from error
        for v in node.outputs:
            values[v.tensor] = v
    return graph


def checked(graph: Graph) -> Graph:
    """Type rules expect attributes of the types converters give them; a file may hold others."""
    try:
        verify(graph, "reading")
    except AirgraphError:
        raise
    except Exception as error:
        raise VerifyError(f"an op has an attribute it cannot have: {error!r}", where={"graph": graph.name}) from error
    return graph


def place_of(op: Any) -> dict[str, str]:
    return {"op": f"{shown(op.name)[1:-1]} ({shown(op.type)[1:-1]})"}


def add_node(
    graph: Graph, op: Any, values: dict[str, Value], types: dict[tuple[Any, ...], TensorType], reader: DataReader
) -> Node:
    """`values`: of the ops before it, by their names; `types`: those that were read, by their fields."""
    extra, kind = read_extra(op), op.type
    row = None if "custom" in extra else OPS.get(kind)
    if row is None and "custom" not in extra:
        raise VerifyError(f"there is no op {shown(kind)} in the table", hint="a newer airgraph may know it")
    if row is None and kind in OPS and OPS[kind].infer is None:
        raise VerifyError(f"{kind} has inputs and outputs of its own, and this one brings others")
    edges, waits = edges_of(op, values, graph)
    attrs = read_const(op, extra, reader) if kind == "Const" else attrs_of(op, row, extra, reader)
    made = [read_type(desc, shape, types, reader) for desc, shape in zip(op.output_desc, shapes_of(op, extra))]
    take_note(graph, op)
    if kind == "Data" and (name := op.attr.get("_source_name")) is not None:
        graph.names[op.name] = name.s.decode()
    node = graph.add(kind, arranged(op, row, extra, edges), attrs, made, control=waits, name=op.name)
    if kind == "Const":
        value, dtype = attrs["value"], made[0].dtype
        node.output.known = None if isinstance(value, np.ndarray) or not dtype.is_int else nested_tuple(value)
    elif extra.get("known"):
        for output, data in zip(node.outputs, extra["known"]):
            output.known = reader.known(data)
    return node


def read_extra(op: Any) -> dict[str, Any]:
    attr = op.attr.get(EXTRA)
    if attr is None:
        return {}
    extra = json.loads(attr.s.decode())
    if not isinstance(extra, dict):
        raise VerifyError(f"its {EXTRA} attribute is not a JSON object")
    return extra


def take_note(graph: Graph, op: Any) -> None:
    """Neighbours that were made from the same FX node share a note."""
    code, file, module = map(op.attr.get, ("_fx_code", "_source", "_module"))
    if code is not None:
        path = None if file is None else file.s.decode()
        note = Note(path, code.s.decode(), "" if module is None else module.s.decode())
        if not graph.notes or graph.notes[-1] != note:
            graph.notes.append(note)


# -- inputs ---------------------------------------------------------------------------------------------------------
def edges_of(op: Any, values: dict[str, Value], graph: Graph) -> tuple[list[Value | None], list[Node]]:
    edges: list[Value | None] = []
    waits: list[Node] = []
    for edge in op.input:
        if edge in values or not edge:
            edges.append(values.get(edge))
        elif edge.endswith(":-1"):
            waits.append(graph.node(edge[:-3]))
        else:
            raise VerifyError(f"it reads {shown(edge)}, which no op before it computes")
    return edges, waits


def arranged(op: Any, row: Op | None, extra: dict[str, Any], edges: Sequence[Value | None]) -> list[Input]:
    """The edges as the op's inputs: those of a dynamic input, named x0, x1, ..., together."""
    rest = list(edges)
    if row is not None and not row.takes_lists and len(rest) == len(row.slots):
        return [*rest]
    counts = extra["custom"]["counts"] if row is None else dynamic_counts(op, row)
    if sum(1 if n is None else n for n in counts) != len(rest) or any(n is not None and n < 0 for n in counts):
        raise VerifyError(f"it has {len(rest)} inputs, which is not what {op.type} takes")
    found: list[Input] = []
    for count in counts:
        if count is None:
            found.append(rest.pop(0))
        else:
            some, rest = rest[:count], rest[count:]
            if any(v is None for v in some):
                raise VerifyError("one of a list of inputs is missing")
            found.append(tuple(v for v in some if v is not None))
    return found


def dynamic_counts(op: Any, row: Op) -> list[int | None]:
    names = [desc.name for desc in op.input_desc]
    counts: list[int | None] = []
    for slot in row.slots:
        if not slot.dynamic:
            counts.append(None)
        else:
            numbered = [n for n in names if n.startswith(slot.name) and n.removeprefix(slot.name).isdigit()]
            counts.append(len(numbered))
    return counts


# -- types and attributes -------------------------------------------------------------------------------------------
def shapes_of(op: Any, extra: dict[str, Any]) -> Sequence[Any]:
    shapes = extra.get("shapes")
    if not shapes:
        return [None] * len(op.output_desc)
    if len(shapes) != len(op.output_desc):
        raise VerifyError(f"it has {len(op.output_desc)} outputs and {len(shapes)} shapes")
    return list(shapes)


def read_type(desc: Any, symbolic: Any, types: dict[tuple[Any, ...], TensorType], reader: DataReader) -> TensorType:
    """`types`: those that were read so far."""
    number, place, dims = desc.dtype, desc.device_type, tuple(desc.shape.dim)
    key = (number, place, dims, None if symbolic is None else repr(symbolic))
    found = types.get(key)
    if found is None:
        found = types[key] = new_type(dtype_of(number), place, dims, symbolic, reader)
    return found


def new_type(dtype: DataType, place: Any, dims: tuple[int, ...], symbolic: Any, reader: DataReader) -> TensorType:
    if place not in ("CPU", "NPU"):
        raise VerifyError(f"the place of an output is {shown(place)}, not CPU or NPU")
    if symbolic is not None:
        sizes = tuple(reader.size(d) for d in symbolic)
        if len(sizes) != len(dims) or any(isinstance(s, int) and s != d for s, d in zip(sizes, dims)):
            raise VerifyError(f"the shape of an output is {list(dims)} and {shown(symbolic)} at once")
        return TensorType(dtype, sizes, place)
    if dims == (-2,):
        return TensorType(dtype, None, place)
    if any(d < 0 for d in dims):
        raise VerifyError(f"the shape of an output is {list(dims)}, and nothing says what its symbols are")
    return TensorType(dtype, dims, place)


def dtype_of(number: int) -> DataType:
    if not 0 <= number < len(DTYPES):
        raise VerifyError(f"there is no element type {number}")
    return DataType[DTYPES[number]]


def attrs_of(op: Any, row: Op | None, extra: dict[str, Any], reader: DataReader) -> dict[str, Any]:
    attrs = read_attrs(op, row, extra)
    for name, data in (extra.get("exact") or {}).items():
        attrs[name] = reader.value(data)
    if order := extra.get("order"):
        attrs = {name: attrs[name] for name in (*order, *attrs) if name in attrs}
    refuse_text(op.type, attrs)
    if op.type == "AtenCall":
        checked_numbers(attrs.get("strides"), (list, tuple))
    if row is None:
        for key in ("input_names", "output_names"):
            attrs[key] = reader.value(extra["custom"][key])
    return attrs


def read_attrs(op: Any, row: Op | None, extra: dict[str, Any]) -> dict[str, Any]:
    """What GE's fields say, in the order of the table. A default counts as not given."""
    found: dict[str, Any] = {}
    absent, defaults = extra.get("absent") or (), row.attrs if row else {}
    given = [name for name in op.attr if name not in OURS and name not in absent]
    if not given:
        return found
    for name in [*(name for name in defaults if name in given), *sorted(set(given) - defaults.keys())]:
        value = read_attr(op.attr[name], typed=row is None)
        if op.type == "AtenCall" and name in ("args", "kwargs", "strides"):
            value = json.loads(value)
            value = nested_tuple(value) if name == "strides" else value
        default = defaults.get(name, REQUIRED)
        if not same(value, list(default) if isinstance(default, tuple) else default):
            found[name] = value
    return found


def read_attr(attr: Any, typed: bool = False) -> Any:
    """The value of an AttrDef; `typed` gives it as ge.attr.*, which custom ops have."""
    kind = attr.WhichOneof("value")
    if kind is None:
        raise VerifyError("an attribute has no value")
    value = getattr(attr, kind)
    if kind in ("i", "f", "b", "dt"):
        pass
    elif kind in ("s", "expression"):
        value = value.decode()
    elif kind == "list":
        number = attr.list.val_type
        field = LIST_FIELDS[number] if 0 <= number < len(LIST_FIELDS) else ""
        if not field:
            raise VerifyError(f"an attribute is a list of an unknown type ({number})")
        value = [v.decode() if field == "s" else v for v in getattr(value, field)]
        kind = f"list.{field}"
    elif kind in LIST_LISTS:
        rows, entry = LIST_LISTS[kind]
        value = [list(getattr(numbers, entry)) for numbers in getattr(value, rows)]
    else:
        raise VerifyError(f"an attribute is of the kind {kind!r}, which no op here has")
    return ATTR_OF_KIND[kind](value) if typed and kind in ATTR_OF_KIND else value


# -- constants ------------------------------------------------------------------------------------------------------
def read_const(op: Any, extra: dict[str, Any], reader: DataReader) -> dict[str, Any]:
    described, desc = op.attr["value"].t.desc, op.output_desc
    if len(desc) != 1 or (described.dtype, described.shape) != (desc[0].dtype, desc[0].shape):
        raise VerifyError("its value has another type than its output")
    if "number" not in extra:
        return {"value": read_array(op.attr["value"].t), "literal": bool(extra.get("literal", False))}
    (data,) = extra["number"]
    value, tensor = reader.value(data), op.attr["value"].t
    if dtype_of(tensor.desc.dtype) != DataType.DT_STRING:
        checked_numbers(value, list)
    if raw_bytes(value, dtype_of(tensor.desc.dtype)) != tensor.data or np.shape(value) != tuple(tensor.desc.shape.dim):
        raise VerifyError("its number and its bytes differ")
    return {"value": value, "literal": bool(extra.get("literal", False))}


def read_array(tensor: Any) -> np.ndarray:
    return array_of(dtype_of(tensor.desc.dtype), tuple(tensor.desc.shape.dim), tensor.data)


def array_of(dtype: DataType, shape: tuple[Dim, ...], data: bytes) -> np.ndarray:
    """The elements of a constant from their bytes."""
    name = dtype.name.removeprefix("DT_")
    element = np.dtype(BYTES.get(name) or BITS.get(name, "u1"))
    if any(d < 0 for d in shape) or math.prod(shape) * element.itemsize != len(data):
        raise VerifyError(f"it has {len(data)} bytes, which is not {name.lower()}{list(shape)}")
    array = np.frombuffer(data, np.uint8).copy()
    if name == "BOOL" and array.size and int(array.max()) > 1:
        raise VerifyError("it has bytes other than 0 and 1, which are not bools")
    return array.view(element).reshape(shape)
