"""A graph as a GraphDef and back: the same nodes, edges, attributes, sizes and known values."""

import json
import random

import numpy as np
import pytest
import sympy

from airgraph.errors import VerifyError
from airgraph.ir import ge
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.ir.graph import Graph, Note
from airgraph.ir.proto import GraphDef
from airgraph.ir.stored import EXTRA, checked, read_graph, write_graph
from airgraph.ir.text import from_py, to_py

DUMP = """
k_0 = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="k")
x_0 = ge.Data(index=0, dtype=0, shape=[2, -1], placement="NPU", node_name="x")
w_0 = ge.Data(index=2, dtype=0, shape=[-2], placement="NPU", node_name="w")
Mul_0 = ge.Mul(x_0, 0.1, node_name="Mul")
Half_0 = ge.Cast(Mul_0, dst_type=1, node_name="Half")
Mul_1_0 = ge.Mul(Half_0, 0.1, node_name="Mul_1")
MatMulV2_0 = ge.MatMulV2(x_0, x_0, None, None, transpose_x2=True, node_name="MatMulV2")
Log_0 = ge.Log(Mul_0, base=2.718281828, node_name="Log")
Shape_0 = ge.Shape(x_0, node_name="Shape")
[SplitV_0, SplitV_1] = ge.SplitV(x_0, [1, 1], 0, num_split=2)
ConcatV2_0 = ge.ConcatV2([x_0, x_0, Mul_0], 0, N=3, node_name="ConcatV2")
StringFormat_0 = ge.StringFormat([x_0], template='say "{}"\\n\\\\ é', node_name="StringFormat")
_ = ge.PrintV2(StringFormat_0)
Squeeze_0 = ge.Squeeze(Mul_0, node_name="Squeeze")
[AtenCall_0] = ge.AtenCall([x_0], target="aten.roll.default", args=["%0", [1, None]], kwargs={"a": 0.1},
                           strides=[[3, 1]], types=[[0, [2, -1], "NPU"]])
[Own_0, Own_1, Own_2] = ge.custom_op("Own", inputs={"x": x_0, "no": None, "many": [x_0, Mul_0]}, outputs=["y", ["z", 2]],
                                     attrs={"f": ge.attr.Float(0.1), "l": ge.attr.ListListInt([[1], []]), "s": ge.attr.Str("a")})
_ = ge.NetOutput([Half_0, Log_0, Shape_0, Own_1], dependencies=[ge.node("PrintV2"), SplitV_0])
"""


def stored(graph):
    writer = DataWriter()
    message = GraphDef.FromString(write_graph(graph, writer).SerializeToString())
    return message, DataReader(json.loads(json.dumps(writer.symbol_table())))


def again(graph):
    return checked(read_graph(*stored(graph)))


@pytest.fixture
def graph():
    return from_py(DUMP, name="small")


def test_the_same_graph_comes_back(graph):
    back = again(graph)
    assert (back.name, to_py(back)) == ("small", to_py(graph))
    for old, new in zip(graph.nodes, back.nodes, strict=True):
        assert [v.type for v in new.outputs] == [v.type for v in old.outputs], old
        assert [v.known for v in new.outputs] == [v.known for v in old.outputs], old
        assert [c.name for c in new.control] == [c.name for c in old.control], old
        assert new.attrs == old.attrs, old


def test_ges_fields_are_what_they_are_without_us(graph):
    """GE's own tools read the rest as before: only the one attribute is added."""
    from airgraph.ir.proto import to_proto

    message, _ = stored(graph)
    for op in message.op:
        op.attr.pop(EXTRA, None)
    assert message == to_proto(graph)


def test_only_what_ge_has_no_place_for_is_beside_it():
    graph = from_py("""
x_0 = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
Relu_0 = ge.Relu(x_0)
Cast_0 = ge.Cast(Relu_0, dst_type=1)
_ = ge.NetOutput([Cast_0])
""")
    message, _ = stored(graph)
    assert [op.name for op in message.op if EXTRA in op.attr] == []


