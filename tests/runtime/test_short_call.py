"""Replays that are one launch are called without a frame of Python, and whatever is not as it was is left to Python.

On a CPU, with the reference engine; `Launch` stands for a CUDA graph: it reads and writes the memory of the recording.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from types import MethodType

import pytest
import torch
from collecting import call_collecting
from replaying import replaying_engine
from torch import nn

import airgraph
from airgraph.engine.native import short_call
from airgraph.engine.native.address_watch import TensorWatch
from airgraph.engine.native.dict_watch import DictWatch, has_tags
from airgraph.engine.native.replay_tensors import WriteCounter
from airgraph.engine.native.tables import ShortCallWords
from airgraph.errors import BindError
from airgraph.runtime.replay import PROGRAMS, ReplayProgram


@pytest.fixture(autouse=True)
def engine():
    torch._dynamo.reset()
    with replaying_engine():
        yield


class Launch:
    """Called like the replay of a CUDA graph."""

    def __init__(self, program, recording, given):
        self.program, self.recording = weakref.ref(program), weakref.ref(recording)
        self.given = [tensor.data for tensor in given]  # with versions of their own
        self.during = lambda: None

    def __call__(self):
        program, recording = self.program(), self.recording()
        self.during()
        with torch.no_grad():
            program.fill(recording.env, self.given, recording)
            for part in recording.parts:
                part.run(recording.env, dict(recording.symbols))


class Attempts:
    """How often Python made a call."""

    count = 0


@pytest.fixture
def attempts(monkeypatch):
    found, attempt = Attempts(), ReplayProgram.attempt

    def counted(self, *args):
        found.count += 1
        return attempt(self, *args)

    monkeypatch.setattr(ReplayProgram, "attempt", counted)
    return found


def captured(how, model, *args, **options):
    """What calls the model, when it has been captured and Python has replayed it once."""
    if how == "compile":
        fast = airgraph.compile(model, args, engine="replaying", **options)
    else:
        fast = torch.compile(model, backend=airgraph.backend(engine="replaying", **options))
    with torch.no_grad():
        for _ in range(2):
            fast(*args)
        state = {t.data_ptr(): t for t in (*args, *model.parameters(), *model.buffers())}
        for recording in recordings():
            set_launch(recording, state)
        fast(*args)
    return fast


def set_launch(recording, state):
    program = recordings_program(recording)
    recording.whole = Launch(program, recording, [state[a] for a in recording.addresses])
    recording.simple = True


def recordings_program(recording):
    return next(p for p in PROGRAMS for e in p.entries.values() if recording in e.recordings)


def recordings():
    return [r for p in PROGRAMS for e in p.entries.values() for r in e.recordings]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x):
        return x * self.weight


@pytest.fixture(params=["compile", "torch.compile"])
def ready(request, attempts):
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = captured(request.param, model, x)
    attempts.count = 0
    with torch.no_grad():
        yield fast, model, x


def test_python_has_no_part_in_it(ready, attempts):
    fast, model, x = ready
    (recording,) = recordings()
    hits, used, calls = recording.hits, recording.used, recordings_program(recording).calls
    for k in range(3):
        x.fill_(k)
        assert torch.equal(fast(x), model.weight.expand(2, 4) * k)
    assert attempts.count == 0
    assert (recording.hits, recordings_program(recording).calls) == (hits + 3, calls + 3) and recording.used > used


@pytest.mark.parametrize("how", ["compile", "torch.compile"])
@torch.no_grad()
def test_results_that_are_held_stay(how, attempts):
    """There is another recording for each that is held, and all of them are replayed without Python."""
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = captured(how, model, x, clone_input=False)
    first = fast(x)
    second = fast(x)  # recorded
    set_launch(recordings()[1], {t.data_ptr(): t for t in (x, model.weight)})
    del second
    fast(x)
    attempts.count = 0
    for k in range(5):
        x.fill_(k)
        if k > 2:
            first = None
        held = fast(x)
        assert torch.equal(held, model.weight.expand(2, 4) * k)
        assert first is None or torch.equal(first, model.weight.expand(2, 4))
        del held
    assert attempts.count == 0 and recordings()[0].hits > 2 and recordings()[1].hits > 2


def test_a_profiler_is_noticed(ready, attempts):
    fast, _, x = ready
    with torch.profiler.profile() as profile:
        fast(x)
    assert attempts.count >= 1 and any("airgraph" in e.key for e in profile.key_averages())


def test_logging_of_events_is_noticed(ready, attempts):
    fast, _, x = ready
    log = recordings_program(recordings()[0]).log
    before = log.level
    log.setLevel(logging.DEBUG)
    try:
        fast(x)
        assert attempts.count >= 1
    finally:
        log.setLevel(before)
    fast(x)
    attempts.count = 0
    fast(x)
    assert attempts.count == 0


def test_a_busy_arena_is_noticed(ready, attempts):
    """Something runs in it: the graph is computed by ops of PyTorch."""
    fast, model, x = ready
    arena, hits = recordings_program(recordings()[0]).arena, recordings()[0].hits
    arena.busy = True
    try:
        assert torch.equal(fast(x), model.weight.expand(2, 4))
    finally:
        arena.busy = False
    assert attempts.count >= 1 and recordings()[0].hits == hits


def test_another_stream_is_noticed(ready, attempts, monkeypatch):
    fast, _, x = ready
    arena, seen = recordings_program(recordings()[0]).arena, []
    monkeypatch.setattr(type(arena), "ordered", lambda self: seen.append(self.last) or setattr(self, "last", 0))
    arena.last = 7
    fast(x)
    fast(x)
    assert seen == [7] and attempts.count == 1


def test_an_argument_elsewhere_is_noticed(ready, attempts):
    fast, model, _x = ready
    assert torch.equal(fast(torch.full((2, 4), 3.0)), model.weight.expand(2, 4) * 3)
    assert attempts.count >= 1


@pytest.mark.parametrize("other", [lambda x: x.t().contiguous().t(), lambda x: x.as_strided((2, 4), (1, 2))])
def test_arguments_of_other_strides_are_noticed(ready, other):
    fast, model, x = ready
    x.copy_(torch.arange(8.0).view(2, 4))
    assert torch.equal(fast(other(x)), other(x) * model.weight)


def test_a_parameter_elsewhere_is_noticed(ready, attempts):
    fast, model, x = ready
    model.weight.data = torch.full((4,), 5.0)
    assert torch.equal(fast(x), torch.full((2, 4), 5.0)) and attempts.count >= 1
    model.weight = nn.Parameter(torch.full((4,), 6.0))
    assert torch.equal(fast(x), torch.full((2, 4), 6.0))


def test_an_error_of_the_launch_is_raised_and_the_lock_given_up(ready):
    fast, model, x = ready
    launch, arena = recordings()[0].whole, recordings_program(recordings()[0]).arena

    def fail():
        raise RuntimeError("no launch")

    launch.during = fail
    with pytest.raises(RuntimeError, match="no launch"):
        fast(x)
    launch.during = lambda: None
    taken = threading.Thread(target=lambda: arena.lock.acquire() and arena.lock.release())
    taken.start()
    taken.join(10)
    assert not taken.is_alive()
    assert torch.equal(fast(x), model.weight.expand(2, 4))


def test_a_call_of_another_thread_waits(ready):
    """A launch gives up Python's lock: until its results are made, nobody else replays the recording."""
    fast, _, x = ready
    launch, inside, results = recordings()[0].whole, threading.Event(), []

    def call():
        with torch.no_grad():
            results.append(fast(x))

    other = threading.Thread(target=call)

    def during():
        launch.during = lambda: None
        other.start()
        inside.wait(0.2)

    launch.during = during
    mine = fast(x)
    other.join(30)
    assert mine.data_ptr() != results[0].data_ptr() and torch.equal(mine, results[0])


