"""Dead code, equal nodes, constants: before → after."""

import pytest
import sympy

from airgraph.ir import ge
from airgraph.ir.graph import Graph
from airgraph.ir.text import from_py, to_py
from airgraph.ir.verify import verify
from airgraph.passes.cleanup import common_subexpressions, constant_folding, dead_code, dead_inputs, fulfilled_waits

X = 'x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="NPU", node_name="x")\n'
Y = 'y_0 = ge.Data(index=1, dtype=0, shape=[4, 8], placement="NPU", node_name="y")\n'


# -- dead code ------------------------------------------------------------------------------------------------------
def test_what_nobody_reads_goes(after):
    before = (
        X
        + """
Shape_0 = ge.Shape(x_0, node_name="Shape")
Gather_0 = ge.Gather(Shape_0, 0, node_name="Gather")
Mul_0 = ge.Mul(x_0, x_0, node_name="Mul")
_ = ge.NetOutput([Mul_0], dependencies=[])
"""
    )
    expected = X + 'Mul_0 = ge.Mul(x_0, x_0, node_name="Mul")\n_ = ge.NetOutput([Mul_0], dependencies=[])'
    assert after(dead_code, before, expected) == ["dropped Gather", "dropped Shape"]


def test_waits_that_the_order_fulfils():
    """What only computes need not wait, and what was only waited for need not be there; effects stay as they are."""
    graph = from_py(
        X
        + """
Exp_0 = ge.Exp(x_0, node_name="Exp")
Mul_0 = ge.Mul(x_0, x_0, marks={"_user_stream_label": "1"}, dependencies=[Exp_0], node_name="Mul")
StringFormat_0 = ge.StringFormat([x_0], node_name="StringFormat")
_ = ge.PrintV2(StringFormat_0, dependencies=[Mul_0])
_ = ge.NetOutput([Mul_0], dependencies=[])
"""
    )
    fulfilled_waits(graph)
    verify(graph)
    assert [node.op for node in graph.nodes] == ["Data", "Mul", "StringFormat", "PrintV2", "NetOutput"]
    assert graph.node("Mul").control == () and graph.node("PrintV2").control == (graph.node("Mul"),)
    assert graph.node("Mul").marks == {"_user_stream_label": "1"}


def test_effects_are_kept(after):
    text = (
        X
        + """
StringFormat_0 = ge.StringFormat([x_0], node_name="StringFormat")
_ = ge.PrintV2(StringFormat_0)
Exp_0 = ge.Exp(x_0, node_name="Exp")
Assign_0 = ge.Assign(x_0, Exp_0, node_name="Assign")
[AtenCall_0] = ge.AtenCall([x_0], target="aten.a.b", args=["%0"], types=[[0, [4], "NPU"]], node_name="AtenCall")
MyOp_0 = ge.custom_op("MyOp", inputs={"x": x_0}, outputs=["y"], attrs={}, node_name="MyOp")
Mul_0 = ge.custom_op("Mul", inputs={"a": x_0}, outputs=["z"], attrs={}, node_name="Mul")
_ = ge.NetOutput([x_0], dependencies=[])
"""
    )
    assert after(dead_code, text) == []


def test_what_is_waited_for_is_kept(after):
    text = (
        X
        + """
Exp_0 = ge.Exp(x_0, node_name="Exp")
Mul_0 = ge.Mul(x_0, x_0, dependencies=[Exp_0], node_name="Mul")
_ = ge.NetOutput([Mul_0], dependencies=[])
"""
    )
    assert after(dead_code, text) == []


def test_what_only_the_dead_wait_for_goes_at_once(after):
    before = (
        X
        + """
Exp_0 = ge.Exp(x_0, node_name="Exp")
Mul_0 = ge.Mul(x_0, x_0, dependencies=[Exp_0], node_name="Mul")
_ = ge.NetOutput([x_0], dependencies=[])
"""
    )
    assert after(dead_code, before, X + "_ = ge.NetOutput([x_0], dependencies=[])") == ["dropped Mul", "dropped Exp"]


