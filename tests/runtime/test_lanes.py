"""Streams inside a captured graph: what must come before what, and nothing more.

There are no streams on a CPU. Here are some that only keep clocks: each counts its own steps, takes over the clock of an
event it waits for, and so knows which steps of the others are past.
"""

import random
from contextlib import contextmanager, nullcontext

import pytest
import torch

import airgraph
from airgraph.compat.torchair import ops
from airgraph.compat.torchair.scope import npu_stream_switch
from airgraph.ir.graph import stream_of
from airgraph.runtime import replay
from airgraph.runtime.arena import Arena
from airgraph.runtime.lanes import CudaStreams, changes, sources

pytestmark = pytest.mark.slow  # for every landing


class ClockStream:
    def __init__(self, label):
        self.label = label
        self.clock = {}

    def record_event(self):
        return dict(self.clock)

    def wait_event(self, event):
        for label, count in event.items():
            self.clock[label] = max(self.clock.get(label, 0), count)


class ClockStreams:
    """Writes down for each step what was past when it began."""

    def __init__(self):
        self.made = {}
        self.steps = []
        self.held = []

    def named(self, label):
        return self.made.setdefault(label, ClockStream(label))

    @contextmanager
    def on(self, stream):
        self.steps.append((stream.label, stream.clock.get(stream.label, 0) + 1, dict(stream.clock)))
        yield
        stream.clock[stream.label] = stream.clock.get(stream.label, 0) + 1

    def hold(self, tensor, stream):
        self.held.append((tuple(tensor.shape), stream.label))


class Run:
    """A function captured on such streams; `after(a, b)`: step a begins only when step b is done."""

    def __init__(self, function, *args, calls=3):
        self.streams = ClockStreams()
        compiled = torch.compile(function, backend=airgraph.backend(mode="reduce-overhead"), fullgraph=True)
        self.results = []
        for _ in range(calls):
            self.streams.steps.clear()
            self.streams.made.clear()
            self.results.append(compiled(*args))
        (self.program,) = replay.PROGRAMS
        self.nodes = [step.nodes[-1] for step in self.program.executable.steps]

    def find(self, name):
        return next(i for i, node in enumerate(self.nodes) if node.attrs.get("target", "").startswith(f"aten.{name}."))

    def after(self, later, earlier):
        label, count, _ = self.streams.steps[self.find(earlier)]
        return self.streams.steps[self.find(later)][2].get(label, 0) >= count

    def check(self):
        """Every step runs on its stream, after all it reads, and the main stream has waited for everything."""
        assert [label for label, _, _ in self.streams.steps] == [stream_of(node) for node in self.nodes]
        steps, graph = self.program.executable.steps, self.program.executable.graph
        for step, (_, _, past) in zip(steps, self.streams.steps):
            for source in sources(step) & set(self.nodes):
                label, count, _ = self.streams.steps[self.nodes.index(source)]
                assert past.get(label, 0) >= count, (step, source)
        for i, step in enumerate(steps):
            if step.over is None and changes(step, graph):  # everything is before it or after it
                label, count, past = self.streams.steps[i]
                assert all(past.get(other, 0) >= n for other, n, _ in self.streams.steps[:i])
                assert all(later.get(label, 0) >= count for _, _, later in self.streams.steps[i + 1 :])
        end = self.streams.made[None].clock
        assert all(end.get(label, 0) >= stream.clock.get(label, 0) for label, stream in self.streams.made.items())


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """Arenas hand out the streams of the run that is being set up."""
    torch._dynamo.reset()
    replay.PROGRAMS.clear()
    made = []
    start = ClockStreams.__init__

    def init(self):
        start(self)
        made.append(self)

    monkeypatch.setattr(ClockStreams, "__init__", init)
    monkeypatch.setattr(Arena, "streams", property(lambda arena: made[-1]))


def test_branches_do_not_wait_for_each_other():
    def f(x, y):
        a = x + y
        with npu_stream_switch("1"):
            b = a @ y
        c = a.sin()
        return b * c

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    run = Run(f, x, y)
    run.check()
    assert all(torch.equal(result, f(x, y)) for result in run.results)
    assert run.after("mm", "add") and not run.after("sin", "mm") and run.after("mul", "mm")
    assert ((3, 3), "1") in run.streams.held and ((3, 3), None) in run.streams.held


