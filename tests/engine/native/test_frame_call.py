"""Calls of a native program without a frame of Python: what they give, and what is left to Python."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref

import pytest
import torch
from collecting import call_collecting
from torch import nn

import airgraph
from airgraph.capture.live_state import LiveState
from airgraph.compilation import wrapping
from airgraph.engine.native.dict_watch import has_tags
from airgraph.engine.native.frame_call import FrameCall
from airgraph.engine.native.state_gather import StateGather, StatePath
from airgraph.engine.native.tables import FrameCallWords
from airgraph.errors import BadIndexError, BindError
from airgraph.runtime import native_program
from airgraph.runtime.native_program import NativeProgram


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Attempts:
    """How often Python made a call."""

    count = 0


@pytest.fixture
def attempts(monkeypatch):
    found, attempt = Attempts(), NativeProgram.attempt

    def counted(self, args):
        found.count += 1
        return attempt(self, args)

    monkeypatch.setattr(NativeProgram, "attempt", counted)
    return found


class Table(nn.Module):
    """With a lookup that may fail."""

    def __init__(self):
        super().__init__()
        self.rows, self.last = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, i):
        return self.last(self.rows(i)).tanh()


def double(x):
    return x * 2 + 1


def ready(function, *args, **options):
    """A compiled function that Python has called once, and its program."""
    found = []
    with wrapping(lambda gm, program, config: found.append(program) or program):
        fast = torch.compile(function, backend="airgraph", **options)
        for _ in range(2):
            fast(*args)
    return fast, found[-1]


@pytest.mark.parametrize("kind", ["function", "model"])
@torch.no_grad()
def test_python_has_no_part_in_it(kind, attempts):
    function, x = (double, torch.randn(3)) if kind == "function" else (Table().eval(), torch.tensor([1, 7, 0]))
    fast, program = ready(function, x)
    attempts.count, calls = 0, program.calls
    for _ in range(3):
        torch.testing.assert_close(fast(x), function(x))
    assert attempts.count == 0 and program.calls == calls + 3


@torch.no_grad()
def test_python_calls_where_native_code_is_not_available(monkeypatch, attempts):
    monkeypatch.setattr(native_program, "is_available", lambda: False)
    model, x = Table().eval(), torch.tensor([1, 7, 0])
    fast, _ = ready(model, x)
    torch.testing.assert_close(fast(x), model(x))
    assert attempts.count >= 2


@torch.no_grad()
def test_other_sizes_ask_python_for_a_frame_once(attempts):
    model = Table().eval()
    fast, _ = ready(model, torch.tensor([1, 7, 0]), dynamic=True)
    for n in (4, 5, 4, 5, 4):
        i = torch.randint(8, (n,))
        torch.testing.assert_close(fast(i), model(i))
    attempts.count = 0
    fast(torch.randint(8, (4,)))
    assert attempts.count == 0


@torch.no_grad()
def test_a_profiler_is_told(attempts):
    fast, _ = ready(double, torch.randn(3))
    attempts.count = 0
    with torch.profiler.profile() as profile:
        fast(torch.randn(3))
    assert attempts.count >= 1 and any("airgraph" in e.key for e in profile.key_averages())


@torch.no_grad()
def test_a_log_is_told(attempts):
    fast, program = ready(double, torch.randn(3))
    attempts.count, before = 0, program.log.level
    program.log.setLevel(logging.DEBUG)
    try:
        fast(torch.randn(3))
    finally:
        program.log.setLevel(before)
    assert attempts.count >= 1
    fast(torch.randn(3))
    attempts.count = 0
    fast(torch.randn(3))
    assert attempts.count == 0


@torch.no_grad()
def test_an_index_out_of_range_is_an_error_once(attempts):
    """What native code finds is raised; it is not tried again, since what the call wrote would be written twice."""
    model = Table().eval()
    fast, program = ready(model, torch.tensor([1, 7, 0]))
    attempts.count, calls = 0, program.calls
    for _ in range(3):
        with pytest.raises(BadIndexError, match="index out of range in self"):
            fast(torch.tensor([1, 8, 0]))
    torch.testing.assert_close(fast(torch.tensor([3, 2, 1])), model(torch.tensor([3, 2, 1])))
    assert attempts.count == 0 and program.calls == calls + 1


@torch.no_grad()
def test_an_exception_out_of_a_call_of_pytorch():
    """A kernel of PyTorch refuses; the next call is right, and nothing is kept of the one that failed."""

    def function(x, i):
        return torch.gather(x.cumsum(0), 0, i) * 2

    x, i = torch.randn(6), torch.tensor([0, 5])
    fast, _ = ready(function, x, i)
    with pytest.raises((RuntimeError, IndexError)):
        fast(x, torch.tensor([0, 9]))
    torch.testing.assert_close(fast(x, i), function(x, i))


@torch.no_grad()
def test_versions_of_what_is_written_to(attempts):
    def function(x, y):
        x.add_(y)
        return x * 2

    x, y = torch.randn(3), torch.randn(3)
    fast, _ = ready(function, x, y)
    attempts.count, version, before = 0, x._version, x.clone()
    torch.testing.assert_close(fast(x, y), (before + y) * 2)
    torch.testing.assert_close(x, before + y)
    assert x._version == version + 1 and attempts.count == 0


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.zeros(3))

    def forward(self, x):
        self.second.add_(self.first)
        self.first.add_(x)
        return self.second * self.scale


@pytest.mark.parametrize("how", ["torch.compile", "airgraph.compile"])
@torch.no_grad()
def test_versions_of_state_that_is_written_to(how, attempts):
    model, x = Cache().eval(), torch.ones(3)
    fast = torch.compile(model, backend="airgraph") if how == "torch.compile" else airgraph.compile(model, (x,))
    for _ in range(2):
        fast(x)
    attempts.count, versions = 0, [t._version for t in (model.first, model.second, model.scale, x)]
    for calls in range(1, 4):
        assert torch.equal(fast(x), 2 * model.second)
        assert [t._version for t in (model.first, model.second, model.scale, x)] == [
            version + calls * written for version, written in zip(versions, (1, 1, 0, 0))
        ]
    assert torch.equal(model.first, torch.full((3,), 5.0)) and torch.equal(model.second, torch.full((3,), 10.0))
    assert attempts.count == 0
    model.first = torch.zeros(3)  # another tensor
    fast(x)
    assert torch.equal(model.first, x) and model.first._version == 1


@torch.no_grad()
def test_what_is_not_a_tensor_where_one_was(attempts):
    fast, _ = ready(lambda x, y: x + y, torch.randn(3), torch.randn(3))
    assert torch.equal(fast(torch.ones(3), 2.0), torch.full((3,), 3.0))  # compiled again


@torch.no_grad()
def test_a_program_is_freed():
    model, x = Table().eval(), torch.tensor([1, 7, 0])
    fast, program = ready(model, x)
    told = weakref.ref(program)
    del fast, program, model
    torch._dynamo.reset()
    gc.collect()
    assert told() is None


@torch.no_grad()
def test_memory_is_released_where_that_is_wanted():
    fast = torch.compile(double, backend=airgraph.backend(release_memory=True))
    for _ in range(3):
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 3.0))


# -- airgraph.compile ---------------------------------------------------------------------------------------------------
class Pair(Table):
    def forward(self, i):
        return super().forward(i), i + 1


class Nested(Table):
    def forward(self, i):
        return {"y": super().forward(i), "i": [i + 1]}


@pytest.mark.parametrize("kind", [Table, Pair, Nested])
def test_a_model_compiled_ahead_of_time(kind, attempts):
    """A single result, a tuple, and others: Python has no part in it but to nest them."""
    model, i = kind().eval(), torch.tensor([1, 7, 0])
    fast = airgraph.compile(model, i)
    fast(i)
    fast(i)
    attempts.count = 0
    for _ in range(3):
        found = fast(i)
        assert type(found) is type(model(i))
        torch.testing.assert_close(found, model(i).detach() if kind is Table else model(i), check_layout=True)
    assert attempts.count == 0


def test_state_of_a_compiled_model_that_is_elsewhere(attempts):
    model, i = Table().eval(), torch.tensor([1, 7, 0])
    fast = airgraph.compile(model, i)
    for change in (
        lambda: setattr(model.last, "weight", nn.Parameter(torch.randn(4, 4))),
        lambda: setattr(model, "last", nn.Linear(4, 4)),
        lambda: setattr(model.last.weight, "data", torch.randn(4, 4)),
        lambda: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True),
    ):
        for _ in range(3):
            torch.testing.assert_close(fast(i), model(i).detach())
        change()
    torch.testing.assert_close(fast(i), model(i).detach())


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen.add_(x)
        return self.seen * 2


def test_buffers_of_a_compiled_model_count_their_versions():
    model, x = Written().eval(), torch.randn(3)
    fast, twin = airgraph.compile(model, x), Written().eval()
    for _ in range(3):
        before = model.seen._version
        torch.testing.assert_close(fast(x), twin(x))
        torch.testing.assert_close(model.seen, twin.seen)
        assert model.seen._version > before


def test_arguments_that_do_not_fit_are_errors():
    model, i = Table().eval(), torch.tensor([1, 7, 0])
    fast = airgraph.compile(model, i)
    for _ in range(2):
        fast(i)
    for wrong in (torch.randn(3), torch.tensor([1, 2]), "text", None):
        with pytest.raises(BindError):
            fast(wrong)
    torch.testing.assert_close(fast(i), model(i).detach())


# -- finalizers that run within a call ----------------------------------------------------------------------------------
class Scaled(nn.Module):
    """With a weight that is not packed."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.arange(1.0, 5.0)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight + self.bias


