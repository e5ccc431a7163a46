"""Which loops become the prologue of a product, as text: graphs in, plans out."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from airgraph.errors import VerifyError
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import GemmStep, step_reads, step_writes

INPUTS = """
        x_0 = ge.Data(index=0, dtype=0, shape=[80, 32], placement="CPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=0, shape=[16, 32], placement="CPU", node_name="w")
        r_0 = ge.Data(index=2, dtype=0, shape=[80, 32], placement="CPU", node_name="r")
"""


@pytest.fixture
def fused(planned, target):
    def plan(rest: str, columns: int = 16, **limits):
        chosen = replace(target, prologue_columns=columns, **limits)
        return planned(textwrap.dedent(INPUTS) + textwrap.dedent(rest), chosen)

    return plan


def begins(plan) -> list[bool]:
    return [s.prologue is not None for s in plan.steps if isinstance(s, GemmStep)]


def test_elements_of_the_rows(fused):
    rest = """
        a_0 = ge.Relu(x_0, node_name="a")
        s_0 = ge.Add(r_0, a_0, node_name="s")
        m_0 = ge.MatMulV2(s_0, w_0, None, None, transpose_x2=True, node_name="m")
        _ = ge.NetOutput([m_0], dependencies=[])
    """
    plan = fused(rest)
    assert (
        plan.text()
        == textwrap.dedent("""
        plan for test
        x: float[80, 32] input
        w: float[16, 32] input
        r: float[80, 32] input
        t1: float[80, 16] output 0
        t0: float[80, 32] arena
        0 first o0<80, o1<32
            t0[32*o0 + o1] = add(r[32*o0 + o1], relu(x[32*o0 + o1]))
        0 gemm t1 = t0[0, 32, 1] @ w[0, 1, 32] for batch 1, m 80, n 16, k 32
        output 0: t1
    """).strip()
    )
    (step,) = plan.steps
    assert {plan.allocation(t).source for t in step_reads(step)} == {"x", "w", "r"}
    assert [plan.allocation(t).kind for t in step_writes(step)] == ["arena", "output"]
    for columns in (0, 15):
        apart = fused(rest, columns)
        assert begins(apart) == [False] and len(apart.steps) == 2
    assert begins(fused(rest, lanes=16)) == [False]  # two vectors a row


def test_a_norm_of_the_rows_between_two_products(fused):
    """What ends the first product is its epilogue; what is left begins the second."""
    plan = fused(
        """
        m_0 = ge.MatMulV2(x_0, w_0, None, None, transpose_x2=True, node_name="m")
        a_0 = ge.SoftmaxV2(m_0, axes=[-1], node_name="a")
        n_0 = ge.MatMulV2(a_0, w_0, None, None, node_name="n")
        e_0 = ge.Relu(n_0, node_name="e")
        _ = ge.NetOutput([e_0], dependencies=[])
    """,
        columns=32,
        epilogues=100,
        epilogue_columns=8,
    )
    lines = [line for line in plan.text().splitlines() if line[0].isdigit()]
    assert [line.split()[:2] for line in lines] == [["0", "gemm"], ["1", "first"], ["1", "gemm"], ["1", "then"]]
    assert lines[1] == "1 first o0<80, i0<16"
    parsed = parse_plan(plan.text(), plan.graph, plan.boundary, plan.target)
    assert parsed.text() == plan.text() and begins(parsed) == begins(plan) == [False, True]
    for p in (plan, parsed):
        (nest,) = p.steps[1].prologue.nests
        assert (nest.jobs, nest.row) == (80, 16)


def test_rows_of_several_dimensions_are_the_rows_of_the_product(fused):
    plan = fused("""
        v_0 = ge.Reshape(x_0, [8, 10, 32], node_name="v")
        a_0 = ge.SoftmaxV2(v_0, axes=[-1], node_name="a")
        b_0 = ge.Reshape(a_0, [80, 32], node_name="b")
        m_0 = ge.MatMulV2(b_0, w_0, None, None, transpose_x2=True, node_name="m")
        _ = ge.NetOutput([m_0], dependencies=[])
    """)
    assert "0 first i0<32, o0<80\n" in plan.text()


@pytest.mark.parametrize(
    ("why", "rest"),
    [
        (
            "the operand is read again",
            """
            a_0 = ge.Relu(x_0, node_name="a")
            m_0 = ge.MatMulV2(a_0, w_0, None, None, transpose_x2=True, node_name="m")
            n_0 = ge.MatMulV2(a_0, w_0, None, None, transpose_x2=True, node_name="n")
            _ = ge.NetOutput([m_0, n_0], dependencies=[])
            """,
        ),
        (
            "it leaves the graph itself",
            """
            a_0 = ge.Relu(x_0, node_name="a")
            m_0 = ge.MatMulV2(a_0, w_0, None, None, transpose_x2=True, node_name="m")
            _ = ge.NetOutput([a_0, m_0], dependencies=[])
            """,
        ),
        (
            "the epilogue reads it, too",
            """
            u_0 = ge.Data(index=3, dtype=0, shape=[32, 32], placement="CPU", node_name="u")
            a_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="a")
            m_0 = ge.MatMulV2(a_0, u_0, None, None, node_name="m")
            s_0 = ge.Add(a_0, m_0, node_name="s")
            _ = ge.NetOutput([s_0], dependencies=[])
            """,
        ),
        (
            "columns are normalised, which needs all rows",
            """
            a_0 = ge.SoftmaxV2(x_0, axes=[0], node_name="a")
            m_0 = ge.MatMulV2(a_0, w_0, None, None, transpose_x2=True, node_name="m")
            _ = ge.NetOutput([m_0], dependencies=[])
            """,
        ),
        (
            "its columns are the rows of the product",
            """
            y_0 = ge.Reshape(x_0, [32, 80], node_name="y")
            a_0 = ge.Relu(y_0, node_name="a")
            u_0 = ge.Reshape(w_0, [32, 16], node_name="u")
            m_0 = ge.MatMulV2(a_0, u_0, None, None, transpose_x1=True, node_name="m")
            _ = ge.NetOutput([m_0], dependencies=[])
            """,
        ),
        (
            "there are not twice as many rows as columns",
            """
            y_0 = ge.Reshape(x_0, [16, 160], node_name="y")
            a_0 = ge.Relu(y_0, node_name="a")
            u_0 = ge.Data(index=3, dtype=0, shape=[16, 160], placement="CPU", node_name="u")
            m_0 = ge.MatMulV2(a_0, u_0, None, None, transpose_x2=True, node_name="m")
            _ = ge.NetOutput([m_0], dependencies=[])
            """,
        ),
    ],
)
def test_what_stays_a_loop(fused, why, rest):
    assert not any(begins(fused(rest, 32, epilogues=100, epilogue_columns=8))), why


ROWS = """
    a_0 = ge.Relu(x_0, node_name="a")
    m_0 = ge.MatMulV2(a_0, w_0, None, None, transpose_x2=True, node_name="m")
    _ = ge.NetOutput([m_0], dependencies=[])
"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0 gemm", "0 loop", "the product of a prologue is expected"),
        ("0 first", "0 loop", "step 1 expected"),
        ("0 first o0<80, o1<32", "0 first o0<20, o1<32", "its prologue does not make the rows of its first operand"),
        ("= t0[0, 32, 1] @", "= x[0, 32, 1] @", "its prologue does not make the rows of its first operand"),
    ],
)
def test_a_prologue_that_does_not_fit_its_product_is_refused(fused, old, new, reason):
    plan = fused(ROWS)
    text = plan.text()
    assert old in text
    with pytest.raises(VerifyError, match=reason):
        parse_plan(text.replace(old, new), plan.graph, plan.boundary, plan.target)


def test_a_prologue_without_a_product_is_refused(fused):
    plan = fused(ROWS)
    text = "\n".join(line for line in plan.text().splitlines() if not line.startswith("0 gemm"))
    with pytest.raises(VerifyError, match="no product follows"):
        parse_plan(text, plan.graph, plan.boundary, plan.target)