def test_digits_beyond_ges_types_are_kept(graph):
    message, _ = stored(graph)
    extras = {op.name: json.loads(op.attr[EXTRA].s) for op in message.op if EXTRA in op.attr}
    assert extras["Log"]["exact"] == {"base": 2.718281828}  # an AttrDef has only a float for it
    assert extras["Const_1"] == {"number": [0.1], "literal": True}  # and a float16 constant three digits


def test_symbols_survive():
    n, m = sympy.Symbol("n", integer=True, positive=True), sympy.Symbol("m", integer=True, positive=True)
    with ge.building(Graph()) as graph:
        x = ge.Data(index=0, dtype=0, shape=[n, m], placement="CPU", node_name="x")
        y = ge.Reshape(x, ge.Pack([ge.Gather(ge.Shape(x, dtype=9), 0), -1], N=2))
        y.type = type(y.type)(y.dtype, (n, m), "CPU")
        ge.NetOutput([y])
    back = again(graph)
    assert back.node("x").output.type.shape == (n, m)
    assert back.node("Gather").output.known == n


def test_arrays_of_every_kind():
    arrays = [
        (np.arange(6, dtype=np.int16).reshape(2, 3), 6),
        (np.array([[1.5, float("nan")]]), 0),
        (np.zeros((0, 3), np.float32), 0),
        (np.array([0x3F80, 0xC000], np.uint16), 27),  # bfloat16 as its bits
        (np.array([True, False]), 12),
        (np.array([1, 2], np.uint8), 36),  # float8
        (np.array([1 + 2j], np.complex64), 16),
    ]
    with ge.building(Graph()) as graph:
        ge.NetOutput([ge.constant(array, ge.DataType(dtype)) for array, dtype in arrays])
    for (array, _), value in zip(arrays, again(graph).net_output.values()):
        back = value.node.attrs["value"]
        assert back.shape == array.shape and back.flags.writeable
        np.testing.assert_array_equal(back, array.astype(back.dtype))


def test_where_nodes_come_from_is_kept():
    graph = Graph("g")
    with ge.building(graph):
        x = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
        graph.notes.append(Note('"model.py", line 3, in forward    return x.relu() + 1', "relu = aten.relu(x)"))
        y = ge.Add(ge.Relu(x), 1.0)
        graph.notes.append(Note(None, "neg = aten.neg(y)"))
        ge.NetOutput([ge.Neg(y)])
    assert again(graph).notes == graph.notes
    assert to_py(again(graph)) == to_py(graph)


# -- what is wrong with a file --------------------------------------------------------------------------------------
def broken(graph, change):
    message, reader = stored(graph)
    change({op.name: op for op in message.op}, message)
    with pytest.raises(VerifyError) as caught:
        checked(read_graph(message, reader))
    return str(caught.value)


