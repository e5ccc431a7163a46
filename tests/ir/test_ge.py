"""Builders: literals, names, known sizes, control edges, custom ops, and what they say when called wrongly."""

import numpy as np
import pytest
import sympy

from airgraph.errors import VerifyError
from airgraph.ir import ge
from airgraph.ir.graph import Graph
from airgraph.ir.text import call_text, to_py
from airgraph.ir.types import DataType

DT = DataType
S0 = sympy.Symbol("s0", integer=True, positive=True)


@pytest.fixture(autouse=True)
def graph():
    with ge.building(Graph("g")) as graph:
        yield graph


def data(dtype=DT.DT_FLOAT, shape=(2, 3), name=None, **options):
    index = len(ge.current_graph().inputs)
    return ge.Data(index=index, dtype=dtype, shape=shape, placement="NPU", node_name=name, **options)


def size(expr, name):
    return ge.Data(index=9, dtype=9, shape=[], placement="CPU", node_name=name, known=expr)


def fails(call, *args, **kwargs):
    with pytest.raises((VerifyError, AssertionError)) as error:
        call(*args, **kwargs)
    return str(error.value)


# -- literals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "literal, beside, dtype",
    [
        (2, DT.DT_INT32, DT.DT_INT32),
        (2, DT.DT_FLOAT, DT.DT_INT64),  # no int type beside it
        (2.0, DT.DT_FLOAT16, DT.DT_FLOAT16),
        (2.0, DT.DT_INT32, DT.DT_FLOAT),
        ([1, 2.5], DT.DT_BF16, DT.DT_BF16),
        (True, DT.DT_FLOAT, DT.DT_BOOL),
        (1j, DT.DT_COMPLEX128, DT.DT_COMPLEX128),
        (1j, DT.DT_FLOAT, DT.DT_COMPLEX64),
        ("text", DT.DT_FLOAT, DT.DT_STRING),
        ([[1], [2]], DT.DT_UINT8, DT.DT_UINT8),
    ],
)
def test_a_literal_takes_the_type_beside_it(literal, beside, dtype):
    shape = [] if literal == "text" else np.shape(literal)
    x = data(beside, shape)
    const = ge.Mul(x, literal).node.inputs[1]
    assert (const.dtype, const.type.shape, const.type.place) == (dtype, tuple(shape), "CPU")


def test_an_index_is_int64():
    reshape = ge.Reshape(data(DT.DT_INT32), [6])
    assert reshape.node.inputs[1].dtype == DT.DT_INT64 and reshape.node.inputs[1].known == (6,)


def test_an_index_beside_does_not_count():
    axes = data(DT.DT_INT64, [1])
    node = ge.GatherV2(data(DT.DT_INT32), 1, axes).node
    assert node.inputs[1].dtype == DT.DT_INT32


def test_an_ambiguous_literal():
    a, b = data(DT.DT_FLOAT, name="a"), data(DT.DT_FLOAT16, name="b")
    assert fails(ge.Addcmul, a, b, b, 0.5) == (
        "cannot promote Addcmul input 'value' = 0.5: the other inputs are DT_FLOAT, DT_FLOAT16\n"
        "  try: ge.Const(value, dtype=...)"
    )
    assert ge.Addcmul(a, b, b, 1).node.inputs[3].dtype == DT.DT_INT64


def test_const():
    assert ge.Const(0.5).dtype == DT.DT_FLOAT
    assert ge.Const([1, 2]).known == (1, 2)
    assert ge.Const([[1], [2]], dtype=3).known == ((1,), (2,))
    assert ge.Const(2, dtype=0).known is None
    assert ge.Const(np.float32(0.5), dtype=0).node.attrs["value"] == 0.5
    assert ge.Const(sympy.Integer(3), dtype=9).known == 3
    assert fails(ge.Const, S0, dtype=9) == "s0 is symbolic and cannot be a constant"
    assert fails(ge.Const, object, dtype=9).endswith(
        "(type) cannot be a constant\n  try: numbers, lists of numbers, arrays"
    )
    assert fails(ge.Const, [[1], [1, 2]], dtype=9) == ("[[1], [1, 2]] cannot be a constant: its rows differ in length")


# -- wrong calls ----------------------------------------------------------------------------------------------------
def test_wrong_calls(graph):
    x = data(name="x")
    assert fails(ge.Mul, x) == "Mul needs its input 'x2'\n  inputs: x1, x2"
    assert fails(ge.Mul, x, x, x) == "Mul takes 2 inputs, got 3\n  inputs: x1, x2"
    assert fails(ge.Mul, x, x, alpha=1) == (
        "Mul has no attribute or input 'alpha'\n  attributes: none\n  inputs:     x1, x2"
    )
    assert fails(ge.Cast, x) == "Cast needs the attribute 'dst_type'\n  attributes: dst_type"
    assert fails(ge.ConcatV2, [x], 0) == "ConcatV2 needs the attribute 'N'\n  attributes: N"
    assert (
        fails(ge.Pack, x, N=1) == "input 'x' of Pack is a list of values, got Tensor(x:0, dtype=DT_FLOAT, size=[2, 3])"
    )
    assert fails(ge.Pack, [], N=0) == "Pack needs at least one value in its input 'x'"
    assert fails(lambda: ge.build(ge.OPS["Const"], [], {})) == "Const has a builder of its own"
    assert [n.op for n in graph.nodes] == ["Data"]


