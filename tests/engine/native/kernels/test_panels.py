"""Weights in panels are what the kernel would pack; products that read them, of `airgraph.compile` (of C: tests/deploy)."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch
from torch import nn

from airgraph.engine.native.bound import pack_weights
from airgraph.engine.native.image import IN_PANELS
from airgraph.engine.native.kernels import blas, conv_last, panels, products
from airgraph.engine.native.kernels.gemm import BANDS
from airgraph.engine.native.kernels.panels import in_panels, one_by_one
from airgraph.engine.native.kernels.products import ProductShape
from airgraph.engine.native.kernels.shared_kernels import Gemm
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.engine.native.tables import words
from airgraph.journal import JOURNALS
from airgraph.plan.convolution import ConvSizes
from tests.engine.native.packed_models import assert_as_near_as_eager, compiled

CONVOLUTIONS = {
    "table": ConvSizes(1, 24, 9, 9, 70, 3, 3, 1, 1, 1, 1, 1, 1, 1, 9, 9),
    "planes": ConvSizes(1, 3, 9, 9, 40, 3, 3, 1, 1, 1, 1, 1, 1, 1, 9, 9),
    "depthwise": ConvSizes(1, 40, 9, 9, 40, 3, 3, 1, 1, 1, 1, 1, 1, 40, 9, 9),
    "groups": ConvSizes(1, 32, 9, 9, 72, 1, 3, 1, 1, 0, 1, 1, 1, 2, 9, 9),
    "product": one_by_one(16, 100, 37),
}


@pytest.mark.parametrize("tile", conv_last.these_tiles(), ids=lambda tile: f"{tile.rows[0]}x{tile.panel}")
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_as_the_kernel_packs(kind, tile):
    s = CONVOLUTIONS[kind]
    weight = torch.randn(s.o, s.depth)
    expected = torch.full((conv_last.packed_numbers(s, tile),), float("nan"))
    dims = words([int(x) for x in conv_last.words(s, 0, (0, 1, 1, 1), tile)])
    pack_weights()(weight.data_ptr(), ctypes.addressof(dims), expected.data_ptr())
    assert torch.equal(in_panels(weight, s, tile).flatten(), expected)


# -- products -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def in_all_products(monkeypatch):
    """On any x86-64, however small the weight is; parameters that may change, too."""
    monkeypatch.setenv("AIRGRAPH_PACK", "live")
    monkeypatch.setattr(panels, "WEIGHT", 0)
    monkeypatch.setattr(panels, "vector_lanes", lambda: 16)
    monkeypatch.setattr(blas, "pays", lambda m, n, k: False)


def model(*sizes: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in pairwise(sizes))).eval()


def product(m: int, n: int, k: int, threads: int | None = None) -> ProductShape:
    threads = threads or torch.get_num_threads()
    return ProductShape(0, 1, m, n, k, k, k, 0, 0, bias=False, unchanging=True, threads=threads)


def products_in_panels(native) -> int:
    frame = native.frames[-1]
    packs = [p for p in frame.image.packs if p.block == IN_PANELS]
    return sum(bool(frame.part(p.sizes, Gemm.WORDS)[Gemm.PACKED]) for p in packs)


@pytest.fixture(params=conv_last.these_tiles(), ids=lambda tile: f"{tile.rows[0]}x{tile.panel}")
def in_every_tile(request, in_all_products, monkeypatch):
    monkeypatch.setattr(panels, "tile_of", lambda product: request.param)
    return request.param


@pytest.mark.parametrize("rows", [4, 7, 64, 197])
@pytest.mark.parametrize("sizes", [(16, 48), (33, 100, 40), (240, 60), (768, 130)])
def test_results(rows, sizes, in_every_tile):
    module, x = model(*sizes, bias=rows != 7), torch.randn(rows, sizes[0])
    run, native = compiled(module, x)
    assert products_in_panels(native) == len(sizes) - 1
    assert_as_near_as_eager(run(x), module, x)


@pytest.mark.parametrize("rows", [9, 37])
def test_a_product_is_told_where_the_next_weight_lies(rows, in_every_tile):
    """It is fetched with the last panel, whether that is full or not."""
    tile, module, x = in_every_tile, model(24, 2 * in_every_tile.panel, 100, 33), torch.randn(rows, 24)
    run, native = compiled(module, x)
    assert_as_near_as_eager(run(x), module, x)
    frame = native.frames[-1]
    products = [frame.part(pack.sizes, Gemm.WORDS) for pack in frame.image.packs]
    copies = [ctypes.c_int64.from_address(frame.part(pack.args, 2)[1]).value for pack in frame.image.packs]
    told = [(ctypes.c_int64 * len(conv_last.DIMS)).from_address(sizes[Gemm.PANELS]) for sizes in products]
    found = [tuple(dims[conv_last.FOLLOWING : conv_last.FOLLOWING + 3]) for dims in told]
    depths = (2 * tile.panel, 100)
    shapes = [(-(-n // tile.panel), 4 * k * tile.panel) for n, k in zip((100, 33), depths)]
    assert found == [(copy, *shape) for copy, shape in zip(copies[1:], shapes)] + [(0, 0, 0)]


@pytest.mark.parametrize(
    ("m", "n", "threads", "rows"),
    [
        (32, 768, 1, 8),  # 4 · 8 rows, not 5 · 6 + 2
        (48, 256, 2, 6),  # each thread has two panels of 64, or three of 48
        (37, 192, 2, 8),  # two panels of 48 for each thread, or one that is left for 64
        (12, 768, 1, 6),
        (400, 64, 2, 6),  # rows are divided, and one panel of 64 has all columns
    ],
)
def test_the_tile_that_has_less_to_do(m, n, threads, rows, monkeypatch):
    """With AVX-512, whatever this CPU has."""
    for module in (conv_last, products):
        monkeypatch.setattr(module, "vector_lanes", lambda: 16)
    assert panels.tile_of(product(m, n, 512, threads)).rows[0] == rows


@pytest.mark.parametrize(("m", "rows"), [(4, 4), (8, 4), (12, 6), (16, 4), (64, 6), (384, 6)])
def test_the_second_tile_of_avx2_costs_more(m, rows, monkeypatch):
    """It is taken for few rows, of which the first would leave some empty."""
    for module in (conv_last, products):
        monkeypatch.setattr(module, "vector_lanes", lambda: 8)
    assert panels.tile_of(product(m, 768, 512, 1)).rows[0] == rows


@pytest.mark.parametrize("shape", [(48, 96, 1000), (400, 64, 70)])
def test_threads(shape, in_every_tile):
    """Threads divide the columns of one and the rows of the other."""
    before, (rows, deep, wide) = torch.get_num_threads(), shape
    module, x = model(deep, wide), torch.randn(rows, deep)
    try:
        results = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            run, native = compiled(module, x)
            assert products_in_panels(native) == 1
            results.append(run(x))
        torch.set_num_threads(2)  # a frame for another number of threads
        results.append(run(x))
    finally:
        torch.set_num_threads(before)
    assert_as_near_as_eager(results[0], module, x)
    assert all(torch.equal(r, results[0]) for r in results)


class WithLoops(nn.Module):
    """A loop before the product, and one behind it."""

    def __init__(self, deep: int, wide: int) -> None:
        super().__init__()
        self.norm, self.inner, self.shift = nn.LayerNorm(deep), nn.Linear(deep, wide), nn.Parameter(torch.randn(wide))

    def forward(self, x):
        return torch.nn.functional.gelu(self.inner(self.norm(x))) + x[:, :1] * self.shift


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "as stored"])
@pytest.mark.parametrize(("rows", "panels_of_weight"), [(48, 4), (50, 3.1), (33, 4.7), (100, 7.8)])
def test_more_threads_than_panels(rows, panels_of_weight, packed, in_every_tile, monkeypatch):
    """They divide the rows, too: every thread has some rows of some panels, also where the weight cannot be packed."""
    wide = round(panels_of_weight * in_every_tile.panel)
    if not packed:
        monkeypatch.setattr("airgraph.engine.native.bound.tag", lambda weight: None)
    before, module, splits = torch.get_num_threads(), WithLoops(64, wide).eval(), set[int]()
    x = torch.randn(rows, 64)
    try:
        for threads in (1, 4, 7, 8, 16):
            torch.set_num_threads(threads)
            run, native = compiled(module, x)
            assert products_in_panels(native) == packed
            frame = native.frames[-1]
            (pack,) = (p for p in frame.image.packs if p.block == IN_PANELS)
            splits.add(frame.part(pack.sizes, Gemm.WORDS)[Gemm.SPLIT])
            assert_as_near_as_eager(run(x), module, x)
    finally:
        torch.set_num_threads(before)
    assert BANDS in splits


def written(module):
    with torch.no_grad():
        module[0].weight[3, 4] = 9.0


def assigned(module):
    module[0].weight = nn.Parameter(torch.randn_like(module[0].weight))


def row_unseen(module):
    module[0].weight.data[7] = 0


@pytest.mark.parametrize("change", [written, assigned, row_unseen])
def test_a_weight_that_changed_is_seen(change, in_all_products):
    module, x = model(40, 50, 40), torch.randn(8, 40)
    run, native = compiled(module, x)
    for _ in range(2):
        change(module)
        assert_as_near_as_eager(run(x), module, x)
        assert products_in_panels(native) == 2


def test_a_frozen_weight_is_packed_once(in_all_products):
    module, x = model(40, 64, 40), torch.randn(8, 40)
    run, native = compiled(module, x, frozen_parameter=True)
    assert products_in_panels(native) == 2
    assert native.frames[-1].packed == sum(panels.size(product(8, n, k)) for n, k in ((64, 40), (40, 64)))
    assert_as_near_as_eager(run(x), module, x)


def test_a_weight_that_cannot_be_tagged_stays_as_it_is(in_all_products, monkeypatch):
    monkeypatch.setattr("airgraph.engine.native.bound.tag", lambda weight: None)
    module, x = model(40, 50, 40), torch.randn(50, 40)
    run, native = compiled(module, x)
    assert native.frames[-1].image.packs and products_in_panels(native) == 0
    assert_as_near_as_eager(run(x), module, x)


def test_the_limit(in_all_products, monkeypatch):
    """It counts the zeros of the last panel."""
    monkeypatch.setenv("AIRGRAPH_PACK_MB", "1")
    module, x = model(1000, 257, 100), torch.randn(8, 1000)
    run, native = compiled(module, x)
    assert products_in_panels(native) == 1  # the first is larger with them, the second fits
    assert_as_near_as_eager(run(x), module, x)


@pytest.mark.skipif(blas.functions() is None or vector_lanes() < 16, reason="measured with AVX-512 and MKL")
@pytest.mark.parametrize("rows", [32, 200])
def test_large_weights_for_many_rows_are_packed_by_mkl_and_others_in_panels(rows):
    module, x = model(256, 256, 4096), torch.randn(rows, 256)
    _, native = compiled(module, x, frozen_parameter=True)
    assert [p.block == IN_PANELS for p in native.frames[-1].image.packs] == [True, rows == 32]
    large = panels.size(product(32, 4096, 256)) if rows == 32 else 4 * 4096 * 256
    size = (panels.size(product(rows, 256, 256)) + large) / 2**20
    assert f"{size:.1f} MiB of packed weights beside the parameters" in JOURNALS[-1].remarks


class ByColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 1024))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.skipif(blas.functions() is None or vector_lanes() < 16, reason="measured with AVX-512 and MKL")
def test_a_weight_stored_by_columns_is_packed_by_mkl():
    module, x = ByColumns(), torch.randn(32, 256)
    run, native = compiled(module, x, frozen_parameter=True)
    assert [p.block == IN_PANELS for p in native.frames[-1].image.packs] == [False]
    assert_as_near_as_eager(run(x), module, x)
