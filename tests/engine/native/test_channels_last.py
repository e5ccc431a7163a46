"""Images inside a graph: what follows a convolution lies channels last, too, and nothing is transposed in between."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import airgraph
import airgraph.engine.native
from airgraph.plan import groups
from airgraph.plan.origins import title
from airgraph.plan.steps import ConvStep, LoopStep, step_reads
from airgraph.plan.widening import HALVES


@pytest.fixture
def plans(monkeypatch):
    """Plans for a CPU whose convolutions are channels last, whatever this one's are."""
    found = []
    make = groups.make_plan

    def made(graph, boundary, target):
        found.append(make(graph, boundary, replace(target, channels_last=True)))
        return make(graph, boundary, target)

    monkeypatch.setattr(groups, "make_plan", made)
    return found


def normed(given, made, size, stride=1, groups=1):
    parts = nn.Conv2d(given, made, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(made)
    nn.init.normal_(parts[1].running_mean)
    return nn.Sequential(*parts)


class Network(nn.Module):
    """A first layer, pooling, a residual, a depthwise convolution, squeeze, a concatenation."""

    def __init__(self):
        super().__init__()
        self.first, self.second = normed(3, 16, 7, 2), normed(16, 16, 3)
        self.wide, self.squeeze = normed(16, 16, 5, 2, 16), nn.Conv2d(16, 16, 1)
        self.last = nn.Conv2d(32, 9, 3, dilation=2, padding=2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)
        x = F.hardswish(self.wide(F.relu(self.second(x) + x)))
        x = x * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        return self.last(torch.cat((x, F.pad(x[..., 1:], (0, 1))), 1))


def copies(plan):
    """Loops that only move data: their formulas are single loads."""
    stores = [s for step in plan.steps if isinstance(step, LoopStep) for p in step.kernel.parts for s in p.stores]
    return [s for s in stores if s.value.op == "copy" and s.value.args[0].op == "load"]


def test_nothing_is_transposed_between_convolutions(plans):
    model, x = Network().eval(), torch.randn(2, 3, 43, 50)
    airgraph.compile(model, x)
    (plan,) = plans
    convolutions = [step for step in plan.steps if isinstance(step, ConvStep)]
    assert len(convolutions) == 5 and all(step.last for step in convolutions)
    assert convolutions[0].x.tensor.op == "buffer" and convolutions[0].x.strides[3] == 1, "read as the argument lies"
    assert all(step.x.strides[1] == 1 for step in convolutions[1:])
    assert len(copies(plan)) <= 1, "only the result"


class TwoReaders(nn.Module):
    """An argument of 16 channels that two convolutions read, each with a batch norm behind it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = normed(16, 16, 3), normed(16, 16, 1)

    def forward(self, x):
        return F.relu(self.left(x)), F.relu(self.right(x))


def test_an_image_that_two_convolutions_read_is_copied_once(plans):
    airgraph.compile(TwoReaders().eval(), torch.randn(1, 16, 9, 9))
    (plan,) = plans
    convolutions = [step for step in plan.steps if isinstance(step, ConvStep)]
    assert convolutions[0].x == convolutions[1].x
    (copied,) = (s for s in plan.steps if isinstance(s, LoopStep) and s.roots == [convolutions[0].x.tensor])
    assert title(plan, copied) == title(plan, convolutions[0])


def test_batch_norms_are_prepared_before_all_else(plans):
    """So that threads wait for each other once, not before every convolution."""
    airgraph.compile(TwoReaders().eval(), torch.randn(1, 16, 9, 9))
    (plan,) = plans
    loops = [i for i, step in enumerate(plan.steps) if isinstance(step, LoopStep)]
    prepared = [i for i in loops if math.prod(plan.steps[i].roots[0].shape) == 16]
    first = next(i for i, step in enumerate(plan.steps) if isinstance(step, ConvStep))
    assert len(prepared) == 2
    assert max(prepared) < first or not plan.target.conv_epilogues


def test_two_numbers_for_each_channel_of_a_batch_norm(plans):
    """Its four are made two by the loop that prepares it: what reads the convolution's result reads these."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Hardswish(), nn.Conv2d(16, 4, 1))
    airgraph.compile(model.eval(), torch.randn(1, 8, 9, 9))
    (plan,) = plans
    loops = [s.epilogue if isinstance(s, ConvStep) else s for s in plan.steps]
    loops = [s for s in loops if isinstance(s, LoopStep)]
    (prepares,) = (s for s in loops if len(s.roots) == 2)
    (norm,) = (s for s in loops if s is not prepares and {*prepares.roots} & {*step_reads(s)})
    results = {step.out for step in plan.steps if isinstance(step, ConvStep)}
    assert {*step_reads(norm)} - results == {*prepares.roots}
    assert all(e.op != "div" for part in norm.kernel.parts for e in part.exprs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hard_functions_are_exact_where_they_are_flat(dtype, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    x = torch.linspace(3, 40, 1001, dtype=dtype)
    swish, sigmoid = (airgraph.compile(f, (x,))(x) for f in (nn.Hardswish(), nn.Hardsigmoid()))
    assert torch.equal(swish, x) and torch.equal(sigmoid, torch.ones_like(x))
    low = airgraph.compile(nn.Hardswish(), (x,))(-x)
    assert torch.equal(low, torch.zeros_like(x))


@pytest.mark.slow
@pytest.mark.parametrize("layout, dynamo", [(torch.contiguous_format, False), (torch.channels_last, True)])
def test_as_eager(layout, dynamo):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Network().eval(), torch.randn(2, 3, 43, 50).to(memory_format=layout)
    compiled = torch.compile(model, backend="airgraph") if dynamo else airgraph.compile(model, x)
    with torch.no_grad():
        found, wanted = compiled(x), model(x)
    assert found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_weights_that_change_are_seen():
    model, x = nn.Conv2d(16, 24, 3, padding=1), torch.randn(1, 16, 9, 9)
    compiled = airgraph.compile(model, x)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
            model.weight.data.mul_(3)  # PyTorch does not count this as a new version of the parameter


@pytest.mark.slow
def test_gradients():
    torch._dynamo.reset()
    model, x = Network().train(), torch.randn(2, 3, 33, 33, requires_grad=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    for run in (model, torch.compile(model, backend="airgraph")):
        model.load_state_dict(state)
        model.zero_grad()
        x.grad = None
        run(x).square().mean().backward()
        results.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    for found, wanted in zip(results[1], results[0]):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_convolutions_in_half_precision_are_done_in_float32(dtype, monkeypatch):
    """The error against float64 is eager's; PyTorch does none of them."""
    plans, make = [], groups.make_plan

    def made(graph, boundary, target):
        plans.append(make(graph, boundary, replace(target, widens=HALVES, widen_rows=8)))
        return plans[-1]

    monkeypatch.setattr(groups, "make_plan", made)
    torch.manual_seed(0)
    model, x = Network().eval().to(dtype), torch.randn(2, 3, 43, 50, dtype=dtype)
    with torch.no_grad():
        found, eager = airgraph.compile(model, x)(x), model(x)
        exact = model.double()(x.double())
    convolutions = [step for step in plans[0].steps if isinstance(step, ConvStep)]
    assert len(convolutions) == 4, "all but the squeeze, whose weights are used twice"
    assert found.dtype == dtype and found.stride() == eager.stride()
    assert (found - exact).norm() <= 1.2 * (eager - exact).norm()


class OnePixel(nn.Module):
    """Images whose channels are the only axis with several elements, some of them apart in memory."""

    def __init__(self):
        super().__init__()
        self.wide, self.one = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 5, 1)

    def forward(self, x, y):
        made = self.wide(x[:, ::2])
        return torch.cat((made, y), 1), made * 2 + y, self.one(x[:, 1::2]), made.mean((0, 2, 3)), made.amax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 6, 1, 1), (2, 6, 1, 1), (1, 6, 1, 3)], ids=str)
def test_images_of_one_pixel(shape, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, (n, c, *size) = OnePixel().to(dtype).eval(), shape
    x, y = torch.randn(n, 2 * c, *size, dtype=dtype), torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        found = torch.compile(model, backend="airgraph")(x, y)
        torch.testing.assert_close(found, model(x, y), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
