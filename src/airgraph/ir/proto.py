"""A graph as protobuf: GE's own `GraphDef` (`txt` dumps), and TensorFlow's, which Netron opens (`pbtxt` dumps).

    to_proto(graph)    a ge.proto.GraphDef: `.SerializeToString()` is what GE reads
    to_model(graph)    the same inside a ge.proto.ModelDef
    to_txt(graph)      its text:       op { name: "Mul" type: "Mul" input: "x:0" input: "Const:0" attr { ... } ... }
    to_pbtxt(graph)    for the viewer: node { name: "Mul" op: "Mul" input: "x:0" input: "Const:0" attr { ... } }

The message classes are made when this module is imported, from the tables below, in a pool of our own: generated code
would be tied to one protobuf release, and would clash with any other copy of ge_ir.proto in the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from airgraph.errors import VerifyError
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import REQUIRED, row
from airgraph.ir.symbols import is_expression
from airgraph.ir.text import INLINE_LIMIT, number_text, readable
from airgraph.ir.types import DataType, TensorType

# -- schemas --------------------------------------------------------------------------------------------------------
# A field is `type name=number`; behind the type, * is repeated, % a map from string, | a member of the oneof `value`.
# An enum is the prefix of its names, then the names in the order of their numbers, from 0.
GE_ENUMS = {
    "DataType": """DT_ UNDEFINED FLOAT FLOAT16 INT8 UINT8 INT16 UINT16 INT32 INT64 UINT32 UINT64 BOOL DOUBLE STRING
        DUAL_SUB_INT8 DUAL_SUB_UINT8 COMPLEX64 COMPLEX128 QINT8 QINT16 QINT32 QUINT8 QUINT16 RESOURCE STRING_REF DUAL
        VARIANT BF16 INT4 UINT1 INT2 UINT2 COMPLEX32 HIFLOAT8 FLOAT8_E5M2 FLOAT8_E4M3FN FLOAT8_E8M0 FLOAT6_E3M2
        FLOAT6_E2M3 FLOAT4_E2M1 FLOAT4_E1M2""",
    "AttrDef.ListValue.ListValueType": """VT_LIST_ NONE STRING INT FLOAT BOOL BYTES TENSOR_DESC TENSOR GRAPH NAMED_ATTRS
        DATA_TYPE""",
}
# All of ge_ir.proto but its `attr_groups` (symbol tables of GE's own shape inference), which we have no use for.
GE_MESSAGES = {
    "AttrDef": """AttrDef.ListValue| list=1, bytes| s=2, int64| i=3, float| f=4, bool| b=5, bytes| bt=7,
        NamedAttrs| func=10, TensorDescriptor| td=11, TensorDef| t=12, GraphDef| g=13, int64| dt=15,
        AttrDef.ListListInt| list_list_int=14, AttrDef.ListListFloat| list_list_float=16, bytes| expression=17""",
    "AttrDef.ListValue": """bytes* s=2, int64* i=3, float* f=4, bool* b=5, bytes* bt=7, TensorDescriptor* td=8,
        TensorDef* t=9, GraphDef* g=10, NamedAttrs* na=11, int64* dt=12, AttrDef.ListValue.ListValueType val_type=20""",
    "AttrDef.ListListInt": "AttrDef.ListListInt.ListInt* list_list_i=1",
    "AttrDef.ListListInt.ListInt": "int64* list_i=1",
    "AttrDef.ListListFloat": "AttrDef.ListListFloat.ListFloat* list_list_f=1",
    "AttrDef.ListListFloat.ListFloat": "float* list_f=1",
    "NamedAttrs": "string name=1, AttrDef% attr=2",
    "ShapeDef": "int64* dim=1",
    "TensorDescriptor": """string name=1, DataType dtype=2, ShapeDef shape=3, string layout=4, AttrDef% attr=5,
        bool has_out_attr=9, int64 size=10, int64 weight_size=11, bool reuse_input=12, bool output_tensor=13,
        string device_type=14, bool input_tensor=15, int64 real_dim_cnt=16, int64 reuse_input_index=17,
        int64 data_offset=18, int64 cmps_size=19, string cmps_tab=20, int64 cmps_tab_offset=21""",
    "TensorDef": "TensorDescriptor desc=1, bytes data=2",
    "OpDef": """string name=1, string type=2, string* input=5, AttrDef% attr=10, bool has_out_attr=20, int64 id=21,
        int64 stream_id=22, string* input_name=23, string* src_name=24, int64* src_index=25, string* dst_name=26,
        int64* dst_index=27, int64* input_i=28, int64* output_i=29, int64* workspace=30, int64* workspace_bytes=31,
        bool* is_input_const=32, TensorDescriptor* input_desc=33, TensorDescriptor* output_desc=34,
        string* subgraph_name=35""",
    "GraphDef": "string name=1, string* input=4, string* output=5, OpDef* op=6, AttrDef% attr=11",
    "ModelDef": "string name=1, uint32 version=2, string custom_version=3, GraphDef* graph=7, AttrDef% attr=11",
}
TF_ENUMS = {
    "DataType": """DT_ INVALID FLOAT DOUBLE INT32 UINT8 INT16 INT8 STRING COMPLEX64 INT64 BOOL QINT8 QUINT8 QINT32
        BFLOAT16 QINT16 QUINT16 UINT16 COMPLEX128 HALF RESOURCE VARIANT UINT32 UINT64 FLOAT8_E5M2 FLOAT8_E4M3FN"""
}
TF_MESSAGES = {  # the part we write
    "TensorShapeProto": "TensorShapeProto.Dim* dim=2, bool unknown_rank=3",
    "TensorShapeProto.Dim": "int64 size=1",
    "TensorProto": "DataType dtype=1, TensorShapeProto tensor_shape=2, bytes tensor_content=4",
    "AttrValue": """AttrValue.ListValue| list=1, bytes| s=2, int64| i=3, float| f=4, bool| b=5, DataType| type=6,
        TensorProto| tensor=8""",
    "AttrValue.ListValue": "bytes* s=2, int64* i=3, float* f=4, bool* b=5, DataType* type=6, TensorShapeProto* shape=7",
    "NodeDef": "string name=1, string op=2, string* input=3, AttrValue% attr=5",
    "GraphDef": "NodeDef* node=1",
}


def names(enum: str) -> list[str]:
    prefix, *rest = enum.split()
    return [prefix + name for name in rest]


def classes(package: str, enums: Mapping[str, str], messages: Mapping[str, str]) -> dict[str, type[Any]]:
    """The message classes of a schema, by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"airgraph/{package}.proto", package=package, syntax="proto3")
    made: dict[str, Any] = {}
    for name, fields in messages.items():
        outer, _, leaf = name.rpartition(".")
        made[name] = (made[outer].nested_type if outer else file.message_type).add(name=leaf)
        for field in fields.split(","):
            _add_field(made[name], field, f".{package}.", name, enums)
    for name, values in enums.items():
        outer, _, leaf = name.rpartition(".")
        enum = (made[outer] if outer else file).enum_type.add(name=leaf)
        for number, value in enumerate(names(values)):
            enum.value.add(name=value, number=number)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{n}")) for n in messages}


