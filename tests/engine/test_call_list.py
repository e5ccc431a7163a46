"""Replays on a CPU: the calls of a graph as one function. Everything is compared with eager, call by call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine import reference
from airgraph.engine.call_list import address_only
from airgraph.errors import EngineError


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    torch._dynamo.reset()
    airgraph.release()
    yield
    torch._dynamo.reset()
    airgraph.release()


def compiled(fn, **options):
    return torch.compile(fn, backend=airgraph.backend(mode="reduce-overhead", **options))


def test_a_replay_is_calls_of_pytorch_only(monkeypatch):
    """After the recording neither arguments are decoded nor steps advanced."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(3, 8)
    with torch.no_grad():
        fast = compiled(model)
        for _ in range(2):
            assert torch.equal(fast(x), model(x))
        monkeypatch.setattr(reference.Step, "advance", None)
        for _ in range(3):
            assert torch.equal(fast(x), model(x))


def test_views_of_parameters_are_taken_once():
    """The transposed weight is no call of a replay, and its new values are seen."""
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    with torch.no_grad():
        fast = compiled(model)
        for _ in range(2):
            fast(x)
        model.weight.mul_(2)
        with torch.profiler.profile() as profile:
            result = fast(x)
        assert torch.equal(result, model(x))
    names = {event.key for event in profile.key_averages()}
    assert "aten::addmm" in names and "aten::t" not in names


def test_a_view_that_was_taken_keeps_nothing_alive():
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    with torch.no_grad():
        fast = compiled(model)
        for _ in range(3):
            fast(x)
        gone = weakref.ref(model.weight.untyped_storage())
        model.weight.data = torch.randn(4, 8)  # at another address: another recording
        gc.collect()
        assert gone() is None
        for _ in range(3):
            assert torch.equal(fast(x), model(x))


def test_a_tensor_that_is_an_address_only():
    for x in (torch.randn(4, 6).t()[1:], torch.randn(3, 1).expand(3, 5), torch.arange(6), torch.empty(0, 3)):
        view = address_only(x)
        assert torch.equal(view, x) and view.stride() == x.stride() and view.dtype == x.dtype
        assert not x.numel() or view.data_ptr() == x.data_ptr()


@torch.library.custom_op("airgraph_test::laid_by_turns", mutates_args=())
def laid_by_turns(x: torch.Tensor) -> torch.Tensor:
    """Its result is laid out differently in every other call, which is its right."""
    laid_by_turns_calls.append(None)
    return x.clone() if len(laid_by_turns_calls) % 2 else x.t().contiguous().t()


laid_by_turns_calls: list[None] = []


@laid_by_turns.register_fake
def _(x):
    return torch.empty_like(x)


def test_ops_of_others_between_calls():
    """They run as steps, and what reads their results looks at the layout."""

    def f(x, y):
        a = (x @ y).relu()
        b = torch.ops.airgraph_test.laid_by_turns(a)
        return b.view(-1) * 2, a + 1, torch.ops.airgraph_test.laid_by_turns(b).sum()

    x, y = torch.randint(-3, 4, (2, 4, 4)).float()  # whole numbers: a sum is the same in every order
    fast = compiled(f)
    for _ in range(6):
        for ours, eager in zip(fast(x, y), f(x, y)):
            assert torch.equal(ours, eager) and ours.stride() == eager.stride()


def test_several_results_lists_and_cats():
    def f(x):
        a, b = x.split([1, 3], dim=1)
        values, places = torch.cat([b, a], 1).topk(2)
        mean, var = torch.var_mean(x, 1)
        return values, places, torch.stack([mean, var]), torch.where(x > 0, x, float("inf")), x[:, [2, 0]]

    x, fast = torch.randn(5, 4), compiled(f)
    for _ in range(4):
        for ours, eager in zip(fast(x), f(x)):
            assert torch.equal(ours, eager) and ours.stride() == eager.stride()


def test_in_place_and_written_arguments():
    def f(x, cache):
        cache[1] = x.relu().exp()
        return cache.sum(0), x.add_(1)

    fast = compiled(f)
    ours, eager = [[torch.ones(3), torch.zeros(2, 3)] for _ in range(2)]
    for _ in range(5):
        for a, b in zip([*fast(*ours), *ours], [*f(*eager), *eager]):
            assert torch.equal(a, b)


def test_an_error_in_a_replay_names_op_and_line():
    def f(table, places):
        return table.mul(2)[places]  # the user's line

    table, places = torch.randn(4, 3), torch.tensor([1, 2])
    fast = compiled(f)
    for _ in range(3):
        fast(table, places)
    places.fill_(9)
    with pytest.raises(IndexError, match="out of bounds") as caught:
        fast(table, places)
    assert isinstance(caught.value, EngineError) and "the user's line" in str(caught.value)
    places.fill_(3)
    assert torch.equal(fast(table, places), f(table, places))
