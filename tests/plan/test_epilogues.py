"""Which loops become the epilogue of a product, as text: graphs in, plans out."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from airgraph.errors import VerifyError
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import ConvStep, GemmStep, step_reads, step_writes

PRODUCT = """
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=0, shape=[16, 8], placement="CPU", node_name="w")
        r_0 = ge.Data(index=2, dtype=0, shape=[4, 16], placement="CPU", node_name="r")
        m_0 = ge.MatMulV2(x_0, w_0, None, None, transpose_x2=True, node_name="m")
"""


@pytest.fixture
def fused(planned, target):
    def plan(rest: str, product: str = PRODUCT, cost: int = 100, columns: int = 16):
        chosen = replace(target, epilogues=cost, epilogue_columns=columns)
        return planned(textwrap.dedent(product) + textwrap.dedent(rest), chosen)

    return plan


def ends(plan) -> list[bool]:
    return [s.epilogue is not None for s in plan.steps if isinstance(s, GemmStep)]


def test_an_activation_and_a_residual(fused):
    rest = """
        a_0 = ge.Relu(m_0, node_name="a")
        s_0 = ge.Add(r_0, a_0, node_name="s")
        _ = ge.NetOutput([s_0], dependencies=[])
    """
    plan = fused(rest)
    assert (
        plan.text()
        == textwrap.dedent("""
        plan for test
        x: float[4, 8] input
        w: float[16, 8] input
        r: float[4, 16] input
        t1: float[4, 16] output 0
        t0: float[4, 16] output 0 alias t1
        0 gemm t0 = x[0, 8, 1] @ w[0, 1, 8] for batch 1, m 4, n 16, k 8
        0 then o0<4, o1<16
            t1[16*o0 + o1] = add(r[16*o0 + o1], relu(t0[16*o0 + o1]))
        output 0: t1
    """).strip()
    )
    (step,) = plan.steps
    assert [plan.allocation(t).source for t in step_reads(step)] == ["x", "w", "r"]
    assert len({plan.allocation(t).alias or plan.allocation(t) for t in step_writes(step)}) == 1
    for limits in ({"cost": 0}, {"cost": 1}, {"columns": 17}):
        apart = fused(rest, **limits)
        assert ends(apart) == [False] and len(apart.steps) == 2


def test_text_and_back(fused):
    plan = fused(
        """
        a_0 = ge.Gelu(m_0, approximate="none", node_name="a")
        v_0 = ge.Reshape(a_0, [2, 2, 16], node_name="v")
        s_0 = ge.SoftmaxV2(v_0, axes=[-1], node_name="s")
        _ = ge.NetOutput([s_0], dependencies=[])
    """
    )
    parsed = parse_plan(plan.text(), plan.graph, plan.boundary, plan.target)
    assert parsed.text() == plan.text() and ends(parsed) == ends(plan)
    for step in (s for p in (plan, parsed) for s in p.steps if isinstance(s, GemmStep) and s.epilogue is not None):
        assert [[v.size for v in nest.outer] for nest in step.epilogue.nests] == [[4, 16]]


def test_rows_of_several_dimensions_are_the_rows_of_the_product(fused):
    plan = fused(
        """
        v_0 = ge.Reshape(m_0, [2, 2, 16], node_name="v")
        a_0 = ge.Relu(v_0, node_name="a")
        b_0 = ge.Add(a_0, c_0, node_name="b")
        _ = ge.NetOutput([b_0], dependencies=[])
    """,
        PRODUCT + '        c_0 = ge.Data(index=3, dtype=0, shape=[16], placement="CPU", node_name="c")\n',
    )
    assert "0 then o0<4, o1<16\n    t1[16*o0 + o1] = add(relu(t0[16*o0 + o1]), c[o1])" in plan.text()


def test_two_products_do_not_wait_for_each_other(fused):
    plan = fused(
        """
        n_0 = ge.MatMulV2(x_0, u_0, None, None, transpose_x2=True, node_name="n")
        g_0 = ge.Mul(m_0, n_0, node_name="g")
        _ = ge.NetOutput([g_0], dependencies=[])
    """,
        PRODUCT + '        u_0 = ge.Data(index=3, dtype=0, shape=[16, 8], placement="CPU", node_name="u")\n',
    )
    assert ends(plan) == [False, False]


@pytest.mark.parametrize(
    ("why", "rest"),
    [
        (
            "the product is read again",
            """
            a_0 = ge.Relu(m_0, node_name="a")
            e_0 = ge.SoftmaxV2(m_0, axes=[-1], node_name="e")
            _ = ge.NetOutput([a_0, e_0], dependencies=[])
            """,
        ),
        (
            "it leaves the graph itself",
            """
            a_0 = ge.Relu(m_0, node_name="a")
            _ = ge.NetOutput([m_0, a_0], dependencies=[])
            """,
        ),
        (
            "a row is summed up",
            """
            a_0 = ge.SoftmaxV2(m_0, axes=[-1], node_name="a")
            _ = ge.NetOutput([a_0], dependencies=[])
            """,
        ),
        (
            "elements change their places",
            """
            a_0 = ge.Transpose(m_0, [1, 0], node_name="a")
            b_0 = ge.Relu(a_0, node_name="b")
            _ = ge.NetOutput([b_0], dependencies=[])
            """,
        ),
        (
            "the result is of another type",
            """
            a_0 = ge.Cast(m_0, dst_type=1, node_name="a")
            _ = ge.NetOutput([a_0], dependencies=[])
            """,
        ),
    ],
)
def test_what_stays_a_loop(fused, why, rest):
    assert not any(ends(fused(rest))), why


def test_an_epilogue_without_a_product_is_refused(planned):
    plan = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        a_0 = ge.Relu(x_0, node_name="a")
        _ = ge.NetOutput([a_0], dependencies=[])
    """)
    with pytest.raises(VerifyError, match="then is not a kind of step"):
        parse_plan(plan.text().replace("0 loop", "0 then"), plan.graph, plan.boundary, plan.target)


