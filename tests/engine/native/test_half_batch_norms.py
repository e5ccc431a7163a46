"""Batch norms of halves with float32 parameters, as under autocast, are loops in training: forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import airgraph
from airgraph.ir.types import DataType
from airgraph.plan.steps import CallStep

BF16, F16 = torch.bfloat16, torch.float16


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend=airgraph.backend())


def norm(rank, channels, **options):
    torch.manual_seed(0)
    made = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[rank](channels, **options)
    if made.affine:
        nn.init.uniform_(made.weight, 0.5, 1.5)
        nn.init.normal_(made.bias)
    return made


def step(module, run, x, dy):
    """Everything that a training step leaves behind, by name."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = run(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return found | {name: b.clone() for name, b in module.named_buffers()}


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(module, x, plans, steps=2, tolerance=4.0):
    """As near to float64 as eager, with its element types and strides, and nothing left to PyTorch."""
    ours, theirs, exact = module, copy.deepcopy(module), copy.deepcopy(module).double()
    call, dy = compiled(ours), (torch.randn(x.shape) + 0.5).to(x.dtype).as_strided(x.shape, x.stride())
    for _ in range(steps):
        for part in (ours, theirs, exact):
            part.zero_grad()
        got, want = step(ours, call, x, dy), step(theirs, theirs, x, dy)
        right = step(exact, exact, x.double(), dy.double())
        for name in want:
            assert (got[name].dtype, got[name].stride()) == (want[name].dtype, want[name].stride()), name
            far, allowed = distance(got[name], right[name].double()), distance(want[name], right[name].double())
            assert far <= tolerance * allowed + 1e-6, (name, far, allowed)
    assert len(plans) == 2
    assert not [s for plan in plans for s in plan.steps if isinstance(s, CallStep)]


SHAPES = {
    "few channels": (8, 16, 16, 16),
    "many short rows": (64, 64, 7, 7),
    "long rows": (2, 3, 61, 67),
    "volumes": (2, 8, 4, 6, 5),
    "sequences": (16, 12, 33),
    "rows": (700, 20),
    "one pixel": (9, 16, 1, 1),
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", SHAPES)
def test_values_gradients_and_running_statistics(name, dtype, plans):
    shape = SHAPES[name]
    check(norm(len(shape), shape[1]), torch.randn(shape).to(dtype), plans)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", [(8, 16, 16, 16), (32, 64, 7, 7), (1, 20, 40, 30)])
def test_channels_last(shape, dtype, plans):
    x = torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)
    check(norm(4, shape[1]), x, plans)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", [(8, 16, 16, 16), (64, 64, 7, 7), (700, 20)])
def test_a_mean_that_is_far_from_zero(shape, dtype, plans):
    """Sixty deviations: the mean of the squares would have lost the variance."""
    check(norm(len(shape), shape[1]), (torch.randn(shape) + 60).to(dtype), plans)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.5}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}], ids=str
)
def test_options(options, plans):
    check(norm(4, 8, **options), torch.randn(4, 8, 9, 9).to(BF16), plans)


def test_averages_of_all_steps():
    """momentum=None: running statistics are plain averages. Their factor is a number that only running tells."""
    module, x = norm(4, 8, momentum=None), torch.randn(4, 8, 9, 9).to(BF16)
    theirs, call = copy.deepcopy(module), compiled(module)
    for _ in range(3):
        torch.testing.assert_close(call(x), theirs(x))
        torch.testing.assert_close(module.running_mean, theirs.running_mean)
        torch.testing.assert_close(module.running_var, theirs.running_var)
        assert module.num_batches_tracked == theirs.num_batches_tracked


def test_statistics_are_saved_in_float32(plans):
    module = norm(4, 8)
    compiled(module)(torch.randn(4, 8, 9, 9).to(BF16).requires_grad_()).float().sum().backward()
    _, backward = plans
    saved = {a.type.dtype for a in backward.boundary.arguments if a.type.shape == (8,)}
    assert saved == {DataType.DT_FLOAT}


def test_parameters_in_half_precision_are_left_to_pytorch(plans):
    """It rounds the statistics to the type of the parameters."""
    module = norm(4, 8).to(BF16)
    theirs, x = copy.deepcopy(module), torch.randn(4, 8, 9, 9).to(BF16)
    dy = torch.randn_like(x)
    got, want = step(module, compiled(module), x, dy), step(theirs, theirs, x, dy)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=2e-2, atol=2e-2)
    assert [s for plan in plans for s in plan.steps if isinstance(s, CallStep)]


def test_under_autocast(plans):
    """Behind a convolution, in a network whose parameters are float32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    theirs, x = copy.deepcopy(module), torch.randn(4, 3, 16, 16)
    exact = copy.deepcopy(module).double()
    call = compiled(module)
    with torch.autocast("cpu", BF16):
        ours, eager = call(x), theirs(x)
    right = exact(x.double())
    for y in (ours, eager, right):
        y.double().square().mean().backward()
    assert distance(ours, right) <= 2 * distance(eager, right)
    for a, b, c in zip(module.parameters(), theirs.parameters(), exact.parameters()):
        assert distance(a.grad, c.grad) <= 2 * distance(b.grad, c.grad) + 1e-3
    called = [s.node.op for plan in plans for s in plan.steps if isinstance(s, CallStep)]
    assert not [op for op in called if "Norm" in op or op == "AtenCall"], called
