"""Which results may be written over what a loop reads."""

from __future__ import annotations

import textwrap

from airgraph.ir.boundary import Boundary, Fresh, Layout, TensorIn
from airgraph.ir.text import from_py
from airgraph.plan.groups import make_plan
from airgraph.plan.index import strides_of
from airgraph.plan.overwrite import overwrites
from airgraph.plan.steps import LoopStep
from airgraph.plan.text import PlanText

HEAD = """
x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
y_0 = ge.Data(index=1, dtype=0, shape=[4, 8], placement="CPU", node_name="y")
"""


def pairs(text: str) -> list[str]:
    """What may lie where, by the names of the plan's text."""
    graph = from_py(HEAD + textwrap.dedent(text))
    inputs = [TensorIn(n.name, n.output.type, strides_of(n.output.type.shape), "cpu") for n in graph.inputs]
    outputs = [
        Fresh(i, Layout(v.type.shape, strides_of(v.type.shape)), "cpu") for i, v in enumerate(graph.net_output.values())
    ]
    plan = make_plan(graph, Boundary(inputs, outputs))
    names = PlanText(plan)
    names.lines()
    found = [p for step in plan.steps if isinstance(step, LoopStep) for p in overwrites(step)]
    return [f"{names.name(t)} over {names.name(x)}" for t, x in found]


def test_element_by_element():
    assert pairs("""
        Add_0 = ge.Add(x_0, y_0, node_name="Add")
        Relu_0 = ge.Relu(Add_0, node_name="Relu")
        _ = ge.NetOutput([Relu_0], dependencies=[])
    """) == ["t0 over x", "t0 over y"]


def test_elements_that_move_are_not_overwritten():
    assert pairs("""
        Transpose_0 = ge.Transpose(x_0, [1, 0], node_name="Transpose")
        Reshape_0 = ge.Reshape(Transpose_0, [4, 8], node_name="Reshape")
        Add_0 = ge.Add(Reshape_0, y_0, node_name="Add")
        _ = ge.NetOutput([Add_0], dependencies=[])
    """) == ["t0 over y"]


def test_elements_that_are_read_at_two_places_are_not_overwritten():
    assert pairs("""
        Slice_0 = ge.StridedSliceV2(x_0, [0], [1], [0], [1], node_name="Slice")
        Add_0 = ge.Add(x_0, Slice_0, node_name="Add")
        Mul_0 = ge.Mul(Add_0, y_0, node_name="Mul")
        _ = ge.NetOutput([Mul_0], dependencies=[])
    """) == ["t0 over y"]


def test_the_last_turn_over_a_row_may():
    assert pairs("""
        SoftmaxV2_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="SoftmaxV2")
        _ = ge.NetOutput([SoftmaxV2_0], dependencies=[])
    """) == ["t0 over x"]


def test_an_earlier_turn_may_not():
    """The sum is stored in the first turn; later turns compute it again from x and y."""
    assert pairs("""
        Add_0 = ge.Add(x_0, y_0, node_name="Add")
        SoftmaxV2_0 = ge.SoftmaxV2(Add_0, axes=[-1], node_name="SoftmaxV2")
        _ = ge.NetOutput([Add_0, SoftmaxV2_0], dependencies=[])
    """) == ["t1 over x", "t1 over y"]


def test_two_results_of_one_turn():
    """What the first store has read is at hand when the second one comes; what it has not read is not."""
    assert pairs("""
        Add_0 = ge.Add(x_0, y_0, node_name="Add")
        Exp_0 = ge.Exp(Add_0, node_name="Exp")
        Mul_0 = ge.Mul(Exp_0, x_0, node_name="Mul")
        _ = ge.NetOutput([Exp_0, Mul_0], dependencies=[])
    """) == ["t0 over x", "t0 over y", "t1 over x", "t1 over y"]
    assert pairs("""
        Exp_0 = ge.Exp(x_0, node_name="Exp")
        Mul_0 = ge.Mul(Exp_0, y_0, node_name="Mul")
        _ = ge.NetOutput([Exp_0, Mul_0], dependencies=[])
    """) == ["t0 over x", "t1 over x", "t1 over y"]
