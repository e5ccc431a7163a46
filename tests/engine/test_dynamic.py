"""Sizes that Dynamo cannot know beforehand: from data, from strides, of jagged tensors. Results are eager's."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils._pytree import tree_leaves

import airgraph


@pytest.fixture(autouse=True)
def captured():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def same(model, *calls, whole=True, **options):
    """How many graphs were compiled. `whole`: each without a break, which would leave part of the model to eager."""
    graphs = []
    run = torch.compile(model, backend="airgraph", fullgraph=whole, **options)
    with airgraph.compilation.wrapping(lambda gm, program, config: graphs.append(gm) or program):
        for args in calls:
            torch.testing.assert_close(run(*args), model(*args))
    return len(graphs)


X = torch.arange(8.0)


def first(x, n):
    return x[: n.item()] * 2


def narrowed(x, n):
    size = n.item()
    torch._check(size >= 0)
    torch._check(size <= x.shape[0])
    return x.narrow(0, 0, size).sum() + 1


def made(x, n):
    size = n.item()
    torch._check(size >= 0)
    return torch.arange(size) * 2, torch.zeros(size) + x.sum()


def scaled(x, n):
    return x * n.item()


@pytest.mark.parametrize("model", [first, narrowed, made, scaled])
def test_a_number_from_data(model):
    assert same(model, *((X, torch.tensor(n)) for n in (3, 5, 2))) == 1


def test_a_float_from_data():
    assert same(scaled, *((X, torch.tensor(n)) for n in (3.5, 0.25))) == 1


@pytest.mark.parametrize(
    "model", [lambda x: x[x > 0] * 2, lambda x: (x.nonzero() + 1, x.nonzero().shape[0] * 2)], ids=["mask", "nonzero"]
)
def test_as_many_as_there_are(model):
    torch.manual_seed(0)
    assert same(model, *((torch.randn(n).relu(),) for n in (20, 20, 9)), dynamic=True) == 1


def test_symbols_that_only_strides_have():
    """Same sizes, other strides: behind a graph break Dynamo makes a symbol of the stride alone."""

    def model(x):
        torch._dynamo.graph_break()
        return x * 2 + 1

    calls = [(torch.randn(4, width)[:, :6],) for width in (50, 7, 9, 11)]
    same(model, *calls, (torch.randn(12, 6)[::3],), whole=False)


@pytest.mark.parametrize("train", [False, True])
def test_jagged_tensors(train):
    linear = nn.Linear(4, 3)

    def model(x):
        return linear(x).relu() * 2

    run = torch.compile(model, backend="airgraph", fullgraph=True)
    for lengths in ((3, 5), (2, 7, 4), (6,)):
        parts = [torch.randn(n, 4) for n in lengths]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=train)
        with torch.set_grad_enabled(train):
            found, wanted = run(x).values(), model(x).values()
        torch.testing.assert_close(found, wanted)
        if train:
            (weight, mine), (eager_weight, eager) = (
                torch.autograd.grad(y.sum(), (linear.weight, x)) for y in (found, wanted)
            )
            torch.testing.assert_close((weight, mine.values()), (eager_weight, eager.values()))
            assert mine.shape == eager.shape == x.shape  # the ragged size is known by the identity of its offsets


def test_calls_of_pytorch_with_jagged_tensors():
    """The ragged size is no number, also where PyTorch does a step with the others."""

    def model(x):
        return torch.nested.to_padded_tensor(x.sin(), 0.0) * 2

    run = torch.compile(model, backend="airgraph", fullgraph=True)
    for lengths in ((3, 5), (2, 7, 4), (6, 1)):
        parts = [torch.randn(n, 4) for n in lengths]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        found, wanted = run(x), model(x)
        torch.testing.assert_close(found, wanted)
        mine, eager = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted))
        torch.testing.assert_close(mine.values(), eager.values())


def test_views_and_numbers_of_a_dynamic_graph():
    """Their sizes and strides come with the outputs of the native call."""
    linear = nn.Linear(4, 4)

    def model(x):
        y = linear(x)
        return y.view(-1), y.t(), x[1:], x.shape[0] * 2

    same(model, *((torch.randn(n, 4),) for n in (3, 5, 9, 40)), dynamic=True)


def test_a_number_that_only_a_call_of_python_reads():
    """The truth of `k > 5` is a call of Python's; no size and no kernel depends on k."""
    function = torch.compile(lambda x, k: x + (k > 5), backend="airgraph", dynamic=True, fullgraph=True)
    x = torch.ones(3)
    for k in (7, 8, 3, 9, -1):
        torch.testing.assert_close(function(x, k), x + (k > 5))


def test_views_at_offsets_that_only_the_data_tell():
    x = torch.randn(5, 5)
    same(lambda x, s: torch.tensor_split(x, s), (x, torch.tensor([1, 3])), (x, torch.tensor([2, 2])))


def test_a_number_of_the_data_in_a_call_of_fixed_sizes():
    x = torch.randn(5, 5)
    same(lambda x, s: torch.narrow(x, 0, s, 2) * 2, *((x, torch.tensor(i)) for i in (1, 0, 3)))


VIEWS = [
    lambda x, i: torch.narrow(x, 0, i, 1),
    lambda x, i: x.select(0, i.item()),
    lambda x, i: x[i.item() :][1:, i.item() :],
    lambda x, i: [(y := x * 2), y[i.item() :], y[i.item()]],
]


@pytest.mark.parametrize("view", VIEWS)
def test_views_that_are_returned_begin_where_eagers_do(view):
    x = torch.arange(24.0).reshape(6, 4)
    run = torch.compile(view, backend="airgraph", fullgraph=True)
    for i in (2, 1, 0, -2, 3):
        found, wanted = run(x, torch.tensor(i)), view(x, torch.tensor(i))
        torch.testing.assert_close(found, wanted)
        for f, w in zip(tree_leaves(found), tree_leaves(wanted)):
            assert (f.stride(), f.storage_offset()) == (w.stride(), w.storage_offset())