def set_extra(name, text):
    return lambda ops, message: setattr(ops[name].attr[EXTRA], "s", text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda ops, m: setattr(ops["Mul"], "type", "Mull"), "there is no op 'Mull' in the table\n  op:  Mul (Mull)"),
        (
            lambda ops, m: ops["Mul"].input.__setitem__(0, "y:0"),
            "it reads 'y:0', which no op before it computes\n  op: Mul (Mul)",
        ),
        (lambda ops, m: ops["Mul"].input.append("x:0"), "it has 3 inputs, which is not what Mul takes"),
        (lambda ops, m: setattr(ops["Log"], "name", "Mul"), "duplicated node name 'Mul' is not allowed"),
        (lambda ops, m: setattr(ops["Half"].attr["dst_type"], "dt", 3), "Half:0 is float16"),
        (
            lambda ops, m: (
                ops["Squeeze"].attr["colour"].ClearField("i") or setattr(ops["Squeeze"].attr["colour"], "i", 1)
            ),
            "Squeeze has no attribute 'colour'",
        ),
        (
            lambda ops, m: setattr(ops["x"].output_desc[0], "device_type", "GPU"),
            "the place of an output is 'GPU', not CPU or NPU",
        ),
        (lambda ops, m: setattr(ops["x"].output_desc[0], "dtype", 99), "there is no element type 99"),
        (lambda ops, m: ops["x"].attr.pop(EXTRA), "nothing says what its symbols are"),
        (lambda ops, m: m.op.remove(ops["NetOutput"]), "a graph has one NetOutput, this one has 0"),
        (set_extra("x", b"{"), "an op is not described as it should be: JSONDecodeError"),
        (set_extra("x", b"[1]"), "its _airgraph attribute is not a JSON object"),
        (set_extra("x", b'{"shapes": [[2, {"expr": "zz"}]]}'), "'zz' is not an expression"),
        (set_extra("x", b'{"shapes": [[3, {"expr": "x_1"}]]}'), "the shape of an output is [2, -1] and"),
        (set_extra("x", b"[" * 100_000), "an op is not described as it should be: RecursionError"),
        (set_extra("Const", b'{"number": [0.2]}'), "its number and its bytes differ"),
        (lambda ops, m: setattr(ops["Const"].attr["value"].t, "data", b"abc"), "its number and its bytes differ"),
        (
            set_extra("Own", b'{"custom": {"counts": [null, -1, 9]}}'),
            "an op is not described as it should be: KeyError",
        ),
    ],
)
def test_what_is_wrong_is_said(graph, change, text):
    found = broken(graph, change)
    assert " ".join(text.split()) in " ".join(found.split())


def test_an_array_without_its_bytes():
    with ge.building(Graph()) as graph:
        ge.NetOutput([ge.constant(np.ones(4, np.float32), ge.DataType.DT_FLOAT)])

    def change(ops, message):
        for desc in (ops["Const"].attr["value"].t.desc, ops["Const"].output_desc[0]):
            desc.shape.dim[0] = 2**40

    assert "it has 16 bytes, which is not float[1099511627776]" in broken(graph, change)


def set_list(attr):
    attr.list.i.extend([-3, 2**40])


ODD_VALUES = [
    lambda attr: setattr(attr, "i", 2**40),
    lambda attr: setattr(attr, "s", b"\xff"),
    lambda attr: setattr(attr, "f", 1e30),
    lambda attr: setattr(attr, "dt", 77),
    lambda attr: attr.Clear(),
    set_list,
]


def test_odd_attributes_never_get_past_the_check(graph):
    """Any attribute of any op as another kind of value: read as a graph that holds, or refused, by an error of ours."""
    message, reader = stored(graph)
    random.seed(0)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(200):
        changed = GraphDef()
        changed.CopyFrom(message)
        op = random.choice(changed.op)
        random.choice(ODD_VALUES)(op.attr[random.choice(sorted(op.attr))])
        try:
            checked(read_graph(changed, reader))
            outcomes["read"] += 1
        except VerifyError:
            outcomes["refused"] += 1
    assert outcomes["read"] > 0 and outcomes["refused"] > 20


def test_notes_and_marks_of_a_call_are_no_attributes():
    with ge.building(Graph()) as graph:
        graph.notes.append(Note("model.py", "roll", "layers.0"))
        x = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
        graph.names["x"] = "hidden_states"
        marks = {"_user_stream_label": "side"}
        (y,) = ge.AtenCall([x], target="aten.roll.default", args=["%0", 1], types=[[0, [2], "CPU"]], marks=marks)
        ge.NetOutput([y])
    writer = DataWriter()
    again = read_graph(write_graph(graph, writer), DataReader(writer.symbol_table()))
    assert again.notes == graph.notes and again.names == graph.names
    assert again.node("AtenCall").attrs == graph.node("AtenCall").attrs
