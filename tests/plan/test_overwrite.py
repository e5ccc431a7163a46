"""Which results may be written over what a loop reads."""

from __future__ import annotations

import textwrap

import pytest

from airgraph.plan.overwrite import overwrites
from airgraph.plan.steps import LoopStep
from airgraph.plan.text import PlanText

HEAD = """
x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
y_0 = ge.Data(index=1, dtype=0, shape=[4, 8], placement="CPU", node_name="y")
"""


@pytest.fixture
def pairs(planned):
    """What may be written over what, by the names of the plan's text."""

    def found(text: str) -> list[str]:
        plan = planned(HEAD + textwrap.dedent(text))
        names = PlanText(plan)
        names.lines()
        steps = [step for step in plan.steps if isinstance(step, LoopStep)]
        return [f"{names.name(t)} over {names.name(x)}" for step in steps for t, x in overwrites(step)]

    return found


def test_element_by_element(pairs):
    assert pairs("""
        Add_0 = ge.Add(x_0, y_0, node_name="Add")
        Relu_0 = ge.Relu(Add_0, node_name="Relu")
        _ = ge.NetOutput([Relu_0], dependencies=[])
    """) == ["t0 over x", "t0 over y"]


def test_elements_that_move_are_not_overwritten(pairs):
    assert pairs("""
        Transpose_0 = ge.Transpose(x_0, [1, 0], node_name="Transpose")
        Reshape_0 = ge.Reshape(Transpose_0, [4, 8], node_name="Reshape")
        Add_0 = ge.Add(Reshape_0, y_0, node_name="Add")
        _ = ge.NetOutput([Add_0], dependencies=[])
    """) == ["t0 over y"]


def test_elements_that_are_read_at_two_places_are_not_overwritten(pairs):
    assert pairs("""
        Slice_0 = ge.StridedSliceV2(x_0, [0], [1], [0], [1], node_name="Slice")
        Add_0 = ge.Add(x_0, Slice_0, node_name="Add")
        Mul_0 = ge.Mul(Add_0, y_0, node_name="Mul")
        _ = ge.NetOutput([Mul_0], dependencies=[])
    """) == ["t0 over y"]


def test_the_last_stage_of_a_row_may(pairs):
    assert pairs("""
        SoftmaxV2_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="SoftmaxV2")
        _ = ge.NetOutput([SoftmaxV2_0], dependencies=[])
    """) == ["t0 over x"]


def test_an_earlier_stage_may_not(pairs):
    """The sum is stored in the first stage; later stages compute it again from x and y."""
    assert pairs("""
        Add_0 = ge.Add(x_0, y_0, node_name="Add")
        SoftmaxV2_0 = ge.SoftmaxV2(Add_0, axes=[-1], node_name="SoftmaxV2")
        _ = ge.NetOutput([Add_0, SoftmaxV2_0], dependencies=[])
    """) == ["t1 over x", "t1 over y"]


def test_two_results_of_one_stage(pairs):
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


def test_a_part_of_narrower_numbers_is_not_overwritten(pairs):
    """Six float16 take as many bytes as twelve bools: the second result would lie over the third operand."""
    found = pairs("""
        Equal_0 = ge.Equal(x_0, y_0, node_name="Equal")
        Slice_0 = ge.StridedSliceV2(Equal_0, [0], [2], [0], [1], node_name="Slice")
        Cast_0 = ge.Cast(Slice_0, dst_type=1, node_name="Cast")
        Softmax_0 = ge.SoftmaxV2(Cast_0, axes=[-1], node_name="Softmax")
        _ = ge.NetOutput([Equal_0, Softmax_0], dependencies=[])
    """)
    assert not any(pair.endswith("over t0") for pair in found)
