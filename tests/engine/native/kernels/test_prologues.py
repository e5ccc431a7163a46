"""Prologues of products: bit for bit what a loop and the product behind it compute, however threads divide the product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine.native import frames
from airgraph.engine.native import target as native
from airgraph.engine.native.kernels import products
from airgraph.plan.steps import GemmStep


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No program from the cache: its key does not see the patched target."""
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Squared(nn.Module):
    """The rows are scaled by numbers that all rows share, and the result is added to what the prologue reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.rand(width)), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x.square() * self.scale).relu()


class Residual(nn.Module):
    """What the prologue reads is read by the epilogue, too, so the rows cannot be written over it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return y + self.second(y.relu())


MODELS = {
    "elements": (lambda: nn.Sequential(nn.GELU(), nn.Linear(64, 24)), (1003, 64)),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 9)), (31, 67, 48)),
    "softmax": (lambda: nn.Sequential(nn.Softmax(-1), nn.Linear(20, 3)), (65, 20)),
    "read by both": (lambda: Residual(96), (301, 24)),
    "residual": (lambda: Squared(72), (517, 72)),
}


def chosen(target, columns):
    return replace(target, prologue_columns=columns, epilogues=100 * (columns > 0), epilogue_columns=1)


def both(name, monkeypatch, dynamic=False):
    """The results without and with prologues and eager's, and the program with them."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    target, results, made = native.this_cpu(), [], []
    for columns in (0, 1000):
        monkeypatch.setattr(native, "this_cpu", lambda n=columns: chosen(target, n))
        with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
            run = airgraph.compile(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},) if dynamic else None)
        with torch.no_grad():
            results += [run(x), run(x)]
    assert [sum(isinstance(s, GemmStep) and s.prologue is not None for s in p.native.plan.steps) for p in made] == [
        0,
        1,
    ]
    apart, _, fused, again = results
    assert torch.equal(apart, fused) and torch.equal(fused, again)
    with torch.no_grad():
        torch.testing.assert_close(fused, model(x))
    return made[-1].native


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit(name, dynamic, threads, monkeypatch):
    both(name, monkeypatch, dynamic)


@pytest.mark.parametrize("split", [products.COLUMNS, products.ROWS])
@pytest.mark.parametrize("name", MODELS)
def test_however_threads_divide_the_product(name, split, monkeypatch):
    """By rows each thread has the same share of both; by columns they wait for all rows."""
    monkeypatch.setattr(frames, "rule_of_sizes", lambda sizes, threads: (split, threads))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        executable = both(name, monkeypatch)
    finally:
        torch.set_num_threads(before)
    shared = executable.shared
    kinds = [step.kind for step in shared.steps]
    at = kinds.index("prologue")
    assert executable.titles[at] == f"{executable.titles[at + 1]} (prologue)"  # a kernel of its own in profiles
    assert kinds[at + 1] == "gemm" and at not in shared.time.waits
    loop, product = shared.sized[at : at + 2]
    values = shared.sizes.run(dict.fromkeys(shared.sizes.symbols, 2))
    waits = shared.sizes.value(loop.wait, values)
    assert waits == (split == products.COLUMNS)
    if split == products.ROWS:
        assert (loop.jobs, loop.unit, loop.single) == (product.jobs, product.unit, product.single)


def test_rows_are_written_over_what_they_are_made_of():
    """As those of a loop: a prologue needs no memory of its own where nothing else reads its operand."""
    model, made = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval(), []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run = airgraph.compile(model, (x := torch.randn(400, 64),))
    run(x)
    native = made[-1].native
    assert native.frames[-1].arena == 400 * 128 * 4