def test_a_recording_that_is_dropped_meanwhile(ready):
    fast, model, x = ready
    (recording,) = recordings()
    launch, dropped = weakref.ref(recording.whole), []

    def during():
        recording.drop()
        dropped.append(launch())

    recording.whole.during = during
    program, parts = recordings_program(recording), recording.parts
    recording.whole.program = lambda: type("Program", (), {"fill": lambda *args: None})
    recording.whole.recording = lambda: type("Recording", (), {"env": {}, "parts": [], "symbols": {}})
    fast(x)
    assert dropped[0] is not None  # it was kept until the call was over
    dropped.clear()
    assert launch() is None and program.entries and parts
    program.forget(recordings())
    assert torch.equal(fast(x), model.weight.expand(2, 4))


def test_what_native_code_reads_of_a_dropped_recording_stays(ready):
    fast, model, x = ready
    words = weakref.ref(recordings()[0].words)
    airgraph.release()
    gc.collect()
    assert words() is not None
    assert torch.equal(fast(x), model.weight.expand(2, 4))


def test_nothing_is_held_by_what_was_released(ready):
    fast, model, x = ready
    launch = weakref.ref(recordings()[0].whole)
    airgraph.release()
    assert launch() is None
    assert torch.equal(fast(x), model.weight.expand(2, 4))


