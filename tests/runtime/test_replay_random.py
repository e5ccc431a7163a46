"""Random sequences of calls over random shapes, results kept, dropped, written to and fed back at random: always eager's
results, nothing that is held ever changes, and memory is back where it was after `release`."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import airgraph
from airgraph.runtime.arena import arenas

pytestmark = pytest.mark.slow
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def smooth(x):
    y = torch.sin(x) * 2
    return y, y.view(-1)[1:], x[1:]


def step(state, x):
    state.add_(x.sum())
    return x * state


def noisy(x):
    return torch.nn.functional.dropout(x, 0.5) + 1


def squared(x, w):
    return (x * w).square()


ACTIONS = st.one_of(
    st.tuples(st.just("smooth"), st.integers(2, 5), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(2, 4), st.integers(0, 3)),
    st.tuples(st.just("noisy"), st.integers(2, 3), st.integers(0, 3)),
    st.tuples(st.just("train"), st.integers(2, 4), st.integers(0, 3)),
    st.tuples(st.just("drop"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("write"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("backward"), st.integers(0, 9), st.just(0)),
)


class Session:
    """The same calls on the compiled functions and on eager ones. `held`: pairs of tensors that must stay equal."""

    def __init__(self, functions, device):
        self.functions = functions
        self.device = device
        self.held = []
        self.pending = []  # (loss, loss, weights) of calls whose backward has not run
        self.states = [torch.zeros(1, device=device) for _ in range(2)]
        self.weights = [torch.full((1,), 1.5, device=device, requires_grad=True) for _ in range(2)]
        self.count = 0

    def argument(self, size, choice):
        """A fresh tensor, or one that came out of an earlier call."""
        fitting = [(a, b) for a, b in self.held if a.dim() == 2 and a.shape == (size, 3)]
        if choice < 2 or not fitting:
            self.count += 1
            x = torch.arange(3.0 * size, device=self.device).view(size, 3) / 7 + self.count
            return x, x.clone()
        return fitting[choice % len(fitting)]

    def call(self, name, size, choice):
        mine, plain = self.argument(size, choice)
        fast, slow = self.functions[name]
        match name:
            case "step":
                got, want = fast(self.states[0], mine), slow(self.states[1], plain)
                assert torch.equal(*self.states)
            case "train":
                got, want = fast(mine, self.weights[0]), slow(plain, self.weights[1])
                self.pending.append((got.sum(), want.sum()))
                got, want = got.detach(), want.detach()
            case _:
                state = torch.get_rng_state(), torch.cuda.get_rng_state() if self.device == "cuda" else None
                want = slow(plain)
                torch.set_rng_state(state[0])
                if state[1] is not None:
                    torch.cuda.set_rng_state(state[1])
                got = fast(mine)
        pairs = zip(got, want) if isinstance(got, tuple) else [(got, want)]
        self.held += [pair for i, pair in enumerate(pairs) if (choice + i) % 3]

    def act(self, name, number, choice):
        if name in self.functions:
            self.call(name, number, choice)
        elif name == "backward" and self.pending:
            for loss in self.pending.pop(number % len(self.pending)):
                loss.backward()
            assert torch.equal(self.weights[0].grad, self.weights[1].grad)
        elif self.held:
            index = number % len(self.held)
            if name == "drop":
                self.held.pop(index)
            elif name == "write":
                for tensor in self.held[index]:
                    tensor.add_(1)
        for got, want in self.held:
            assert torch.equal(got, want), (name, number, choice)


@pytest.fixture(scope="module", params=DEVICES)
def functions(request):
    torch._dynamo.reset()
    made = {}
    for name, f in {"smooth": smooth, "step": step, "noisy": noisy, "train": squared}.items():
        made[name] = (torch.compile(f, backend=airgraph.backend(mode="reduce-overhead"), dynamic=True), f)
    yield made, request.param
    torch._dynamo.reset()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(actions=st.lists(ACTIONS, min_size=1, max_size=30))
def test_any_sequence_of_calls(functions, actions):
    compiled, device = functions
    session = Session(compiled, device)
    for action in actions:
        session.act(*action)
    del session


def test_memory_is_back_after_release(functions):
    compiled, device = functions
    torch.manual_seed(0)
    session = Session(compiled, device)
    airgraph.release()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    for number in range(60):
        session.act(("smooth", "step", "noisy", "train")[number % 4], 2 + number % 3, number % 4)
    assert airgraph.graphs()
    session.held.clear(), session.pending.clear()
    airgraph.release()
    gc.collect()
    assert airgraph.graphs() == []
    assert all(not arena.slots.slots for arena in arenas())
    if device == "cuda":
        assert torch.cuda.memory_allocated() <= before
