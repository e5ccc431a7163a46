"""Intermediates need no more memory than eager's."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import airgraph
from airgraph.engine.native import engine, runner
from airgraph.engine.native.tables import FrameWords

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from cpu_models import MODELS


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


# -- how much it is -----------------------------------------------------------------------------------------------------
def compiled(model, args, train=False):
    """Call it; (the function, the native executables that came of it)."""
    made = []
    run = torch.compile(model, backend="airgraph")
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        step(run, args, train)
    return run, [p.native for p in made]


def step(run, args, train):
    if not train:
        with torch.no_grad():
            return run(*args)
    loss = run(*args)
    return torch.autograd.grad(loss, [p for p in run.parameters() if p.requires_grad], allow_unused=True)


class Living(TorchDispatchMode):
    """The bytes of all tensors that are alive and were not before, at their most."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                storage = t.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def allocations(run):
    """The bytes PyTorch allocates (and, negative, frees) while this runs, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    found, stack = [], list(recorded.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    del result
    return [size for _, size in sorted(found)]


def most(sizes):
    return max((sum(sizes[: i + 1]) for i in range(len(sizes))), default=0)


# Bytes above eager's peak, with the reason.
ABOVE = {"lstm": 320}  # as much as eager, and the output (ten numbers a row), which is there from the start
DAILY = ("bert", "bert_train", "llama_decode", "resnet", "lstm", "mixtral", "deit_heads_60")  # one of each kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.night)
        for name, model in MODELS.items()
        if model.group in ("small", "odd")
    ],
)
def test_no_more_memory_than_eager(name):
    """Intermediates, outputs, what is saved for the backward pass and what library calls make, at their most.

    Not counted are the scratch memory of threads here and the work space inside of PyTorch's kernels there.
    """
    pytest.importorskip("transformers")
    model, (module, args) = MODELS[name], MODELS[name].build()
    living = Living([*module.parameters(), *module.buffers(), *args])
    with living:
        step(module, args, model.train)
    run, natives = compiled(module, args, model.train)
    step(run, args, model.train)
    block = max(native.frames[-1].arena for native in natives)
    assert block + most(allocations(lambda: step(run, args, model.train))) <= living.peak + ABOVE.get(name, 0)


def test_nothing_is_allocated_but_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3), nn.Softmax(-1)).eval()
    x = torch.randn(5, 16)
    run = airgraph.compile(model, (x,))
    run(x)
    for _ in range(3):
        assert [size for size in allocations(lambda: run(x)) if size > 0] == [5 * 3 * 4]


def test_a_training_step_allocates_what_is_saved_and_the_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).train()
    x = torch.randn(128, 16)
    run = torch.compile(lambda x: model(x).sum(), backend="airgraph")
    run(x).backward()
    saved, gradients = 128 * 64 * 4, sum(p.numel() * 4 for p in model.parameters())
    model.zero_grad()
    sizes = allocations(lambda: run(x).backward())
    assert sum(s for s in sizes if s > 0) <= saved + gradients + 256  # the loss, and the gradient of it
    assert most(sizes) <= saved + gradients + 256


def test_a_small_model_holds_little(monkeypatch):
    """The block of a call: intermediates, and for each thread what its steps need."""
    monkeypatch.setattr(runner, "POOL", runner.BlockPool())
    module, args = MODELS["mlp"].build()
    _, (native,) = compiled(module, args)
    (block,) = runner.POOL.blocks
    assert block[0][2] == native.frames[-1].need < 256 << 10


def test_two_results_do_not_lie_over_one_input():
    """Both are computed in the loop that reads the product, and read by steps of their own."""

    def model(x, w):
        y = x @ w
        z = y.exp()
        return z @ w, z.neg() @ w.T

    args = torch.randn(24, 24), torch.randn(24, 24) / 8
    run, (native,) = compiled(model, args)
    assert sum(s.kind == "loop" for s in native.kernels) == 1
    torch.testing.assert_close(run(*args), model(*args))


# -- what is let go early -----------------------------------------------------------------------------------------------
def test_library_calls_let_go_of_arguments_and_results(monkeypatch):
    """Before each: arguments that nothing reads any more, and what earlier calls have made. (Python has to do these.)"""

    def model(x, y, z):
        first = (x * 2).renorm(2, 0, 1.0)
        third = (first + 1).renorm(2, 0, 1.0).renorm(2, 1, 1.0)
        return third * y, z[1:]

    args = torch.randn(6, 5), torch.randn(6, 5), torch.randn(4)
    run, (native,) = compiled(model, args)
    assert [s.kind for s in native.kernels].count("call") == 3
    seen = []
    library = engine.NativeExecutable.library_step

    def watch(self, frame, number):
        library(self, frame, number)
        given = ctypes.cast(frame.words[FrameWords.LIST], ctypes.py_object).value
        seen.append(([a is not None for a in given], len(frame.results)))

    monkeypatch.setattr(engine.NativeExecutable, "library_step", watch)
    torch.testing.assert_close(run(*args), model(*args))
    (_, second, third) = seen
    assert second == ([False, True, True], 1)
    assert third == ([False, True, True], 2)  # what it reads itself, and what it has made
    assert not native.frames[-1].results


def test_the_dispatchers_results_are_let_go_of():
    def model(x):
        for _ in range(6):
            x = (x + 1).cumsum(0)
        return x * 2

    x = torch.randn(256, 64)
    run, (native,) = compiled(model, (x,))
    assert [s.kind for s in native.kernels].count("call") == 6 and not native.by_python
    with torch.no_grad():
        assert most(allocations(lambda: run(x))) <= 3 * x.nbytes  # the sum before, the one after it, the output


def test_symbolic_sizes_are_known_after_arguments_are_gone():
    def model(x, y):
        return (x.exp().cumsum(0) + y).cumsum(0), y.shape[0]

    run = torch.compile(model, backend="airgraph", dynamic=True)
    for rows in (3, 5, 3):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        torch.testing.assert_close(run(x, y), model(x, y))


def test_wider_numbers_are_not_written_over_narrower_ones():
    """Three float16 take as many bytes as six bools; the second of them would lie over the third bool."""

    def model(x):
        true = (x == x) == (x == x)
        both = true * true
        return both, x.reshape(-1)[:3, None] * both.reshape(-1)[None, :3]

    x = torch.arange(6.0).reshape(3, 2).to(torch.float16).mT
    run, _ = compiled(model, (x,))
    assert torch.equal(run(x)[1], model(x)[1])