def _add_field(message: Any, text: str, prefix: str, owner: str, enums: Mapping[str, str]) -> None:
    kind, name, number = text.replace("=", " ").split()
    base = kind.rstrip("*%|")
    field = message.field.add(name=name, number=int(number), label=3 if kind[-1] in "*%" else 1)  # repeated, optional
    if kind[-1] == "%":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "string key=1", prefix, "", enums)
        _add_field(entry, f"{base} value=2", prefix, "", enums)
        field.type, field.type_name = field.TYPE_MESSAGE, f"{prefix}{owner}.{entry.name}"
    elif base.islower():
        field.type = getattr(field, f"TYPE_{base.upper()}")
    else:
        field.type = field.TYPE_ENUM if base in enums else field.TYPE_MESSAGE
        field.type_name = prefix + base
    if kind[-1] == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value")
        field.oneof_index = 0


GE = classes("ge.proto", GE_ENUMS, GE_MESSAGES)
TF = classes("tensorflow", TF_ENUMS, TF_MESSAGES)
GraphDef, ModelDef = GE["GraphDef"], GE["ModelDef"]
DTYPES = names(GE_ENUMS["DataType"])  # by their numbers in descriptors, which are others than those of ge.DataType
LIST_TYPES = {"s": 1, "i": 2, "f": 3, "b": 4, "dt": 10}  # AttrDef.ListValue.ListValueType by the field that is filled
LIST_LISTS = {"list_list_int": ("list_list_i", "list_i"), "list_list_float": ("list_list_f", "list_f")}


