"""New sizes: bound by native code, once a program has been called, with the numbers that Python would compute."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import airgraph
from airgraph.engine.native import engine
from airgraph.engine.planned import THREADS


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, *args, **options):
    """(the function, the native executables that came of calling it)."""
    made = []
    run = torch.compile(model, backend="airgraph", dynamic=True, **options)
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run(*args)
    return run, [p.native for p in made]


@pytest.fixture
def no_python(monkeypatch):
    """From now on no frame may be made or bound by Python."""

    def forbid():
        monkeypatch.setattr(engine.NativeExecutable, "frame_for", lambda *_: pytest.fail("bound by Python"))

    return forbid


def check(executable):
    for frame in executable.frames:
        symbols = frame.bound()
        assert list(frame.values) == executable.sizes.run(symbols)
        assert symbols[THREADS] == torch.get_num_threads()


class Block(nn.Module):
    """Products, attention and loops; one thread for small sizes, two for large ones."""

    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x):
        y = self.inner(x).cumsum(1)
        return y.softmax(-1) @ y.mT, y.topk(2, 1)[0], x[:, 1:].mean()


class Mixed(nn.Module):
    def forward(self, x):
        return (x @ x).tanh().softmax(-1)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8, stride=2)

    def forward(self, x):
        return self.second(F.max_pool2d(self.first(x).relu(), 2)).flatten(1)


CASES = {
    "block": (Block, lambda a, b: (torch.randn(a, b, 32),), [(2, 5), (3, 40), (2, 300), (7, 9), (2, 5)]),
    "convolutions": (Convolutions, lambda a, b: (torch.randn(2, 3, a, b),), [(12, 20), (31, 18), (90, 70), (13, 11)]),
    "products": (
        lambda: lambda x, y: ((x @ y).relu() @ x, (x.t() @ x).sum(0), y.sort(1)[0]),
        lambda a, b: (torch.randn(a, b), torch.randn(b, a)),
        [(4, 6), (40, 6), (3, 500), (300, 200), (17, 5)],
    ),
}


def assert_as_near(ours, eager, args, model):
    """As eager is to a run in float64."""
    exact = (copy.deepcopy(model).double() if isinstance(model, nn.Module) else model)(*(a.double() for a in args))
    results = [r if isinstance(r, tuple) else (r,) for r in (ours, eager, exact)]
    for mine, theirs, true in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine - true).abs().max() <= 4 * (theirs - true).abs().max() + 1e-6


@pytest.mark.parametrize("name", CASES)
def test_new_sizes_without_python(name, no_python, two_threads):
    torch.manual_seed(0)
    make, inputs, sizes = CASES[name]
    model = make()
    with torch.no_grad():
        run, executables = compiled(model, *inputs(15, 33))
        run(*inputs(18, 61))
        count = [len(e.frames) for e in executables]
        no_python()
        for pair in sizes:
            args = inputs(*pair)
            assert_as_near(run(*args), model(*args), args, model)
            for executable in executables:
                check(executable)
    assert [len(e.frames) for e in executables] == count == [1] * len(count)


def test_training_without_python(no_python):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 3))

    def step(run, x):
        run(x).square().sum().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    run = torch.compile(model, backend="airgraph", dynamic=True)
    for rows in (5, 9):
        step(run, torch.randn(rows, 16))
    no_python()
    for rows in (2, 30, 700, 31, 5):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(step(run, x), step(model, x), rtol=1e-3, atol=1e-4)


class Ranked(nn.Module):
    """Products, a loop and a call into PyTorch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3))

    def forward(self, x):
        y = self.inner(x)
        return y.softmax(-1), y.topk(2, 0)[0] * 2


def ahead_of_time(model, folder, **shapes):
    return airgraph.compile(model, (torch.randn(4, 16),), **shapes)


def loaded_export(model, folder, **shapes):
    return airgraph.load_export(airgraph.export(model, (torch.randn(4, 16),), path=str(folder), **shapes))


def saved(model, folder, **shapes):
    return airgraph.load(airgraph.save(model, folder / "m.airp", torch.randn(4, 16), **shapes))


@pytest.mark.parametrize("obtain", [ahead_of_time, loaded_export, saved])
def test_without_dynamo_and_without_python(obtain, no_python, monkeypatch, tmp_path):
    """More size sets than any table would keep."""
    torch.manual_seed(0)
    model = Ranked().eval()
    run = obtain(model, tmp_path, dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=4096)},))
    with torch.no_grad():
        run(torch.randn(4, 16))
        run(torch.randn(301, 16))  # the largest: memory is allocated by Python
        no_python()
        monkeypatch.setattr(engine.NativeExecutable, "library", lambda *_: pytest.fail("called by Python"))
        for rows in (2, 300, *range(3, 20)):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_number_of_threads_may_change(no_python, two_threads):
    """A size like any other, also of a program without dynamic sizes."""
    x = torch.randn(300, 300)
    with torch.no_grad():
        run = airgraph.compile(Mixed(), (x,))  # (Dynamo would compile again)
        wanted = run(x)
        no_python()
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            torch.testing.assert_close(run(x), wanted, rtol=1e-5, atol=1e-6)


def test_threads_with_sizes_of_their_own():
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    run = torch.compile(model, backend="airgraph", dynamic=True)
    with torch.no_grad():
        for rows in (3, 5):
            run(torch.randn(rows, 16))

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for i in range(60):
                x = torch.randn(2 + (7 * i + seed) % 40, 16, generator=generator)
                if not torch.allclose(run(x), model(x), atol=1e-5):
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_what_only_sympy_can_compute():
    """A size by way of a fraction: Python is asked, and the frame stays the same one."""

    def model(x):
        return F.interpolate(x, scale_factor=1.7, mode="nearest") * 2

    run, executables = compiled(model, torch.randn(1, 2, 10, 9))
    for height in (11, 23, 11):
        x = torch.randn(1, 2, height, 9)
        torch.testing.assert_close(run(x), model(x))
    assert all(len(e.frames) == 1 for e in executables)


def test_many_size_sets_in_one_frame(no_python):
    def model(x):
        return (x.exp().sum(-1) + x[:, 0]).softmax(0)

    run, (executable,) = compiled(model, torch.randn(3, 5))
    no_python()
    for rows in range(2, 300):
        x = torch.randn(rows, 3 + rows % 7)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(executable.frames) == 1


def test_other_strides_than_the_program_was_made_for():
    _, (executable,) = compiled(lambda x: x.relu() + 1, torch.randn(6, 5))
    for x in (torch.randn(7, 5), torch.randn(5, 8).t(), torch.randn(9, 11)[:, ::2], torch.randn(4, 5)):
        torch.testing.assert_close(
            executable.call([x.shape[0], x.shape[1], x], bound(executable, x))[0][0], x.relu() + 1
        )


def bound(executable, x):
    symbols = [s.symbol for s in executable.sources]
    return lambda args: dict(zip(symbols, x.shape))
