"""GraphDef and its texts: the schema is GE's, what goes in is what the graph says, and what comes out parses."""

import json

import numpy as np
import pytest
import sympy
from google.protobuf import text_format

from airgraph.errors import VerifyError
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Note
from airgraph.ir.proto import GE, GraphDef, ModelDef, classes, kind_of, raw_bytes, to_model, to_pbtxt, to_proto, to_txt
from airgraph.ir.text import from_py
from airgraph.ir.types import DataType

DUMP = """
k_0 = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="k")
x_0 = ge.Data(index=0, dtype=0, shape=[2, -1], placement="NPU", node_name="x")
w_0 = ge.Data(index=2, dtype=0, shape=[-2], placement="NPU", node_name="w")
Mul_0 = ge.Mul(x_0, 2.5, node_name="Mul")
Cast_0 = ge.Cast(Mul_0, dst_type=27, node_name="Cast")
MatMulV2_0 = ge.MatMulV2(x_0, x_0, None, None, transpose_x2=True, node_name="MatMulV2")
Log_0 = ge.Log(Mul_0, base=2, node_name="Log")
Shape_0 = ge.Shape(x_0, node_name="Shape")
[SplitV_0, SplitV_1] = ge.SplitV(x_0, [1, 1], 0, num_split=2)
StringFormat_0 = ge.StringFormat([x_0], template='say "{}"\\n\\\\ é', node_name="StringFormat")
_ = ge.PrintV2(StringFormat_0)
Squeeze_0 = ge.Squeeze(Mul_0, node_name="Squeeze")
[AtenCall_0] = ge.AtenCall([x_0], target="aten.roll.default", args=["%0", [1, None]], kwargs={"a": 0.5},
                           strides=[[3, 1]], types=[[0, [2, -1], "NPU"]])
_ = ge.NetOutput([Cast_0, Log_0, Shape_0], dependencies=[ge.node("PrintV2"), SplitV_0])
"""


@pytest.fixture
def graph() -> Graph:
    return from_py(DUMP, name="small")


@pytest.fixture
def ops(graph):
    return {op.name: op for op in to_proto(graph).op}


def dims(desc):
    return list(desc.shape.dim)


# -- the schema -----------------------------------------------------------------------------------------------------
def test_every_dtype_has_a_number_in_descriptors():
    numbers = GE["TensorDescriptor"].DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_name
    assert {t.name for t in DataType} - {"DT_MAX"} == set(numbers.keys())
    spots = {"FLOAT": 1, "INT32": 7, "INT64": 8, "BOOL": 11, "DOUBLE": 12, "BF16": 27, "INT4": 28, "FLOAT4_E1M2": 40}
    assert {name: numbers[f"DT_{name}"].number for name in spots} == spots


def test_wire_format_is_that_of_ge_ir():
    """Written by hand: tag = number << 3 | wire type."""
    op = GE["OpDef"](name="a", type="B", input=["c:0"])
    op.attr["k"].i = 5
    op.output_desc.add(dtype=27, device_type="NPU").shape.dim.extend([2, 3])
    desc = b"\x10\x1b" + b"\x1a\x04\x0a\x02\x02\x03" + b"\x72\x03NPU"
    attr = b"\x0a\x01k" + b"\x12\x02\x18\x05"
    expected = b"\x0a\x01a\x12\x01B\x2a\x03c:0" + b"\x52" + bytes([len(attr)]) + attr
    assert op.SerializeToString() == expected + b"\x92\x02" + bytes([len(desc)]) + desc


def test_attr_is_a_oneof():
    attr = GE["AttrDef"](i=1)
    attr.s = b"x"
    assert attr.WhichOneof("value") == "s" and attr.i == 0


def test_a_second_schema_of_the_same_name_does_not_clash():
    assert classes("ge.proto", {}, {"GraphDef": "string name=1"})["GraphDef"](name="g").name == "g"