# -- the graph ------------------------------------------------------------------------------------------------------
def to_model(graph: Graph) -> Any:
    """A ge.proto.ModelDef with this one graph."""
    return ModelDef(name=graph.name, graph=[to_proto(graph)])


def to_txt(graph: Graph) -> str:
    """The `txt` dump; `text_format.Parse(text, GraphDef())` reads it back."""
    return str(text_format.MessageToString(to_proto(graph), as_utf8=True))


def read_txt(text: str) -> Any:
    """The GraphDef of a `txt` dump: data, of which nothing is run."""
    try:
        return text_format.Parse(text, GraphDef())
    except (text_format.ParseError, RecursionError) as error:
        raise VerifyError(f"not the text of a GE graph: {error}", hint="a dump of the kind txt") from None


def to_proto(graph: Graph) -> Any:
    """A ge.proto.GraphDef. Edges are `node:index`, `node:-1` for control and "" for an optional input not given."""
    message = GraphDef(name=graph.name)
    for node in graph.nodes:
        _fill_op(message.op.add(), graph, node)
    places = {v.type.place for node in graph.nodes for v in node.outputs}
    results = [v for node in graph.of("NetOutput") for v in node.values()]
    data = sorted(graph.inputs, key=lambda node: node.attrs["index"])
    _put(message.attr, "_input_placements", "list.i", [int(node.output.type.place == "NPU") for node in data])
    _put(message.attr, "_output_dtypes", "list.i", [int(v.dtype) for v in results])
    _put(message.attr, "_executor_type", "i", int("NPU" in places))
    return message


def _fill_op(op: Any, graph: Graph, node: Node) -> None:
    op.name, op.type = node.name, "RefData" if node.name in graph.ref_data else node.op
    for name, value in named_inputs(node):
        op.input.append("" if value is None else value.tensor)
        _fill_desc(op.input_desc.add(name=name), None if value is None else value.type)
    op.input.extend(f"{before.name}:-1" for before in node.control)
    for name, output in zip(output_names(node), node.outputs):
        _fill_desc(op.output_desc.add(name=name), output.type)
    for name, kind, value in typed_attrs(node):
        _put(op.attr, name, kind, value)
    for name, value in node.marks.items():
        _put(op.attr, name, *kind_of(name, value))
    if node.op == "Data" and node.name in graph.names:
        _put(op.attr, "_source_name", "s", graph.names[node.name])
    if node.op == "Const":
        _fill_const(op.attr, node.attrs["value"], node.output.type)
    for side, descs in (("input", op.input_desc), ("output", op.output_desc)):
        _put(op.attr, f"_{side}_name_key", "list.s", [desc.name for desc in descs])
        _put(op.attr, f"_{side}_name_value", "list.i", range(len(descs)))
    if 0 <= node.note < len(graph.notes):
        note = graph.notes[node.note]
        _put(op.attr, "_fx_code", "s", note.code)
        if note.file is not None:
            _put(op.attr, "_source", "s", note.file)
        if note.module:
            _put(op.attr, "_module", "s", note.module)


def _fill_desc(desc: Any, type_: TensorType | None) -> None:
    desc.layout = "ND"
    if type_ is None:
        _put(desc.attr, "_is_unfed_optional", "b", True)
        return
    desc.dtype = DTYPES.index(type_.dtype.name)
    desc.shape.dim.extend(type_.printed_shape())
    desc.device_type = type_.place


def named_inputs(node: Node) -> Iterator[tuple[str, Value | None]]:
    """Each input with its name; the values of a dynamic one are x0, x1, ..."""
    op = row(node)
    names = [slot.name for slot in op.slots] if op else node.attrs["input_names"]
    for name, entry in zip(names, node.inputs):
        if isinstance(entry, tuple):
            yield from ((f"{name}{i}", value) for i, value in enumerate(entry))
        else:
            yield name, entry


def output_names(node: Node) -> list[str]:
    """As many as there are outputs; a dynamic one (`y*`, or `("y", 2)` of a custom op) takes several."""
    op = row(node)
    if op is None:
        counts = [(n, None) if isinstance(n, str) else n for n in node.attrs["output_names"]]
    else:
        rest = len(node.outputs) - len(op.outputs) + 1
        counts = [(n[:-1], rest) if n[-1] == "*" else (n, None) for n in op.outputs]
    return [name for n, count in counts for name in ([n] if count is None else [f"{n}{i}" for i in range(count)])]


