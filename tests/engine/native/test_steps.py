"""The native executable as steps (protocol.Steps): captured, replayed and observed like any other; and its threads."""

import ctypes
import time

import pytest
import torch
from torch import nn

import airgraph
from airgraph.deploy import pool
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.native import NativeEngine, steps
from airgraph.engine.native.engine import NativeExecutable
from airgraph.engine.native.llvm import jit
from airgraph.engine.native.tables import MOST, ContextWords, FrameWords, StepWords

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


# -- threads that are held up -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("waited", "joined", "worked", "held"),
    [
        (0, 10, 50, False),
        (0, 400, 50, True),  # for the end of the region
        (400, 0, 50, True),  # at a barrier
        (200, 200, 50, True),
        (200, 50, 50, False),  # not long enough
        (400, 0, 450, False),  # alone it would have taken longer
        (9000, 0, 8000, True),
    ],
)
def test_who_waits_longer_than_they_work_is_held_up(waited, joined, worked, held):
    """Times in microseconds; the region begins at 1000 and the clock tells when it ends."""
    end = 1000 + waited + joined + worked
    clock = f"define internal i64 @nanoseconds() {{ ret i64 {end * 1000} }}"
    text = "\n".join([clock, steps.held_up().replace("define internal", "define")])
    code = jit.build([jit.Unit(text, ("held_up",))])
    context = (ctypes.c_int64 * ContextWords.WORDS)()
    context[ContextWords.WAITED], context[ContextWords.FINISHED] = waited * 1000, (end - joined) * 1000
    found = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64)(code["held_up"])
    assert found(ctypes.addressof(context), 1_000_000) is held


KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p)


class Observed:
    """A program whose kernel is called by way of Python: the shares of a call, and a second share that takes its time."""

    def __init__(self):
        self.shares, self.pause = [], 0.0
        self.x, self.run = torch.randn(512, 512), compiled(lambda x: x.sin() + 1, "replayed")
        self.expected = self.run(self.x)
        (executable,) = made
        (self.frame,) = executable.frames
        (place,) = [i for i, address in enumerate(executable.functions) if address]
        self.kernel, self.wrapper = KERNEL(executable.functions[place]), KERNEL(self.share)
        address = ctypes.cast(self.wrapper, ctypes.c_void_p).value
        self.frame.step_table[place * StepWords.WORDS + StepWords.FUNCTION] = address

    def share(self, args, sizes, begin, end, scratch):
        self.shares.append((begin, end))
        if begin > 0:
            time.sleep(self.pause)
        self.kernel(args, sizes, begin, end, scratch)

    def call(self):
        self.shares.clear()
        assert torch.equal(self.run(self.x), self.expected)
        return len(self.shares)


def test_a_region_that_was_held_up_is_followed_by_some_without_other_threads(two_threads):
    program = Observed()
    program.frame.words[FrameWords.ALONE_UNTIL] = 0  # its first call may have been held up here
    assert program.call() == 2
    program.frame.words[FrameWords.ALONE_UNTIL] = MOST
    assert program.call() == 1
    program.frame.words[FrameWords.ALONE_UNTIL] = 0
    program.pause = 0.02
    for _ in range(50):  # the calling thread may be the one that does not get its core
        program.call()
        if program.frame.words[FrameWords.ALONE_UNTIL]:
            break
    assert 0 < program.frame.words[FrameWords.ALONE_UNTIL] < MOST
    program.frame.words[FrameWords.ALONE_UNTIL] += 1_000_000
    assert program.call() == 1