# -- nodes ----------------------------------------------------------------------------------------------------------
def test_graph_attributes(graph):
    attr = to_proto(graph).attr
    assert list(attr["_input_placements"].list.i) == [1, 0, 1]
    assert list(attr["_output_dtypes"].list.i) == [27, 0, 3]
    assert attr["_output_dtypes"].list.val_type == 2
    assert attr["_executor_type"].i == 1


def test_data(ops):
    assert ops["k"].attr["index"].i == 1
    [desc] = ops["x"].output_desc
    assert (desc.name, desc.dtype, dims(desc), desc.layout, desc.device_type) == ("y", 1, [2, -1], "ND", "NPU")
    assert dims(ops["w"].output_desc[0]) == [-2]
    assert (dims(ops["k"].output_desc[0]), ops["k"].output_desc[0].device_type) == ([], "CPU")


def test_inputs_outputs_and_their_names(ops):
    assert list(ops["MatMulV2"].input) == ["x:0", "x:0", "", ""]
    assert [d.name for d in ops["MatMulV2"].input_desc] == ["x1", "x2", "bias", "offset_w"]
    assert ops["MatMulV2"].input_desc[2].attr["_is_unfed_optional"].b
    assert list(ops["NetOutput"].input) == ["Cast:0", "Log:0", "Shape:0", "PrintV2:-1", "SplitV:-1"]
    assert [d.name for d in ops["NetOutput"].input_desc] == ["x0", "x1", "x2"]
    assert [d.name for d in ops["SplitV"].output_desc] == ["y0", "y1"]
    attr = ops["SplitV"].attr
    assert list(attr["_input_name_key"].list.s) == [b"x", b"size_splits", b"split_dim"]
    assert list(attr["_input_name_value"].list.i) == [0, 1, 2]
    assert list(attr["_output_name_key"].list.s) == [b"y0", b"y1"]
    assert list(attr["_output_name_value"].list.i) == [0, 1]
    assert ops["x"].attr["_input_name_key"].list.val_type == 1


def test_attributes(ops):
    assert ops["Cast"].attr["dst_type"].dt == 27
    assert ops["Shape"].attr["dtype"].dt == 3  # a default
    assert ops["MatMulV2"].attr["transpose_x2"].b
    assert ops["MatMulV2"].attr["transpose_x1"].WhichOneof("value") == "b"  # a default
    assert ops["Log"].attr["base"].f == 2.0  # given as an int, a float by the table
    assert ops["StringFormat"].attr["template"].s.decode() == 'say "{}"\n\\ é'
    assert ops["Squeeze"].attr["axis"].list.val_type == 2
    assert ops["AtenCall"].attr["target"].s == b"aten.roll.default"
    assert json.loads(ops["AtenCall"].attr["args"].s) == ["%0", [1, None]]
    assert json.loads(ops["AtenCall"].attr["kwargs"].s) == {"a": 0.5}
    assert json.loads(ops["AtenCall"].attr["strides"].s) == [[3, 1]]


@pytest.mark.parametrize(
    "value, kind, stored",
    [
        (True, "b", True),
        (3, "i", 3),
        (0.5, "f", 0.5),
        ("a", "s", "a"),
        (DataType.DT_BF16, "dt", 27),
        (sympy.Symbol("s0") * 2, "expression", "2*s0"),
        ((1, 2), "list.i", [1, 2]),
        ([1, sympy.Symbol("s0")], "list.i", [1, -1]),
        ([1, 0.5], "list.f", [1, 0.5]),
        ([True, False], "list.b", [True, False]),
        (["a", "b"], "list.s", ["a", "b"]),
        ([DataType.DT_BOOL], "list.dt", [12]),
        ([[1], [2, 3]], "list_list_int", [[1], [2, 3]]),
        ([[1], [0.5]], "list_list_float", [[1], [0.5]]),
        ([True, 1], "s", "[true, 1]"),
        ([1, "a"], "s", '[1, "a"]'),
        ([["a"]], "s", '[["a"]]'),
        ({"é": 1j}, "s", '{"é": "1j"}'),
    ],
)
def test_kind_of(value, kind, stored):
    assert kind_of("name", value) == (kind, stored)


