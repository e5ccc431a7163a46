"""A guard that failed, and what would have avoided the recompilation."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

import airgraph
from airgraph.tools.recompile_advice import advice


@pytest.mark.parametrize(
    "guard, wanted",
    [
        ("tensor 'x' size mismatch at index 0. expected 4, actual 5", "torch._dynamo.mark_dynamic(x, 0)"),
        ("tensor 'x' size mismatch at index 1. expected 4, actual 1", "mark_unbacked(x, 1) before the first call"),
        ("tensor 'x' stride mismatch at index 0. expected 4, actual 8", "x.contiguous() before the call"),
        (
            "2 <= d['a'].size(1)",
            "Dynamo specialises on the sizes 0 and 1: torch._dynamo.decorators.mark_unbacked(d['a'], 1)",
        ),
        ("2 <= x.size(0) <= 9", "if the size was 0 or 1: "),
        ("x.stride(0) == 6", "x.contiguous()"),
        ("2 <= x.stride(1)", "x.contiguous()"),
    ],
)
def test_sizes_and_strides(guard, wanted):
    assert wanted in advice(guard)


def test_other_guards_have_none():
    assert advice("___check_obj_id(self, 12345)") is None
    assert advice("n == 3") is None


# -- what Dynamo really says, and whether the advice avoids it -------------------------------------------------------------
@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(x):
    return (x * 2 + 1).sum(-1)


def hints(calls, **options):
    """What `explain` tries for each recompilation; results are eager's."""
    with airgraph.tools.explain.recording() as record:
        run = torch.compile(model, backend="airgraph", **options)
        for x in calls:
            torch.testing.assert_close(run(x), model(x))
    report = record()
    found = [advice(r.guards[0].text) or f"none for {r.guards[0].text}" for r in report.recompiles]
    text = " ".join(report.text(width=10_000).split())
    assert all(f"try: {hint}" in text for hint in found) and len(report.graphs) == len(found) + 1
    return found


def rows(*counts):
    return [torch.randn(n, 6) for n in counts]


@pytest.mark.parametrize("dynamic", [True, None])
def test_sizes_0_and_1(dynamic):
    found = hints(rows(4, 1, 0, 5)[: 3 if dynamic else 4], dynamic=dynamic)
    assert len(found) == (2 if dynamic else 3)
    assert all("mark_unbacked(x, 0)" in hint for hint in found), found


def test_sizes_0_and_1_with_the_mark():
    calls = rows(4, 1, 0, 5)
    torch._dynamo.decorators.mark_unbacked(calls[0], 0)
    assert hints(calls) == []


def test_a_new_size():
    (found,) = hints(rows(4, 5, 6))
    assert found.startswith("torch._dynamo.mark_dynamic(x, 0)")


def test_a_new_size_with_the_mark():
    calls = rows(4, 5, 6)
    torch._dynamo.mark_dynamic(calls[0], 0)
    assert hints(calls) == []


LAYOUTS = [torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2], torch.randn(4, 9)[:, :6]]


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_strides(dynamic):
    found = hints(LAYOUTS, dynamic=dynamic)
    assert len(found) == 3 and all(hint.startswith("x.contiguous()") for hint in found), found


def test_new_strides_made_contiguous():
    assert hints([x.contiguous() for x in LAYOUTS]) == []


def test_airgraph_compile_takes_sizes_0_and_1():
    """Which a bucket pads, if one is given; under torch.compile Dynamo is there first."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.ReLU()).eval()
    dims = ({0: torch.export.Dim("rows")},)
    for buckets in (None, {"batch": [4, 8]}):
        run = airgraph.compile(net, (torch.randn(4, 6),), dynamic_shapes=dims, buckets=buckets)
        for x in rows(0, 1, 5):
            torch.testing.assert_close(run(x), net(x))