# -- attributes -----------------------------------------------------------------------------------------------------
def typed_attrs(node: Node) -> Iterator[tuple[str, str, Any]]:
    """(name, kind, value) of GE's attributes: those given, and the defaults of the others."""
    op = row(node)
    defaults = {name: value for name, value in op.attrs.items() if value is not REQUIRED} if op else {}
    ours = ("value", "literal") if node.op == "Const" else () if op else ("input_names", "output_names")
    for name, value in {**defaults, **node.attrs}.items():
        if name in ours or value is None:
            continue
        if node.op == "AtenCall" and name != "target":
            yield name, "s", _json(value)
        else:
            yield name, *kind_of(name, value, defaults.get(name))


def kind_of(name: str, value: Any, default: Any = None) -> tuple[str, Any]:
    """The field of AttrDef that holds this value, and the value as it goes in there. `list.i`: field i of its list."""
    match value:
        case bool():
            return "b", value
        case int() if isinstance(value, DataType) or isinstance(default, DataType) or _means_dtype(name):
            return "dt", int(value)
        case int() | float() if isinstance(value, float) or isinstance(default, float):
            return "f", float(value)  # GE tells a float attribute by its type: 2 given for base=-1.0 is 2.0
        case int():
            return "i", value
        case str():
            return "s", value
        case list() | tuple():
            return _list_kind(value)
        case _ if is_expression(value):
            return "expression", str(value)
        case _ if hasattr(value, "ge_kind"):
            return value.ge_kind, value.value
    return "s", _json(value)


def _means_dtype(name: str) -> bool:
    """Not every `..._type`: group_type and act_type of GE's ops are ordinary numbers."""
    return name in ("type", "dst_type") or name.endswith("dtype")


def _list_kind(items: Sequence[Any]) -> tuple[str, Any]:
    """A list without elements is one of ints, as nearly all list attributes are. A symbolic size is -1."""
    if items and all(isinstance(item, list | tuple) for item in items):
        kind = {"i": "list_list_int", "f": "list_list_float"}.get(_element([v for item in items for v in item]))
        return (kind, [_numbers(item) for item in items]) if kind else ("s", _json(items))
    element = _element(items)
    return (f"list.{element}", _numbers(items)) if element else ("s", _json(items))


def _element(items: Sequence[Any]) -> str:
    """The one field of AttrDef.ListValue that can hold all of these; "" where there is none."""
    found = {"i" if is_expression(v) else kind_of("", v)[0] for v in items} or {"i"}
    if found == {"i", "f"}:
        return "f"
    return found.pop() if len(found) == 1 and found <= LIST_TYPES.keys() else ""


def _numbers(items: Iterable[Any]) -> list[Any]:
    return [-1 if is_expression(v) else v for v in items]


def _json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _put(attrs: Any, name: str, kind: str, value: Any) -> None:
    attr = attrs[name]
    if kind in ("s", "expression"):
        setattr(attr, kind, value.encode())
    elif kind in LIST_LISTS:
        rows, row = LIST_LISTS[kind]
        getattr(attr, kind).SetInParent()
        for numbers in value:
            getattr(getattr(attr, kind), rows).add(**{row: numbers})
    elif kind.startswith("list."):
        field = kind.removeprefix("list.")
        attr.list.val_type = LIST_TYPES[field]
        getattr(attr.list, field).extend([v.encode() for v in value] if field == "s" else value)
    else:
        setattr(attr, kind, value)


# -- constants ------------------------------------------------------------------------------------------------------
BYTES = {
    "FLOAT": "<f4",
    "FLOAT16": "<f2",
    "DOUBLE": "<f8",
    "COMPLEX64": "<c8",
    "COMPLEX128": "<c16",
    "BOOL": "?",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "QINT8": "i1",
    "QINT16": "<i2",
    "QINT32": "<i4",
    "QUINT8": "u1",
    "QUINT16": "<u2",
}
BITS = {"BF16": "<u2", "COMPLEX32": "<u4"}  # what an array holds instead of elements NumPy has no type for; else bytes


def _fill_const(attrs: Any, value: Any, type_: TensorType) -> None:
    tensor = attrs["value"].t
    _fill_desc(tensor.desc, type_)
    tensor.data = raw_bytes(value, type_.dtype)
    if isinstance(value, np.ndarray):
        value = str(type_) if value.size > INLINE_LIMIT else number_text(readable(value, type_.dtype))
    _put(attrs, "_readable_value", "s", value if isinstance(value, str) else number_text(value))