def test_an_op_that_does_not_exist():
    with pytest.raises(AttributeError, match="there is no GE op 'Mull' in the op table"):
        ge.Mull  # noqa: B018


def test_inputs_by_name():
    x, y = data(name="x"), data(name="y")
    assert call_text(ge.Sub(x2=y, x1=x).node) == 'ge.Sub(x_0, y_0, node_name="Sub")'
    assert call_text(ge.Sub(x, x2=y).node) == 'ge.Sub(x_0, y_0, node_name="Sub_1")'


# -- names ----------------------------------------------------------------------------------------------------------
def test_names_are_counted_past_those_taken():
    x = data()
    names = [ge.Mul(x, x).node.name, ge.Mul(x, x, node_name="Mul_1").node.name, ge.Mul(x, x).node.name, x.node.name]
    assert names == ["Mul", "Mul_1", "Mul_2", "Data"]


def test_wrong_names(graph):
    x = data(name="x")
    ge.Mul(x, x, node_name="mine")
    assert fails(ge.Exp, x, node_name="mine") == "duplicated node name 'mine' is not allowed\n  graph: g"
    for name in ("", "  "):
        assert fails(ge.Exp, x, node_name=name) == f"empty node name {name!r} is not allowed\n  graph: g"
        assert fails(data, name=name) == f"empty node name {name!r} is not allowed\n  graph: g"
    assert fails(graph.node, "nobody") == "there is no node 'nobody'\n  graph: g"


# -- known sizes ----------------------------------------------------------------------------------------------------
def test_sizes_flow():
    x = data(shape=[S0, 3, 4])
    shape = ge.Shape(x, dtype=9)
    first, last = ge.Gather(shape, 0), ge.Gather(shape, -1)
    assert (shape.known, first.known, last.known) == ((S0, 3, 4), S0, 4)
    assert (shape.type.place, first.type.place) == ("CPU", "CPU")
    assert ge.Pack([ge.Mul(first, 2), last, -1], N=3).known == (2 * S0, 4, -1)
    assert ge.Sub(ge.Add(first, first), first).known == S0
    assert ge.Sub(last, 1).known == 3
    assert ge.Cast(ge.ReduceProdD(shape, axes=[0]), dst_type=3).known == 12 * S0
    assert ge.Identity(shape).known == shape.known


def test_sizes_that_do_not_flow():
    x = data(shape=[S0, 3])
    first = ge.Gather(ge.Shape(x), 0)
    assert ge.Cast(first, dst_type=0).known is None
    assert ge.Mul(ge.Shape(x), 2).known is None  # lists are not computed with
    assert ge.Pack([first, first], N=2, axis=-1).known is None
    assert ge.Gather(ge.Shape(x), data(DT.DT_INT64, [])).known is None
    assert ge.Shape(data(shape=[-2])).type.shape is None
    assert fails(ge.Gather, ge.Shape(x), 2) == "Gather takes number 2 of 2"


def test_sizes_give_shapes():
    x = data(shape=[S0, 4])
    rows = size(S0, "rows")
    assert ge.Reshape(x, ge.Pack([ge.Mul(rows, 2), -1], N=2)).type.shape == (2 * S0, 2)
    assert ge.BroadcastTo(x, ge.Pack([3, rows, 4], N=3)).type.shape == (3, S0, 4)
    assert ge.Fill(ge.Pack([rows, 1], N=2), 0.0).type.shape == (S0, 1)


# -- control --------------------------------------------------------------------------------------------------------
def test_dependencies(graph):
    x = data(name="x")
    printed = ge.PrintV2(ge.StringFormat([x]))
    y = ge.Exp(x, dependencies=[printed, x])
    moved = ge.Clone(x, dependencies=[y], node_name="copy")
    ge.NetOutput([y], dependencies=[moved])
    assert [[c.name for c in node.control] for node in graph.nodes[2:]] == [[], ["PrintV2", "x"], ["Exp"], ["copy"]]
    assert moved.node.op == "TensorMove"
    assert fails(ge.Clone, 1) == "Clone needs a Tensor, got int"


