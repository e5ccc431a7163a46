"""Prologues of products: bit for bit what a loop and the product behind it compute, however threads divide the product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from airgraph.engine.native import frames
from airgraph.engine.native import target as native
from airgraph.engine.native.kernels import products
from airgraph.plan.steps import GemmStep


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


def count(plan) -> int:
    return sum(isinstance(s, GemmStep) and s.prologue is not None for s in plan.steps)


@pytest.fixture
def both(compiled_for):
    def run(name, dynamic=False):
        """With one prologue the results are, bit for bit, those without, and right; the executable with it."""
        make, shape = MODELS[name]
        torch.manual_seed(0)
        model, x, target = make().eval(), torch.randn(shape), native.this_cpu()
        targets = [chosen(target, columns) for columns in (0, 1000)]
        (without, apart, _), (executable, fused, again) = compiled_for(targets, model, x, dynamic)
        assert [count(without.plan), count(executable.plan)] == [0, 1]
        assert torch.equal(apart, fused) and torch.equal(fused, again)
        with torch.no_grad():
            torch.testing.assert_close(fused, model(x))
        return executable

    return run


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit(name, dynamic, threads, both):
    both(name, dynamic)


@pytest.mark.parametrize("split", [products.COLUMNS, products.ROWS])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_however_threads_divide_the_product(name, split, threads, both, monkeypatch):
    """By rows each thread has the same share of both; by columns they wait for all rows."""
    monkeypatch.setenv("AIRGRAPH_PACK", "frozen")  # packed weights have a rule of their own
    monkeypatch.setattr(frames, "rule_of_sizes", lambda sizes, threads: (split, threads))
    executable = both(name)
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


def test_rows_are_written_over_what_they_are_made_of(compiled_for):
    """As those of a loop: a prologue needs no memory of its own where nothing else reads its operand."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
    ((executable, *_),) = compiled_for([native.this_cpu()], model, torch.randn(400, 64))
    assert executable.frames[-1].arena == 400 * 128 * 4
