"""Convolution in two dimensions, float32, channels last: out[pixel, o] = Σk patch[pixel, k] · W[o, k].

The inner kernel multiplies 14 pixels, read where they lie, with a *panel*: the weights of 32 output channels, packed so
that those for one value of a patch are two vectors side by side. 28 accumulators, two loads and 14 broadcasts for 28
multiply-adds (AVX-512; AVX2 has tiles of 6 × 16). 14 divides images of 7, 14, 28, 56 and 112 pixels a side, which most
networks have. With AVX-512 one iteration has one value of a patch: with four, LLVM's scheduler needs a 33rd register and
stores an accumulator in every iteration (one core of a Cascade Lake, weights packed before, GFLOP/s with one / four: 3 × 3
of 64 channels at 56² 138 / 117, of 256 at 14² 141 / 131, 1 × 1 256→1024 at 14² 135 / 116, 64→256 at 56² 116 / 88). AVX2
has four: 67 / 57, 67 / 58, 70 / 67 and 63 / 62 with four / one.

Where a patch is read from is a *table*: for each of its taps (kh, kw) the addresses of the 14 pixels' channels, zeros for
those in the padding. So stride, padding, dilation and groups are nothing to the kernel. With few channels (the first layer)
there are no runs of channels to read: patches are gathered, from any layout, and the table has one row.

Weights that keep their content, and those that can be tagged (packing.py), are packed once, for a frame. Others are packed
in every call, by the thread that uses them: transposing 16 × 16 costs a quarter of a cycle a value, which is used for
pixels / 32 cycles. Threads divide the pixels, and each packs all weights; or, where there are few pixels, the panels.

A depthwise convolution multiplies 8 pixels of a row, a vector of channels each, with the taps of those channels; with 3, 5
or 7 taps in a row and a step of 1 or 2, what neighbouring pixels share is loaded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airgraph.engine.native.llvm.builder import vector
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import Amount, ceil, choose, less

SIZES = ConvSizes._fields
PARTS = ("zeros", "positions", "tables", "patches", "packed")  # of a thread's scratch memory
# mode: TABLE, GATHER, DEPTHWISE; split: threads divide pixels (0) or panels (1); prepacked: 1 where the weights are packed
# already; x's strides (floats); where PARTS begin
DIMS = [*SIZES, "mode", "split", "prepacked", "xn", "xc", "xh", "xw", *PARTS]
PREPACKED = DIMS.index("prepacked")
TABLE, GATHER, DEPTHWISE = range(3)
DEEPEST = 1 << 16  # values of a patch
TILES = 4  # in a block
SLOTS = 16  # addresses in a row of a table
PACKED = 4 << 20  # bytes of packed weights that each thread may have
PACKING = 10  # the cost of packing a weight, in pixels that it is used for
WHOLE_IMAGE = 1.1  # times as slow: threads that divide panels read the whole image each


def refuses(sizes: ConvSizes) -> str | None:
    """Why there is no kernel for a convolution of these sizes; None: there is one."""
    deep = sizes.groups * sizes.depth if sizes.few else sizes.depth
    return f"a convolution of patches of {deep} values, more than {DEEPEST}" if deep > DEEPEST else None


@dataclass(frozen=True)
class ConvTile:
    """Of the inner kernel: 32 registers of 16 lanes with AVX-512, 16 of 8 with AVX2."""

    lanes: int
    rows: tuple[int, int]  # pixels, and those of a small one
    deep: int  # values of a patch in one iteration
    vectors: int = 2

    @property
    def kind(self) -> str:
        return vector(self.lanes)

    @property
    def panel(self) -> int:
        return self.lanes * self.vectors

    @property
    def block(self) -> int:
        """Pixels that share a table."""
        return TILES * self.rows[0]


TILE_OF = {16: ConvTile(16, (14, 7), deep=1), 8: ConvTile(8, (6, 3), deep=4)}


def this_tile() -> ConvTile | None:
    """None on Arm, whose kernel (conv.py) works on planes."""
    return TILE_OF.get(vector_lanes())


# -- what is decided when planning ------------------------------------------------------------------------------------
def mode_of(s: ConvSizes) -> int:
    if s.depthwise:
        return DEPTHWISE
    return GATHER if s.few else TABLE


def panels(s: ConvSizes, tile: ConvTile) -> int:
    if mode_of(s) == DEPTHWISE:
        return -(-s.c // tile.panel)
    return s.groups * -(-s.o // s.groups // tile.panel)


def packed_numbers(s: ConvSizes, tile: ConvTile) -> int:
    """In a packed copy of all weights, zeros included."""
    return panels(s, tile) * s.depth * tile.panel


def split(s: ConvSizes, threads: Amount, tile: ConvTile) -> Amount:
    """What the threads divide, by the time that the slowest of them takes."""
    count, pixels = panels(s, tile), s.n * s.oh * s.ow
    if 4 * packed_numbers(s, tile) > PACKED:
        return 1
    by_pixels, by_panels = count * (PACKING + ceil(pixels, threads)), ceil(count, threads) * (PACKING + pixels)
    return choose(less(by_panels * round(100 * WHOLE_IMAGE), by_pixels * 100), 1, 0)


def jobs(s: ConvSizes, by_panels: Amount, tile: ConvTile) -> Amount:
    return choose(less(0, by_panels), panels(s, tile), s.n * s.oh * s.ow)


def unit(by_panels: Amount, tile: ConvTile) -> Amount:
    """Threads get multiples of this many jobs."""
    return choose(less(0, by_panels), 1, tile.rows[0])


def scratch_bytes(s: ConvSizes, by_panels: Amount, tile: ConvTile) -> Amount:
    packed, count = s.depth * tile.panel * 4, panels(s, tile)
    kept = count if mode_of(s) == DEPTHWISE else choose(less(0, by_panels), 1, count)
    return offsets(s, tile)["packed"] + packed * kept


def words(s: ConvSizes, by_panels: Amount, strides: Sequence[int], tile: ConvTile) -> list[Amount]:
    """DIMS, from the strides of x by n, c, h, w. (That of an axis with one element means nothing.)"""
    n, c, h, w = strides
    w = w if s.w > 1 else s.c
    h = h if s.h > 1 else s.w * w
    n = n if s.n > 1 else s.h * h
    return [*s, mode_of(s), by_panels, 0, n, c, h, w, *offsets(s, tile).values()]


def offsets(s: ConvSizes, tile: ConvTile) -> dict[str, int]:
    """Where PARTS begin, in bytes."""
    mode, slots = mode_of(s), TILES * SLOTS
    sizes = {
        "zeros": 4 * (tile.lanes if mode == DEPTHWISE else s.c),
        "positions": 0 if mode == DEPTHWISE else 3 * 8 * slots,
        "tables": 0 if mode == DEPTHWISE else 8 * slots * (s.kh * s.kw if mode == TABLE else 1),
        "patches": 4 * slots * (s.c * s.kh * s.kw + tile.lanes) if mode == GATHER else 0,
    }
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = at
        at += -(-size // 64) * 64
    return {**found, "packed": at}
