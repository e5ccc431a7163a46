"""Graphs in, plans out, as text. No torch: what gets memory and which loops compute it is decided without it."""

from __future__ import annotations

import textwrap

import pytest
import sympy

from airgraph.plan.index import Affine, SplitVar, UnsupportedPlan, Var, backwards, fits, reshape_index
from airgraph.plan.steps import Plan


def same(found: Plan, wanted: str) -> None:
    assert found.text() == textwrap.dedent(wanted).strip()


def test_elementwise_chain_is_one_loop(planned):
    found = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        b_0 = ge.Data(index=1, dtype=0, shape=[8], placement="CPU", node_name="b")
        Add_0 = ge.Add(x_0, b_0, node_name="Add")
        Relu_0 = ge.Relu(Add_0, node_name="Relu")
        _ = ge.NetOutput([Relu_0], dependencies=[])
    """)
    same(
        found,
        """
        plan for test
        x: float[4, 8] input
        b: float[8] input
        t0: float[4, 8] output 0
        0 loop o0<4, o1<8
            t0[8*o0 + o1] = relu(add(x[8*o0 + o1], b[o1]))
        output 0: t0
    """,
    )


def test_softmax_is_a_row_kernel(planned):
    found = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        SoftmaxV2_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="SoftmaxV2")
        _ = ge.NetOutput([SoftmaxV2_0], dependencies=[])
    """)
    same(
        found,
        """
        plan for test
        x: float[4, 8] input
        t0: float[4, 8] output 0
        0 loop o0<4, i0<8
            x0 = exp(sub(x[8*o0 + i0], max_i(x[8*o0 + i0])))
            t0[8*o0 + i0] = mul(x0, reciprocal(sum_i(x0)))
        output 0: t0
    """,
    )


def test_views_cost_nothing(planned):
    """A transpose, a slice and a reshape are only other indices."""
    found = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 6], placement="CPU", node_name="x")
        Transpose_0 = ge.Transpose(x_0, [1, 0], node_name="Transpose")
        StridedSliceV2_0 = ge.StridedSliceV2(Transpose_0, [2], [6], [0], [1], node_name="StridedSliceV2")
        Reshape_0 = ge.Reshape(StridedSliceV2_0, [2, 8], node_name="Reshape")
        Exp_0 = ge.Exp(Reshape_0, node_name="Exp")
        _ = ge.NetOutput([Exp_0], dependencies=[])
    """)
    same(
        found,
        """
        plan for test
        x: float[4, 6] input
        t0: float[2, 8] output 0
        0 loop o0<2, o1<2, o2<4
            t0[8*o0 + 4*o1 + o2] = exp(x[2*o0 + o1 + 6*o2 + 2])
        output 0: t0
    """,
    )


def test_concatenation_is_two_ranges_of_one_loop(planned):
    found = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[3], placement="CPU", node_name="x")
        y_0 = ge.Data(index=1, dtype=0, shape=[5], placement="CPU", node_name="y")
        ConcatV2_0 = ge.ConcatV2([x_0, y_0], 0, N=2, node_name="ConcatV2")
        Neg_0 = ge.Neg(ConcatV2_0, node_name="Neg")
        _ = ge.NetOutput([Neg_0], dependencies=[])
    """)
    same(
        found,
        """
        plan for test
        x: float[3] input
        y: float[5] input
        t0: float[8] output 0
        0 loop o0<3
            t0[o0] = neg(x[o0])
        0 loop o0<5
            t0[o0 + 3] = neg(y[o0])
        output 0: t0
    """,
    )


def test_a_residual_and_its_norm_share_a_kernel(planned):
    """The sum is needed again later, so it is stored; the norm is computed in the same rows."""
    found = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=0, shape=[8, 8], placement="CPU", node_name="w")
        g_0 = ge.Data(index=2, dtype=0, shape=[8], placement="CPU", node_name="g")
        MatMulV2_0 = ge.MatMulV2(x_0, w_0, None, None, transpose_x2=True, node_name="MatMulV2")
        Add_0 = ge.Add(MatMulV2_0, x_0, node_name="Add")
        [RmsNorm_0, RmsNorm_1] = ge.RmsNorm(Add_0, g_0, epsilon=1e-06, node_name="RmsNorm")
        _ = ge.NetOutput([Add_0, RmsNorm_0], dependencies=[])
    """)
    same(
        found,
        """
        plan for test
        x: float[4, 8] input
        w: float[8, 8] input
        g: float[8] input
        t1: float[4, 8] output 0
        t2: float[4, 8] output 1
        t0: float[4, 8] arena
        0 gemm t0 = x[0, 8, 1] @ w[0, 1, 8] for batch 1, m 4, n 8, k 8
        1 loop o0<4, i0<8
            x0 = add(t0[8*o0 + i0], x[8*o0 + i0])
            t1[8*o0 + i0] = x0
            t2[8*o0 + i0] = mul(g[i0], mul(x0, rsqrt(add(div(sum_i(mul(x0, x0)), 8.0), 1e-06))))
        output 0: t1
        output 1: t2
    """,
    )


def test_an_op_without_a_formula_is_a_call(planned):
    found = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        Mul_0 = ge.Mul(x_0, x_0, node_name="Mul")
        Cumsum_0 = ge.Cumsum(Mul_0, 1, node_name="Cumsum")
        Exp_0 = ge.Exp(Cumsum_0, node_name="Exp")
        _ = ge.NetOutput([Exp_0], dependencies=[])
    """)
    same(
        found,
        """
        plan for test
        x: float[4, 8] input
        t1: float[4, 8] call Cumsum:0
        t2: float[4, 8] output 0
        t0: float[4, 8] arena
        0 loop o0<4, o1<8
            t0[8*o0 + o1] = mul(x[8*o0 + o1], x[8*o0 + o1])
        1 call t1 = Cumsum(Mul:0 = t0[8, 1]) node Cumsum
        2 loop o0<4, o1<8
            t2[8*o0 + o1] = exp(t1[8*o0 + o1])
        output 0: t2
        note Cumsum Cumsum by PyTorch: it has no formula
    """,
    )