def test_one_output_of_several_keeps_the_node(after):
    text = (
        X
        + """
[SplitV_0, SplitV_1] = ge.SplitV(x_0, [2, 2], 0, num_split=2)
_ = ge.NetOutput([SplitV_1], dependencies=[])
"""
    )
    assert after(dead_code, text) == []


def test_waiting_is_handed_on_when_a_node_goes():
    graph = from_py(
        X
        + """
_ = ge.PrintV2(ge.StringFormat([x_0]))
a = ge.Exp(x_0, dependencies=[ge.node("PrintV2")])
b = ge.Sin(x_0, dependencies=[a])
_ = ge.NetOutput([b])
"""
    )
    graph.erase([graph.node("Exp")])
    assert [c.name for c in graph.node("Sin").control] == ["PrintV2"]
    verify(graph)


# -- inputs ---------------------------------------------------------------------------------------------------------
def test_inputs_nobody_reads_go(after):
    before = """
c_0 = ge.Data(index=2, dtype=0, shape=[2], placement="NPU", node_name="c")
a_0 = ge.Data(index=0, dtype=0, shape=[2], placement="NPU", node_name="a")
b_0 = ge.Data(index=1, dtype=0, shape=[2], placement="NPU", node_name="b")
Sub_0 = ge.Sub(b_0, c_0, node_name="Sub")
_ = ge.NetOutput([Sub_0], dependencies=[])
"""
    expected = """
c_0 = ge.Data(index=1, dtype=0, shape=[2], placement="NPU", node_name="c")
b_0 = ge.Data(index=0, dtype=0, shape=[2], placement="NPU", node_name="b")
Sub_0 = ge.Sub(b_0, c_0, node_name="Sub")
_ = ge.NetOutput([Sub_0], dependencies=[])
"""
    assert after(dead_inputs, before, expected) == ["dropped input a"]


def test_inputs_keep_their_numbers_where_all_are_read(after):
    text = """
b_0 = ge.Data(index=1, dtype=0, shape=[2], placement="NPU", node_name="b")
a_0 = ge.Data(index=0, dtype=0, shape=[2], placement="NPU", node_name="a")
_ = ge.NetOutput([a_0, b_0], dependencies=[])
"""
    assert after(dead_inputs, text) == []


def test_an_input_that_is_waited_for_stays(after):
    text = f"""{X}{Y}
Exp_0 = ge.Exp(x_0, dependencies=[y_0], node_name="Exp")
_ = ge.NetOutput([Exp_0], dependencies=[])
"""
    assert after(dead_inputs, text) == []


# -- equal nodes ----------------------------------------------------------------------------------------------------
def test_equal_nodes_are_one(after):
    before = (
        X
        + """
Exp_0 = ge.Exp(x_0, node_name="Exp")
Mul_0 = ge.Mul(Exp_0, 2.0, node_name="Mul")
Exp_1_0 = ge.Exp(x_0, node_name="Exp_1")
Mul_1_0 = ge.Mul(Exp_1_0, 2.0, node_name="Mul_1")
Add_0 = ge.Add(Mul_0, Mul_1_0, node_name="Add")
_ = ge.NetOutput([Add_0], dependencies=[])
"""
    )
    expected = (
        X
        + """
Exp_0 = ge.Exp(x_0, node_name="Exp")
Mul_0 = ge.Mul(Exp_0, 2.0, node_name="Mul")
Exp_1_0 = ge.Exp(x_0, node_name="Exp_1")
Mul_1_0 = ge.Mul(Exp_0, 2.0, node_name="Mul_1")
Add_0 = ge.Add(Mul_0, Mul_0, node_name="Add")
_ = ge.NetOutput([Add_0], dependencies=[])
"""
    )
    assert after(common_subexpressions, before, expected) == ["Exp_1 = Exp", "Mul_1 = Mul"]


