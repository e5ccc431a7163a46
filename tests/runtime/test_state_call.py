"""Models that are compiled ahead of time and captured: their state is looked at in one native loop, and nothing is missed.

On a CPU, with the reference engine. `launched` makes one launch of a recording, as a CUDA graph is.
"""

from __future__ import annotations

import copy
import itertools
import weakref

import pytest
import torch
from replaying import replaying_engine
from torch import nn

import airgraph
from airgraph.errors import BindError
from airgraph.runtime.replay import MOVES


@pytest.fixture(autouse=True)
def engine():
    with replaying_engine():
        yield


def compiled(model, *args):
    return airgraph.compile(model, args, engine="replaying")


def program_of(fast):
    return fast.behind.__self__.program


def recordings(fast):
    return [r for entry in program_of(fast).entries.values() for r in entry.recordings]


def launched(fast, *args):
    """Called until it is captured; from then on a replay is one launch, of which PyTorch sees nothing. It reads and writes
    the memory it was recorded with."""
    for _ in range(2):
        fast(*args)
    program, (recording,) = program_of(fast), recordings(fast)
    given = [tensor.data for tensor in (*fast.state, *args)]  # with versions of their own

    def launch():
        with torch.no_grad():
            program.fill(recording.env, given, recording)
            for part in recording.parts:
                part.run(recording.env, dict(recording.symbols))

    recording.whole, recording.simple = launch, True
    return recording


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.add_(x.sum(0))
        return self.linear(x) + self.seen


def same(fast, model, *args):
    """Its results are those of the model, whose buffers it leaves as the model's."""
    expected = copy.deepcopy(model)(*args)
    torch.testing.assert_close(fast(*args), expected)


def without_llvm(monkeypatch):
    from airgraph.engine.native import address_watch, dict_watch, replay_tensors, short_call

    for module in (address_watch, replay_tensors, short_call):
        monkeypatch.setattr(module, "native_method", lambda name: None)
    monkeypatch.setattr(dict_watch, "native_comparison", lambda: None)


@pytest.fixture(params=["parts", "launch", "launch without LLVM"])
def ready(request, monkeypatch):
    """A model that is captured, its argument, and what it is called by."""
    if request.param == "launch without LLVM":
        without_llvm(monkeypatch)
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(4, 4)
    fast = compiled(model, x)
    if request.param != "parts":
        launched(fast, x)
    else:
        for _ in range(2):
            fast(x)
    return fast, model, x


def test_it_is_replayed(ready):
    fast, model, x = ready
    before = recordings(fast)[0].hits
    for _ in range(3):
        same(fast, model, x)
    assert recordings(fast)[0].hits == before + 3
    assert [len(recordings(fast)), program_of(fast).journal.counters["captured"]] == [1, 1]


def test_state_that_is_new_in_every_call_is_copied():
    """After some captures; what stays where it is is still read there."""
    model, x = Counting().eval(), torch.randn(4, 4)
    fast, held = compiled(model, x), []
    for _ in range(3 * MOVES):
        held.append(model.seen)
        model.seen = model.seen.clone()
        same(fast, model, x)
    found = recordings(fast)
    assert MOVES < len(found) < 2 * MOVES
    weight, seen = (fast.exported.names.index(name) for name in ("linear.weight", "seen"))
    assert weight in found[-1].pinned and seen in found[-1].copied


def replaced(model):
    model.linear.weight = nn.Parameter(torch.randn(4, 4))


def moved(model):
    model.linear.weight.data = torch.randn(4, 4)


def assigned(model):
    model.load_state_dict({name: t.clone() + 1 for name, t in model.state_dict().items()}, assign=True)


def another_module(model):
    model.linear = nn.Linear(4, 4)


@pytest.mark.parametrize("change", [replaced, moved, assigned, another_module])
def test_state_that_is_elsewhere_is_read_there(ready, change):
    fast, model, x = ready
    same(fast, model, x)
    with torch.no_grad():
        change(model)
    for _ in range(3):
        same(fast, model, x)
    assert len(recordings(fast)) == 2
    assert [i for r in recordings(fast) for i in r.copied if i < len(fast.state)] == []  # read where it is


def test_state_that_is_written_to_is_seen(ready):
    fast, model, x = ready
    with torch.no_grad():
        model.linear.weight.mul_(2)
    same(fast, model, x)
    assert len(recordings(fast)) == 1


def test_versions_of_what_it_writes_to_go_up():
    model, x = Counting().eval(), torch.randn(4, 4)
    fast = compiled(model, x)
    launched(fast, x)
    before = model.seen._version, model.linear.weight._version, x._version
    fast(x)
    assert (model.seen._version, model.linear.weight._version, x._version) == (before[0] + 1, *before[1:])


def test_versions_of_arguments_it_writes_to_go_up():
    def step(cache, x):
        cache.add_(x)
        return cache * 2

    cache, x = torch.zeros(3), torch.ones(3)
    fast = compiled(step, cache, x)
    launched(fast, cache, x)
    before = cache._version
    assert fast(cache, x).tolist() == [6.0] * 3
    assert cache._version == before + 1 and x._version == 0


def test_results_that_are_held_stay(ready):
    fast, _, x = ready
    held = [fast(x) for _ in range(5)]
    assert len({h.data_ptr() for h in held}) == 5
    for before, after in itertools.pairwise(held):
        torch.testing.assert_close(after - before, x.sum(0).expand(4, 4))


def test_a_copy_of_the_model_has_its_own_state(ready):
    fast, model, x = ready
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        twin.model.linear.weight.add_(1)
    for _ in range(3):
        same(fast, model, x)
        same(twin, twin.model, x)


@pytest.mark.parametrize(
    "other, text",
    [
        (lambda x: x[:2], r"must have shape \[4, 4\], got \[2, 4\]"),
        (lambda x: x.view(2, 8), r"must have shape \[4, 4\], got \[2, 8\]"),
        (lambda x: x.view(torch.int32), "must be torch.float32, got torch.int32"),
    ],
)
def test_an_argument_at_the_same_address_has_the_right_sizes_and_type(ready, other, text):
    fast, _, x = ready
    with pytest.raises(BindError, match=text):
        fast(other(x))


def test_an_argument_at_the_same_address_with_other_strides(ready):
    fast, model, x = ready
    for _ in range(3):
        same(fast, model, x.t())
        same(fast, model, x)


def test_another_kind_of_argument_is_refused(ready):
    fast, _, x = ready
    fast(x.clone())
    fast(x.clone())  # a recording that copies it
    for wrong in (None, 1.0):
        with pytest.raises(BindError, match="must be a tensor"):
            fast(wrong)


def test_a_row_of_results_is_a_tuple():
    fast = compiled(lambda x: (x + 1, x * 2), torch.ones(2))
    for _ in range(4):
        one, two = results = fast(torch.ones(2))
        assert type(results) is tuple and one.tolist() == two.tolist() == [2.0, 2.0]


def test_the_state_is_let_go_when_it_is_replaced(ready):
    fast, model, x = ready
    replaced(model)  # (the example's own state is kept with the exported graph)
    fast(x)
    gone = weakref.ref(model.linear.weight)
    replaced(model)
    fast(x)
    assert gone() is None
