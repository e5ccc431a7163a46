"""Training steps of convolutional networks in half precision: images lie with channels last in both graphs.

The norms have float32 parameters, and the graphs are converted as for a GPU, so that the plans are those for a GPU.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from cases import TestedEngine
from interpreted import InterpretedKernels, needs_interpreter

import airgraph
import airgraph.api
from airgraph.capture.images import ON_GPU
from airgraph.convert.families import norms
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.cuda import executable
from airgraph.engine.cuda.executable import CudaExecutable
from airgraph.ir.types import DataType
from airgraph.plan.index import volume
from airgraph.plan.lowerings import norms as lowerings
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import CallStep, ConvStep, LoopStep

needs_interpreter()
F16, BF16 = torch.float16, torch.bfloat16
FOR_A_GPU = {"lean": True, "images": ON_GPU}


class Interpreted(TestedEngine):
    """The CUDA engine on CPU tensors; it keeps its plans."""

    name = "interpreted"

    def __init__(self):
        self.plans = {}

    def plan(self, request):
        plan = self.plans[request.journal.phase] = super().plan(request)
        return plan

    def load(self, request):
        return CudaExecutable(request, InterpretedKernels())

    def program(self, executable, programs):
        return programs.replayed(executable)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """With graphs as they are for a GPU: float32 formulas of norms, and what is saved as fused kernels make it."""
    compile_by_aot = airgraph.api.compile_by_aot
    monkeypatch.setattr(airgraph.api, "compile_by_aot", lambda *a, **k: compile_by_aot(*a, **{**k, **FOR_A_GPU}))
    monkeypatch.setattr(norms, "is_wide", lambda x, _, training: training and x is not None and x.dtype in norms.HALVES)
    monkeypatch.setattr(lowerings, "sums_at_once", lambda view, x: lowerings.widens_halves(x))
    engine = Interpreted()
    register_engine(engine)
    yield engine
    del ENGINES["interpreted"]


def compiled(function, **options):
    return torch.compile(function, backend=airgraph.backend(engine="interpreted"), **options)


# -- networks -----------------------------------------------------------------------------------------------------------
def normed(given, made, size, stride=1):
    return [nn.Conv2d(given, made, size, stride, size // 2, bias=False), nn.BatchNorm2d(made)]


class Residual(nn.Module):
    def __init__(self, given, made, stride, *inside):
        super().__init__()
        self.inside = nn.Sequential(*inside)
        self.around = nn.Sequential(*normed(given, made, 1, stride)) if stride > 1 or given != made else nn.Identity()

    def forward(self, x):
        return F.relu(self.inside(x) + self.around(x))


def basic(given, made, stride):
    return Residual(given, made, stride, *normed(given, made, 3, stride), nn.ReLU(), *normed(made, made, 3))


def bottleneck(given, width, stride):
    parts = [*normed(given, width, 1), nn.ReLU(), *normed(width, width, 3, stride), nn.ReLU()]
    return Residual(given, 4 * width, stride, *parts, *normed(width, 4 * width, 1))


def stem(made):
    return nn.Sequential(*normed(3, made, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


class Biased(nn.Sequential):
    """Convolutions with biases, other activations, average pooling."""

    def __init__(self):
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2), nn.Conv2d(8, 16, 3, 2, 1), nn.GELU()]
        super().__init__(*layers, nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8), nn.Hardswish(), nn.AdaptiveAvgPool2d(1))


class Joined(nn.Module):
    """Branches that are concatenated, and a part of one of them."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Sequential(*normed(8, 8, 3)), nn.Conv2d(8, 8, 1)
        self.out = nn.Conv2d(12, 8, 3, padding=1)

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        return self.out(torch.cat([left.relu(), right[:, :4] * 2], 1)).sigmoid() * x