# -- convolutions -----------------------------------------------------------------------------------------------------
CONVOLUTION = """
        x_0 = ge.Data(index=0, dtype=0, shape=[1, 8, 5, 6], placement="CPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=0, shape=[16, 8, 1, 1], placement="CPU", node_name="w")
        v_0 = ge.Data(index=2, dtype=0, shape=[4, 16, 1, 1], placement="CPU", node_name="v")
        b_0 = ge.Data(index=3, dtype=0, shape=[1, 16, 1, 1], placement="CPU", node_name="b")
        m_0 = ge.Conv2D(x_0, w_0, None, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], dilations=[1, 1, 1, 1], node_name="m")
"""
READER = """
        c_0 = ge.Conv2D(a_0, v_0, None, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], dilations=[1, 1, 1, 1], node_name="c")
        _ = ge.NetOutput([c_0], dependencies=[])
"""


@pytest.fixture
def convolved(planned, target):
    def plan(rest: str, fuses: bool = True):
        chosen = replace(target, channels_last=True, conv_epilogues=fuses)
        wide = dict.fromkeys(("m", "a", "q", "s", "d"), (1, 16, 5, 6))
        shapes = {**wide, "r": (1, 16, 1, 1), **dict.fromkeys(("c", "e"), (1, 4, 5, 6))}
        shapes |= {"a": (1, 16, 1, 1), "c": (1, 4, 1, 1)} if "ReduceSum" in rest else {}
        shapes |= {"q": (1, 16, 1, 1)} if "Exp" in rest else {}
        return planned(textwrap.dedent(CONVOLUTION) + textwrap.dedent(rest), chosen, **shapes)

    return plan


def lines(plan, *kinds: str) -> list[str]:
    """Of steps of these kinds, with what stands below them."""
    found, wanted = [], False
    for line in plan.text().splitlines():
        wanted = line.split()[1:2] in [[kind] for kind in kinds] if not line.startswith(" ") else wanted
        found += [line] if wanted else []
    return found


def test_elements_of_a_convolution(convolved):
    rest = '        a_0 = ge.Relu(m_0, node_name="a")\n' + READER
    plan = convolved(rest)
    assert lines(plan, "then") == ["1 then o0<480", "    t2[o0] = relu(t1[o0])"]
    assert "t1: float[1, 5, 6, 16] arena alias t2" in plan.text()
    parsed = parse_plan(plan.text(), plan.graph, plan.boundary, plan.target)
    assert parsed.text() == plan.text()
    assert [[v.size for v in nest.outer] for nest in parsed.steps[1].epilogue.nests] == [[480]]
    assert not lines(convolved(rest, fuses=False), "then")


def test_channels_of_a_convolution_and_what_prepares_them(convolved):
    """The square root, which has few elements, is computed before the convolution."""
    plan = convolved(
        """
        q_0 = ge.Exp(b_0, node_name="q")
        r_0 = ge.Rsqrt(q_0, node_name="r")
        s_0 = ge.Mul(m_0, r_0, node_name="s")
        a_0 = ge.Relu(s_0, node_name="a")
        """
        + READER
    )
    assert lines(plan, "then") == ["2 then o0<30, o1<16", "    t3[16*o0 + o1] = relu(mul(t2[16*o0 + o1], t1[o1]))"]
    parsed = parse_plan(plan.text(), plan.graph, plan.boundary, plan.target)
    assert parsed.text() == plan.text()


@pytest.mark.parametrize(
    ("why", "rest"),
    [
        (
            "the convolution is read again",
            """
            q_0 = ge.Relu(m_0, node_name="q")
            a_0 = ge.SoftmaxV2(m_0, axes=[1], node_name="a")
            d_0 = ge.Add(q_0, a_0, node_name="d")
            c_0 = ge.Conv2D(d_0, v_0, None, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], dilations=[1, 1, 1, 1], node_name="c")
            e_0 = ge.Conv2D(q_0, v_0, None, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], dilations=[1, 1, 1, 1], node_name="e")
            _ = ge.NetOutput([c_0, e_0], dependencies=[])
            """,
        ),
        (
            "the result leaves the graph as planes",
            """
            a_0 = ge.Relu(m_0, node_name="a")
            _ = ge.NetOutput([a_0], dependencies=[])
            """,
        ),
        ("it is summed up", '        a_0 = ge.ReduceSum(m_0, [2, 3], keep_dims=True, node_name="a")\n' + READER),
    ],
)
def test_what_stays_a_loop_behind_a_convolution(convolved, why, rest):
    steps = convolved(rest).steps
    first = next(s for s in steps if isinstance(s, ConvStep))
    assert first.epilogue is None and any(first.out in step_reads(s) for s in steps), why
