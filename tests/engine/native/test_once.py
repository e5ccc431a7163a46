"""Steps that depend on parameters only run once: right results, and none that are out of date."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine.native import runner
from airgraph.engine.native.write_watch import can_watch
from airgraph.journal import JOURNALS


def model() -> nn.Sequential:
    """Convolutions with batch norms behind them, in the middle of their training."""
    torch.manual_seed(0)
    parts = [
        nn.Conv2d(3, 24, 3, 2, 1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 40, 1),
        nn.BatchNorm2d(40),
    ]
    for norm in (parts[1], parts[4]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)
    return nn.Sequential(*parts).eval()


def image() -> torch.Tensor:
    return torch.randn(1, 3, 18, 18)


def compiled(module, *args, **options):
    """(the compiled model after a call, its native executable)"""
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run = airgraph.compile(module, args, **{"frozen_parameter": True, **options})
    run(*args)
    return run, made[-1].native


def assert_as_near_as_eager(ours, module, x):
    with torch.no_grad():
        exact, eager = copy.deepcopy(module).double()(x.double()), module(x)
    assert (ours - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-5


def test_a_folded_batch_norm_is_computed_once():
    module, x = model(), image()
    run, native = compiled(module, x)
    assert len(native.once) == native.frames[-1].once >= 2
    for _ in range(2):
        assert_as_near_as_eager(run(x), module, x)
        x = image()
    assert len(native.frames) == 1
    wanted = f"{len(native.once)} steps depend on parameters only: they run once, not in every call"
    assert wanted in native.journal.remarks
    assert native.frames[-1].packed


def test_by_torch_compile():
    module, x = model(), image()
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program), torch.no_grad():
        run = torch.compile(module, backend="airgraph", options={"frozen_parameter": True})
        assert_as_near_as_eager(run(x), module, x)
        assert made[-1].native.frames[-1].once >= 2
        module[1].running_mean.add_(1)
        assert_as_near_as_eager(run(x), module, x)


def counted(module):
    module[1].running_mean.add_(1)


def uncounted(module):
    module[4].running_var.data[3] += 7


def loaded(module):
    module.load_state_dict({name: t + 1 for name, t in module.state_dict().items()})


def assigned(module):
    module[1].running_var = torch.rand(24) + 1


def another_parameter(module):
    module[4].weight = nn.Parameter(torch.randn(40))


def trained(module):
    module.train()
    module(image())
    module.eval()


@pytest.mark.parametrize("change", [counted, uncounted, assigned, another_parameter, trained])
def test_what_is_not_frozen_is_seen(change):
    """Buffers however they change, and other parameters in place of those there were."""
    module, x = model(), image()
    run, native = compiled(module, x)
    for _ in range(2):
        before = run(x)
        change(module)
        assert not torch.equal(run(x), before)
        assert_as_near_as_eager(run(x), module, x)
        assert native.frames[-1].once == len(native.once)


def test_a_new_state_with_new_parameters():
    """Under `frozen_parameter` a write to a parameter need not be seen; one of another model is."""
    module, x = model(), image()
    run, _ = compiled(module, x)
    other = copy.deepcopy(run)
    loaded(other.model)
    for each in (run, other, run):
        assert_as_near_as_eager(each(x), each.model, x)


def test_arguments_are_not_parameters():
    def scaled(x, v):
        return x @ torch.diag(v * 2 + 1)

    x, v = torch.randn(4, 6), torch.randn(6)
    run, native = compiled(scaled, x, v)
    assert not native.once
    for _ in range(3):
        v = torch.randn(6)
        torch.testing.assert_close(run(x, v), scaled(x, v))


class HandsOut(nn.Module):
    """A result of parameters only, and a value of them that PyTorch reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        scale = self.weight.exp() * 2
        return scale, x + torch.linalg.inv(scale.tanh() + 3 * torch.eye(8)), x @ (self.weight.sin() + 1)


def test_results_are_new_in_every_call():
    module, x = HandsOut().eval(), torch.randn(3, 8, 8)
    run, _ = compiled(module, x)
    first = run(x)
    wanted = [t.clone() for t in first]
    for t in first:
        t.zero_()
    for ours, theirs in zip(run(x), wanted):
        torch.testing.assert_close(ours, theirs)