def raw_bytes(value: Any, dtype: DataType) -> bytes:
    """The elements as they lie in memory, little-endian. Numbers are rounded to the type, as PyTorch rounds them."""
    if isinstance(value, np.ndarray) and value.size == 0:
        return b""
    if dtype == DataType.DT_STRING:
        return "\0".join(np.ravel(value).tolist()).encode()
    array, name = np.atleast_1d(np.asarray(value)), dtype.name.removeprefix("DT_")
    bits = np.dtype(BITS.get(name, "u1"))
    with np.errstate(all="ignore"):  # 1e6 is inf in float16
        if name in BYTES:
            return array.astype(BYTES[name], copy=False).tobytes()
        if isinstance(value, np.ndarray) and array.dtype == bits:
            return array.tobytes()
        if name == "BF16":
            return _bfloat16(array.astype(np.float32)).tobytes()
        if name == "COMPLEX32":
            return array.astype(np.complex64).view(np.float32).astype("<f2").tobytes()
    raise VerifyError(f"{value!r} has no bytes as {dtype.name}", hint="ge.Const of a uint8 array that holds the bits")


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """The upper half of a float32, rounded to nearest even; a NaN stays one."""
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype("<u2")


# -- for the viewer -------------------------------------------------------------------------------------------------
TF_NAMES = {"DT_FLOAT16": "DT_HALF", "DT_BF16": "DT_BFLOAT16"}  # where they differ from GE's
TF_DTYPES = names(TF_ENUMS["DataType"])


def to_pbtxt(graph: Graph) -> str:
    """The `pbtxt` dump: nodes and attributes as a TensorFlow GraphDef; `T` and `_output_shapes` type the outputs."""
    return pbtxt_of(to_proto(graph))


def pbtxt_of(source: Any, largest: int | None = None) -> str:
    """The same of a GraphDef. Of a constant of more than `largest` bytes only the type is shown."""
    message = TF["GraphDef"]()
    for op in source.op:
        node = message.node.add(name=op.name, op=op.type)
        node.input.extend(f"^{edge[:-3]}" if edge.endswith(":-1") else edge for edge in op.input if edge)
        for name, attr in op.attr.items():
            if not name.endswith(("_name_key", "_name_value")):
                _fill_tf(node.attr[name], attr, largest)
        if op.output_desc:
            types = [_tf_type(DTYPES[desc.dtype]) for desc in op.output_desc]
            node.attr["T"].type = types[0]
            node.attr["_output_types"].list.type.extend(types)
            node.attr["_output_shapes"].list.shape.extend(_tf_shape(desc) for desc in op.output_desc)
    return str(text_format.MessageToString(message, as_utf8=True))


def _tf_type(name: str) -> int:
    name = TF_NAMES.get(name, name)
    return TF_DTYPES.index(name) if name in TF_DTYPES else 0


def _tf_shape(desc: Any) -> Any:
    if list(desc.shape.dim) == [-2]:
        return TF["TensorShapeProto"](unknown_rank=True)
    return TF["TensorShapeProto"](dim=[TF["TensorShapeProto.Dim"](size=size) for size in desc.shape.dim])


def _fill_tf(to: Any, attr: Any, largest: int | None) -> None:
    kind = attr.WhichOneof("value")
    value = getattr(attr, kind)
    match kind:
        case "dt":
            to.type = _tf_type(DataType(value).name)
        case "t":
            to.tensor.dtype = _tf_type(DTYPES[value.desc.dtype])
            to.tensor.tensor_shape.CopyFrom(_tf_shape(value.desc))
            if largest is None or len(value.data) <= largest:
                to.tensor.tensor_content = value.data
        case "list":
            to.list.SetInParent()
            for field in ("s", "i", "f", "b"):
                getattr(to.list, field).extend(getattr(value, field))
            to.list.type.extend(_tf_type(DataType(dt).name) for dt in value.dt)
        case "list_list_int" | "list_list_float":
            rows, row = LIST_LISTS[kind]
            to.s = _json([list(getattr(numbers, row)) for numbers in getattr(value, rows)]).encode()
        case "expression":
            to.s = value
        case _:
            setattr(to, kind, value)