@pytest.fixture
def builtins(monkeypatch):
    """The builtin functions that were made for calls."""
    found, original = [], FrameCall.builtin

    def noted(self, *args, **kwargs):
        found.append(original(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(FrameCall, "builtin", noted)
    return found


def new_weight(model):
    model.weight = nn.Parameter(torch.full((4,), 7.0))


def moved_weight(model):
    model.weight.data = torch.full((4,), 7.0)


@pytest.mark.parametrize("change", [new_weight, moved_weight])
@pytest.mark.parametrize("how", ["torch.compile", "airgraph.compile"])
@torch.no_grad()
def test_a_collection_that_changes_state_while_arguments_are_listed(how, change, builtins, attempts):
    """What the list of arguments holds is what is there when it is filled: nothing that a finalizer has replaced."""
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = torch.compile(model, backend="airgraph") if how == "torch.compile" else airgraph.compile(model, (x,))
    for _ in range(3):
        fast(x)
    before = model.weight  # (held, so that a wrong call computes something)
    given = (model, x, None) if how == "torch.compile" else (x,)
    found = call_collecting(builtins[-1], given, lambda: change(model))
    found = fast(x) if found is None else found[0] if type(found) is list else found
    assert torch.equal(found, torch.full((2, 4), 8.0)) and before.shape == (4,)


@torch.no_grad()
def test_a_call_within_the_collection_of_a_call(builtins):
    """A finalizer calls the model with other state: the tables of the call around it are others by then."""
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast, inside = airgraph.compile(model, (x,)), []
    for _ in range(3):
        fast(x)

    def finalize():
        model.weight = nn.Parameter(torch.full((4,), 7.0))
        inside.append(fast(x))

    found = call_collecting(fast.direct, (x,), finalize)
    assert torch.equal(inside[0], torch.full((2, 4), 8.0))
    assert found is None or torch.equal(found, inside[0])
    assert torch.equal(fast(x), inside[0])


# -- threads that find other state at once ------------------------------------------------------------------------------
class InterruptedTable:
    """A table of words; before the first word is stored, another thread has done (or waited for) its work."""

    def __init__(self, table, work):
        self.table, self.thread = table, threading.Thread(target=work)

    def __getitem__(self, at):
        return self.table[at]

    def __setitem__(self, at, word):
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(1)
        self.table[at] = word


def two_states(model):
    """Where its state is and what it is, before and after a change."""
    found = []
    for _ in range(2):
        new_weight(model)
        names = [name for name, _ in model.named_parameters()]
        found.append(LiveState(model, names, [*model.parameters()]).watched())
    return found


@pytest.mark.skipif(not has_tags(), reason="dictionaries have no version tags")
def test_threads_that_find_other_state_in_front_of_the_arguments():
    """The table points to what is held, whoever was last."""
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = airgraph.compile(model, (x,))
    for _ in range(2):
        fast(x)
    calls, states = fast.behind.__self__.calls, two_states(model)
    table = calls.table
    calls.table = InterruptedTable(table, lambda: calls.stay_behind(*states[1]))
    calls.stay_behind(*states[0])
    calls.table.thread.join()
    calls.table = table
    owners, tensors, front = calls.state
    assert table[FrameCallWords.FRONT] == ctypes.addressof(front)
    assert table[FrameCallWords.TAGS] == ctypes.addressof(owners.table)
    assert front[0] == len(tensors) and [*front][1:] == [*map(id, tensors)]
    assert table[FrameCallWords.WIDTH] == calls.width
    assert torch.equal(fast(x), torch.full((2, 4), 8.0))


@torch.no_grad()
def test_threads_that_find_other_state_in_modules(monkeypatch):
    made, original = [], FrameCall.follow
    monkeypatch.setattr(FrameCall, "follow", lambda self, gather: made.append(self) or original(self, gather))
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = torch.compile(model, backend="airgraph")
    for _ in range(2):
        fast(x)
    calls = made[-1]
    paths = {i: StatePath(0, (), "_parameters", name) for i, name in ((0, "weight"), (2, "bias"))}
    gathers = [StateGather(3, paths, [model, x, None]) for _ in range(2)]
    table = calls.table
    calls.table = InterruptedTable(table, lambda: original(calls, gathers[1]))
    original(calls, gathers[0])
    calls.table.thread.join()
    calls.table = table
    assert table[FrameCallWords.GATHER] == calls.state.address and calls.state in gathers
    assert torch.equal(fast(x), model(x))


@pytest.mark.skipif(not has_tags(), reason="dictionaries have no version tags")
def test_a_finalizer_of_the_state_before_enters_another():
    """It runs when the table is whole."""
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = airgraph.compile(model, (x,))
    for _ in range(2):
        fast(x)
    calls, states = fast.behind.__self__.calls, two_states(model)
    own = torch.ones(4)
    calls.stay_behind(states[0][0], [own])
    weakref.finalize(own, calls.stay_behind, *states[1])
    del own
    calls.stay_behind(*states[0])
    owners, _, front = calls.state
    assert owners is states[1][0]
    assert table_of(calls) == (ctypes.addressof(front), ctypes.addressof(owners.table), calls.width)


def table_of(calls):
    return tuple(calls.table[word] for word in (FrameCallWords.FRONT, FrameCallWords.TAGS, FrameCallWords.WIDTH))


@torch.no_grad()
def test_threads_that_replace_state_all_the_time():
    """No call fails or reads anything else than one of the weights there were."""
    model, x, wrong = Scaled().eval(), torch.ones(2, 4), []
    fast = airgraph.compile(model, (x,))

    def calls(own):
        with torch.no_grad():
            for _ in range(100):
                model.weight = nn.Parameter(torch.full((4,), own))
                found = fast(x)
                if not (found == found[0, 0]).all() or found[0, 0].item() not in (2.0, 3.0, 4.0):
                    wrong.append(found)

    model.weight = nn.Parameter(torch.ones(4))
    threads = [threading.Thread(target=calls, args=(float(own),)) for own in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_state_that_changed_while_python_looked_for_it(monkeypatch, attempts):
    """What was found then is used by no call: it may be gone."""
    made, original = [], FrameCall.follow
    monkeypatch.setattr(FrameCall, "follow", lambda self, gather: made.append(self) or original(self, gather))
    builtins, builtin = [], FrameCall.builtin
    monkeypatch.setattr(FrameCall, "builtin", lambda *a, **k: builtins.append(builtin(*a, **k)) or builtins[-1])
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = torch.compile(model, backend="airgraph")
    for _ in range(2):
        fast(x)
    before = model._parameters  # (held, so that a wrong call computes something)

    class Late(dict):
        """Paths; when the last one has been followed, the module gets another dictionary."""

        def items(self):
            yield from super().items()
            vars(model)["_parameters"] = {name: nn.Parameter(p + 1) for name, p in before.items()}

    paths = {i: StatePath(0, (), "_parameters", name) for i, name in ((0, "weight"), (2, "bias"))}
    gather = StateGather(3, Late(paths), [model, x, None])
    assert gather.gathered(model, x, None) is None
    original(made[-1], gather)
    attempts.count = 0
    (found,) = builtins[-1](model, x, None)
    assert torch.equal(found, model(x)) and attempts.count == 1