# -- custom ops -----------------------------------------------------------------------------------------------------
def test_custom_op_by_position():
    x = data(name="x")
    assert call_text(ge.custom_op("Mul", x, 2.0).node) == 'ge.Mul(x_0, 2.0, node_name="Mul")'
    assert call_text(ge.custom_op("Cast", x, 1, node_name="c").node) == 'ge.Cast(x_0, dst_type=1, node_name="c")'
    assert call_text(ge.custom_op("MyOp", x, None, [x, x], 2, 0.5, "a", [1, 2], [True], [[1]], node_name="m").node) == (
        'ge.custom_op("MyOp", inputs={"x0": x_0, "x1": None, "x2": [x_0, x_0]}, outputs=["y0"], '
        'attrs={"attr0": ge.attr.Int(2), "attr1": ge.attr.Float(0.5), "attr2": ge.attr.Str("a"), '
        '"attr3": ge.attr.ListInt([1, 2]), "attr4": ge.attr.ListBool([True]), "attr5": ge.attr.ListListInt([[1]])}, '
        'node_name="m")'
    )
    with pytest.raises(AssertionError, match="is not an attribute of a GE op"):
        ge.custom_op("MyOp", x, object())
    assert fails(ge.custom_op, "Cast", x, 1, 2) == "Cast takes 2 inputs and attributes, got 3\n  inputs: x"


def test_custom_op_by_the_names_of_the_table_is_an_op_of_the_table():
    x = data(name="x")
    y = ge.custom_op("MatMul", inputs={"x2": x, "x1": x}, outputs=["y"], attrs={"transpose_x2": ge.attr.Bool(True)})
    assert call_text(y.node) == 'ge.MatMul(x_0, x_0, None, transpose_x2=True, node_name="MatMul")'
    assert y.type.shape == (2, 2)
    parts = ge.custom_op("Unpack", inputs={"x": x}, outputs=[("y", 2)], attrs={"num": ge.attr.Int(2)})
    assert [p.type.shape for p in parts] == [(3,), (3,)]


@pytest.mark.parametrize(
    "op, inputs, outputs, attrs",
    [
        ("Mul", ["a", "b"], ["y"], {}),
        ("Mul", ["x1"], ["y"], {}),
        ("Mul", ["x1", "x2"], ["z"], {}),
        ("Mul", ["x1", "x2"], ["y"], {"alpha": ge.attr.Float(1)}),
        ("Cast", ["x"], ["y"], {}),
        ("Identity", ["x"], [("y", 2)], {}),
        ("AtenCall", ["x"], ["y"], {}),
    ],
)
def test_custom_op_by_other_names_keeps_them(op, inputs, outputs, attrs):
    x = data(name="x")
    ge.custom_op(op, inputs=dict.fromkeys(inputs, x), outputs=outputs, attrs=attrs)
    assert f'ge.custom_op("{op}", inputs={{"{inputs[0]}": x_0' in to_py(ge.current_graph())


def test_wrong_custom_ops():
    x = data(name="x")
    assert fails(ge.custom_op, "MyOp", inputs={"x": x}, outputs=["y"], attrs={"alpha": 0.5}) == (
        "attribute 'alpha' of custom_op must be one of ge.attr.*, got float"
    )
    assert fails(ge.custom_op, "MyOp", inputs={"x": 2}, outputs=["y"]) == (
        "an input of custom_op is a Tensor, a list of Tensors or None, got int"
    )


@pytest.mark.parametrize(
    "kind, value",
    [
        ("Int", 0.5),
        ("Int", True),
        ("Float", "a"),
        ("Bool", 1),
        ("Str", 1),
        ("DataType", 99),
        ("ListInt", 1),
        ("ListInt", [0.5]),
        ("ListFloat", ["a"]),
        ("ListListInt", [1]),
        ("ListStr", "ab"),
    ],
)
def test_an_attribute_holds_its_kind_only(kind, value):
    assert fails(getattr(ge.attr, kind), value) == f"ge.attr.{kind} cannot hold {value!r}"


def test_attributes_compare_by_kind_and_value():
    assert ge.attr.Int(1) == ge.attr.Int(1) != ge.attr.Float(1)
    assert len({ge.attr.Int(1), ge.attr.Int(1), ge.attr.ListInt([1])}) == 2
    assert repr(ge.attr.ListFloat([1, 2])) == "ge.attr.ListFloat([1.0, 2.0])"


# -- scopes ---------------------------------------------------------------------------------------------------------
def test_new_nodes_carry_the_marks_of_the_moment(graph):
    x = data()
    graph.marks = {"_user_stream_label": "1"}
    a = ge.Exp(x, marks={"_more": "2"})
    ge.Mul(a, 2.0)
    graph.marks = {}
    ge.Neg(a)
    assert [n.marks for n in graph.nodes] == [
        {},
        {"_user_stream_label": "1", "_more": "2"},
        {},
        {"_user_stream_label": "1"},
        {},
    ]
    with graph.before(a.node):
        inserted = ge.Neg(x)
    assert inserted.node.marks == a.node.marks and inserted.node.marks is not a.node.marks


def test_the_next_node_waits(graph):
    x = data()
    a = ge.Exp(x)
    graph.waits = [a.node]
    b = ge.Mul(x, 2.0)
    c = ge.Neg(x)
    assert b.node.control == (a.node,) and c.node.control == () and graph.waits == []