def test_a_wait_of_the_program():
    def f(x, y, wait):
        a = x.sin()
        moment = ops.record()
        b = x.tan()
        with npu_stream_switch("1"):
            if wait:
                ops.wait([moment])
            c = y.exp()
        return a, b, c

    x, y = torch.randn(3), torch.randn(3)
    for wait in (False, True):
        torch._dynamo.reset()
        replay.PROGRAMS.clear()
        run = Run(f, x, y, wait)
        run.check()
        assert run.after("exp", "sin") is wait and not run.after("exp", "tan")


def test_nothing_is_written_over_what_another_stream_reads():
    """Alone, relu would write over `a`, which nobody reads afterwards; but cos may not have read it yet."""

    def f(x):
        a = x + 1
        with npu_stream_switch("1"):
            b = a.cos()
        return b, torch.relu(a)

    x = torch.randn(4)
    run = Run(f, x)
    run.check()
    assert run.program.executable.steps[run.find("relu")].in_place is not None
    assert not run.after("relu", "cos")
    assert all(torch.equal(g, w) for g, w in zip(run.results[-1], f(x)))


def test_a_write_to_an_argument_waits_for_all_and_all_wait_for_it():
    def f(cache, row, x):
        with npu_stream_switch("1"):
            a = cache.cos()
        cache.index_copy_(0, torch.tensor([1]), row)
        with npu_stream_switch("2"):
            b = x.exp()
        return a, b

    row, x, ours, theirs = torch.randn(1, 3), torch.randn(3), torch.zeros(2, 3), torch.zeros(2, 3)
    run = Run(f, ours, row, x)
    run.check()
    wanted = [f(theirs, row, x) for _ in range(3)]
    assert all(torch.equal(g, w) for got, want in zip(run.results, wanted) for g, w in zip(got, want))
    assert torch.equal(ours, theirs)
    write = next(s for s in run.program.executable.steps if changes(s, run.program.executable.graph))
    name = write.nodes[-1].attrs["target"].split(".")[1]
    assert run.after(name, "cos") and (run.find("exp") < run.find(name) or run.after("exp", name))


STEPS = [
    torch.sin,
    torch.cos,
    torch.relu,
    lambda x: x * 2,
    lambda x: x.t(),
    lambda x: x + 1,
    lambda x: x[1:].sum(0) + x,
]


def program(seed):
    """A function of random steps on random streams, with random waits and sums, that writes to its argument or not."""
    choose = random.Random(seed)
    plan = [
        (
            choose.choice(STEPS),
            choose.choice([None, None, "1", "2", "3"]),
            choose.random(),
            choose.random(),
            choose.random(),
        )
        for _ in range(12)
    ]
    write = choose.randrange(18)

    def f(x, cache):
        values, moments = [x + 0.5, x - 0.5], []
        for i, (step, label, which, other, kind) in enumerate(plan):
            a, b = values[int(which * len(values))], values[int(other * len(values))]
            with nullcontext() if label is None else npu_stream_switch(label):
                if kind < 0.2 and moments:
                    ops.wait([moments[int(which * len(moments))]])
                elif kind < 0.3:
                    ops.wait([b])
                values.append(step(a) if kind < 0.7 else step(a) + b)
                if i == write:
                    cache.mul_(2).add_(values[-1])
                if kind > 0.6:
                    moments.append(ops.record())
        return values[-1], values[-2].t(), sum(values), cache * 1

    return f


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24))])
def test_random_programs(seed):
    f = program(seed)
    x, ours, theirs = torch.randn(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    run = Run(f, x, ours)
    run.check()
    wanted = [f(x, theirs) for _ in range(3)]
    for got, want in zip(run.results, wanted):
        assert all(torch.equal(g, w) for g, w in zip(got, want))
    assert torch.equal(ours, theirs)


def test_without_scopes_there_are_no_streams():
    run = Run(lambda x: (x.sin() + 1).exp(), torch.randn(3))
    assert run.streams.made == {} and run.streams.steps == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(monkeypatch):
    def f(x, y):
        a = x + y
        with npu_stream_switch("1"):
            b = (a @ y).relu()
        with npu_stream_switch("2"):
            c = (a @ x).sin()
        return b + c, a.exp()

    monkeypatch.undo()
    x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    compiled = torch.compile(f, backend=airgraph.backend(mode="reduce-overhead"), fullgraph=True)
    for _ in range(4):
        torch.testing.assert_close(compiled(x, y), f(x, y))
    (program,) = replay.PROGRAMS
    assert isinstance(program.arena.streams, CudaStreams) and set(program.arena.named) >= {"1", "2"}
    assert "scope.npu_stream_switch('1'): its ops are captured on a stream of their own" in program.journal.remarks