class Twice(nn.Module):
    """An image is used twice and is a result as well."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Sequential(*normed(8, 8, 3))

    def forward(self, x):
        y = self.first(x)
        z = y.relu()
        return y, self.second(z) + z, z.flatten(1)


class Up(nn.Sequential):
    def __init__(self):
        super().__init__(*normed(8, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2), nn.SiLU())


class Grouped(nn.Sequential):
    def __init__(self):
        super().__init__(*normed(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False))


class GroupNormed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1))


class Checkpointed(nn.Module):
    """(Without norms inside: eager updates their running statistics twice, a compiled graph once.)"""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 1))
        self.rest = nn.Sequential(*normed(8, 8, 3))

    def forward(self, x):
        return self.rest(checkpoint(self.block, x, use_reentrant=False))


IMAGE, NARROW = (2, 3, 32, 32), (2, 8, 8, 8)
NETWORKS = {
    "stem": (lambda: stem(8), IMAGE),
    "basic": (lambda: basic(8, 8, 1), NARROW),
    "basic, stride 2": (lambda: basic(8, 16, 2), NARROW),
    "bottleneck": (lambda: bottleneck(8, 4, 2), NARROW),
    "several blocks": (lambda: nn.Sequential(stem(8), basic(8, 8, 1), bottleneck(8, 4, 2)), IMAGE),
    "biased": (Biased, (2, 3, 16, 16)),
    "joined": (Joined, NARROW),
    "twice": (Twice, NARROW),
    "up": (Up, NARROW),
    "grouped": (Grouped, NARROW),
    "group norm": (GroupNormed, NARROW),
    "checkpoint": (Checkpointed, NARROW),
    "one image": (lambda: basic(8, 8, 1), (1, 8, 4, 4)),
    "one pixel": (lambda: nn.Sequential(*normed(8, 8, 1), nn.ReLU(), *normed(8, 8, 1)), (4, 8, 1, 1)),
    "one channel": (lambda: nn.Sequential(*normed(8, 1, 3), nn.ReLU(), *normed(1, 8, 3)), NARROW),
}


def network(make, dtype, norms_in=torch.float32):
    """In training, its norms with float32 parameters."""
    torch.manual_seed(0)
    module = make().to(dtype).train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.2)
            part.to(norms_in)
    return module


# -- a step -------------------------------------------------------------------------------------------------------------
def step(module, run, x, keep=False):
    """Everything a training step leaves behind, by name."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    for p in module.parameters():
        p.grad = None
    outs = run(x)
    outs = outs if isinstance(outs, tuple) else (outs,)
    loss = sum((t.to(torch.promote_types(t.dtype, torch.float32)).square() * 100).mean() for t in outs)
    if keep:
        loss.backward(retain_graph=True)
    loss.backward()
    found = {f"output {i}": t.detach() for i, t in enumerate(outs)}
    found |= {"input's gradient": x.grad, **{n: p.grad for n, p in module.named_parameters()}}
    return found | {name: b.clone() for name, b in module.named_buffers()}


def distance(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()


def check(module, x, run=None, tolerance=2e-3, keep=False, **options):
    """Three steps: run, recorded and replayed. Values are judged against a run in float64, all else is eager's."""
    run = run or (lambda module: module)
    ours, theirs, exact = module, copy.deepcopy(module), copy.deepcopy(module).double()
    call = compiled(run(ours), **options)
    for _ in range(3):
        got, want = step(ours, call, x, keep), step(theirs, run(theirs), x, keep)
        right = step(exact, exact, x.double(), keep)
        for name in want:
            assert got[name].stride() == want[name].stride() and got[name].dtype == want[name].dtype, name
            far, allowed = distance(got[name], right[name]), distance(want[name], right[name])
            assert far <= 2 * allowed + tolerance, (name, far, allowed)


@pytest.mark.parametrize("name", NETWORKS)
def test_float16(name):
    make, shape = NETWORKS[name]
    check(network(make, F16), torch.randn(shape).to(F16))


@pytest.mark.parametrize("name", ["basic, stride 2", "bottleneck", "stem"])
def test_bfloat16(name):
    """(The interpreter cuts off what does not fit into bfloat16, where a GPU rounds.)"""
    make, shape = NETWORKS[name]
    check(network(make, BF16), torch.randn(shape).to(BF16), tolerance=2e-2)


def test_norms_in_half_precision():
    """(A CPU saves statistics in the type of the norm.)"""
    check(network(NETWORKS["basic, stride 2"][0], F16, F16), torch.randn(NARROW).to(F16), tolerance=1e-2)


def test_statistics_of_images_far_from_zero():
    """Means of 60 times the deviation, where the difference of two sums of squares would have few digits."""
    module = network(lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)), F16)
    nn.init.constant_(module[0].bias, 30.0)
    x = torch.randn(4, 8, 16, 16).to(F16)
    ours, theirs, exact = module, copy.deepcopy(module), copy.deepcopy(module).double()
    got, want, right = compiled(ours)(x), theirs(x), exact(x.double())
    assert distance(got, right) <= 1.5 * distance(want, right) + 1e-4
    for name in ("running_mean", "running_var"):
        a, b, c = (getattr(m[1], name) for m in (ours, theirs, exact))
        assert distance(a, c) <= 1.5 * distance(b, c) + 1e-5, name


