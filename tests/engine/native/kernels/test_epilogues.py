"""Epilogues of products: bit for bit what the product and a loop behind it compute, however threads divide the product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from airgraph.engine.native import frames
from airgraph.engine.native import target as native
from airgraph.engine.native.kernels import blas, products
from airgraph.plan.steps import GemmStep


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def activated(width: int, hidden: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), activation(), nn.Linear(hidden, 5))


MODELS = {
    "relu, columns": (lambda: activated(64, 256, nn.ReLU), (32, 64), 1),
    "gelu, columns that are no multiple": (lambda: activated(40, 203, nn.GELU), (3, 7, 40), 1),
    "one row": (lambda: activated(64, 512, nn.SiLU), (1, 64), 1),
    "rows": (lambda: activated(64, 24, nn.GELU), (1003, 64), 1),
    "several operands": (lambda: Gated(48, 160), (2, 9, 48), 1),
}


@pytest.fixture
def both(compiled_for):
    def run(name, dynamic=False):
        """With one epilogue the results are, bit for bit, those without, and right; the executable with it."""
        make, shape, wanted = MODELS[name]
        torch.manual_seed(0)
        model, x, target = make().eval(), torch.randn(shape), native.this_cpu()
        targets = [replace(target, epilogues=limit, epilogue_columns=1) for limit in (0, 1000)]
        (_, apart, _), (executable, fused, again) = compiled_for(targets, model, x, dynamic and shape[0] > 1)
        assert count(executable.plan) == wanted
        assert torch.equal(apart, fused) and torch.equal(fused, again)
        with torch.no_grad():
            torch.testing.assert_close(fused, model(x))

    return run


def count(plan) -> int:
    return sum(isinstance(s, GemmStep) and s.epilogue is not None for s in plan.steps)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit(name, dynamic, threads, both):
    both(name, dynamic)


@pytest.mark.parametrize("split", [products.COLUMNS, products.ROWS])
def test_however_threads_divide_the_product(split, threads, both, monkeypatch):
    monkeypatch.setattr(frames, "rule_of_sizes", lambda sizes, threads: (split, threads))
    both("gelu, columns that are no multiple")


@pytest.mark.skipif(blas.functions() is None, reason="this libtorch has no MKL")
def test_packed_weights(threads, both, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_PACK", "live")
    monkeypatch.setattr(blas, "pays", lambda m, n, k: m >= blas.ROWS and n > 1 and k > 1)
    both("relu, columns")


def test_no_barrier_between_a_product_and_its_epilogue(compiled_for):
    model, x = activated(64, 1024, nn.ReLU).eval(), torch.randn(32, 64)
    ((executable, *_),) = compiled_for([replace(native.this_cpu(), epilogues=6)], model, x)
    kinds = [step.kind for step in executable.shared.steps]
    assert kinds == ["gemm", "epilogue", "gemm"]
    assert executable.shared.time.waits == {1}
    assert executable.shared.sized[0][1:4] == executable.shared.sized[1][1:4]
