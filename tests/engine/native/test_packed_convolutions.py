"""Weights of convolutions that are packed once: right results, weights that change, memory, programs on disk."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine.native.kernels import conv_last
from airgraph.journal import JOURNALS
from tests.engine.native.packed_models import assert_as_near_as_eager, compiled


@pytest.fixture
def live(monkeypatch):
    """Parameters that may change are packed, too."""
    monkeypatch.setenv("AIRGRAPH_PACK", "live")


def model() -> nn.Sequential:
    """A first layer, a depthwise one, one of several groups and a 1 × 1: every mode of the kernel."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, 2, 1),
        nn.Conv2d(40, 40, 5, 1, 2, groups=40),
        nn.ReLU(),
        nn.Conv2d(40, 64, 3, 1, 1, groups=2, bias=False),
        nn.Conv2d(64, 50, 1),
    ).eval()


def packed_steps(native) -> int:
    frame = native.frames[-1]
    return sum(frame.part(p.sizes, 64)[4 + conv_last.PREPACKED] for p in native.image.conv_packs)


def image() -> torch.Tensor:
    return torch.randn(2, 3, 22, 26)


# -- which weights ------------------------------------------------------------------------------------------------------
def test_frozen_parameters_are_packed():
    module, x = model(), image()
    run, native = compiled(module, x, frozen_parameter=True)
    assert packed_steps(native) == 4
    assert_as_near_as_eager(run(x), module, x)
    assert any("MiB of packed weights beside the parameters" in remark for remark in JOURNALS[-1].remarks)


@pytest.mark.parametrize("setting", ["on", "off"])
def test_squares(setting, live, two_threads, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_WINOGRAD", setting)
    module = nn.Sequential(nn.Conv2d(32, 48, 3), nn.SiLU(), nn.Conv2d(48, 40, 3, padding=1)).eval()
    x = torch.randn(2, 32, 15, 18)
    run, native = compiled(module, x)
    wanted = 2 if setting == "on" else 0
    assert packed_steps(native) == 2 and native.frames[-1].by_squares == wanted
    said = "2 convolutions by Winograd's F(2×2, 3×3) (AIRGRAPH_WINOGRAD)" in JOURNALS[-1].remarks
    assert said == (wanted == 2)
    for _ in range(2):
        assert_as_near_as_eager(run(x), module, x)
        module[2].weight.data.mul_(2)


def test_by_default_every_write_is_seen():
    """Also one of a single number that PyTorch does not count: small parameters are packed only if they are frozen."""
    module, x = model(), image()
    run, native = compiled(module, x)
    assert packed_steps(native) == 0
    module[3].weight.data[3, 4, 1, 1] = 9.0
    assert_as_near_as_eager(run(x), module, x)


def test_the_results_do_not_depend_on_it(live):
    module, x = model(), image()
    packed, native = compiled(module, x)
    assert packed_steps(native) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRGRAPH_PACK", "frozen")
        plain, _ = compiled(module, x)
    assert torch.equal(packed(x), plain(x))


def test_training_graphs_pack_nothing(live):
    module, x = model(), image()
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        torch.compile(module, backend="airgraph")(x).sum().backward()
    assert made and not any(program.native.image.conv_packs for program in made)


def test_the_limit(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_PACK_MB", "0")
    module, x = model(), image()
    run, native = compiled(module, x, frozen_parameter=True)
    assert packed_steps(native) == 0
    assert_as_near_as_eager(run(x), module, x)


# -- weights that change ------------------------------------------------------------------------------------------------
def written(module):
    with torch.no_grad():
        module[3].weight[3, 4, 1, 2] += 9.0


def loaded(module):
    module.load_state_dict({name: torch.randn_like(t) for name, t in module.state_dict().items()})


def assigned(module):
    module[1].weight = nn.Parameter(torch.randn_like(module[1].weight))


def channel_unseen(module):
    module[4].weight.data[7] += 1


def stepped(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    module(image()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", [written, loaded, assigned, channel_unseen, stepped])
def test_a_weight_that_changed_is_seen(change, live):
    module, x = model(), image()
    run, native = compiled(module, x)
    for _ in range(2):
        before = run(x)
        change(module)
        assert not torch.equal(run(x), before)
        assert_as_near_as_eager(run(x), module, x)
        assert packed_steps(native) == 4


def test_another_parameter_is_seen_where_they_are_frozen():
    module, x = model(), image()
    run, _ = compiled(module, x, frozen_parameter=True)
    assigned(module)
    assert_as_near_as_eager(run(x), module, x)


def test_weights_that_change_leave_nothing_behind(live):
    module, x = model(), image()
    run, native = compiled(module, x)
    old = [weakref.ref(f) for f in native.frames]
    for _ in range(3):
        written(module)
        run(x)
    gc.collect()
    assert len(native.frames) == 1 and not any(r() for r in old)
    assert len(native.copies) == 4


# -- programs on disk ---------------------------------------------------------------------------------------------------
def test_a_program_from_the_cache_packs(live, tmp_path, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")
    module, x = model(), image()
    first = airgraph.compile(module, (x,))(x)
    run = airgraph.compile(module, (x,))
    assert torch.equal(run(x), first)
    assert JOURNALS[-1].counters["program hits"] == 1
    written(module)
    assert_as_near_as_eager(run(x), module, x)