@pytest.mark.parametrize("name", ["basic, stride 2", "stem"])
def test_float32_stays_with_channels_first(engine, name):
    make, shape = NETWORKS[name]
    check(network(make, torch.float32), torch.randn(shape), tolerance=1e-5)
    assert not any("channels_last" in plan.text() for plan in engine.plans.values())


@pytest.mark.parametrize("name", ["grouped", "group norm"])
def test_others_stay_with_channels_first(engine, name):
    make, shape = NETWORKS[name]
    step(module := network(make, F16), compiled(module), torch.randn(shape).to(F16))
    assert not any("channels_last" in plan.text() for plan in engine.plans.values())


def test_autocast():
    def run(module):
        def call(x):
            with torch.autocast("cpu", BF16):
                return module(x)

        return call

    check(network(lambda: basic(8, 16, 2), torch.float32), torch.randn(NARROW), run, tolerance=2e-2)


def test_gradients_twice():
    check(network(lambda: basic(8, 16, 2), F16), torch.randn(NARROW).to(F16), keep=True)


def test_images_that_come_with_channels_last(engine):
    module = network(lambda: basic(8, 16, 2), F16).to(memory_format=torch.channels_last)
    check(module, torch.randn(NARROW).to(F16).to(memory_format=torch.channels_last))
    assert not transposed(engine.plans)


def test_batches_of_any_size():
    module = network(lambda: basic(8, 16, 2), F16)
    ours, theirs, exact = module, copy.deepcopy(module), copy.deepcopy(module).double()
    call = compiled(ours, dynamic=True)
    for n in (2, 3, 5):
        x = torch.randn(n, 8, 8, 8).to(F16)
        got, want, right = step(ours, call, x), step(theirs, theirs, x), step(exact, exact, x.double())
        for name in want:
            assert got[name].stride() == want[name].stride(), name
            assert distance(got[name], right[name]) <= 2 * distance(want[name], right[name]) + 2e-3, name


def test_the_reference_engine_runs_the_same_graphs():
    """What is saved with channels last is right for any engine."""
    module = network(lambda: nn.Sequential(stem(8), basic(8, 16, 2)), F16)
    theirs = copy.deepcopy(module)
    x = torch.randn(IMAGE).to(F16)
    call = torch.compile(module, backend=airgraph.backend(engine="reference"))
    for _ in range(3):
        got, want = step(module, call, x), step(theirs, theirs, x)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=2e-2, atol=2e-2)
            assert got[name].stride() == want[name].stride()


def test_results_are_made_by_cudnn_where_they_are_wanted(monkeypatch):
    """cuDNN writes into the memory of what is saved: here PyTorch's convolution stands for it."""
    made = []

    def convolution(x, w, *, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32, out):
        made.append(out.shape)
        return out.copy_(torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, (0, 0), groups))

    monkeypatch.setattr(executable, "by_cudnn", lambda *operands: True)
    monkeypatch.setattr(torch.ops.aten.cudnn_convolution, "out", convolution)
    check(network(lambda: basic(8, 16, 2), F16), torch.randn(NARROW).to(F16))
    assert {*made} == {(2, 16, 4, 4)}
    names = {a.name for a in torch._C._get_schema("aten::cudnn_convolution", "out").arguments}
    assert names == {"self", "weight", *inspect.signature(convolution).parameters} - {"x", "w"}