# -- indices ------------------------------------------------------------------------------------------------------------
def test_a_reshape_that_only_merges_is_a_sum():
    a, b = Var(4), Var(6)
    (merged,) = reshape_index([Affine.of(a), Affine.of(b)], (4, 6), (24,))
    assert merged == Affine.make(0, {a: 6, b: 1})


def test_a_reshape_that_cuts_through_a_loop_asks_for_two():
    a = Var(24)
    with pytest.raises(SplitVar) as found:
        reshape_index([Affine.of(a)], (24,), (4, 6))
    assert found.value.var is a and found.value.sizes == (4, 6)


def test_a_reshape_that_is_no_sum_is_refused():
    a = Var(4)
    with pytest.raises(UnsupportedPlan):
        reshape_index([Affine.of(a) + 1], (6,), (2, 3))


def test_a_loop_that_would_stay_whole_is_not_split():
    a = Var(3)
    with pytest.raises(UnsupportedPlan):
        reshape_index([Affine.of(a) + 1], (6,), (2, 3))


def test_a_reshape_of_what_is_read_backwards():
    """5, 4, 3, … as a row and a column: the loop crosses rows, so it has to be two."""
    a = Var(6)
    with pytest.raises(SplitVar) as found:
        reshape_index([Affine.of(a) * -1 + 5], (6,), (2, 3))
    assert found.value.var is a and found.value.sizes == (2, 3)
    row, column = Var(2), Var(3)
    last_first = Affine.make(5, {row: -3, column: -1})
    assert reshape_index([last_first], (6,), (2, 3)) == [Affine.of(row) * -1 + 1, Affine.of(column) * -1 + 2]


def test_backwards_from_a_place_within_a_row_is_refused():
    a = Var(3)
    for first in (3, 4):
        with pytest.raises(UnsupportedPlan):
            reshape_index([Affine.of(a) * -1 + first], (6,), (2, 3))


def test_an_index_below_zero_does_not_fit():
    size = sympy.Symbol("s", integer=True, positive=True)
    assert fits(Affine.of(Var(size)), size)
    assert not fits(Affine.of(Var(size)) * -1, size)
    assert not fits(Affine.of(Var(3)) * -1 + 1, 3)
    assert fits(Affine.of(Var(3)) * -1 + 2, 3)


def test_a_sum_of_which_nothing_is_known_may_go_backwards():
    a, b = (sympy.Symbol(name, integer=True, positive=True) for name in "ab")
    assert [backwards(x) for x in (2, -2, a, -a, a * b, -2 * a * b, a + 1, -a - 1, a - b, b - a)] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
        True,
        True,
        True,
    ]


def test_an_empty_tensor_is_not_stored_in_the_loops_of_a_reduction(planned):
    """The outer loops of a reduction over nothing run once, and a store there would be one outside of the empty tensor."""
    found = planned("""
        x_0 = ge.Data(index=0, dtype=12, shape=[0, 2], placement="CPU", node_name="x")
        y_0 = ge.Data(index=1, dtype=12, shape=[0, 1], placement="CPU", node_name="y")
        a_0 = ge.ReduceAny(x_0, [0, 1], keep_dims=False, node_name="a")
        b_0 = ge.LogicalAnd(y_0, a_0, node_name="b")
        _ = ge.NetOutput([a_0, b_0], dependencies=[])
    """)
    same(
        found,
        """
        plan for test
        x: bool[0, 2] input
        y: bool[0, 1] input
        t0: bool[] output 0
        t1: bool[0, 1] output 1
        0 loop i0<0, i1<2
            t0[0] = or_i(x[2*i0 + i1])
        1 loop o0<0, o1<1
            t1[o0] = and(y[o0], t0[0])
        output 0: t0
        output 1: t1
    """,
    )
