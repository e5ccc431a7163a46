"""Packed weights and MKL: right results, weights that change, memory, and what happens where MKL is missing."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine.native.kernels import blas, panels
from airgraph.journal import JOURNALS
from airgraph.torch_internals import MKL
from tests.engine.native.packed_models import assert_as_near_as_eager, compiled

pytestmark = pytest.mark.skipif(blas.functions() is None, reason="this libtorch has no MKL")


@pytest.fixture(autouse=True)
def packs_small_weights(monkeypatch):
    """On any x86-64, so that small models do; parameters that may change, too."""
    monkeypatch.setenv("AIRGRAPH_PACK", "live")
    monkeypatch.setattr(blas, "pays", lambda m, n, k: m >= blas.ROWS and n > 1 and k > 1)
    monkeypatch.setattr(panels, "pay", lambda p: False)


def model(*sizes: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in pairwise(sizes))).eval()


def executable(compile):
    """(what `compile` gives, its native executable)"""
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        result = compile()
    return result, made[-1].native


def packed_steps(native) -> int:
    return sum(isinstance(x, blas.PackedWeight) for x in native.frames[-1].kept)


# -- results ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [4, 7, 64])
@pytest.mark.parametrize("sizes", [(16, 16), (33, 100, 17), (240, 60), (768, 130)])
def test_results(rows, sizes):
    module, x = model(*sizes, bias=rows != 7), torch.randn(rows, sizes[0])
    run, native = compiled(module, x)
    assert packed_steps(native) == len(sizes) - 1
    assert_as_near_as_eager(run(x), module, x)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        module, x = model(96, 1000), torch.randn(48, 96)
        run, _ = compiled(module, x)
        first = run(x)
        assert_as_near_as_eager(first, module, x)
        torch.set_num_threads(2)  # the blocks of the weight stay what they were
        assert torch.equal(run(x), first)
    finally:
        torch.set_num_threads(before)


class ByColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 90))

    def forward(self, x):
        return x @ self.weight


def test_a_weight_stored_by_columns():
    module, x = ByColumns(), torch.randn(20, 64)
    run, native = compiled(module, x)
    assert packed_steps(native) == 1
    assert_as_near_as_eager(run(x), module, x)


def test_equal_inputs_give_equal_bits_wherever_they_lie():
    module, x = model(100, 70), torch.randn(9, 100)
    run, _ = compiled(module, x)
    first = run(x)
    for offset in (1, 2, 3, 5, 16):
        moved = torch.empty(offset + x.numel())[offset:].view(9, 100).copy_(x)
        assert torch.equal(run(moved), first)


# -- weights that change ------------------------------------------------------------------------------------------------
def written(module):
    with torch.no_grad():
        module[0].weight[3, 4] = 9.0


def loaded(module):
    module.load_state_dict({name: torch.randn_like(t) for name, t in module.state_dict().items()})


def assigned(module):
    module[0].weight = nn.Parameter(torch.randn_like(module[0].weight))


def written_unseen(module):
    module[0].weight.data.mul_(2)


def row_unseen(module):
    module[0].weight.data[7] = 0


def column_unseen(module):
    module[0].weight.data[:, 11] = 0


def by_numpy(module):
    module[0].weight.detach().numpy()[:] *= 3


def stepped(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.randn(4, 40)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "change", [written, loaded, assigned, written_unseen, row_unseen, column_unseen, by_numpy, stepped]
)
def test_a_weight_that_changed_is_seen(change):
    module, x = model(40, 50, 30), torch.randn(8, 40)
    run, native = compiled(module, x)
    assert packed_steps(native) == 2
    for _ in range(2):
        change(module)
        assert_as_near_as_eager(run(x), module, x)
        assert packed_steps(native) == 2


def test_by_default_every_write_is_seen(monkeypatch):
    """Also one of a single number that PyTorch does not count: small parameters are packed only if they are frozen."""
    monkeypatch.delenv("AIRGRAPH_PACK")
    module, x = model(40, 50, 30), torch.randn(8, 40)
    run, native = compiled(module, x)
    assert packed_steps(native) == 0
    module[0].weight.data[3, 4] = 9.0
    assert_as_near_as_eager(run(x), module, x)
    _, native = compiled(model(40, 50, 30), x, frozen_parameter=True)
    assert packed_steps(native) == 2


def test_weights_that_change_leave_nothing_behind():
    module, x = model(40, 50), torch.randn(8, 40)
    run, native = compiled(module, x)
    old = [weakref.ref(f) for f in native.frames]
    for _ in range(5):
        written(module)
        run(x)
    gc.collect()
    assert len(native.frames) == 1 and not any(r() for r in old)


def test_copies_of_a_model_share_the_program():
    module, x = model(40, 50), torch.randn(8, 40)
    run, native = compiled(module, x)
    runs = [run, *(copy.deepcopy(run) for _ in range(8))]
    for i, each in enumerate(runs):
        with torch.no_grad():
            each.model[0].weight.mul_(i + 1)
    for each in [*runs, *runs]:
        assert_as_near_as_eager(each(x), each.model, x)
    assert len(native.frames) <= 4


def test_training_graphs_keep_the_weight_as_it_is():
    module, x = model(40, 50), torch.randn(8, 40)
    _, native = executable(lambda: torch.compile(module, backend="airgraph")(x))
    assert packed_steps(native) == 0


def test_a_parameter_of_inference_mode_has_no_counter():
    with torch.inference_mode():
        module, x = model(40, 50).requires_grad_(False), torch.randn(8, 40)
    run, native = compiled(module, x)
    assert packed_steps(native) == 0
    with torch.inference_mode():
        torch.testing.assert_close(run(x), module(x))


# -- memory, and machines without it ------------------------------------------------------------------------------------
def test_the_journal_counts_the_bytes():
    module, x = model(256, 1024), torch.randn(8, 256)
    compiled(module, x)
    assert "1.0 MiB of packed weights beside the parameters" in JOURNALS[-1].remarks


def test_the_limit(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_PACK_MB", "1")
    module, x = model(256, 1000, 256), torch.randn(8, 256)
    run, native = compiled(module, x)
    assert packed_steps(native) == 1
    assert_as_near_as_eager(run(x), module, x)


class Repeated(nn.Module):
    """The same weights at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(256, 600), nn.Linear(600, 256)

    def forward(self, x):
        for _ in range(5):
            x = torch.tanh(self.back(torch.tanh(self.there(x))))
        return x