def test_written_buffers_are_not_frozen():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(5))

        def forward(self, x):
            self.sum.add_(1)
            return x * (self.sum * 2)

    module, x = Counts().eval(), torch.ones(5)
    run, native = compiled(module, x)
    assert not native.once
    assert torch.equal(run(x), torch.full((5,), 4.0))


# -- parameters that may change -----------------------------------------------------------------------------------------
watched = pytest.mark.skipif(not can_watch(), reason="this kernel does not say which pages were written to")


class Reparametrised(nn.Module):
    """What is multiplied with is computed from the parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(256, 192, dtype=dtype)), nn.Parameter(torch.randn(256))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(self.bias.dtype).tanh(), self.bias)


def in_place(module):
    module.weight.data[100, 7] += 3


def replaced(module):
    module.weight = nn.Parameter(torch.randn_like(module.weight))


def from_file(module):
    module.load_state_dict({name: t + 1 for name, t in module.state_dict().items()})


@watched
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [in_place, replaced, from_file])
def test_every_change_of_a_parameter_is_seen(change, dtype):
    module, x = Reparametrised(dtype).eval(), torch.randn(16, 192)
    run, native = compiled(module, x, frozen_parameter=False)
    assert len(native.once) == native.frames[-1].once == 1
    for _ in range(2):
        before = run(x)
        change(module)
        assert not torch.equal(run(x), before)
        assert_as_near_as_eager(run(x), module, x)
        assert native.frames[-1].once == 1


@watched
@pytest.mark.parametrize("change", [in_place, replaced, from_file])
def test_weights_with_channels_last_are_packed(change):
    """A model in `torch.channels_last`: its weights are brought into the order of the kernel once."""

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 128, 3, padding=1), nn.ReLU())
    layers = layers.eval().to(memory_format=torch.channels_last)
    x = torch.randn(1, 16, 14, 14).to(memory_format=torch.channels_last)
    run, native = compiled(layers, x, frozen_parameter=False)
    for _ in range(2):
        before = run(x)
        change(layers[1])
        assert not torch.equal(run(x), before)
        assert_as_near_as_eager(run(x), layers, x)
        assert run(x).stride() == layers(x).stride()
        assert native.frames[-1].once == 1 and native.frames[-1].by_squares == 1


@watched
def test_sizes_that_change_share_what_was_computed():
    """Products with a symbolic number of rows read the weight as it is: what was computed stays as it is, too."""
    module, rows = Reparametrised().eval(), torch.export.Dim("rows")
    run, native = compiled(module, torch.randn(8, 192), frozen_parameter=False, dynamic_shapes={"x": {0: rows}})
    for n in (3, 40, 8):
        x = torch.randn(n, 192)
        assert_as_near_as_eager(run(x), module, x)
    (frame,) = native.frames
    assert frame.once == 1 and frame.image.once[0].writes[0][1:] == (4 * 256 * 192, True)


@watched
def test_no_more_is_kept_than_may_be_packed(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_PACK_MB", "0")
    module, x = Reparametrised().eval(), torch.randn(16, 192)
    run, native = compiled(module, x, frozen_parameter=False)
    assert native.frames[-1].once == 0
    assert_as_near_as_eager(run(x), module, x)


@pytest.mark.parametrize("how", ["frozen", "live"])
def test_parameters_that_cannot_be_watched_are_read_in_every_call(how, monkeypatch):
    """Half precision has no samples (AIRGRAPH_PACK=live)."""
    monkeypatch.setenv("AIRGRAPH_PACK", how)
    module, x = Reparametrised(torch.bfloat16).eval(), torch.randn(16, 192)
    run, native = compiled(module, x, frozen_parameter=False)
    for _ in range(2):
        assert native.frames[-1].once == 0
        assert_as_near_as_eager(run(x), module, x)
        in_place(module)


@watched
def test_a_stored_program_runs_them_once_too(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")  # a second compilation takes what is stored
    module, x = Reparametrised().eval(), torch.randn(16, 192)
    airgraph.compile(module, (x,))(x)
    run = airgraph.compile(module, (x,))
    run(x)
    assert JOURNALS[-1].counters["program hits"] == 1
    assert max(runner._frames.items())[1].once == 1
    in_place(module)
    assert_as_near_as_eager(run(x), module, x)
