"""Training steps by captured programs: what autograd saves lies in slots, one ticket for all of it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import airgraph
from airgraph.runtime import replay

MARKS = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
REPLAYED = {"mode": "reduce-overhead"}
WAYS = [
    pytest.param(("cpu", REPLAYED), id="cpu"),
    pytest.param(("cuda", REPLAYED), id="cuda-replay", marks=MARKS),
    pytest.param(("cuda", {"engine": "cuda"}), id="cuda", marks=MARKS),
]
options = {}


@pytest.fixture(params=WAYS)
def device(request):
    """Where the test runs; the options of the backend are those of the way."""
    torch._dynamo.reset()
    airgraph.release()
    gc.collect()  # programs of other tests
    device, chosen = request.param
    options.clear()
    options.update(chosen)
    yield device
    torch._dynamo.reset()
    airgraph.release()
    gc.collect()


class Block(nn.Module):
    """Saved tensors of every kind: inputs, weights and views of them, results, a random mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.dropout = dropout

    def forward(self, x):
        y = torch.nn.functional.gelu(self.norm(self.first(x)))
        y = nn.functional.dropout(y, self.dropout, self.training)
        return self.second(y).tanh() * x


def pair(device):
    """The same model twice, the second one compiled, with the programs that were made for it."""
    torch.manual_seed(0)
    eager = Block().to(device)
    copy = Block().to(device)
    copy.load_state_dict(eager.state_dict())
    return eager, copy, torch.compile(copy, backend=airgraph.backend(**options))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def equal_gradients(a, b):
    for p, q in zip(a.parameters(), b.parameters()):
        close(q.grad, p.grad)


def inputs(device, count, rows=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 8, generator=generator).to(device) for _ in range(count)]


def forward_program():
    (found,) = [p for p in replay.PROGRAMS if p.journal.phase == "forward"]
    return found


def step(model, run, x, **options):
    loss = run(x).square().sum()
    loss.backward(**options)
    return loss.detach()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_of_an_optimizer(device, set_to_none):
    eager, copy, fast = pair(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (eager, copy)]
    for x in inputs(device, 8):
        losses = []
        for model, run, optimizer in zip((eager, copy), (eager, fast), optimizers):
            optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(step(model, run, x))
            optimizer.step()
        close(losses[1], losses[0])
    for p, q in zip(eager.parameters(), copy.parameters()):
        close(q, p)


def test_saved_tensors_are_no_views_and_made_once(device):
    _, copy, fast = pair(device)
    for x in inputs(device, 5):
        step(copy, fast, x)
    program = forward_program()
    (entry,) = program.entries.values()
    handout = entry.recordings[-1].results
    assert not handout.views
    assert len(handout.fresh) == 2  # the result and the ticket
    assert sum(k is not None for k in handout.kept) >= 2  # tensors that autograd gets as they are
    assert handout.given  # weights and inputs


def test_two_forwards_before_their_backwards(device):
    eager, copy, fast = pair(device)
    for a, b in zip(inputs(device, 5), inputs(device, 10)[5:]):
        for model, run in ((eager, eager), (copy, fast)):
            model.zero_grad()
            first, second = run(a), run(b)
            first.square().sum().backward()
            second.sum().backward()
        equal_gradients(eager, copy)


def test_a_graph_that_is_dropped_without_a_backward(device):
    eager, copy, fast = pair(device)
    for x in inputs(device, 4):
        step(copy, fast, x)
    for x in inputs(device, 3):
        fast(x)
        for model, run in ((eager, eager), (copy, fast)):
            model.zero_grad()
            step(model, run, x)
        equal_gradients(eager, copy)
    assert len([r for e in forward_program().entries.values() for r in e.recordings]) <= 2


def test_retained_graphs_and_accumulated_gradients(device):
    eager, copy, fast = pair(device)
    for x in inputs(device, 5):
        for model, run in ((eager, eager), (copy, fast)):
            model.zero_grad()
            loss = run(x).square().sum()
            loss.backward(retain_graph=True)
            run(x * 2)  # must not overwrite what the retained graph has saved
            loss.backward()
            step(model, run, x * 3)
        equal_gradients(eager, copy)


def test_the_result_is_held_while_others_are_computed(device):
    eager, copy, fast = pair(device)
    held = []
    for x in inputs(device, 7):
        held.append((fast(x), eager(x)))
    for mine, theirs in reversed(held):
        for model, result in ((copy, mine), (eager, theirs)):
            model.zero_grad()
            result.square().sum().backward()
        close(mine, theirs)
        equal_gradients(eager, copy)


def test_hooks_that_hold_a_part_of_what_is_saved(device):
    eager, copy, fast = pair(device)
    for x in inputs(device, 4):
        step(copy, fast, x)
    kept = []

    def pack(t):
        """Some stay where they are, some are moved elsewhere."""
        kept.append(t)
        return t.clone() if len(kept) % 2 else t

    for x in inputs(device, 4):
        for model, run in ((eager, eager), (copy, fast)):
            model.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                loss = run(x).square().sum()
            run(x * 2)
            run(x * 3)
            loss.backward()
        equal_gradients(eager, copy)


def test_weights_at_another_address(device):
    eager, copy, fast = pair(device)
    for i, x in enumerate(inputs(device, 9)):
        if i in (4, 6):
            with torch.no_grad():
                for model in (eager, copy):
                    model.first.weight.data = model.first.weight.data.clone() * 2
        for model, run in ((eager, eager), (copy, fast)):
            model.zero_grad()
            step(model, run, x)
        equal_gradients(eager, copy)


def test_sizes_in_turn_share_slots(device):
    """A result of one size is held while another size runs on the same slots."""
    eager, copy, fast = pair(device)
    torch._dynamo.mark_dynamic(inputs(device, 1)[0], 0)
    rows = [6, 4, 6, 4, 6, 4, 5, 6, 5, 4]
    held = []
    for n in rows:
        x = inputs(device, 1, rows=n)[0]
        torch._dynamo.mark_dynamic(x, 0)
        held.append((x, fast(x), eager(x)))
        if len(held) == 3:
            for _, mine, theirs in held[::-1]:
                for model, result in ((copy, mine), (eager, theirs)):
                    model.zero_grad()
                    result.square().sum().backward()
                equal_gradients(eager, copy)
            held.clear()


def test_random_masks_follow_the_generator(device):
    torch.manual_seed(0)
    model = Block(dropout=0.5).to(device)
    fast = torch.compile(model, backend=airgraph.backend(**options))
    (x,) = inputs(device, 1)
    for _ in range(4):
        state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
        found = []
        for _ in range(2):
            torch.cuda.set_rng_state(state) if device == "cuda" else torch.set_rng_state(state)
            model.zero_grad()
            step(model, fast, x)
            found.append([p.grad.clone() for p in model.parameters()])
        for a, b in zip(*found):
            close(a, b)