def custom() -> Graph:
    a = ge.attr
    with ge.building(Graph("custom")) as graph:
        x = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
        y, *_ = ge.custom_op(
            "MyOp",
            inputs={"x": x, "mask": None, "parts": [x, x]},
            outputs=["y", ("rest", 2)],
            attrs={
                "i": a.Int(1),
                "f": a.Float(2),
                "b": a.Bool(False),
                "s": a.Str("t"),
                "dt": a.DataType(1),
                "li": a.ListInt([1]),
                "lf": a.ListFloat([1]),
                "lb": a.ListBool([True]),
                "ls": a.ListStr(["u", "v"]),
                "ldt": a.ListDataType([0, 27]),
                "lli": a.ListListInt([[1, 2], [3]]),
                "llf": a.ListListFloat([[0.5]]),
                "none": a.ListListInt([]),
            },
        )
        ge.NetOutput([y])
    return graph


def test_custom_op():
    op = next(op for op in to_proto(custom()).op if op.type == "MyOp")
    assert list(op.input) == ["x:0", "", "x:0", "x:0"]
    assert [d.name for d in op.input_desc] == ["x", "mask", "parts0", "parts1"]
    assert [(d.name, d.dtype, dims(d)) for d in op.output_desc] == [(n, 0, [-2]) for n in ("y", "rest0", "rest1")]
    attr = op.attr
    assert (attr["i"].i, attr["f"].f, attr["b"].b, attr["s"].s, attr["dt"].dt) == (1, 2.0, False, b"t", 1)
    assert [attr[name].list.val_type for name in ("ls", "li", "lf", "lb", "ldt")] == [1, 2, 3, 4, 10]
    assert list(attr["ls"].list.s) == [b"u", b"v"] and list(attr["ldt"].list.dt) == [0, 27]
    assert [list(row.list_i) for row in attr["lli"].list_list_int.list_list_i] == [[1, 2], [3]]
    assert [list(row.list_f) for row in attr["llf"].list_list_float.list_list_f] == [[0.5]]
    assert attr["none"].WhichOneof("value") == "list_list_int"
    assert "input_names" not in attr and "output_names" not in attr


def test_custom_op_of_a_type_in_the_table():
    with ge.building(Graph()) as graph:
        x = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
        ge.NetOutput([ge.custom_op("Mul", inputs={"b": x, "a": x}, outputs=["z"])])
    op = to_proto(graph).op[1]
    assert ([d.name for d in op.input_desc], [d.name for d in op.output_desc]) == (["b", "a"], ["z"])
    assert all(name.startswith("_") for name in op.attr)


def test_marks(graph):
    graph.node("Mul").marks |= {"_user_stream_label": "1", "_op_exec_never_timeout": True}
    ops = {op.name: op for op in to_proto(graph).op}
    assert ops["Mul"].attr["_user_stream_label"].s == b"1" and ops["Mul"].attr["_op_exec_never_timeout"].b is True
    assert "_user_stream_label" not in ops["Cast"].attr


def test_notes(graph):
    graph.notes.append(Note('"model.py", line 3, in forward    y = x * 2', "mul = aten.mul(x, 2)"))
    graph.notes.append(Note(None, "neg = aten.neg(mul)"))
    graph.node("Mul").note, graph.node("Cast").note = 0, 1
    ops = {op.name: op for op in to_proto(graph).op}
    assert ops["Mul"].attr["_fx_code"].s == b"mul = aten.mul(x, 2)"
    assert ops["Mul"].attr["_source"].s.startswith(b'"model.py", line 3')
    assert "_fx_code" in ops["Cast"].attr and "_source" not in ops["Cast"].attr
    assert "_fx_code" not in ops["x"].attr


# -- constants ------------------------------------------------------------------------------------------------------
NUMPY = {
    "FLOAT": "f4",
    "FLOAT16": "f2",
    "DOUBLE": "f8",
    "COMPLEX64": "c8",
    "COMPLEX128": "c16",
    "BOOL": "?",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "QINT8": "i1",
    "QINT32": "i4",
}


