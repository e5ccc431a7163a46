"""Gradients in the memory of saved tensors: eager's results whatever happens to either, and less memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._functorch import config as functorch_config

import airgraph
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.reference import ReferenceExecutable
from airgraph.journal import JOURNALS
from airgraph.runtime.arena import arena_of
from airgraph.runtime.sharing import SavedPiece, Wanted, shared_places
from airgraph.runtime.slots import Slots

SIZE = 64


class WithSpans(ReferenceExecutable):
    """Of graphs without views, in which every value has memory of its own."""

    def spans(self):
        last = {key: i for i, step in enumerate(self.steps) for key in step.reads}
        last |= dict.fromkeys(self.outputs, len(self.steps))
        first = {key: i for i, step in enumerate(self.steps) for key in step.makes}
        return {name: last.get(key, -1) for name, key in self.inputs.items()}, [first[key] for key in self.outputs]


class Sharing:
    """The reference engine, with programs that are replayed and share memory, on a CPU."""

    name = "sharing"

    def serves(self, device, mode):
        return "it is for tests"

    def warm_up(self):
        pass

    def plan(self, request):
        return None

    def load(self, request):
        return WithSpans(request.graph, request.device, request.map_device)

    def program(self, executable, programs):
        return programs.replayed(executable)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
        ),
    ]
)
def device(request):
    register_engine(Sharing())
    airgraph.release()
    JOURNALS.clear()
    yield request.param
    del ENGINES["sharing"]
    torch._dynamo.reset()


def chain(x, *weights):
    """Each weight in a kernel of its own; without views on a CPU, see WithSpans."""
    for w in weights:
        x = torch.tanh(x @ w if x.is_cuda else torch.sin(x) * w)
    return x


def compiled(device):
    torch._dynamo.reset()
    return torch.compile(chain, backend=airgraph.backend(engine="sharing" if device == "cpu" else "cuda"))


def leaves(device, count=6):
    torch.manual_seed(0)
    weights = [(torch.randn(SIZE, SIZE, device=device) / 8).requires_grad_() for _ in range(count)]
    return torch.randn(SIZE, SIZE, device=device), weights


def gradients(x, weights):
    """Eager's."""
    return [*torch.autograd.grad(chain(x, *weights).square().sum(), weights)]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def cleared(weights):
    for w in weights:
        w.grad = None


def said(text):
    return [remark for journal in JOURNALS for remark in journal.remarks if text in remark]


SHARED = "lie in the memory of saved tensors"


def test_gradients_lie_where_saved_tensors_were(device):
    fast, (x, weights) = compiled(device), leaves(device)
    for i in range(6):
        x = x + i
        fast(x, *weights).square().sum().backward()
        close([w.grad for w in weights], gradients(x, weights))
        cleared(weights)
    assert said(SHARED)
    captured = [journal.counters["captured"] for journal in JOURNALS]
    assert captured == [1, 1]  # forward and backward
    guests = {g for s in arena_of(x.device).slots.slots for g in s.guests}
    assert sum(g.nbytes for g in guests) >= 4 * SIZE * SIZE * 4


@functorch_config.patch(donated_buffer=False)  # else PyTorch refuses
def test_a_graph_that_is_retained_is_not_overwritten(device):
    fast, (x, weights) = compiled(device), leaves(device)
    for i in range(6):
        x = x + i
        loss = fast(x, *weights).square().sum()
        times = 3 if i % 3 == 2 else 1
        for again in range(times):
            loss.backward(retain_graph=again + 1 < times)
            close([w.grad for w in weights], gradients(x, weights))
            cleared(weights)
    assert said(SHARED)


def test_two_forwards_before_a_backward(device):
    fast, (x, weights) = compiled(device), leaves(device)
    for i in range(6):
        inputs = [x + i, x - i]
        outputs = [fast(one, *weights) for one in inputs]
        found = []
        for one, out in zip(inputs, outputs):
            out.square().sum().backward()
            close([w.grad for w in weights], gradients(one, weights))
            found.append([w.grad for w in weights])
            cleared(weights)
        for one, grads in zip(inputs, found):
            close(grads, gradients(one, weights))


@pytest.mark.parametrize("first", [1, 4])
def test_gradients_that_are_held_over_the_next_call(device, first):
    """From the beginning on (no memory is shared), or later (it is given up)."""
    fast, (x, weights) = compiled(device), leaves(device)
    held = []
    for i in range(8):
        x = x + i
        loss = fast(x, *weights).square().sum()
        cleared(weights)
        loss.backward()
        grads, expected = [w.grad for w in weights], gradients(x, weights)
        close(grads, expected)
        for old, its in held:
            close(old, its)
        held = [(grads, expected)] if i >= first - 1 else []
        if i < first - 1:
            cleared(weights)
            del grads, expected
    assert bool(said(SHARED)) == (first > 1)
    assert bool(said("they get memory of their own")) == (first > 1)


def test_accumulated_gradients(device):
    fast, (x, weights) = compiled(device), leaves(device)
    expected = [torch.zeros_like(w) for w in weights]
    for i in range(7):
        x = x + i
        fast(x, *weights).square().sum().backward()
        expected = [a + b for a, b in zip(expected, gradients(x, weights))]
        close([w.grad for w in weights], expected)


def test_saved_tensors_that_hooks_hold(device):
    """They are not overwritten while somebody has them, and nobody sees them change."""
    fast, (x, weights) = compiled(device), leaves(device)
    seen = []

    def pack(tensor):
        seen.append((tensor, tensor.clone()))
        return tensor

    for i in range(6):
        x = x + i
        if i in (1, 4):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                loss = fast(x, *weights).square().sum()
        else:
            loss = fast(x, *weights).square().sum()
        loss.backward()
        close([w.grad for w in weights], gradients(x, weights))
        cleared(weights)
        for tensor, before in seen:
            torch.testing.assert_close(tensor, before, rtol=0, atol=0)
        seen.clear()


def test_release_between_forward_and_backward(device):
    fast, (x, weights) = compiled(device), leaves(device)
    for i in range(6):
        loss = fast(x + i, *weights).square().sum()
        if i == 3:
            airgraph.release()
        loss.backward()
        if i == 4:
            airgraph.release()
        close([w.grad for w in weights], gradients(x + i, weights))
        cleared(weights)


def test_nothing_stays_behind(device):
    fast, (x, weights) = compiled(device), leaves(device)
    for i in range(4):
        fast(x + i, *weights).square().sum().backward()
        cleared(weights)
    airgraph.release()
    gc.collect()
    assert not arena_of(x.device).slots.slots


def test_gaps():
    """Results go, as they are written, into the smallest gap of what has been read."""
    slots = Slots(torch.device("cpu"))
    a, b, c = slots.take([512, 1024, 512], "forward", {0, 1, 2})
    pieces = [SavedPiece(a, 3), SavedPiece(b, 2), SavedPiece(c, 0)]

    def placed(*results):
        found = shared_places(pieces, [Wanted(i, *result) for i, result in enumerate(results)])
        return {i: (place.start, *("abc"[[a, b, c].index(s)] for s in place.over)) for i, place in found.items()}

    assert placed((512, 0)) == {}  # c is read in the same step
    assert placed((512, 1)) == {0: (1536, "c")}
    assert placed((512, 1), (1500, 3)) == {0: (1536, "c")}
    assert placed((1500, 3)) == {0: (512, "b", "c")}
    assert placed((2048, 4)) == {0: (0, "a", "b", "c")}
    assert placed((512, 4), (1536, 4)) == {1: (0, "a", "b"), 0: (1536, "c")}