@pytest.mark.parametrize(
    "a, b",
    [
        ("ge.Mul(x_0, 2.0)", "ge.Mul(x_0, 3.0)"),
        ("ge.Mul(x_0, 0.0)", "ge.Mul(x_0, -0.0)"),
        ("ge.Cast(x_0, dst_type=1)", "ge.Cast(x_0, dst_type=27)"),
        ("ge.Mul(x_0, ge.Const(2, dtype=0))", "ge.Mul(x_0, ge.Const(2, dtype=1))"),
        ("ge.Sub(x_0, y_0)", "ge.Sub(y_0, x_0)"),
        ("ge.Exp(x_0)", "ge.Exp(x_0, dependencies=[y_0])"),
        ("ge.Assign(x_0, y_0)", "ge.Assign(x_0, y_0)"),
        (
            'ge.custom_op("Mul", inputs={"a": x_0}, outputs=["z"])',
            'ge.custom_op("Mul", inputs={"a": x_0}, outputs=["z"])',
        ),
    ],
)
def test_nodes_that_differ_stay_two(a, b):
    graph = from_py(f"{X}{Y}a = {a}\nb = {b}\n_ = ge.NetOutput([a, b])")
    common_subexpressions(graph)
    first, second = graph.net_output.values()
    assert first.node is not second.node


def test_calls_are_never_merged():
    """They may draw random numbers."""
    call = 'ge.AtenCall([x_0], target="aten.rand_like.default", args=["%0"], types=[[0, [4, 8], "NPU"]])'
    graph = from_py(X + f"[a] = {call}\n[b] = {call}\n_ = ge.NetOutput([a, b])")
    assert not common_subexpressions(graph).changed


# -- constants ------------------------------------------------------------------------------------------------------
def test_sizes_that_are_numbers_are_constants():
    before = (
        X
        + """
Shape_0 = ge.Shape(x_0, dtype=9, node_name="Shape")
Gather_0 = ge.Gather(Shape_0, 0, node_name="Gather")
Mul_0 = ge.Mul(Gather_0, 2, node_name="Mul")
Pack_0 = ge.Pack([Mul_0, -1], N=2, node_name="Pack")
Reshape_0 = ge.Reshape(x_0, Pack_0, node_name="Reshape")
_ = ge.NetOutput([Reshape_0, Shape_0], dependencies=[])
"""
    )
    graph = from_py(before)
    result = constant_folding(graph)
    dead_code(graph)
    verify(graph)
    assert result.notes == ["Shape = [4, 8]", "Gather = 4", "Mul = 8", "Pack = [8, -1]"]
    assert to_py(graph, notes=False).splitlines()[-4:] == [
        'x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="NPU", node_name="x")',
        'Reshape_0 = ge.Reshape(x_0, ge.Const([8, -1], dtype=9), node_name="Reshape")',
        "",
        "_ = ge.NetOutput([Reshape_0, ge.Const([4, 8], dtype=9)], dependencies=[])",
    ]
    assert not constant_folding(graph).changed


def test_sizes_that_are_symbols_are_not(after):
    text = (
        X.replace("[4, 8]", "[-1, 8]")
        + """
Shape_0 = ge.Shape(x_0, node_name="Shape")
Gather_0 = ge.Gather(Shape_0, 0, node_name="Gather")
_ = ge.NetOutput([Gather_0], dependencies=[])
"""
    )
    assert after(constant_folding, text) == []


def test_a_node_that_waits_is_not_folded(after):
    text = (
        X
        + """
_ = ge.PrintV2("here")
Shape_0 = ge.Shape(x_0, dependencies=[ge.node("PrintV2")], node_name="Shape")
_ = ge.NetOutput([Shape_0], dependencies=[])
"""
    )
    assert after(constant_folding, text) == []


def test_an_input_is_not_folded_even_if_its_value_is_known():
    with ge.building(Graph()) as graph:
        k = ge.Data(index=0, dtype=9, shape=[], placement="CPU", node_name="k", known=3)
        n = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="n", known=sympy.Symbol("s0"))
        ge.NetOutput([ge.Add(k, 1), ge.Add(n, 1)])
    assert constant_folding(graph).notes == ["Add = 4"]
    assert [v.node.op for v in graph.net_output.values()] == ["Const", "Add"]