# -- plans --------------------------------------------------------------------------------------------------------------
def transposed(plans, least=1):
    """What loops only store in another order than they read it: the phase, and the shape that is stored."""
    found = []
    for phase, plan in plans.items():
        parts = [part for step in plan.steps if isinstance(step, LoopStep) for part in step.kernel.parts]
        for store in (store for part in parts for store in part.stores):
            value = store.value.args[0] if store.value.op == "copy" else store.value
            if value.op == "load" and value.at != store.at and volume(store.target.shape) >= least:
                found.append((phase, [*store.target.shape]))
    return found


def images_of_convolutions(plan):
    """The strides of the images and weights that convolutions and pooling read, where those have several channels."""
    for step in plan.steps:
        match step:
            case ConvStep():
                yield from [(step.x.strides, step.sizes.c), (step.w.strides, step.sizes.c)]
            case CallStep():
                yield from ((m.strides, t.shape[1]) for _, m, t in step.reads if len(t.shape) == 4)


def test_no_image_is_only_transposed(engine):
    """But for the image that comes in with channels first, for the gradient of its convolution."""
    layers = stem(8), basic(8, 8, 1), bottleneck(8, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    module = network(lambda: nn.Sequential(*layers), F16)
    x = torch.randn(16, 3, 64, 64).to(F16)
    compiled(module)(x).float().square().mean().backward()
    smallest = 16 * 16 * 8 * 8
    assert all(p.numel() < smallest for p in module.parameters())
    assert transposed(engine.plans, smallest) == [("backward", [16, 64, 64, 3])]
    for plan in engine.plans.values():
        assert all(strides[1] == 1 for strides, channels in images_of_convolutions(plan) if channels > 3)


def test_plans_are_read_back(engine):
    make, shape = NETWORKS["basic, stride 2"]
    compiled(network(make, F16))(torch.randn(shape).to(F16)).float().sum().backward()
    for plan in engine.plans.values():
        text = plan.text()
        again = parse_plan(text, plan.graph, plan.boundary, plan.target)
        assert again.text() == text and again.last == plan.last
    assert engine.plans["forward"].last


def test_a_batch_norm_reads_its_image_twice_in_each_direction(engine):
    """Once for the statistics, or for the sums of the gradients, and once for what it makes."""
    module = network(lambda: nn.Sequential(*normed(8, 16, 3), nn.ReLU(), *normed(16, 8, 3)), F16)
    compiled(module)(torch.randn(8, 8, 32, 32).to(F16)).float().square().mean().backward()
    image = 8 * 16 * 32 * 32
    for phase, plan in engine.plans.items():
        parts = [part for step in plan.steps if isinstance(step, LoopStep) for part in step.kernel.parts]
        loads = [
            e for part in parts for e in part.exprs() if e.op == "load" and volume([v.size for v in e.vars]) == image
        ]
        assert [*Counter(e.source for e in loads).values()] == [2] * len({e.source for e in loads}), phase
        assert all(e.dtype == DataType.DT_FLOAT16 for e in loads)


def test_statistics_beside_an_element_that_is_far_away():
    """The first one, hundreds of deviations from all others, of which no sum may lose what is left."""
    x = torch.randn(4, 2, 112, 112) / 100
    x[0, :, 0, 0] = 10
    x, norm = x.to(F16), nn.BatchNorm2d(2)
    twin, truth = copy.deepcopy(norm), copy.deepcopy(norm).double()
    with torch.no_grad():
        wanted = truth(x.double())
    found, eager = compiled(norm)(x.clone().requires_grad_()).detach(), twin(x).detach()
    ours, theirs = ((t.double() - wanted).abs().max() for t in (found, eager))
    assert ours <= 2 * theirs + 1e-4, (ours, theirs)
    torch.testing.assert_close(norm.running_var, twin.running_var, rtol=1e-4, atol=0)