def test_a_program_is_freed_with_its_model(attempts):
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = captured("compile", model, x)
    program = weakref.ref(recordings_program(recordings()[0]))
    del fast
    gc.collect()
    assert program() is None


def test_versions_of_arguments_that_are_written_to(attempts):
    class Adding(nn.Module):
        def forward(self, cache, x):
            cache.add_(x)
            return cache * 2

    for how in ("compile", "torch.compile"):
        cache, x = torch.zeros(3), torch.ones(3)
        fast = captured(how, Adding(), cache, x)
        attempts.count, before, value = 0, cache._version, cache.clone()
        with torch.no_grad():
            assert torch.equal(fast(cache, x), 2 * (value + 1))
        assert (attempts.count, cache._version, x._version) == (0, before + 1, 0)
        airgraph.release()


def test_versions_of_state_that_is_written_to(attempts):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x):
            self.cache.add_(x)
            return self.cache * self.scale

    for how in ("compile", "torch.compile"):
        model, x = Cache().eval(), torch.ones(3)
        fast = captured(how, model, x)
        attempts.count, before, value = 0, model.cache._version, model.cache.clone()
        with torch.no_grad():
            assert torch.equal(fast(x), 2 * (value + 1))
        assert (attempts.count, model.cache._version, model.scale._version) == (0, before + 1, 0)
        airgraph.release()


def test_arguments_of_inference_mode_have_no_version(attempts):
    class Adding(nn.Module):
        def forward(self, cache, x):
            cache.add_(x)
            return cache * 2

    with torch.inference_mode():
        cache, x = torch.zeros(3), torch.ones(3)
        fast = captured("compile", Adding(), cache, x)
        attempts.count, value = 0, cache.clone()
        assert torch.equal(fast(cache, x), 2 * (value + 1)) and attempts.count == 0


class Several(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x + 1, x * 2)


@pytest.mark.parametrize("form", [lambda a, b: (a, b), lambda a, b: [a, b], lambda a, b: {"sum": a, "product": b}])
@pytest.mark.parametrize("how", ["compile", "torch.compile"])
def test_several_results(how, form, attempts):
    model, x = Several(form), torch.full((3,), 5.0)
    fast = captured(how, model, x)
    attempts.count = 0
    with torch.no_grad():
        found, expected = fast(x), model(x)
    assert attempts.count == 0 and type(found) is type(expected)
    torch.testing.assert_close(found, expected)


def test_arguments_by_name_and_too_many(ready, attempts):
    fast, model, x = ready
    assert torch.equal(fast(x=x), model.weight.expand(2, 4)) and attempts.count == 0
    with pytest.raises((BindError, TypeError)):
        fast(x, x)


def test_the_count_of_references_is_found():
    assert short_call.reference_word() is not None


def test_without_it_python_makes_all_calls(monkeypatch, attempts):
    monkeypatch.setattr(short_call, "reference_word", lambda: None)
    model, x = Scaled().eval(), torch.ones(2, 4)
    for how in ("compile", "torch.compile"):
        fast = captured(how, model, x)
        attempts.count = 0
        with torch.no_grad():
            assert torch.equal(fast(x), model.weight.expand(2, 4))
        assert attempts.count >= 1
        airgraph.release()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("way", ["airgraph.compile", "torch.compile"])
def test_streams_and_captures_of_the_user(way, attempts):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda().eval()
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        run = airgraph.compile(model, (x,)) if way == "airgraph.compile" else torch.compile(model, backend="airgraph")

        def right(times):
            for _ in range(times):
                torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)
                x.add_(0.5)
            torch.cuda.synchronize()

        right(4)
        for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
            with torch.cuda.stream(stream):
                right(2)
                before = attempts.count
                right(3)
                assert not short_call.is_available() or attempts.count == before  # on this stream, too
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(x)
        x.add_(0.5)
        graph.replay()
        torch.testing.assert_close(captured, model(x), rtol=1e-3, atol=1e-3)
        del captured, graph
        right(3)


