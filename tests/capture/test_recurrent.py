"""nn.LSTM, whose steps are fused where there are few of them."""

from __future__ import annotations

import forked
import pytest
import torch
from torch import nn

import airgraph
from airgraph.journal import JOURNALS

# nn.LSTM itself gives its weights to torch.export in a list
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")


def calls():
    """What PyTorch does in the last compiled graph."""
    return [fallback.target for fallback in JOURNALS[-1].fallbacks]


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2, "batch_first": True},
        {"bidirectional": True},
        {"bias": False},
        {"num_layers": 2, "bidirectional": True},
    ],
    ids=str,
)
def test_as_eager_without_a_call(options):
    torch.manual_seed(0)
    model, x = nn.LSTM(24, 32, **options).eval(), torch.randn(7, 5, 24)
    layers = (2 if options.get("bidirectional") else 1) * options.get("num_layers", 1)
    batch = 7 if options.get("batch_first") else 5
    state = (torch.randn(layers, batch, 32), torch.randn(layers, batch, 32))
    with torch.no_grad():
        found = airgraph.compile(model, (x, state))(x, state)
        eager = model(x, state)
        exact = model.double()(x.double(), tuple(s.double() for s in state))
    assert not calls()
    for ours, theirs, true in zip((found[0], *found[1]), (eager[0], *eager[1]), (exact[0], *exact[1])):
        assert ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
        assert (ours - true).norm() <= 2 * (theirs - true).norm()


def test_many_steps_are_one_call():
    model, x = nn.LSTM(4, 4).eval(), torch.randn(65, 2, 4)
    with torch.no_grad():
        torch.testing.assert_close(airgraph.compile(model, (x,))(x)[0], model(x)[0])
    assert calls() == ["torch.ops.aten.mkldnn_rnn_layer.default"]


def test_any_number_of_rows():
    model, x = nn.LSTM(4, 4).eval(), torch.randn(9, 2, 4)
    compiled = airgraph.compile(model, (x,), dynamic_shapes=({1: torch.export.Dim("rows", min=2, max=100)},))
    assert not calls()
    for rows in (2, 9, 70):
        x = torch.randn(9, rows, 4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x)[0], model(x)[0])


TRAINING = """
import torch
torch._dynamo.config.allow_rnn = True  # lasts: Dynamo remembers what it may trace
torch.manual_seed(0)
model, x = torch.nn.LSTM(4, 4), torch.randn(5, 2, 4, requires_grad=True)
compiled = torch.compile(model, backend="airgraph", fullgraph=True)
wanted, found = (torch.autograd.grad(f(x)[0].sum(), [x, *model.parameters()]) for f in (model, compiled))
torch.testing.assert_close(found, wanted)
"""


def test_a_training_step():
    done = forked.run("-c", TRAINING)
    assert done.returncode == 0, done.stderr[-3000:]