def test_products_with_the_same_weight_share_a_copy(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_PACK_MB", "2")  # enough for each weight once
    module, x = Repeated(), torch.randn(8, 256)
    run, native = compiled(module, x)
    assert packed_steps(native) == 10
    assert native.frames[-1].packed == 2 * 4 * 256 * 600 and len(native.copies) == 2
    assert_as_near_as_eager(run(x), module, x)


class InHalves(nn.Module):
    """Two weights in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1200, 256))

    def forward(self, x):
        a, b = self.weight.chunk(2)
        return nn.functional.linear(x, a) * nn.functional.linear(x.tanh(), b)


def test_halves_of_a_weight_are_two(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_PACK_MB", "1")  # enough for one of them
    module, x = InHalves(), torch.randn(8, 256)
    run, native = compiled(module, x)
    assert packed_steps(native) == 1
    assert_as_near_as_eager(run(x), module, x)


@pytest.mark.parametrize("missing", ["MKL", "the version counter"])
def test_where_a_symbol_is_missing(missing, monkeypatch):
    if missing == "MKL":
        monkeypatch.undo()
        monkeypatch.setattr(blas, "functions", lambda: None)
    else:
        monkeypatch.setattr("airgraph.engine.native.runtime.version_function", lambda: 0)
    module, x = model(512, 512), torch.randn(8, 512)
    run, native = compiled(module, x)
    assert packed_steps(native) == 0
    assert_as_near_as_eager(run(x), module, x)


def test_symbols_are_listed():
    assert {row.name for row in MKL} == set(blas.SYMBOLS)


def test_a_profile_runs_the_same_products():
    module, x = model(64, 100), torch.randn(8, 64)
    run, _ = compiled(module, x)
    first = run(x)
    with torch.profiler.profile():
        assert torch.equal(run(x), first)
    assert torch.equal(run(x), first)
