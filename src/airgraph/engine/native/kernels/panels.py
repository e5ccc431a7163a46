"""Weights in panels, packed before a program runs: for convolutions, and for matrix products as convolutions of 1 × 1.

    one_by_one(m, n, k)             the rows of a product are pixels, its columns output channels
    in_panels(weight, sizes, tile)  what ag_conv_pack (conv_last_kernels.py) writes, for the tile of any CPU

A program without PyTorch (airgraph.deploy) has no MKL; its products with a weight of known content use this.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from airgraph.engine.native.kernels.conv_last import TABLE, ConvTile, mode_of, packed_numbers, refuses, this_tile
from airgraph.engine.native.kernels.products import TRANSPOSED, ProductShape
from airgraph.plan.convolution import ConvSizes

MOST = 2  # times as many numbers as the weight has, with the zeros of its last panel
ROWS = 4  # of a product, at least: fewer read the weight once in any case


def one_by_one(m: int, n: int, k: int) -> ConvSizes:
    return ConvSizes(1, k, 1, m, n, kh=1, kw=1, sh=1, sw=1, ph=0, pw=0, dh=1, dw=1, groups=1, oh=1, ow=m)


def serve(p: ProductShape) -> bool:
    """Whether the kernel of convolutions takes this product: one matrix, rows that lie side by side, panels of channels."""
    tile = this_tile()
    if tile is None or p.batch != 1 or p.form not in TRANSPOSED or p.m < ROWS:
        return False
    s = one_by_one(p.m, p.n, p.k)
    return mode_of(s) == TABLE and refuses(s) is None and packed_numbers(s, tile) <= MOST * p.n * p.k


def in_panels(weight: torch.Tensor, s: ConvSizes, tile: ConvTile) -> torch.Tensor:
    """From weight[o, depth]. Each group of output channels has panels of its own, the last one with zeros; a value of
    channel c and tap t is c · taps + t in a weight, and t · channels + c in a panel."""
    taps = s.kh * s.kw
    if mode_of(s) == TABLE:
        weight = weight.reshape(s.o, -1, taps).transpose(1, 2).reshape(s.o, -1)
    groups = 1 if s.depthwise else s.groups
    by_group = F.pad(weight.reshape(groups, s.o // groups, -1), (0, 0, 0, -(s.o // groups) % tile.panel))
    return by_group.reshape(-1, tile.panel, s.depth).transpose(1, 2).contiguous()
