"""The native executable as steps (protocol.Steps): captured, replayed and observed like any other."""

import pytest
import torch
from torch import nn

import airgraph
from airgraph.deploy import pool
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.native import NativeEngine, steps
from airgraph.engine.native.engine import NativeExecutable

made: list[NativeExecutable] = []


class Replayed(NativeEngine):
    """The native engine, run by the program that captures and replays."""

    name = "replayed"

    def load(self, request):
        made.append(super().load(request))
        return made[-1]

    def program(self, executable, programs):
        return programs.replayed(executable)


@pytest.fixture(autouse=True)
def engine():
    register_engine(Replayed())
    yield
    made.clear()
    del ENGINES["replayed"]


def compiled(f, engine, dynamic=False):
    torch._dynamo.reset()
    return torch.compile(f, backend=airgraph.backend(engine=engine), dynamic=dynamic)


def written(x, y):
    x.add_(1)
    return torch.softmax(x @ y, -1), y.sort(0)[0]


CASES = {
    "kernels": (lambda x, y: (torch.relu(x @ y).sum(1), x * 2), False),
    "a write": (written, False),
    "an argument that nothing reads": (lambda x, y: y.exp(), False),
    "open sizes": (lambda x, y: (x @ y).exp() + x.shape[0], True),
    "sizes that only running tells": (lambda x, y: x[x > 0] * 2, True),
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_as_run(name):
    f, dynamic = CASES[name]
    direct, replayed = compiled(f, "native", dynamic), compiled(f, "replayed", dynamic)
    torch.manual_seed(0)
    for rows in (4, 4, 4, 6, 6) if dynamic else (4, 4, 4):
        x, y = torch.randn(rows, 8), torch.randn(8, 8)
        ours, theirs = x.clone(), x.clone()
        torch.testing.assert_close(replayed(ours, y), direct(theirs, y), rtol=0, atol=0)
        assert torch.equal(ours, theirs)


def test_one_step_makes_the_outputs():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = compiled(model, "replayed")(x)
    (executable,) = made
    (step,) = executable.steps
    env = {**executable.constants, **dict.fromkeys(executable.inputs.values())}
    arguments = {tuple(p.shape): p for p in (*model.parameters(), x)}
    for spec in executable.boundary.arguments:
        env[executable.inputs[spec.name]] = arguments[spec.type.shape].detach()
    step.advance(env, {}, executable.graph)
    assert torch.equal(env[executable.outputs[0]], expected)
    assert executable.writes == [] and executable.written == frozenset() and executable.cells == set()


@pytest.mark.parametrize(
    ("x86_64", "instruction"), [(True, "llvm.x86.sse2.pause"), (False, "llvm.aarch64.hint(i32 1)")]
)
def test_waiting_threads_leave_their_core_to_its_other_hardware_thread(x86_64, instruction):
    assert f"call void @{instruction}" in steps.idle(x86_64)
    for waiting in (steps.barrier, pool.pool_wait, pool.pool_run):
        assert "call void @idle(i64 %next)" in waiting()
