"""Convolutions in bfloat16 by AMX: as near to the truth as eager's, whatever their sizes and wherever their images lie."""

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from amx import BF16, WITH_AMX, Function, steps_of

import airgraph
from airgraph.engine.native import target, write_watch
from airgraph.engine.native.image import BY_TAPS
from airgraph.engine.native.kernels import conv_bfloat16
from airgraph.engine.native.kernels.shared_kernels import kernel
from airgraph.engine.native.runner import POOL
from airgraph.ir.types import DataType
from airgraph.journal import JOURNALS
from airgraph.plan import groups
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import as_int
from airgraph.plan.steps import CallStep, ConvStep, GemmStep

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
import poison


class UnderAutocast(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def wide(t):
    return t.float() if t.dtype == torch.bfloat16 else t


def assert_as_near(found, eager, truth):
    mine, theirs = ((x.double() - truth).abs().max() for x in (found, eager))
    assert found.dtype == eager.dtype and mine <= 1.5 * theirs + 1e-6, (mine, theirs)


def residual_net():
    """A stem and blocks of all kinds of convolutions, with batch norms as after training."""

    class Block(torch.nn.Module):
        def __init__(self, given, made, stride):
            super().__init__()
            sizes = [(given, 24, 1, 1), (24, 24, 3, stride), (24, made, 1, 1)]
            convs = [torch.nn.Conv2d(c, o, k, s, k // 2, bias=False) for c, o, k, s in sizes]
            self.inside = torch.nn.ModuleList(convs)
            self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(o) for _, o, _, _ in sizes)
            self.around = torch.nn.Conv2d(given, made, 1, stride)

        def forward(self, x):
            y = x
            for conv, norm in zip(self.inside, self.norms):
                y = F.relu(norm(conv(y)))
            return y + self.around(x)

    layers = [torch.nn.Conv2d(3, 32, 7, 2, 3), torch.nn.MaxPool2d(3, 2, 1), Block(32, 40, 1), Block(40, 64, 2)]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(part.running_mean, std=0.1)
            torch.nn.init.uniform_(part.running_var, 0.5, 1.5)
    return model


# -- the plan -----------------------------------------------------------------------------------------------------------
def test_llvm_accepts_the_text():
    """Any LLVM: it is not translated."""
    llvm = pytest.importorskip("llvmlite.binding")
    module = llvm.parse_assembly(conv_bfloat16.source(), context=llvm.create_context())
    module.verify()
    assert set(conv_bfloat16.EXPORTS) <= {f.name for f in module.functions if not f.is_declaration}


@pytest.mark.parametrize("size, kind", [(1, GemmStep), (3, ConvStep)])
def test_convolutions_read_and_make_bfloat16(size, kind, plans):
    x, w = torch.randn(1, 48, 12, 12).bfloat16(), torch.randn(40, 48, size, size).bfloat16()
    airgraph.compile(Function(lambda x, w: F.conv2d(x, w, padding=size // 2)), (x, w))
    (step,) = steps_of(plans[0], ConvStep, GemmStep, CallStep)
    assert type(step) is kind and step.out.dtype == BF16


@pytest.mark.parametrize("size, kind", [(12, ConvStep), (64, CallStep)])
def test_small_convolutions_of_groups_are_widened(size, kind, plans):
    x, w = torch.randn(1, 128, size, size).bfloat16(), torch.randn(128, 4, 3, 3).bfloat16()
    airgraph.compile(Function(lambda x, w: F.conv2d(x, w, groups=32)), (x, w))
    (step,) = steps_of(plans[0], ConvStep, CallStep)
    assert isinstance(step, kind) and (kind is CallStep or step.out.dtype == DataType.DT_FLOAT)


def test_without_tiles_convolutions_are_widened_or_left_to_pytorch(monkeypatch):
    """Those in one group as those of groups: `multiplies` says what there are kernels for."""
    here, found = replace(target.this_cpu(), widens=(), multiplies=(), widened=target.WITH_AMX), []
    make = groups.make_plan
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")
    monkeypatch.setattr(groups, "make_plan", lambda *given: found.append(make(*given[:2], here)) or make(*given))
    for size in (1, 3):
        x, w = torch.randn(1, 256, 32, 32).bfloat16(), torch.randn(256, 256, size, size).bfloat16()
        airgraph.compile(Function(lambda x, w, size=size: F.conv2d(x, w, padding=size // 2)), (x, w))
    assert [type(step) for plan in found for step in steps_of(plan, ConvStep, GemmStep, CallStep)] == [
        CallStep,
        ConvStep,
    ]


def test_images_stay_channels_last(plans):
    x = torch.randn(1, 32, 6, 5).bfloat16()
    convs = [torch.nn.Conv2d(32, 40, 1), torch.nn.ReLU(), torch.nn.Conv2d(40, 32, 3, padding=1), torch.nn.ReLU()]
    model = torch.nn.Sequential(*convs, torch.nn.Conv2d(32, 32, 1)).bfloat16().eval()
    with torch.no_grad():
        assert_as_near(airgraph.compile(model, (x,))(x), model(x), model.double()(x.double()))
    copies = [line for line in plans[0].text().splitlines() if "= copy(" in line]
    assert len(copies) == 2, plans[0].text()  # of the argument and of the weight of 3 × 3


def test_batch_norms_under_autocast_are_loops(plans):
    """Their input is bfloat16 and their parameters are float32."""
    model, x = residual_net().eval(), torch.randn(2, 3, 33, 30)
    with torch.no_grad():
        found, eager = airgraph.compile(UnderAutocast(model), (x,))(x), UnderAutocast(model)(x)
        assert_as_near(found, eager, model.double()(x.double()))
    assert not steps_of(plans[0], CallStep) and "relu(bf16(" in plans[0].text()


# -- the kernel ---------------------------------------------------------------------------------------------------------
CONVOLUTIONS = [  # n, c, h, w, o, kernel, stride, padding, dilation
    (1, 64, 8, 8, 64, (3, 3), 1, 1, 1),
    (2, 64, 17, 19, 70, (3, 3), 1, 1, 1),
    (3, 40, 17, 19, 33, (3, 3), 2, 1, 1),
    (5, 33, 7, 7, 31, (3, 3), 1, 1, 1),
    (2, 3, 40, 41, 64, (7, 7), 2, 3, 1),
    (1, 1, 9, 9, 3, (3, 3), 1, 0, 1),
    (2, 16, 9, 40, 5, (5, 3), 1, (4, 2), (2, 3)),
    (1, 32, 1, 40, 40, (1, 3), 1, 0, 1),
    (1, 33, 5, 12, 40, (1, 1), 1, 1, 1),
    (1, 64, 100, 130, 33, (3, 3), (2, 1), 1, 1),  # an image that is no single strip
    (30, 32, 16, 16, 16, (3, 3), 1, 1, 1),  # more images than one strip has
    (1, 7, 2, 2, 9, (2, 2), 1, 0, 1),
]


def both(value):
    return value if isinstance(value, tuple) else (value, value)


def sizes_of(case):
    n, c, h, w, o, (kh, kw), stride, padding, dilation = case
    (sh, sw), (ph, pw), (dh, dw) = map(both, (stride, padding, dilation))
    oh, ow = (h + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (w + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    return ConvSizes(n, c, h, w, o, kh, kw, sh, sw, ph, pw, dh, dw, 1, oh, ow)


def beside_garbage(t):
    """A copy with NaN in front and behind."""
    memory = torch.full((t.numel() + 128,), float("nan"), dtype=t.dtype)
    found = memory[64:-64].view(t.shape)
    return found.copy_(t)


@WITH_AMX
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_panels", [0, 1])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_the_kernel(case, by_panels, packed):
    torch.manual_seed(0)
    s = sizes_of(case)
    x, w = torch.randn(s.n, s.c, s.h, s.w).bfloat16(), torch.randn(s.o, s.c, s.kh, s.kw).bfloat16()
    bias = torch.randn(s.o).bfloat16() if s.c % 2 else None
    image, weight = (beside_garbage(t.permute(0, 2, 3, 1).contiguous()) for t in (x, w))
    dims = (ctypes.c_int64 * len(conv_bfloat16.DIMS))(*map(as_int, conv_bfloat16.words(s, by_panels)))
    dims[conv_bfloat16.PACKED] = packed
    p, i = ctypes.c_void_p, ctypes.c_int64
    panels = torch.full((conv_bfloat16.packed_bytes(s) // 2,), float("nan"), dtype=torch.bfloat16)
    assert conv_bfloat16.bytes_of_panels(conv_bfloat16.weight_shape(dims)) == 2 * len(panels)
    if packed:
        ctypes.CFUNCTYPE(None, p, p, p)(kernel("ag_pack_conv_bf16"))(weight.data_ptr(), dims, panels.data_ptr())
    out = torch.full((s.n * s.oh * s.ow * s.o + 64,), 7.0, dtype=torch.bfloat16)
    need = conv_bfloat16.scratch_bytes(s) // 2
    scratch = torch.full((need + 64,), float("nan"), dtype=torch.bfloat16)
    run = ctypes.CFUNCTYPE(None, *[p] * 5, i, i, p)(kernel("ag_conv_bf16"))
    jobs = as_int(conv_bfloat16.jobs(s, by_panels))
    for begin, end in ((0, jobs // 3), (jobs // 3, jobs)):
        given = (
            image.data_ptr(),
            (panels if packed else weight).data_ptr(),
            bias.data_ptr() if bias is not None else 0,
        )
        run(*given, out.data_ptr(), dims, begin, end, scratch.data_ptr())
    attributes = ((s.sh, s.sw), (s.ph, s.pw), (s.dh, s.dw))
    want = F.conv2d(x.double(), w.double(), None if bias is None else bias.double(), *attributes)
    found = out[:-64].view(s.n, s.oh, s.ow, s.o).permute(0, 3, 1, 2).double()
    torch.testing.assert_close(found, want, rtol=2**-8, atol=2e-3)
    assert (out[-64:] == 7).all() and scratch[need:].isnan().all()


# -- graphs -------------------------------------------------------------------------------------------------------------
IMAGES = {
    "1×1": (lambda x, w: F.conv2d(x, w), (2, 40, 7, 9), (24, 40, 1, 1)),
    "1×1, bias": (lambda x, w, b: F.conv2d(x, w, b), (1, 5, 6, 6), (7, 5, 1, 1)),
    "1×1, stride": (lambda x, w: F.conv2d(x, w, stride=2), (2, 33, 7, 8), (18, 33, 1, 1)),
    "1×1, two and a residual": (lambda x, w: F.conv2d(F.conv2d(x, w).relu(), w) + x, (1, 34, 5, 5), (34, 34, 1, 1)),
    "1×1, stride behind another": (
        lambda x, w: F.conv2d(F.conv2d(x, w).relu(), w, stride=2),
        (1, 16, 9, 9),
        (16, 16, 1, 1),
    ),
    "1×1, one pixel": (lambda x, w, b: F.conv2d(x, w, b).sigmoid() * x, (1, 64, 1, 1), (64, 64, 1, 1)),
    "3×3": (lambda x, w: F.conv2d(x, w, padding=1), (2, 40, 7, 9), (24, 40, 3, 3)),
    "3×3, bias": (lambda x, w, b: F.conv2d(x, w, b, stride=2), (1, 5, 12, 11), (7, 5, 3, 3)),
    "3×3, wide": (lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)), (1, 32, 5, 5), (1056, 32, 3, 3)),
    "3×3, as float32": (lambda x, w: wide(F.conv2d(x, w)).relu(), (1, 32, 5, 5), (1056, 32, 3, 3)),
    "1×1, as float32": (lambda x, w: wide(F.conv2d(x, w)).relu(), (1, 32, 5, 5), (1056, 32, 1, 1)),
    "3×3, before one in float32": (
        lambda x, w: F.conv2d(wide(F.conv2d(x, w, padding=1)).relu(), wide(w)),
        (1, 32, 9, 9),
        (32, 32, 3, 3),
    ),
    "3×3, a part of the image": (lambda x, w: F.conv2d(x[:, 3:20, 2:, ::2], w), (1, 32, 9, 20), (17, 17, 3, 3)),
    "3×3, a part of the weight": (lambda x, w: F.conv2d(x, w[2:, :, :3, 1:4]), (1, 32, 9, 9), (19, 32, 5, 5)),
}


@WITH_AMX
@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels_last"])
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions(name, last, threads, plans):
    function, image, weight = IMAGES[name]
    torch.manual_seed(0)
    args = [torch.randn(shape).bfloat16() for shape in (image, weight, weight[:1])][: function.__code__.co_argcount]
    if last:
        args[:2] = (t.to(memory_format=torch.channels_last) for t in args[:2])
    fast = airgraph.compile(Function(function), tuple(args), engine="native")
    assert_as_near(fast(*args), function(*args), function(*(a.double() for a in args)))
    assert steps_of(plans[0], GemmStep, ConvStep) and not steps_of(plans[0], CallStep)


@WITH_AMX
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_not_finite_stays_where_it_is(value, size):
    x, w = torch.randn(2, 33, 9, 17).bfloat16(), torch.randn(40, 33, size, size).bfloat16()
    x[1, 32, 0, 16], w[5, 0, 0, 0] = value, value
    fast = airgraph.compile(Function(lambda x, w: F.conv2d(x, w, padding=size // 2)), (x, w), engine="native")
    torch.testing.assert_close(fast(x, w), F.conv2d(x, w, padding=size // 2), equal_nan=True, rtol=0.02, atol=0.02)


@WITH_AMX
@pytest.mark.parametrize("channels", [3, 20])
def test_an_infinity_reaches_only_the_patches_that_have_it(channels):
    x, w = torch.randn(1, channels, 20, 21).bfloat16(), torch.randn(8, channels, 5, 5).bfloat16()
    x[0, 1, 10, 11] = float("inf")
    fast = airgraph.compile(Function(lambda x, w: F.conv2d(x, w, stride=2, padding=2)), (x, w), engine="native")
    found, eager = fast(x, w), F.conv2d(x, w, stride=2, padding=2)
    assert torch.equal(found.isfinite(), eager.isfinite()) and not found.isfinite().all()


@WITH_AMX
@pytest.mark.parametrize("options", [{}, {"frozen_parameter": True}], ids=["watched", "frozen"])
def test_weights_are_packed_once(options):
    if not options and not write_watch.can_watch():
        pytest.skip("memory cannot be watched here")
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(200, 170, 1), torch.nn.Conv2d(170, 101, 3, padding=1), torch.nn.Conv2d(101, 340, 1, 2)]
    model = torch.nn.Sequential(*layers).bfloat16().eval()
    x = torch.randn(2, 200, 9, 9).bfloat16()
    with torch.no_grad(), airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        made = []
        fast = airgraph.compile(model, (x,), **options)
        torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.02)
        (frame,) = made[-1].native.frames
        packs = [pack for pack in made[-1].native.image.packs if pack.block == BY_TAPS]
        assert len(packs) == 1 and any("packed weights" in remark for remark in JOURNALS[-1].remarks)
        assert len(frame.packed_copies) == 3
        if not options:
            for layer in model:
                layer.weight.data.view(-1)[::3] *= -2
                torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.02)
            model[1].weight = torch.nn.Parameter(torch.randn(101, 170, 3, 3).bfloat16())
            torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.1)


@WITH_AMX
def test_symbolic_batches_are_left_to_pytorch():
    model = (
        torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 1)).bfloat16().eval()
    )
    with torch.no_grad():
        x = torch.randn(3, 16, 9, 9).bfloat16()
        fast = airgraph.compile(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=9)},))
        for batch in (3, 2, 7):
            x = torch.randn(batch, 16, 9, 9).bfloat16()
            torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.02)


@WITH_AMX
@pytest.mark.parametrize("autocast", [False, True])
def test_a_network_under_autocast_and_in_bfloat16(autocast, threads):
    torch.manual_seed(0)
    model, x = residual_net().eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        truth = model.double()(x.double())
        model = UnderAutocast(model.float()) if autocast else model.bfloat16()
        x = x if autocast else x.bfloat16()
        fast = airgraph.compile(model, (x,))
        first, eager = fast(x), model(x)
        mine, theirs = ((y.double() - truth).abs().max() for y in (first, eager))
        assert mine <= 2 * theirs
        for value in poison.GARBAGE.values():
            POOL.fill(value)
            assert torch.equal(fast(x), first), value


@WITH_AMX
def test_a_step_of_training():
    """Weights are packed in every call; the backward is PyTorch's."""
    torch.manual_seed(0)
    model, x = residual_net().train(), torch.randn(2, 3, 40, 40)
    gradients = {}
    for name, run in (
        ("eager", UnderAutocast(model)),
        ("fast", torch.compile(UnderAutocast(model), backend="airgraph")),
    ):
        for _ in range(2):
            model.zero_grad()
            loss = run(x).float().square().mean()
            loss.backward()
        gradients[name] = (loss.detach(), [p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(gradients["fast"][0], gradients["eager"][0], rtol=0.05, atol=1e-3)
    for mine, theirs in zip(gradients["fast"][1], gradients["eager"][1]):
        assert (mine - theirs).norm() <= 0.1 * theirs.norm() + 1e-3


@WITH_AMX
def test_a_stored_program(tmp_path, monkeypatch):
    for name, value in {"CACHE": "on", "CACHE_DIR": str(tmp_path), "VERIFY": "0"}.items():
        monkeypatch.setenv(f"AIRGRAPH_{name}", value)
    torch.manual_seed(0)
    model, x = residual_net().bfloat16().eval(), torch.randn(1, 3, 40, 40).bfloat16()
    found = []
    with torch.no_grad():
        for hits in (0, 1):
            torch._dynamo.reset()
            JOURNALS.clear()
            found.append(torch.compile(model, backend="airgraph")(x))
            assert [journal.counters["program hits"] for journal in JOURNALS] == [hits]
        torch.testing.assert_close(found[0], model(x), rtol=0.02, atol=0.02)
    assert torch.equal(*found)


def gradient_steps(plans, n, c, size, o, stride):
    """Those of the backward graph of one convolution, with AMX: its kernels, and what PyTorch computes."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(c, o, 3, stride, 1, bias=False).bfloat16()
    x = torch.randn(n, c, size, size, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(conv, backend=airgraph.backend(engine="native"))(x).float().square().mean().backward()
    _, backward = plans
    return steps_of(backward, ConvStep, GemmStep), [s.node.op for s in steps_of(backward, CallStep)]


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_are_computed_in_bfloat16(stride, plans):
    torch._dynamo.reset()
    steps, calls = gradient_steps(plans, 2, 16, 9, 32, stride)
    assert not calls
    assert [type(s) for s in steps].count(GemmStep) == 1 and len(steps) == 1 + stride**2
    assert {t.dtype for s in steps for t in (s.out, (s.a if isinstance(s, GemmStep) else s.x).tensor)} == {BF16}


def test_sums_over_many_pixels_are_pytorchs(plans):
    torch._dynamo.reset()
    steps, calls = gradient_steps(plans, 1, 16, 64, 16, 1)
    assert [type(s) for s in steps] == [ConvStep]
    assert calls == ["Conv2DBackpropFilter"]
