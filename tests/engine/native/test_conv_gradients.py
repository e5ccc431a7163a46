"""Gradients of convolutions on a CPU: convolutions and products of our own, judged against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import airgraph
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import CallStep, ConvStep, GemmStep, LoopStep

BF16, F16 = torch.bfloat16, torch.float16
GRADIENTS = {"Conv2DBackpropInput", "Conv2DBackpropFilter", "ConvolutionBackward"}


def called(plans):
    """The gradients of convolutions that PyTorch computes."""
    return sorted(s.node.op for plan in plans for s in plan.steps if isinstance(s, CallStep) and s.node.op in GRADIENTS)


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def strides(t):
    """Of the axes where they mean something."""
    return [stride for size, stride in zip(t.shape, t.stride()) if size > 1]


def check(module, x, tolerance=5e-7):
    ours, theirs, exact = module, copy.deepcopy(module), copy.deepcopy(module).double()
    call = torch.compile(ours, backend=airgraph.backend())
    for _ in range(2):
        found = []
        for run, part, given in ((call, ours, x), (theirs, theirs, x), (exact, exact, x.double())):
            part.zero_grad()
            given = given.clone(memory_format=torch.preserve_format).requires_grad_()
            y = run(given)
            torch.manual_seed(1)
            y.backward(torch.randn(y.shape).to(y.dtype))
            found.append({"x": given.grad, **{name: p.grad for name, p in part.named_parameters()}})
        for name, right in found[2].items():
            got, want = found[0][name], found[1][name]
            assert (strides(got), got.dtype) == (strides(want), want.dtype), name
            far, allowed = distance(got, right), distance(want, right)
            assert far <= 2 * allowed + tolerance, (name, far, allowed)


# batch, channels, height, width; channels of the result, kernel, stride, padding, dilation
CASES = {
    "3×3": (2, 8, 9, 10, 16, 3, 1, 1, 1),
    "no padding": (2, 16, 9, 9, 8, 3, 1, 0, 1),
    "more padding": (2, 16, 9, 9, 8, 3, 1, 2, 1),
    "1×1": (2, 16, 7, 7, 24, 1, 1, 0, 1),
    "1×1, stride 2": (2, 16, 8, 9, 24, 1, 2, 0, 1),
    "3×3, stride 2": (2, 16, 14, 14, 24, 3, 2, 1, 1),
    "odd sizes, stride 2": (2, 16, 15, 13, 24, 3, 2, 1, 1),
    "what is left over": (2, 16, 16, 14, 24, 3, 2, 0, 1),
    "5×5, stride 2": (2, 16, 16, 12, 24, 5, 2, 2, 1),
    "stride 3": (2, 16, 17, 17, 16, 3, 3, 1, 1),
    "patches": (1, 16, 12, 12, 32, 4, 4, 0, 1),
    "pixels between": (1, 16, 14, 14, 32, 1, 3, 0, 1),
    "a wide kernel": (2, 8, 9, 11, 8, (3, 5), 1, (1, 2), 1),
    "a tall stride": (2, 8, 12, 11, 8, 3, (2, 1), 1, 1),
    "one pixel": (4, 16, 1, 1, 16, 1, 1, 0, 1),
    "one result": (3, 8, 6, 6, 1, 3, 1, 1, 1),
}


LEFT = ("one result", "stride 3")  # to PyTorch


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, last, plans):
    n, c, h, w, o, *how = CASES[name]
    torch.manual_seed(0)
    module, x = nn.Conv2d(c, o, *how), torch.randn(n, c, h, w)
    if last:
        module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    check(module, x)
    assert called(plans) == (["ConvolutionBackward"] if name in LEFT else [])


def test_patches_of_small_images(plans):
    """Images of 3 × 3, and 2 × 2 after a stride: padded they would have two to four times as many pixels."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.Conv2d(64, 64, 3, 2, 1, bias=False)]
    check(nn.Sequential(*layers), torch.randn(4, 32, 3, 3))
    products = [s for plan in plans for s in plan.steps if isinstance(s, GemmStep)]
    assert sorted(s.sizes for s in products) == [(1, 64, 288, 36), (1, 64, 576, 16)]


def test_images_that_are_not_small_are_padded(plans):
    torch.manual_seed(0)
    check(nn.Conv2d(32, 32, 3, padding=1, bias=False), torch.randn(2, 32, 20, 20))
    (product,) = [s for plan in plans for s in plan.steps if isinstance(s, GemmStep)]
    assert product.sizes == (3, 32, 96, 2 * 22 * 22 - 2 * 22 - 2)


