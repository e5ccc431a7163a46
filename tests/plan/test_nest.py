"""Graphs in, nests out, as text: loop order, the vectorised and the parallel loop, stages, spills, blocked sums."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from airgraph.plan.nest_text import nest_text
from airgraph.plan.steps import LoopStep
from airgraph.plan.text import PlanText

SOFTMAX = 'y_0 = ge.SoftmaxV2(x_0, axes=[{axis}], node_name="y")'


@pytest.fixture
def nests(planned):
    """The text of all nests of a graph that computes y_0 from x_0."""

    def found(shape, text, dtype=0, outputs="y_0", **limits):
        head = f'x_0 = ge.Data(index=0, dtype={dtype}, shape={shape}, placement="CPU", node_name="x")\n'
        graph = head + textwrap.dedent(text) + f"\n_ = ge.NetOutput([{outputs}], dependencies=[])"
        plan = planned(graph)
        if limits:
            plan = planned(graph, replace(plan.target, **limits))
        names = PlanText(plan)
        names.lines()
        loops = [step for step in plan.steps if isinstance(step, LoopStep)]
        return "\n".join(nest_text(nest, names.name) for step in loops for nest in step.nests)

    return found


def same(found: str, wanted: str) -> None:
    assert found == textwrap.dedent(wanted).strip()


def test_a_softmax_spills_its_exponentials(nests):
    same(
        nests([48, 256], SOFTMAX.format(axis=-1)),
        """
        for o0<48 parallel
          for i0<256 vector 8
            r0 = max(x[256*o0 + i0])
          for i0<256 vector 8
            s0 = exp(sub(x[256*o0 + i0], r0))
            r1 = sum(s0)
          for i0<256 vector 8
            t0[256*o0 + i0] = mul(s0, reciprocal(r1))
        cost 233472, scratch 2048 bytes
        """,
    )


@pytest.mark.parametrize("limits", [{"scratch": 2047}, {"spill_cost": 100}])
def test_what_does_not_fit_or_is_cheap_is_computed_again(nests, limits):
    same(
        nests([48, 256], SOFTMAX.format(axis=-1), **limits),
        """
        for o0<48 parallel
          for i0<256 vector 8
            r0 = max(x[256*o0 + i0])
          for i0<256 vector 8
            r1 = sum(exp(sub(x[256*o0 + i0], r0)))
          for i0<256 vector 8
            t0[256*o0 + i0] = mul(exp(sub(x[256*o0 + i0], r0)), reciprocal(r1))
        cost 233472
        """,
    )


def test_a_softmax_of_columns_vectorises_the_columns(nests):
    same(
        nests([48, 256], SOFTMAX.format(axis=0)),
        """
        for o0<256 parallel vector 8
          for i0<48
            r0 = max(x[256*i0 + o0])
          for i0<48
            r1 = sum(exp(sub(x[256*i0 + o0], r0)))
          for i0<48
            t0[256*i0 + o0] = mul(exp(sub(x[256*i0 + o0], r0)), reciprocal(r1))
        cost 233472
        """,
    )


def test_a_long_sum_is_blocked(nests):
    text = 'y_0 = ge.ReduceSum(x_0, [1], keep_dims=False, node_name="y")'
    same(
        nests([9, 2049], text),
        """
        for o0<9 parallel
          for i0<2049 vector 8
            r0 = sum(x[2049*o0 + i0]) in blocks of 512
          t0[o0] = r0
        cost 55323
        """,
    )
    assert "blocks" not in nests([9, 2048], text)
    assert "blocks" not in nests([9, 2049], text, dtype=11)  # float64 needs none
    assert "blocks of 100" in nests([9, 2048], text, block=100)


def test_many_short_rows_are_summed_in_blocks_of_rows(nests):
    """As many blocks as there are rows in a block, and the same down a column."""
    text = 'y_0 = ge.ReduceSum(x_0, [{axes}], keep_dims=False, node_name="y")'
    same(
        nests([500, 64, 49], text.format(axes="0, 2")),
        """
        for o0<64 parallel
          for i0<500
            for i1<49 vector 8
              r0 = sum(x[3136*i0 + 49*o0 + i1]) in blocks of 9 i0
          t0[o0] = r0
        cost 4704000
        """,
    )
    assert "in blocks of 64\n" in nests([300, 4096], text.format(axes="0"))
    assert "blocks" not in nests([256, 4096], text.format(axes="0"))


def test_a_transpose_keeps_the_longer_loop_outside(nests):
    same(
        nests([3, 20, 30], 'y_0 = ge.Transpose(x_0, [2, 1, 0], node_name="y")'),
        """
        for o0<20 parallel
          for o1<3
            for o2<30 vector 8
              t0[60*o2 + 3*o0 + o1] = x[o2 + 30*o0 + 600*o1]
        cost 3600
        """,
    )


def test_neighbouring_loops_become_one(nests):
    same(
        nests([3, 20, 30], 'y_0 = ge.Relu(x_0, node_name="y")'),
        """
        for o0<1800 parallel vector 8
          t0[o0] = relu(x[o0])
        cost 5400
        """,
    )


def test_a_short_loop_is_not_vectorised(nests):
    """Rows of the result have four elements: the other loop is vectorised although it writes them apart."""
    same(
        nests([4, 100], 'y_0 = ge.Transpose(x_0, [1, 0], node_name="y")'),
        """
        for o0<4 parallel
          for o1<100 vector 8
            t0[4*o1 + o0] = x[o1 + 100*o0]
        cost 800
        """,
    )


def test_results_of_one_row_and_of_one_element(nests):
    """A stage stores rows; what is one element per row comes after all stages. Shared values get a name."""
    same(
        nests(
            [4, 16],
            """
            g_0 = ge.Data(index=1, dtype=0, shape=[16], placement="CPU", node_name="g")
            a_0 = ge.Relu(x_0, node_name="a")
            [y_0, y_1] = ge.RmsNorm(a_0, g_0, epsilon=1e-06, node_name="y")
            """,
            outputs="y_0, y_1",
        ),
        """
        for o0<4 parallel
          for i0<16 vector 8
            x0 = relu(x[16*o0 + i0])
            r0 = sum(mul(x0, x0))
          for i0<16 vector 8
            t1[16*o0 + i0] = mul(g[i0], mul(relu(x[16*o0 + i0]), rsqrt(add(div(r0, 16.0), 1e-06))))
          t0[o0] = rsqrt(add(div(r0, 16.0), 1e-06))
        cost 1280
        """,
    )


def test_gathered_rows(nests):
    found = nests(
        [10, 16],
        """
        n_0 = ge.Data(index=1, dtype=9, shape=[5], placement="CPU", node_name="n")
        y_0 = ge.GatherV2(x_0, n_0, 0, node_name="y")
        """,
    )
    same(
        found,
        """
        for o0<5 parallel
          for o1<16 vector 8
            t0[16*o0 + o1] = x[o1 + 16*at(n[o0], 10)]
        cost 240
        """,
    )


@pytest.mark.parametrize(
    "shape, axes, wanted",
    [
        (
            [1000000],
            "[0]",
            """
            for o0<64 parallel
              for i0<15625 vector 8
                r0 = sum(x[15625*o0 + i0]) in blocks of 512
              t0[o0] = r0
            cost 3000000
            for i0<64 vector 8
              r0 = sum(t0[i0])
            t1[0] = r0
            cost 192
            """,
        ),
        (
            [9000, 10],
            "[0]",
            """
            for o0<60 parallel
              for o1<10 vector 8
                for i0<150
                  r0 = sum(x[1500*o0 + 10*i0 + o1])
                t0[10*o0 + o1] = r0
            cost 270000
            for o0<10 parallel vector 8
              for i0<60
                r0 = sum(t0[10*i0 + o0])
              t1[o0] = r0
            cost 1800
            """,
        ),
    ],
)
def test_a_long_reduction_with_few_rows_is_split(nests, shape, axes, wanted):
    same(nests(shape, f'y_0 = ge.ReduceSum(x_0, {axes}, keep_dims=False, node_name="y")'), wanted)


@pytest.mark.parametrize("shape", [[64, 100000], [1000], [65537]])
def test_reductions_that_stay_whole(nests, shape):
    """There are rows enough, it is short, or its length has no divisor."""
    text = f'y_0 = ge.ReduceSum(x_0, [{len(shape) - 1}], keep_dims=False, node_name="y")'
    assert nests(shape, text).count("cost") == 1


def test_split_means_of_kept_dimensions(nests):
    """The axes of the result are those of the whole reduction."""
    found = nests([3, 40, 2, 500], 'y_0 = ge.ReduceMean(x_0, [1, 3], keep_dims=True, node_name="y")', split=1000)
    assert found.count("cost") == 2 and "t1[" in found
