"""Epilogues of convolutions: bit for bit what the convolution and a loop behind it compute, whatever threads divide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import airgraph
from airgraph.engine.native import target as native
from airgraph.engine.native.kernels import conv_last
from airgraph.plan.steps import ConvStep
from airgraph.tools.profile import profiling

pytestmark = pytest.mark.skipif(conv_last.this_tile() is None, reason="convolutions of this CPU have planes")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No program from the cache: its key does not see the patched target."""
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")


class Residual(nn.Module):
    """Convolution, batch norm, the sum with another convolution's result, ReLU."""

    def __init__(self, given: int, made: int, size: int) -> None:
        super().__init__()
        self.inside, self.norm = nn.Conv2d(given, made, size, padding=size // 2, bias=False), nn.BatchNorm2d(made)
        self.around, self.last = nn.Conv2d(given, made, 1), nn.Conv2d(made, 3, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.inside(x)) + self.around(x)))


class Chain(nn.Module):
    """A convolution and an activation, whose result another convolution reads."""

    def __init__(self, activation: nn.Module, *args: int, **options: int) -> None:
        super().__init__()
        self.first, self.activation = nn.Conv2d(*args, **options), activation
        self.last = nn.Conv2d(args[1], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(x)))


MODELS = {
    "pixels are divided": (lambda: Chain(nn.ReLU(), 16, 40, 3), (2, 16, 30, 30), 1),
    "panels are divided": (lambda: Chain(nn.Hardswish(), 32, 200, 1), (1, 32, 3, 3), 1),
    "weights that do not stay in level 2": (lambda: Chain(nn.SiLU(), 400, 140, 3, padding=1), (1, 400, 9, 9), 1),
    "planes": (lambda: Chain(nn.ReLU6(), 3, 24, 7, stride=2, padding=3), (2, 3, 61, 40), 1),
    "depthwise": (lambda: Chain(nn.GELU(), 48, 48, 5, padding=2, groups=48), (1, 48, 19, 21), 1),
    "groups": (lambda: Chain(nn.LeakyReLU(), 24, 72, 3, groups=3), (1, 24, 12, 12), 1),
    "squares": (lambda: Chain(nn.SiLU(), 64, 72, 3, padding=1), (3, 64, 13, 11), 1),
    "squares, panels are divided": (lambda: Residual(130, 200, 3), (1, 130, 10, 10), 1),
    "one pixel": (lambda: Chain(nn.ReLU(), 96, 130, 1), (1, 96, 1, 1), 2),  # planes and channels last are the same
    "by channel": (lambda: Residual(24, 40, 3), (2, 24, 17, 9), 1),
    "by channel, panels are divided": (lambda: Residual(64, 200, 1), (1, 64, 4, 4), 1),
    "by channel, whole vectors, half of one, and single channels": (lambda: Residual(24, 28, 3), (1, 24, 17, 9), 1),
}


def both(make, shape, monkeypatch, **options):
    """The results without and with epilogues, eager's, and the plan with epilogues."""
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    target, results, made = native.this_cpu(), [], []
    for fuses in (False, True):
        monkeypatch.setattr(native, "this_cpu", lambda fuses=fuses: replace(target, conv_epilogues=fuses))
        with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
            run = airgraph.compile(model, (x,), **options)
        with torch.no_grad():
            results += [run(x), run(x)]
    assert count(made[0].native.plan) == 0
    return results, model(x), made[-1].native.plan


def count(plan) -> int:
    return sum(isinstance(s, ConvStep) and s.epilogue is not None for s in plan.steps)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit(name, frozen, threads, monkeypatch):
    make, shape, wanted = MODELS[name]
    (apart, _, fused, again), eager, plan = both(make, shape, monkeypatch, frozen_parameter=frozen)
    assert count(plan) == wanted
    assert torch.equal(apart, fused) and torch.equal(fused, again)
    torch.testing.assert_close(fused, eager)


def test_a_residual_that_is_read_again(threads, monkeypatch):
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = F.relu(part(x) + x)
            return x

    (apart, _, fused, again), eager, plan = both(Blocks, (1, 32, 14, 14), monkeypatch)
    assert count(plan) >= 3
    assert torch.equal(apart, fused) and torch.equal(fused, again)
    torch.testing.assert_close(fused, eager)


def test_parameters_that_change_between_calls(threads):
    """What stands in front of a convolution, for its epilogue, is computed in every call."""
    torch.manual_seed(0)
    model, x = Residual(24, 40, 3).eval(), torch.randn(1, 24, 9, 9)
    run = airgraph.compile(model, (x,))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
            model.norm.weight.mul_(2)
            model.norm.running_var.add_(1)


def test_its_time_is_the_convolutions_in_profiles():
    model, x = Residual(16, 64, 3).eval(), torch.randn(1, 16, 20, 20)
    with torch.no_grad(), profiling() as found:  # frames are made while the profiler listens
        fast = airgraph.compile(model, x)
        fast(x), fast(x)
    names = {kernel.name: kernel.calls for kernel in found[0].kernels}
    assert not [name for name in names if name.endswith("(epilogue)")], names
    assert names["BNInfer+Conv2D+Add+Relu around"] == 2, "the convolution with its epilogue, once in each call"
