"""Epilogues of products: bit for bit what the product and a loop behind it compute, however threads divide the product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import airgraph
from airgraph.engine.native import target as native
from airgraph.engine.native.kernels import blas, products
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


def both(make, shape, monkeypatch, dynamic=False):
    """The results without and with epilogues, and the plan with them."""
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    target, results, made = native.this_cpu(), [], []
    for epilogues in (0, 1000):
        monkeypatch.setattr(native, "this_cpu", lambda e=epilogues: replace(target, epilogues=e, epilogue_columns=1))
        with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
            shapes = ({0: torch.export.Dim.AUTO},) if dynamic and shape[0] > 1 else None
            run = airgraph.compile(model, (x,), dynamic_shapes=shapes)
        with torch.no_grad():
            results += [run(x), run(x), model(x)]
    return results, made[-1].native.plan


def count(plan) -> int:
    return sum(isinstance(s, GemmStep) and s.epilogue is not None for s in plan.steps)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit(name, dynamic, threads, monkeypatch):
    make, shape, wanted = MODELS[name]
    (apart, _, eager, fused, again, _), plan = both(make, shape, monkeypatch, dynamic)
    assert count(plan) == wanted
    assert torch.equal(apart, fused) and torch.equal(fused, again)
    torch.testing.assert_close(fused, eager)


@pytest.mark.parametrize("split", [products.COLUMNS, products.ROWS])
def test_however_threads_divide_the_product(split, threads, monkeypatch):
    from airgraph.engine.native import frames

    monkeypatch.setattr(frames, "rule_of_sizes", lambda sizes, threads: (split, threads))
    (apart, _, eager, fused, *_), plan = both(*MODELS["gelu, columns that are no multiple"][:2], monkeypatch)
    assert count(plan) == 1 and torch.equal(apart, fused)
    torch.testing.assert_close(fused, eager)


@pytest.mark.skipif(blas.functions() is None, reason="this libtorch has no MKL")
def test_packed_weights(threads, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_PACK", "live")
    monkeypatch.setattr(blas, "pays", lambda m, n, k: m >= blas.ROWS and n > 1 and k > 1)
    (apart, _, eager, fused, *_), plan = both(*MODELS["relu, columns"][:2], monkeypatch)
    assert count(plan) == 1 and torch.equal(apart, fused)
    torch.testing.assert_close(fused, eager)


def test_no_barrier_between_a_product_and_its_epilogue(monkeypatch):
    target, made = native.this_cpu(), []
    monkeypatch.setattr(native, "this_cpu", lambda: replace(target, epilogues=6))
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run = airgraph.compile(activated(64, 1024, nn.ReLU).eval(), (torch.randn(32, 64),))
    run(torch.randn(32, 64))
    shared = made[-1].native.shared
    kinds = [step.kind for step in shared.steps]
    assert kinds == ["gemm", "epilogue", "gemm"]
    assert shared.time.waits == {1}
    assert shared.sized[0][1:4] == shared.sized[1][1:4]