# -- finalizers that run within a call ----------------------------------------------------------------------------------
class ReplayMethod:
    """Called like a method of a builtin class, to which Python hands a tuple of arguments."""

    def __init__(self, inside):
        self.inside = inside

    def __call__(self, launch):
        self.inside()
        launch()


def test_no_collection_between_the_look_at_state_and_the_launch(attempts):
    model, x, there = Scaled().eval(), torch.ones(2, 4), []
    fast = airgraph.compile(model, (x,), engine="replaying")
    fast(x)
    fast(x)
    (recording,) = recordings()
    set_launch(recording, {t.data_ptr(): t for t in (x, model.weight)})
    weight, address, moved = model.weight, recording.addresses[0], torch.full((4,), 7.0)
    inside = ReplayMethod(lambda: there.append(weight.data_ptr() == address))  # (allocates nothing)
    recording.whole = MethodType(inside, recording.whole)
    fast(x)
    there.clear()
    attempts.count, direct = 0, fast.direct
    found = call_collecting(direct, (x,), lambda: setattr(weight, "data", moved))
    assert weight.data_ptr() == moved.data_ptr() and attempts.count == 0
    assert there == [True] and found is not None
    assert torch.equal(fast(x), torch.full((2, 4), 7.0))


def test_state_that_moves_after_python_looked_at_it(ready, attempts, monkeypatch):
    """What Python does before a launch may run finalizers, too."""
    fast, model, x = ready
    arena, launch, moved = recordings_program(recordings()[0]).arena, recordings()[0].whole, torch.full((4,), 7.0)
    launches, before = [], model.weight.data  # (held, so that a wrong launch computes something)
    launch.during = lambda: launches.append(model.weight.data_ptr())

    def ordered(self):
        self.last = 0
        model.weight.data = moved

    monkeypatch.setattr(type(arena), "ordered", ordered)
    arena.last = 7
    assert torch.equal(fast(x), torch.full((2, 4), 7.0))
    assert launches == [] and attempts.count >= 1 and torch.equal(before, torch.arange(1.0, 5.0))


@pytest.mark.parametrize("way", ["native", "Python"])
def test_a_finalizer_that_calls_the_model_within_a_launch(ready, attempts, way):
    """The results of the call around it are not made yet, so their memory is nobody's: it is not given to this one."""
    fast, model, x = ready
    arena, launch, inside = recordings_program(recordings()[0]).arena, recordings()[0].whole, []

    def during():
        launch.during = lambda: None
        x.fill_(2)
        inside.append(fast(x))
        x.fill_(1)

    launch.during = during
    if way == "Python":
        arena.last = 7
        arena.ordered = lambda: setattr(arena, "last", 0)
    try:
        around = fast(x)
    finally:
        vars(arena).pop("ordered", None)
    assert torch.equal(around, model.weight.expand(2, 4)) and torch.equal(inside[0], model.weight.expand(2, 4) * 2)
    assert not arena.busy
    del around
    attempts.count = 0
    assert torch.equal(fast(x), model.weight.expand(2, 4)) and attempts.count == 0


@pytest.mark.skipif(not has_tags(), reason="dictionaries have no version tags")
def test_a_finalizer_of_the_state_before_enters_another():
    """It runs when the table is whole: what the table points to is held afterwards."""
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = captured("compile", model, x)
    short = fast.behind.__self__.short

    def state(tensor):
        return DictWatch([]), TensorWatch([tensor]), WriteCounter([])

    other, own, last = state(torch.ones(4)), torch.ones(4), state(torch.ones(4))
    short.follow(*state(own))
    weakref.finalize(own, short.follow, *last)
    del own
    short.follow(*other)
    assert short.state[1] is last[1] and short.tensors is last[1]
    names = (ShortCallWords.TAGS, ShortCallWords.STATE, ShortCallWords.STATE_WRITES)
    assert [short.table[word] for word in names] == [ctypes.addressof(watch.table) for watch in short.state]
    assert torch.equal(fast(x), model.weight.expand(2, 4))


