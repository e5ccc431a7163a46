"""Experts: products of rows in groups, and the histogram that counts the rows."""

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (it defines the op)

import airgraph
import airgraph.engine.native
from airgraph.engine.meanings.matrices import grouped_matmul
from airgraph.plan import groups
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import CallStep


class Grouped(torch.nn.Module):
    def forward(self, x, w, ends):
        return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


def compiled(module, args, **options):
    with torch.no_grad():
        return airgraph.compile(module, args, engine="native", **options)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
@pytest.mark.parametrize("counts", [(1, 0, 0, 1), (0, 0, 0, 0), (7, 13, 1, 19), (40, 0, 0, 0), (0, 3, 2, 0)], ids=str)
def test_groups(counts, turned, threads):
    torch.manual_seed(0)
    rows, k, n = sum(counts), 20, 52
    x, w = torch.randn(rows, k), torch.randn(4, n, k).mT if turned else torch.randn(4, k, n)
    ends = torch.tensor(counts).cumsum(0).int()
    example = (torch.randn(5, k), w, ends)
    fast = compiled(Grouped(), example, dynamic_shapes=({0: torch.export.Dim("rows", min=0, max=64)}, None, None))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = fast(x, w, ends)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, grouped_matmul([x], [w], ends, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ends", [(2, 2, 3), (5, 3, 8), (0, 90, 90), (9, 9, 9)], ids=str)
def test_rows_behind_the_last_group_are_zero_and_ends_never_lead_out_of_memory(ends):
    x, w, ends = torch.randn(9, 16), torch.randn(3, 16, 8), torch.tensor(ends, dtype=torch.int32)
    found = compiled(Grouped(), (x, w, ends))(x, w, ends)
    torch.testing.assert_close(found, grouped_matmul([x], [w], ends, None), rtol=1e-5, atol=1e-5)


def test_negative_ends_are_empty_groups():
    x, w, ends = torch.randn(3, 4), torch.randn(2, 4, 4), torch.tensor([-5, 3], dtype=torch.int32)
    torch.testing.assert_close(compiled(Grouped(), (x, w, ends))(x, w, ends), x @ w[1])


def test_other_types_are_left_to_pytorch():
    x, w, ends = torch.randn(6, 16), torch.randn(2, 16, 8), torch.tensor([2, 6])
    for args in ((x.bfloat16(), w.bfloat16(), ends.int()), (x.double(), w.double(), ends.int()), (x, w, ends)):
        assert torch.equal(compiled(Grouped(), args)(*args), Grouped()(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0, 3), (1, 0, 1), (7, -1.5, 2.25), (100, 0, 3)])
def test_histograms(bins, low, high, dtype):
    class Histogram(torch.nn.Module):
        def forward(self, x):
            return torch.histc(x, bins, low, high)

    torch.manual_seed(0)
    edges = torch.linspace(low, high, bins + 1, dtype=dtype)
    x = torch.cat([edges, torch.randint(0, 4, (50,)).to(dtype), torch.randn(70).to(dtype)])
    x = torch.cat([x, torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype)]).reshape(-1, 1)
    found = compiled(Histogram(), (x,))(x)
    assert found.dtype == dtype and torch.equal(found, Histogram()(x))


def test_histograms_between_the_extremes():
    class Histogram(torch.nn.Module):
        def forward(self, x):
            return torch.histc(x, 4)

    x = torch.randn(30)
    assert torch.equal(compiled(Histogram(), (x,))(x), torch.histc(x, 4))


def test_experts_are_steps_of_our_own(monkeypatch):
    """Of a mixture: sorted rows, a histogram that says where groups end, two products. PyTorch only sorts and sums up."""

    class Experts(torch.nn.Module):
        def forward(self, x, chosen, first, second):
            chosen, order = torch.sort(chosen)
            ends = torch.cumsum(torch.histc(chosen.float(), 3, 0, 2), 0, dtype=torch.int32)
            y = torch.ops.transformers.grouped_mm_fallback(x[order], first, ends)
            return torch.ops.transformers.grouped_mm_fallback(torch.relu(y), second, ends)

    args = (torch.randn(7, 8), torch.randint(0, 3, (7,)), torch.randn(3, 8, 20), torch.randn(3, 20, 8))
    plans, make = [], groups.make_plan

    def made_and_read(graph, boundary, target):
        text = make(graph, boundary, target).text()
        plans.append(parse_plan(text, graph, boundary, target))
        assert plans[-1].text() == text
        return plans[-1]

    monkeypatch.setattr(groups, "make_plan", made_and_read)
    fast = compiled(Experts(), args)
    torch.testing.assert_close(fast(*args), Experts()(*args), rtol=1e-5, atol=1e-5)
    (plan,) = plans
    assert [type(step).__name__ for step in plan.steps].count("GemmStep") == 2
    assert {step.node.op for step in plan.steps if isinstance(step, CallStep)} == {"Sort", "Cumsum"}
