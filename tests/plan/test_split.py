"""Long reductions in two steps: when, and in how many parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airgraph.engine.cuda.target import GPU
from airgraph.plan.steps import LoopStep


def partial_sizes(planned, shape, axes, target) -> list[list[int]]:
    """The shapes of the tensors in the arena: the partial results."""
    plan = planned(
        f"""
        x_0 = ge.Data(index=0, dtype=0, shape={shape}, placement="CPU", node_name="x")
        s_0 = ge.ReduceSum(x_0, {axes}, keep_dims=False, node_name="s")
        _ = ge.NetOutput([s_0], dependencies=[])
    """,
        target,
    )
    found = [list(p.tensor.shape) for p in plan.allocations.values() if p.kind == "arena"]
    assert len([s for s in plan.steps if isinstance(s, LoopStep)]) == 1 + len(found)
    return found


@pytest.mark.parametrize(
    ("shape", "axes", "wanted"),
    [
        ([100000], [0], [[50]]),  # the largest divisor up to the target's 64 jobs
        ([65536], [0], [[64]]),
        ([60000], [0], []),  # too short
        ([8, 20000], [1], [[8, 8]]),  # eight rows are eight jobs, so eight parts of each make 64
        ([16, 20000], [1], [[16, 4]]),
        ([22, 20000], [1], []),  # three parts each would not be worth a second step
        ([64, 20000], [1], []),  # the rows are jobs enough
        ([18000, 4], [0], [[60, 4]]),  # columns: a job is 64 of them, so these four are none
    ],
)
def test_parts(planned, target, shape, axes, wanted):
    assert partial_sizes(planned, shape, axes, target) == wanted


def test_a_target_says_how_many_jobs_it_wants(planned, target):
    assert partial_sizes(planned, [100000], [0], replace(target, jobs=16)) == [[16]]
    assert partial_sizes(planned, [100000], [0], replace(target, jobs=1)) == []
    assert partial_sizes(planned, [8, 20000], [1], replace(target, unsplit=20000)) == []


def test_a_target_says_how_long_a_part_may_be(planned, target):
    assert partial_sizes(planned, [8, 20000], [1], replace(target, part=1000)) == [[8, 20]]
    assert partial_sizes(planned, [8, 20000], [1], replace(target, part=5000)) == [[8, 8]]


def test_halves_with_several_uses_stay_halves_in_memory(planned):
    """Their float32 copy would need twice the memory and is exact: it is made where it is read."""
    plan = planned("""
        x_0 = ge.Data(index=0, dtype=1, shape=[32, 64], placement="CPU", node_name="x")
        e_0 = ge.Erf(x_0, node_name="e")
        f_0 = ge.Cast(e_0, dst_type=0, node_name="f")
        a_0 = ge.SoftmaxV2(f_0, axes=[-1], node_name="a")
        b_0 = ge.ReduceSum(f_0, [0], keep_dims=False, node_name="b")
        _ = ge.NetOutput([a_0, b_0], dependencies=[])
    """)
    kept = [(p.tensor.dtype.name, p.tensor.shape) for p in plan.allocations.values() if p.kind == "arena"]
    assert kept == [("DT_FLOAT16", (32, 64))]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ([16, 112, 112, 64], [[16 * 28, 64]]),  # 448 parts of 4 × 112 elements: no end is within a row
        ([16, 28, 28, 128], [[16 * 2, 128]]),  # few enough elements in each
        ([100000, 64], [[200, 64]]),
    ],
)
def test_columns_of_a_gpu(planned, shape, wanted):
    """Programs that add up columns are many, each for a few hundred rows."""
    assert partial_sizes(planned, shape, [*range(len(shape) - 1)], GPU) == wanted