@torch.no_grad()
def test_another_state_that_was_entered_meanwhile(attempts):
    """By another thread, say: Python enters that of its call again."""
    model, x = Scaled().eval(), torch.ones(2, 4)
    fast = captured("compile", model, x)
    short = fast.behind.__self__.short
    short.follow(DictWatch([]), TensorWatch([torch.ones(4)]), WriteCounter([]))
    fast(x)
    attempts.count = 0
    assert torch.equal(fast(x), model.weight.expand(2, 4)) and attempts.count == 0


# -- state that is read from modules ------------------------------------------------------------------------------------
class Affine(nn.Module):
    def __init__(self, by=1.0):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.arange(1.0, 5.0) * by), nn.Parameter(torch.full((4,), by))

    def forward(self, x):
        return x * self.weight + self.bias


def affine(model, x):
    return model(x)


@pytest.fixture
def several(attempts):
    """A function captured for two models, both of which Python has replayed once."""
    models, x = [Affine().eval(), Affine(2.0).eval()], torch.ones(2, 4)
    fast = torch.compile(affine, backend=airgraph.backend(engine="replaying", clone_input=False))
    with torch.no_grad():
        for model in (models[0], *models, models[1]):
            fast(model, x)
        state = {t.data_ptr(): t for t in (x, *models[0].parameters(), *models[1].parameters())}
        for recording in recordings():
            set_launch(recording, state)
        for model in models:
            fast(model, x)
        del model
        attempts.count = 0
        yield fast, models, x


def test_models_that_share_a_program_are_replayed_without_python(several, attempts):
    fast, models, x = several
    for k in range(3):
        x.fill_(k)
        for model in models:
            assert torch.equal(fast(model, x), model(x))
    assert attempts.count == 0 and len(recordings()) == 2


@pytest.mark.parametrize("change", ["replaced", "moved", "assigned"])
def test_state_that_is_elsewhere_is_noticed(several, attempts, change):
    fast, (model, other), x = several
    if change == "replaced":
        model.weight = nn.Parameter(torch.full((4,), 7.0))
    elif change == "moved":
        model.weight.data = torch.full((4,), 7.0)
    else:
        model.load_state_dict({name: t + 3 for name, t in model.state_dict().items()}, assign=True)
    assert torch.equal(fast(model, x), model(x)) and attempts.count >= 1
    for _ in range(3):
        assert torch.equal(fast(model, x), model(x)) and torch.equal(fast(other, x), other(x))


def test_state_that_is_written_to_in_place_is_read(several, attempts):
    fast, (model, _), x = several
    model.weight.mul_(3)
    model.bias.zero_()
    assert torch.equal(fast(model, x), model(x)) and attempts.count == 0


def test_models_that_are_gone_leave_nothing(several, attempts):
    fast, models, x = several
    told = [weakref.ref(model) for model in models]
    del models[:]
    gc.collect()
    assert [t() for t in told] == [None, None]
    for _ in range(20):  # perhaps at their addresses
        model = Affine(5.0).eval()
        assert torch.equal(fast(model, x), model(x))


def test_a_parameter_that_is_set_again_and_again(several):
    """Another tensor on the same memory: nothing is captured, and nothing piles up."""
    fast, (model, _), x = several
    for _ in range(200):
        model.weight = nn.Parameter(model.weight.data)
        assert torch.equal(fast(model, x), model(x))
    assert len(recordings()) == 2 and all(len(r.launches) < 8 for r in recordings())


def test_another_model_may_be_called_meanwhile(several, monkeypatch):
    """By another thread, say, after the state of this call was read: what is replayed for it is its own."""
    fast, (model, other), x = several
    for each in (model, other):  # other tensors on the same memory: Python looks for the state of both again
        each.weight = nn.Parameter(each.weight.data)
    attempt, nested = ReplayProgram.attempt, []

    def interrupted(self, *args):
        if not nested:
            nested.append(None)
            nested[0] = fast(other, x)
        return attempt(self, *args)

    monkeypatch.setattr(ReplayProgram, "attempt", interrupted)
    assert torch.equal(fast(model, x), model(x)) and torch.equal(nested[0], other(x))
    nested[:] = [None]
    monkeypatch.setattr(ReplayProgram, "attempt", attempt)
    for _ in range(3):
        assert torch.equal(fast(other, x), other(x)) and torch.equal(fast(model, x), model(x))