@pytest.mark.parametrize("name", NUMPY)
def test_bytes_are_those_of_numpy(name):
    dtype = DataType[f"DT_{name}"]
    expected = np.array([[0, 1], [3, 100]]).astype("<" + NUMPY[name])
    assert raw_bytes([[0, 1], [3, 100]], dtype) == expected.tobytes()
    assert raw_bytes(expected, dtype) == expected.tobytes()
    assert raw_bytes(expected.T, dtype) == expected.T.tobytes()  # row by row, however it lies in memory
    assert raw_bytes(1, dtype) == np.ones((), "<" + NUMPY[name]).tobytes()


def bfloat16(*values):
    return np.frombuffer(raw_bytes(list(values), DataType.DT_BF16), "<u2").tolist()


def test_floats_are_rounded_to_the_type():
    assert raw_bytes(0.1, DataType.DT_FLOAT) == np.float32(0.1).tobytes()
    assert raw_bytes(0.1, DataType.DT_FLOAT16) == np.float16(0.1).tobytes()
    assert raw_bytes(1e6, DataType.DT_FLOAT16) == np.float16("inf").tobytes()
    assert bfloat16(1.0, -2.0, 0.1, 3.4e38) == [0x3F80, 0xC000, 0x3DCD, 0x7F80]
    assert bfloat16(1 + 2**-8, 1 + 3 * 2**-8) == [0x3F80, 0x3F82]  # halfway: to even
    assert bfloat16(float("inf"), -float("inf")) == [0x7F80, 0xFF80]
    assert np.isnan((np.array(bfloat16(float("nan")), np.uint32) << 16).view(np.float32)).all()
    assert raw_bytes(1 + 2j, DataType.DT_COMPLEX32) == np.array([1, 2], "<f2").tobytes()


def test_bits_are_kept():
    assert raw_bytes(np.array([0x3F80, 0x4000], np.uint16), DataType.DT_BF16) == b"\x80\x3f\x00\x40"
    assert raw_bytes(np.array([0x38], np.uint8), DataType.DT_FLOAT8_E4M3FN) == b"\x38"
    assert raw_bytes(np.array([1.0], np.float32), DataType.DT_BF16) == b"\x80\x3f"
    assert raw_bytes(np.empty((0, 3), np.uint8), DataType.DT_FLOAT) == b""
    with pytest.raises(VerifyError, match=r"0\.5 has no bytes as DT_FLOAT8_E5M2"):
        raw_bytes(0.5, DataType.DT_FLOAT8_E5M2)


def const(*args, **kwargs):
    with ge.building(Graph()) as graph:
        ge.NetOutput([ge.Const(*args, **kwargs)])
    return to_proto(graph).op[0].attr


def test_const():
    attr = const([[1.5, 2.0]], dtype=27)
    tensor = attr["value"].t
    assert (tensor.desc.dtype, dims(tensor.desc), tensor.desc.layout) == (27, [1, 2], "ND")
    assert tensor.data == b"\xc0\x3f\x00\x40"
    assert attr["_readable_value"].s == b"[[1.5, 2.0]]"
    assert "literal" not in attr
    assert const(np.array([0x3FC0], np.uint16), dtype=27)["_readable_value"].s == b"[1.5]"
    assert const(float("inf"), dtype=0)["_readable_value"].s == b'float("inf")'
    assert const("text", dtype=13)["value"].t.data == b"text"


def test_large_const():
    attr = const(np.arange(2000, dtype=np.int32), dtype=3)
    assert attr["_readable_value"].s == b"int32[2000]@CPU"
    assert attr["value"].t.data == np.arange(2000, dtype="<i4").tobytes()


# -- there and back -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("build", [lambda: from_py(DUMP), custom], ids=["small", "custom"])
def test_round_trips(build):
    message = to_proto(build())
    assert text_format.Parse(to_txt(build()), GraphDef()) == message
    assert GraphDef.FromString(message.SerializeToString()) == message