@pytest.mark.parametrize("how", [(3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 2)], ids=str)
def test_depthwise(how, plans):
    """The gradient of the weight is PyTorch's."""
    torch.manual_seed(0)
    check(nn.Conv2d(16, 16, *how, groups=16, bias=False), torch.randn(2, 16, 13, 14))
    assert called(plans) == ["Conv2DBackpropFilter"]


@pytest.mark.parametrize("stride", [1, 2])
def test_groups(stride, plans):
    torch.manual_seed(0)
    check(nn.Conv2d(32, 16, 3, stride, 1, groups=2, bias=False), torch.randn(2, 32, 9, 9))
    assert called(plans) == ["Conv2DBackpropFilter"]


def test_what_is_left_to_pytorch(plans):
    torch.manual_seed(0)
    check(nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False), torch.randn(2, 8, 9, 9))
    assert called(plans) == ["Conv2DBackpropFilter"]


def test_the_first_layer(plans):
    """Nobody asks for the gradient of its image; that of its weight is PyTorch's."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 8, 7, 2, 3), torch.randn(2, 3, 33, 31)
    theirs = copy.deepcopy(module).double()
    torch.compile(module, backend=airgraph.backend())(x).square().mean().backward()
    theirs(x.double()).square().mean().backward()
    assert distance(module.weight.grad, theirs.weight.grad) < 1e-6
    assert called(plans) == ["ConvolutionBackward"]


def test_long_sums(plans):
    """A hundred thousand pixels that are all positive."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(8, 8, 3, padding=1), torch.rand(8, 8, 112, 112) + 1
    theirs, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    torch.compile(module, backend=airgraph.backend())(x).sum().backward()
    exact(x.double()).sum().backward()
    eager = copy.deepcopy(theirs)
    eager(x).sum().backward()
    assert distance(module.weight.grad, exact.weight.grad) < 2 * distance(eager.weight.grad, exact.weight.grad) + 1e-6


HALVES = [*((name, BF16) for name in CASES), *((name, F16) for name in ("3×3", "1×1, stride 2", "odd sizes, stride 2"))]


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_half_precision(name, dtype):
    """By whomever they are computed: that depends on the CPU."""
    torch._dynamo.reset()
    n, c, h, w, o, *how = CASES[name]
    torch.manual_seed(0)
    check(nn.Conv2d(c, o, *how).to(dtype), torch.randn(n, c, h, w).to(dtype), tolerance=1e-3)


def test_batches_of_any_size():
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1))
    exact = copy.deepcopy(module).double()
    call = torch.compile(module, backend=airgraph.backend(), dynamic=True)
    for n in (2, 3, 5):
        x = torch.randn(n, 8, 9, 9)
        for run, part, given in ((call, module, x), (exact, exact, x.double())):
            part.zero_grad()
            run(given).square().sum().backward()
        for a, b in zip(module.parameters(), exact.parameters()):
            assert distance(a.grad, b.grad) < 1e-6


def network():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False),
    ]
    return nn.Sequential(*layers, nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 1), nn.AdaptiveAvgPool2d(1))


def test_networks(plans):
    check(network(), torch.randn(2, 3, 16, 16), tolerance=2e-5)


def test_saved_images_lie_with_channels_last(plans):
    """In both graphs nothing is only transposed but what comes in."""
    network_ = network()
    torch.compile(network_, backend=airgraph.backend())(torch.randn(2, 3, 16, 16)).square().mean().backward()
    forward, backward = plans
    assert forward.last
    saved = [a.strides for a in backward.boundary.arguments if len(a.type.shape or ()) == 4 and a.type.shape[0] == 2]
    images = [strides for strides in saved if strides[1] == 1]
    assert len(images) >= 5, saved
    for plan in plans:
        for step in plan.steps:
            if isinstance(step, ConvStep):
                assert step.x.strides[1] == 1 or step.sizes.few


def test_plans_are_read_back(plans):
    module = network()
    torch.compile(module, backend=airgraph.backend())(torch.randn(2, 3, 16, 16)).square().mean().backward()
    backward = plans[1]
    products = [s for s in backward.steps if isinstance(s, GemmStep)]
    assert len(products) == 2 and any(isinstance(s, LoopStep) for s in backward.steps)
    for plan in plans:
        text = plan.text()
        assert parse_plan(text, plan.graph, plan.boundary, plan.target).text() == text
