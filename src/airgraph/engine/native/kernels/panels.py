"""Weights in panels, packed before a program runs: for convolutions, and for matrix products as convolutions of 1 × 1.

    one_by_one(m, n, k)             the rows of a product are pixels, its columns output channels
    in_panels(weight, sizes, tile)  what ag_conv_pack (conv_last_kernels.py) writes, for the tile of any CPU

Products of nn.Linear use this below 2 MiB or with few rows, and for all others where there is no MKL (blas.py), as in a
program without PyTorch (airgraph.deploy). BERT-base by panels / MKL, two threads of a Xeon (Cascade Lake, AVX-512), ms: 16
rows 18.0 / 20.8, 32 rows 22.9 / 28.1, 64 rows 39.3 / 42.1, 128 rows 73.4 / 72.7. Smaller models, when the next panel was
fetched for large weights only, milliseconds a call by airgraph.compile, medians of 11 to 15 alternating rounds:

                    MKL from 512 KiB,   with panels      MKL from 2 MiB,   panels
                    nothing below       below            panels below      alone
    DeiT            2.30                1.87             –                 1.90
    Qwen3           2.81                2.56             2.54              2.55
    ELECTRA         2.58                2.37             2.07              2.09
    BERT, 256 wide  3.22                3.00             2.77              2.74
    ViT             2.01                1.83             1.84              1.82
    GRU             1.97                2.01             1.79              1.82

With AVX-512 there are two tiles: that of convolutions, 6 rows × 64 columns, and one of 8 × 48, which reads less of the
weight for each multiply-add, and of which there are whole numbers in the usual numbers of rows. One core of a Cascade Lake,
both tiles before their weights were fetched into level 1, percent of the peak, 6 × 64 / 8 × 48: 32×768→3072 68 / 75,
64×768→3072 81 / 89, 64×256→1024 75 / 83, 40×320→864 71 / 77, 96×512→256 90 / 82. Whole models with it, two threads, the
time before / after: ViT 1.07, BERT-base with 64 tokens 1.05, Mixtral 1.05, a Llama's prefill of 64 tokens 1.04.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from airgraph.engine.native.kernels import gemm
from airgraph.engine.native.kernels.conv_last import (
    TABLE,
    ConvTile,
    mode_of,
    packed_numbers,
    panels,
    refuses,
    split,
    these_tiles,
)
from airgraph.engine.native.kernels.products import TRANSPOSED, ProductShape, rule
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import Amount, as_int, ceil, choose, less

MOST = 2  # times as many numbers as the weight has, with the zeros of its last panel
ROWS = 4  # of a product, at least: fewer read the weight once in any case
WEIGHT, LARGE = (
    8 << 10,
    512 << 10,
)  # numbers: at least so many, and from how many on MKL is faster with more than FEW rows
FEW = 128
BANDS_TRIED = (2, 4, 8)


def one_by_one(m: int, n: int, k: int) -> ConvSizes:
    return ConvSizes(1, k, 1, m, n, kh=1, kw=1, sh=1, sw=1, ph=0, pw=0, dh=1, dw=1, groups=1, oh=1, ow=m)


def serve(p: ProductShape) -> bool:
    """Whether the kernel of convolutions takes this product: one matrix, rows that lie side by side, panels of channels."""
    if p.batch != 1 or p.form not in TRANSPOSED or p.m < ROWS:
        return False
    s = one_by_one(p.m, p.n, p.k)
    return mode_of(s) == TABLE and refuses(s) is None and packed_numbers(s, tile_of(p)) <= MOST * p.n * p.k


def pay(p: ProductShape) -> bool:
    """Whether a product is faster with panels than with the weight as it is: on x86-64, with AVX-512 and with AVX2."""
    as_linear = gemm.FORMS[p.form] == "nt" and p.ldb == p.k  # what ag_conv_pack reads
    return vector_lanes() >= 8 and as_linear and p.n * p.k >= WEIGHT and serve(p)


def size(p: ProductShape) -> int:
    """Of the packed copy, in bytes."""
    return 4 * packed_numbers(one_by_one(p.m, p.n, p.k), tile_of(p))


def tile_of(p: ProductShape) -> ConvTile:
    """The one with less work for the thread that has most of it."""
    return min(these_tiles(), key=lambda tile: work(p, tile) * tile.cost)


def work(p: ProductShape, tile: ConvTile) -> int:
    """Rows of tiles times columns of panels. (A panel with fewer columns than others takes nearly as long: 96 rows of
    512→256, 5 1/3 panels of 48 or four of 64, 82 and 90 % of the peak.)"""
    s, threads = one_by_one(p.m, p.n, p.k), rule(p).threads
    columns, rows = panels(s, tile), p.m
    if split(s, threads, tile):
        rows = min(as_int(rows_of_band(p, threads, tile)), p.m)
        columns = -(-columns * -(-p.m // rows) // threads)
    else:
        rows = -(-rows // (threads * tile.rows[0])) * tile.rows[0]
    large, small = tile.rows
    whole, rest = divmod(rows, large)
    return columns * tile.panel * (whole * large + (0 if not rest else small if rest <= small else large))


def rows_of_band(p: ProductShape, threads: Amount, tile: ConvTile) -> Amount:
    """Where there are fewer panels than threads, or some more, they divide rows as well: bands of so many, of which each
    has all panels. More bands must save a tenth of the tiles, since each of them reads the whole weight."""
    columns, tiles = panels(one_by_one(p.m, p.n, p.k), tile), -(-p.m // tile.rows[0])
    found: Amount = tiles
    least = ceil(columns, threads) * tiles
    for count in BANDS_TRIED:
        if count <= tiles:
            each = -(-tiles // count)
            most = ceil(columns * -(-tiles // each), threads) * each
            better = less(most * 10, least * 9)
            found, least = choose(better, each, found), choose(better, most, least)
    return found * tile.rows[0]


def in_panels(weight: torch.Tensor, s: ConvSizes, tile: ConvTile) -> torch.Tensor:
    """From weight[o, depth]. Each group of output channels has panels of its own, the last one with zeros; a value of
    channel c and tap t is c · taps + t in a weight, and t · channels + c in a panel."""
    taps = s.kh * s.kw
    if mode_of(s) == TABLE:
        weight = weight.reshape(s.o, -1, taps).transpose(1, 2).reshape(s.o, -1)
    groups = 1 if s.depthwise else s.groups
    by_group = F.pad(weight.reshape(groups, s.o // groups, -1), (0, 0, 0, -(s.o // groups) % tile.panel))
    return by_group.reshape(-1, tile.panel, s.depth).transpose(1, 2).contiguous()