def test_model(graph):
    model = ModelDef.FromString(to_model(graph).SerializeToString())
    assert (model.name, list(model.graph)) == ("small", [to_proto(graph)])


def test_txt_is_the_same_each_time(graph):
    assert to_txt(graph) == to_txt(from_py(DUMP, name="small"))
    assert to_txt(graph).startswith('name: "small"\nop {\n  name: "k"\n  type: "Data"\n')


# -- pbtxt ----------------------------------------------------------------------------------------------------------
# TensorFlow's schema once more, with the names of its types as a reader has to know them.
TENSORFLOW = classes(
    "tensorflow",
    {"DataType": "DT_ INVALID FLOAT HALF BFLOAT16 DOUBLE INT32 INT64 STRING BOOL"},  # text has names, not numbers
    {
        "Dim": "int64 size=1, string name=2",
        "TensorShapeProto": "Dim* dim=2, bool unknown_rank=3",
        "TensorProto": "DataType dtype=1, TensorShapeProto tensor_shape=2, bytes tensor_content=4",
        "ListValue": "bytes* s=2, int64* i=3, float* f=4, bool* b=5, DataType* type=6, TensorShapeProto* shape=7",
        "AttrValue": """bytes| s=2, int64| i=3, float| f=4, bool| b=5, DataType| type=6, TensorShapeProto| shape=7,
            TensorProto| tensor=8, ListValue| list=1, string| placeholder=9""",
        "NodeDef": "string name=1, string op=2, string* input=3, string device=4, AttrValue% attr=5",
        "GraphDef": "NodeDef* node=1, int32 version=3",
    },
)


def parsed(graph):
    return {node.name: node for node in text_format.Parse(to_pbtxt(graph), TENSORFLOW["GraphDef"]()).node}


@pytest.fixture
def nodes(graph):
    return parsed(graph)


def tf_name(number):
    return TENSORFLOW["TensorProto"].DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number[number].name


def shapes(node):
    return [[d.size for d in shape.dim] for shape in node.attr["_output_shapes"].list.shape]


def test_pbtxt_edges(nodes):
    assert nodes["MatMulV2"].op == "MatMulV2"
    assert list(nodes["MatMulV2"].input) == ["x:0", "x:0"]
    assert list(nodes["NetOutput"].input) == ["Cast:0", "Log:0", "Shape:0", "^PrintV2", "^SplitV"]


def test_pbtxt_types(nodes):
    assert tf_name(nodes["Cast"].attr["T"].type) == "DT_BFLOAT16"
    assert tf_name(nodes["Cast"].attr["dst_type"].type) == "DT_BFLOAT16"
    assert tf_name(nodes["Shape"].attr["T"].type) == "DT_INT32"
    assert shapes(nodes["SplitV"]) == [[1, -1], [1, -1]]
    assert nodes["w"].attr["_output_shapes"].list.shape[0].unknown_rank
    assert "T" not in nodes["NetOutput"].attr


def test_pbtxt_attributes(nodes):
    assert nodes["StringFormat"].attr["template"].s.decode() == 'say "{}"\n\\ é'
    assert nodes["Log"].attr["base"].f == 2.0
    assert nodes["k"].attr["index"].i == 1
    tensor = nodes["Const"].attr["value"].tensor
    assert (tf_name(tensor.dtype), tensor.tensor_content) == ("DT_FLOAT", np.float32(2.5).tobytes())
    assert "_input_name_key" not in nodes["Log"].attr


def test_pbtxt_of_odd_attributes():
    attr = parsed(custom())["MyOp"].attr
    assert attr["lli"].s == b"[[1, 2], [3]]"
    assert list(map(tf_name, attr["ldt"].list.type)) == ["DT_FLOAT", "DT_BFLOAT16"]
    assert tf_name(attr["T"].type) == "DT_INVALID"
    assert attr["none"].s == b"[]"


def test_pbtxt_strings_are_double_quoted(graph):
    text = to_pbtxt(graph)
    assert 's: "say \\"{}\\"\\n\\\\' in text
    assert "s: '" not in text
