"""The table of engines: which one is chosen, what the journal says of the others, and what an engine must follow."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import airgraph
from airgraph.engine import ENGINES, candidates, find_engine, register_engine
from airgraph.engine.protocol import Step
from airgraph.engine.reference import ReferenceEngine, ReferenceExecutable
from airgraph.errors import ConfigError
from airgraph.journal import JOURNALS
from airgraph.plan.index import UnsupportedPlan

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_knob(monkeypatch):
    monkeypatch.delenv("AIRGRAPH_ENGINE", raising=False)


@pytest.fixture
def table():
    before = dict(ENGINES)
    yield ENGINES
    ENGINES.clear()
    ENGINES.update(before)


def names(*args):
    return [engine.name for engine in candidates(*args)]


@pytest.mark.parametrize("name", list(ENGINES))
def test_every_engine_follows_the_protocol(name):
    engine = find_engine(name)
    assert engine.name == name
    assert all(callable(getattr(engine, part)) for part in ("warm_up", "plan", "load", "program"))
    answers = [engine.serves(device, mode) for device in (CPU, CUDA) for mode in ("max-autotune", "reduce-overhead")]
    assert all(answer is None or (isinstance(answer, str) and answer) for answer in answers)


def test_auto_walks_the_table_and_says_why_not():
    assert names("auto", CPU, "max-autotune") == ["native", "reference"]
    notes = []
    assert names("auto", CPU, "reduce-overhead", notes.append) == ["reference"]
    assert "not native: mode reduce-overhead replays PyTorch's own ops" in notes
    notes.clear()
    assert names("auto", CUDA, "max-autotune", notes.append)[-1] == "reference"
    assert "not native: it runs on a CPU, this graph is on cuda:0" in notes


def test_an_engine_asked_for_by_name_comes_first(monkeypatch):
    assert names("native", CPU, "reduce-overhead") == ["native", "reference"]
    assert names("reference", CPU, "max-autotune") == ["reference"]
    monkeypatch.setenv("AIRGRAPH_ENGINE", "reference")
    assert names("auto", CPU, "max-autotune") == ["reference"]
    assert names("native", CPU, "max-autotune") == ["native", "reference"]


@pytest.mark.parametrize("make", [airgraph.backend, airgraph.get_compiler])
def test_an_unknown_engine_is_named(make):
    with pytest.raises(ConfigError) as error:
        make(engine="magic")
    known = ", ".join(map(repr, ("auto", *ENGINES)))
    assert error.value.text() == f"engine cannot be 'magic'\n  allowed: {known}"


def test_an_unknown_engine_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "magic")
    with pytest.raises(ConfigError, match="engine cannot be 'magic'"):
        names("auto", CPU, "max-autotune")


class Counting(ReferenceEngine):
    """An engine of somebody else's."""

    name = "counting"
    loaded = 0

    def load(self, request):
        self.loaded += 1
        return super().load(request)


class Refusing(ReferenceEngine):
    name = "refusing"

    def plan(self, request):
        raise UnsupportedPlan("not on a Sunday")


def test_a_registered_engine_is_chosen_by_name(table):
    engine = Counting()
    register_engine(engine)
    assert [*table][-2:] == ["counting", "reference"]
    x = torch.randn(4)
    assert torch.equal(torch.compile(lambda x: x * 2, backend="airgraph", options={"engine": "counting"})(x), x * 2)
    assert engine.loaded == 1


def test_where_an_engine_refuses_the_next_one_runs_the_graph(table):
    register_engine(Refusing())
    x = torch.randn(4)
    assert torch.equal(torch.compile(lambda x: x + 2, backend="airgraph", options={"engine": "refusing"})(x), x + 2)
    assert "the reference engine runs this graph, as the refusing one cannot: not on a Sunday" in JOURNALS[-1].remarks


def test_planning_is_a_stage_of_its_own():
    torch.compile(lambda x: x + 3, backend="airgraph")(torch.randn(4))
    stages = [stage.name for stage in JOURNALS[-1].stages]
    assert stages.index("convert") < stages.index("plan") < stages.index("load")


def test_importing_airgraph_loads_no_compiler():
    code = "import sys, airgraph; print([m for m in ('llvmlite', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_capture_works_on_any_steps(table):
    """An engine that computes several nodes in one step, with memory of its own between them: captured and replayed."""

    class Joined(ReferenceEngine):
        name = "joined"

        def load(self, request):
            executable = ReferenceExecutable(request.graph, request.device, request.map_device)
            executable.steps = pairs(executable.steps)
            return executable

    register_engine(Joined())
    airgraph.release()
    run = torch.compile(
        lambda x, y: ((x + y).relu() * 3).sum(-1),
        backend=airgraph.backend(mode="reduce-overhead", engine="joined"),
        fullgraph=True,
    )
    for _ in range(4):
        x, y = torch.randn(3, 5), torch.randn(5)
        assert torch.equal(run(x, y), ((x + y).relu() * 3).sum(-1))
    assert [g.hits for g in airgraph.graphs()] == [2]
    airgraph.release()


def pairs(steps):
    """Two steps at a time as one, under other keys."""

    def both(first, second):
        def run(env, symbols):
            inner = dict(env)
            first.advance(inner, symbols, None)
            return second.run(inner, symbols)

        reads = (*first.reads, *(key for key in second.reads if key not in first.makes))
        alive = [key for key in first.makes if key not in second.last_uses]
        assert not alive
        dead = tuple(key for key in (*first.last_uses, *second.last_uses) if key not in first.makes)
        return Step((*first.nodes, *second.nodes), run, reads, second.makes, dead)

    return [both(replace(a, last_uses=()), b) for a, b in zip(steps[::2], steps[1::2])]
