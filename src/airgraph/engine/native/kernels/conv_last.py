"""Convolution in two dimensions, float32, channels last: out[pixel, o] = Σk patch[pixel, k] · W[o, k].

The inner kernel multiplies 6 pixels, read where they lie, with a *panel*: the weights of 64 output channels, packed so that
those for one value of a patch are four vectors side by side. With AVX-512 that is 24 accumulators, four loads and 6
broadcasts for 24 multiply-adds (AVX2 has panels of 16 channels). A tile of 14 × 32 has 16 loads for 28 multiply-adds, and
the addresses of 14 pixels do not fit in the registers. One core of a Cascade Lake, 6 × 64 / 14 × 32 / oneDNN's convolution,
packed weights, GFLOP/s, medians of alternating calls beside other programs: 3 × 3 of 64 channels at 56² 81 / 72 / 75, of
256 at 14² 81 / 70 / 77, 1 × 1 256→64 at 56² 74 / 62 / 62, 256→1024 at 14² 76 / 61 / 62, 1024→256 at 14² 70 / 59 / 61. The
best calls: 3 × 3 of 64 channels 134, oneDNN 117, where the core can do 152. MKL's packed product, its bias written before,
takes 1.04 (1 × 1 128→512 at 28², 1024→256 at 14²) to 1.47 times (64→64 at 56²) as long as 6 × 64 for ResNet-50's nine
shapes, and 1.04 (160→960 at 7²) to 1.67 times (16→64 at 112²) for eight of MobileNetV3's (one run, medians as above): it
has no place here.

With AVX-512 the weights of a value are asked for eight values before they are used, since the hardware brings them to level
1 too late (32 rows of 3072→768 as a product 81 → 90 % of the peak, 16 of 768→3072 78 → 83 %; whole models, two threads,
time before / after: ResNet-like 1.09, MobileNetV3 1.03, ResNet-50 1.02).

On Arm a tile is 8 pixels × 8 channels: 16 accumulators, and four values of each pixel in a register, of which multiply-adds
take one lane. One core of a Neoverse-N1, GFLOP/s, packed weights: 1 × 1 256→64 at 56² 34.5, 256→1024 at 14² 35.3 (29.0 when
the next weights are asked for), 3 × 3 of 128 channels with stride 2 at 56² 35.5, 3 × 3 with stride 1 by winograd.py 67 to
73. A kernel for planes that packed the pixels reached 33 to 36, without Winograd's transformation and epilogues: ResNet-50
131 ms with it and 100 with this one, MobileNetV3 12.0 and 10.1, the UNet block 94.6 and 68.6, ConvNeXt-tiny 155 and 148.

Where a patch is read from is a *table*: for each of its taps (kh, kw) the addresses of a tile's pixels, zeros for
those in the padding. So stride, padding, dilation and groups are nothing to the kernel. With few channels (the first layer)
there are no runs of channels to read, but runs of columns in planes: some rows at a time are copied, from any layout, as
planes with the padding around them, and the table has a row for each plane and row of a patch (2.3 times as fast as
gathering patches for 3 × 3 on 3 channels, 1.4 times for 7 × 7). Kernels that are 3 or 7 wide need no table
(conv_rows.py).

Weights that keep their content, and those that can be tagged (packing.py), are packed once, for a frame. Others are packed
in every call, by the thread that uses them: transposing 16 × 16 costs a quarter of a cycle a value, which is used for
pixels / 32 cycles. Threads divide the pixels, and each packs all weights; or, where there are few pixels, the panels.

A block of pixels, nine tiles or more, is multiplied with one panel after the other. Weights that do not stay in level 2 are
read from farther away by every block. So blocks are larger for these, deep panels are used in chunks that stay in level 2
for all tiles of a block, and meanwhile the next chunk is fetched (1.03 to 1.2 times as fast as without fetching). Each
chunk is a sum of its own, which is then added to the sum of the others: less is rounded than in one long sum.

A depthwise convolution multiplies 8 pixels of a row, a vector of channels each, with the taps of those channels; with 3, 5
or 7 taps in a row and a step of 1 or 2, what neighbouring pixels share is loaded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airgraph.engine.native.llvm.builder import vector
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import Amount, ceil, choose, less, minimum

SIZES = ConvSizes._fields
PARTS = ("zeros", "positions", "tables", "planes", "packed")  # of a thread's scratch memory
# mode: TABLE, PLANES, DEPTHWISE; split: threads divide pixels (0) or panels (1); prepacked: 1 where the weights are packed
# already; tile: its number; tiles: in a block; far: 1 or 0; chunk: values; strip: rows; squares: in a block (winograd.py)
# or 0; of a product, where the next one's panels are (0: nobody knows), how many, and the bytes of each; x's strides
# (floats); the epilogue (NO_EPILOGUE …) with its function, arguments and sizes; where PARTS begin
NEXT = ("next", "next_panels", "next_bytes")
HOW = ("mode", "split", "prepacked", "tile", "tiles", "far", "chunk", "strip", "squares", *NEXT)
DIMS = [*SIZES, *HOW, "xn", "xc", "xh", "xw", "epilogue", "function", "arguments", "numbers", *PARTS]
PREPACKED, TILE, SQUARES, FOLLOWING = (DIMS.index(name) for name in ("prepacked", "tile", "squares", NEXT[0]))
TABLE, PLANES, DEPTHWISE = range(3)
NO_EPILOGUE, BY_ELEMENT, BY_CHANNEL = range(3)  # loops of an epilogue
DEEPEST = 1 << 16  # values of a patch
CHUNK = 768  # values of a patch, at most, that all tiles of a block are multiplied with, one tile after the other
IN_CACHE, BLOCK = 768 << 10, 512 << 10  # bytes of weights, and of the pixels of a block
ONE_BLOCK = 128  # pixels: in this case a block has all of them
STRIP = 128 << 10  # bytes of planes that are copied
SLOTS = 8  # addresses in a row of a table, at least as many as a tile has pixels
PACKED = 4 << 20  # bytes of packed weights that each thread may have
# The cost of packing a weight, in pixels that it is used for. (ResNet-50, two threads, loaded machine: 3 % better than 10.)
PACKING = 30
WHOLE_IMAGE = 1.1  # times as slow: threads that divide panels read the whole image each


def refuses(sizes: ConvSizes) -> str | None:
    """Why there is no kernel for a convolution of these sizes; None: there is one."""
    deep = sizes.groups * sizes.depth if sizes.few else sizes.depth
    return f"a convolution of patches of {deep} values, more than {DEEPEST}" if deep > DEEPEST else None


@dataclass(frozen=True)
class ConvTile:
    """Of the inner kernel: 32 registers of 16 lanes with AVX-512, 16 of 8 with AVX2, 32 of 4 on Arm. Tiles with a number
    other than 0 are for products only (panels.py)."""

    lanes: int
    rows: tuple[int, int]  # pixels, and those of a small one
    vectors: int  # of output channels
    tiles: int  # in a block, or more
    deep: int  # values of a patch in one iteration
    number: int = 0  # among those of the CPU
    near: int = 0  # values of a patch whose weights are on their way to level 1 while one is used
    cost: float = 1.0  # of a multiply-add, beside the first tile's

    @property
    def kind(self) -> str:
        return vector(self.lanes)

    @property
    def masks(self) -> bool:
        """A vector can be loaded and stored in part, by one instruction. (AVX2 has them as well, but a masked store is some
        forty micro-operations on a Zen 3: MobileNetV3 took 21.7 ms with them and 14.9 without, products 5 to 12 % more.)"""
        return self.lanes == 16

    @property
    def fetches(self) -> bool:
        """The next weights are asked for while some are used. A Neoverse-N1 does that better by itself."""
        return self.lanes > 4

    @property
    def by_element(self) -> bool:
        """A multiply-add can take one lane of a vector for all."""
        return self.lanes == 4

    @property
    def panel(self) -> int:
        return self.lanes * self.vectors

    def named(self, function: str) -> str:
        """A function that there is for every tile."""
        return f"{function}_{self.rows[0]}x{self.vectors}" if self.number else function


AVX512 = (
    ConvTile(16, (6, 3), vectors=4, tiles=9, deep=2, near=8),
    ConvTile(16, (8, 4), vectors=3, tiles=7, deep=2, number=1, near=8, cost=0.97),
)
AVX2 = (
    ConvTile(8, (6, 3), vectors=2, tiles=4, deep=4),
    ConvTile(8, (4, 2), vectors=3, tiles=6, deep=4, number=1, cost=1.05),
)
NEON = (ConvTile(4, (8, 4), vectors=2, tiles=8, deep=4),)
TILES = {tiles[0].lanes: tiles for tiles in (AVX512, AVX2, NEON)}


def these_tiles() -> tuple[ConvTile, ...]:
    return TILES[vector_lanes()]


def this_tile() -> ConvTile:
    """That of convolutions."""
    return these_tiles()[0]


# -- what is decided when planning ------------------------------------------------------------------------------------
def mode_of(s: ConvSizes) -> int:
    if s.depthwise:
        return DEPTHWISE
    return PLANES if s.few else TABLE


def panels(s: ConvSizes, tile: ConvTile) -> int:
    if mode_of(s) == DEPTHWISE:
        return -(-s.c // tile.panel)
    return s.groups * -(-s.o // s.groups // tile.panel)


def vectors(s: ConvSizes, tile: ConvTile) -> int:
    """Of output channels, in all panels."""
    groups = 1 if mode_of(s) == DEPTHWISE else s.groups
    return groups * -(-s.o // groups // tile.lanes)


def packed_numbers(s: ConvSizes, tile: ConvTile) -> int:
    """In a packed copy of all weights, zeros included."""
    return panels(s, tile) * s.depth * tile.panel


def split(s: ConvSizes, threads: Amount, tile: ConvTile) -> Amount:
    """What the threads divide, by the time that the slowest of them takes."""
    count, pixels = panels(s, tile), s.n * s.oh * s.ow
    if mode_of(s) == PLANES:
        return 0
    if 4 * packed_numbers(s, tile) > PACKED:
        return 1
    all_vectors = vectors(s, tile)  # the last panel may have fewer than the others
    most = minimum(ceil(count, threads) * tile.vectors, all_vectors)
    by_pixels, by_panels = all_vectors * (PACKING + ceil(pixels, threads)), most * (PACKING + pixels)
    return choose(less(by_panels * round(100 * WHOLE_IMAGE), by_pixels * 100), 1, 0)


def jobs(s: ConvSizes, by_panels: Amount, tile: ConvTile) -> Amount:
    return choose(less(0, by_panels), panels(s, tile), s.n * s.oh * s.ow)


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
    how = [tile.number, tiles(s, tile), int(far(s, tile)), chunk(s), strip(s, tile), 0, 0, 0, 0]
    return [*s, mode_of(s), by_panels, 0, *how, n, c, h, w, NO_EPILOGUE, 0, 0, 0, *offsets(s, tile).values()]


def following(s: ConvSizes, tile: ConvTile, address: int) -> list[int]:
    """What a product is told of the next one (NEXT), whose panels are at this address."""
    return [address, panels(s, tile), 4 * s.depth * tile.panel]


def far(s: ConvSizes, tile: ConvTile) -> bool:
    """Whether the next weights are fetched while some are used: there are too many of them for level 2, or so few pixels
    that each is used by one block only."""
    once = s.n * s.oh * s.ow <= ONE_BLOCK
    return mode_of(s) == TABLE and (once or 4 * packed_numbers(s, tile) > IN_CACHE)


def chunk(s: ConvSizes) -> int:
    """How many values of a patch all tiles of a block are multiplied with, before they go on with the next ones: their
    weights stay in level 2. Whole taps, or channels of the only one."""
    if mode_of(s) != TABLE:
        return s.depth
    parts, taps = -(-s.depth // CHUNK), s.kh * s.kw
    return -(-taps // parts) * (s.depth // taps) if taps > 1 else -(-s.depth // parts)


def tiles(s: ConvSizes, tile: ConvTile) -> int:
    """In a block. Every block reads all weights: where these are far, blocks are larger."""
    if not far(s, tile):
        return tile.tiles
    most = BLOCK // (4 * s.c * tile.rows[0])
    whole = -(-s.n * s.oh * s.ow // tile.rows[0])
    blocks = -(-whole // max(tile.tiles, most))
    return -(-whole // blocks)


def taps(s: ConvSizes) -> int:
    """In a table. Columns of a plane that lie side by side are one."""
    if mode_of(s) == TABLE:
        return s.kh * s.kw
    return s.c // s.groups * s.kh * (1 if s.dw == 1 else s.kw)


def strip(s: ConvSizes, tile: ConvTile) -> int:
    """Rows of the result whose planes are copied at a time."""
    one, two = (strip_bytes(s, rows, tile) for rows in (1, 2))
    return max(1, min(s.oh, 1 + (STRIP - one) // max(two - one, 1)))


def strip_bytes(s: ConvSizes, rows: int, tile: ConvTile) -> int:
    if mode_of(s) != PLANES:
        return 0
    wide = -(-(s.w + 2 * s.pw) // tile.lanes) * tile.lanes
    return 4 * s.c * ((rows - 1) * s.sh + (s.kh - 1) * s.dh + 1) * wide


def offsets(s: ConvSizes, tile: ConvTile) -> dict[str, int]:
    """Where PARTS begin, in bytes."""
    mode, slots = mode_of(s), tiles(s, tile) * SLOTS
    sizes = {
        "zeros": 4 * (tile.lanes if mode == DEPTHWISE else s.c),
        "positions": 0 if mode == DEPTHWISE else 3 * 8 * slots,
        "tables": 0 if mode == DEPTHWISE else 8 * slots * taps(s),
        "planes": strip_bytes(s, strip(s, tile), tile),
    }
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = at
        at += -(-size // 64) * 64
    return {**found, "packed": at}
