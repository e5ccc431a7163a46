"""Convolutions in bfloat16 by AMX, channels last: out[pixel, o] = Σ taps, channels image[pixel, tap, c] · W[o, tap, c].

It is the product of bfloat16.py without a matrix of patches. Some rows of the image at a time are copied with the padding
around them into a *strip*, whose pixels have a multiple of 32 channels, zeros behind the last. So a tile of A is loaded
from where it lies: 9 to 16 neighbouring pixels of a row of the result (all of them where rows are shorter) are as many
lines, as far apart as the stride says, and one tap after the other is a distance in bytes. The weights are in panels of 32
output channels, [tap][32 channels] as bfloat16.py packs them.

With few channels (the first layer) most of these 32 would be zeros. There a strip has for every pixel of the result the
values of a whole row of its patch, which lie side by side in the image, and a tap is a row of the patch.

Threads divide the rows of the result, and each multiplies with all panels; or the panels, where the weights are many.
Weights that are not packed once are packed by every thread, strip by strip.

One core of a Xeon with AMX (Emerald Rapids class, 2.1 GHz, a virtual machine), torch 2.13, µs of CPU time beside other
programs, least of 9 alternating batches, images with channels last before and behind; float32: by conv_last.py, 3 × 3 with
stride 1 by Winograd's transformation; PyTorch: its call, which brings the weights into its own order every time:

                                       this   float32   PyTorch
    7×7, stride 2, 3→64 at 224²         576      1666       683
    3×3, 64→64 at 56²                   211      1117       402
    3×3, 64→64 at 56², batch of 16     3986     19385      3884
    3×3, stride 2, 128→128 at 56²       253      2563       900
    3×3, 128→128 at 28²                 180      1480       795
    3×3, 256→256 at 14²                 151       855       906
    3×3, 512→512 at 7²                  426      1498      2447
    3×3, 512→512 at 7², batch of 16    4641     14353      7571
    3×3, 512→512 at 2²                  236      2843      2512
    3×3, 32→32 at 14²                     7        26       130
    3×3, 16→16 at 56²                    60       162       151
    1×1, 64→256 at 56²                  294      1271       483
    1×1, 256→64 at 56²                  129      3407       312
    1×1, 1024→256 at 14²                 95      1132       498
    1×1, stride 2, 512→1024 at 28²      265      2056       665

(1 × 1 without padding is a product of bfloat16.py.) So there is no shape in one group for which another way is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from airgraph.engine.native.kernels import bfloat16
from airgraph.engine.native.kernels.bfloat16 import (
    ACC,
    CONFIG,
    DEEP,
    PANEL,
    STEP,
    TILE,
    configure,
    mask,
    masked_load,
    store_words,
    words_of,
)
from airgraph.engine.native.llvm.builder import Function
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import Amount, ceil, choose, less

EXPORTS = ("ag_conv_bf16", "ag_pack_conv_bf16")
OPERANDS = "ptr %x, ptr %weight, ptr %bias, ptr %out, ptr %dims"
STRIP = 512 << 10  # bytes of a strip
MANY = 1 << 20  # bytes of packed weights, more than stay in level 2 beside a strip
# row, advance, before, values: numbers of x in a row, from one unit to the next, of padding in front, and in a unit; down,
# right, stride: bytes from a tap to the one below and beside it, and from a pixel to the next; high: pixels of a tile;
# group: rows that strips do not cross
DIMS = (
    *("n", "o", "oh", "ow", "h", "sh", "ph", "kh", "dh", "row", "taps", "units", "advance", "before", "values"),
    *("steps", "down", "right", "stride", "high", "strip", "group", "by_panels", "packed"),
)
PACKED = DIMS.index("packed")


class Patch(NamedTuple):
    """How a strip holds patches: a line has `units` of `values`, each filled up to whole `steps` of 32, which begin
    `advance` numbers of x after each other; taps of a row of the patch, bytes to the next, and from pixel to pixel."""

    taps: int
    values: int
    steps: int
    units: int
    advance: int
    right: int
    stride: int

    @property
    def line(self) -> int:
        """Bytes of a line."""
        return self.units * self.steps * 2 * DEEP


def patch(s: ConvSizes) -> Patch:
    by_row, by_tap = -(-s.kw * s.c // DEEP), -(-s.c // DEEP)
    if s.dw == 1 and 4 * by_row <= 3 * s.kw * by_tap:
        return Patch(1, s.kw * s.c, by_row, s.ow, s.sw * s.c, 0, 2 * DEEP * by_row)
    units, unit = (s.ow - 1) * s.sw + (s.kw - 1) * s.dw + 1, 2 * DEEP * by_tap
    return Patch(s.kw, s.c, by_tap, units, s.c, s.dw * unit, s.sw * unit)


def panels(s: ConvSizes) -> int:
    return -(-s.o // PANEL)


def packed_bytes(s: ConvSizes) -> int:
    """Of all weights in panels."""
    return panels(s) * panel_bytes(s)


def weight_shape(dims: Sequence[int]) -> tuple[int, int, int]:
    """Output channels, taps and values of a tap, from DIMS."""
    o, kh, taps, values = (dims[DIMS.index(name)] for name in ("o", "kh", "taps", "values"))
    return o, kh * taps, values


def bytes_of_panels(shape: tuple[int, int, int]) -> int:
    """`packed_bytes` of weights of this shape."""
    o, taps, values = shape
    return -(-o // PANEL) * taps * -(-values // DEEP) * STEP


def panel_bytes(s: ConvSizes) -> int:
    p = patch(s)
    return s.kh * p.taps * p.steps * STEP


def lines(s: ConvSizes, rows: int) -> int:
    """Of an image that so many rows of the result are made from."""
    return (rows - 1) * s.sh + (s.kh - 1) * s.dh + 1


def strip(s: ConvSizes) -> tuple[int, int]:
    """Rows of the result that are made from a strip, and of the group: several images, or a part of one."""
    images = min(STRIP // (lines(s, s.oh) * patch(s).line), s.n)
    if images:
        return images * s.oh, images * s.oh
    fit = STRIP // patch(s).line
    return max(1, (fit - lines(s, 1)) // s.sh + 1), s.oh


def strip_bytes(s: ConvSizes) -> int:
    rows, _ = strip(s)
    return max(rows // s.oh * lines(s, s.oh), lines(s, min(rows, s.oh))) * patch(s).line


def split(s: ConvSizes, threads: Amount) -> Amount:
    """1 where threads divide the panels, 0 where they divide the rows: whichever leaves less to the slowest; if both leave
    nearly as much, panels where each thread would read more weights than stay near."""
    count, rows = panels(s), s.n * s.oh
    margin = 11 if packed_bytes(s) > MANY else 9
    return less(ceil(count, threads) * (rows * 10), ceil(rows, threads) * (count * margin))


def jobs(s: ConvSizes, by_panels: Amount) -> Amount:
    return choose(less(0, by_panels), panels(s), s.n * s.oh)


def scratch_bytes(s: ConvSizes) -> int:
    """What a thread needs: the configuration of the tiles, the sums of a block, a packed panel, a strip."""
    return CONFIG + ACC + panel_bytes(s) + strip_bytes(s)


def words(s: ConvSizes, by_panels: Amount) -> list[Amount]:
    """DIMS."""
    p, (rows, group), high = patch(s), strip(s), -(-s.ow // -(-s.ow // TILE))
    down, row, before = s.dh * p.line, s.w * s.c, s.pw * s.c
    image = [s.n, s.o, s.oh, s.ow, s.h, s.sh, s.ph, s.kh, s.dh, row, p.taps, p.units, p.advance, before, p.values]
    return [*image, p.steps, down, p.right, p.stride, high, rows, group, by_panels, 0]


# -- the text -----------------------------------------------------------------------------------------------------------
@cache
def source() -> str:
    """The module's text."""
    shared = [bfloat16.DECLARES, bfloat16.pack_panel("nt"), bfloat16.finish()]
    blocks = [block(tiles, first) for tiles in (1, 2) for first in (True, False)]
    return "".join([*shared, pack_panel(), pack(), copy_lines(), *blocks, panel(), whole()])


class ConvFunction(Function):
    """With the sizes by name."""

    def __init__(self, name: str, params: str, exported: bool = False) -> None:
        super().__init__(name, params, exported=exported)
        self.d = {name: self.word("%dims", i) for i, name in enumerate(DIMS)}

    def product(self, *factors: str | int) -> str:
        """Of these numbers; a name is one of the sizes."""
        found = "1"
        for factor in factors:
            value = self.d.get(factor, factor) if isinstance(factor, str) else factor
            found = str(value) if found == "1" else self.mul(found, value)
        return found

    def lines_of(self, rows: str) -> str:
        """See `lines`."""
        reach = self.product(self.sub(self.d["kh"], 1), "dh")
        return self.add(self.add(self.product(self.sub(rows, 1), "sh"), reach), 1)

    def panel_bytes(self) -> str:
        return self.product("kh", "taps", "steps", STEP)


def pack_panel() -> str:
    """Weights of 32 output channels, of which `count` exist; w: where the first begins."""
    f = ConvFunction("pack_taps", "ptr %w, ptr %dims, i64 %count, ptr %to")
    taps, apart = f.product("kh", "taps"), f.product("steps", STEP)
    depth = f.product(taps, "values")

    def tap(t: str) -> None:
        begin, to = f.at("%w", f.product(t, "values"), "i16"), f.at("%to", f.mul(t, apart), "i8")
        f.call("@pack_panel_nt", f"ptr {begin}, i64 {depth}, i64 %count, i64 {f.d['values']}, ptr {to}")

    f.loop("0", taps, 1, tap)
    return f.text()


def pack() -> str:
    """All panels."""
    f = ConvFunction("ag_pack_conv_bf16", "ptr %w, ptr %dims, ptr %to", exported=True)
    depth, apart = f.product("kh", "taps", "values"), f.panel_bytes()

    def one(n: str) -> None:
        begin, to = f.at("%w", f.mul(n, depth), "i16"), f.at("%to", f.mul(f.div(n, PANEL), apart), "i8")
        f.call("@pack_taps", f"ptr {begin}, ptr %dims, i64 {f.min(f.sub(f.d['o'], n), PANEL)}, ptr {to}")

    f.loop("0", f.d["o"], PANEL, one)
    return f.text()


def copy_lines() -> str:
    """Some lines of an image as a strip has them, the first `top` lines below the upper edge of the padding."""
    f = ConvFunction("copy_lines", "ptr %x, ptr %dims, i64 %top, i64 %count, ptr %to")
    row, steps = f.d["row"], f.d["steps"]

    def line(i: str) -> None:
        y = f.sub(f.add("%top", i), f.d["ph"])
        there = f.choose(f.test("ult", y, f.d["h"]), "i64", row, "0")
        source, to = f.product(y, "row"), f.at("%to", f.product(i, "units", "steps", 2 * DEEP), "i8")

        def unit(u: str) -> None:
            start = f.sub(f.product(u, "advance"), f.d["before"])
            low, high = f.sub("0", start), f.min(f.d["values"], f.sub(there, start))
            begin, into = f.add(source, start), f.at(to, f.product(u, "steps", 2 * DEEP), "i8")

            def some(step: str) -> None:
                k = f.mul(step, DEEP)
                inside, outside = mask(f, f.sub(high, k)), mask(f, f.sub(low, k))
                bits = f.op(f"and <32 x i1> {inside}, {f.op(f'xor <32 x i1> {outside}, splat (i1 true)')}")
                place = f.op(
                    f"getelementptr i16, ptr %x, i64 {f.add(begin, k)}"
                )  # where nothing is read it may lie outside
                store_words(f, words_of(f, masked_load(f, place, bits)), f.at(into, f.mul(step, 2 * DEEP), "i8"))

            f.loop("0", steps, 1, some)

        f.loop("0", f.d["units"], 1, unit)

    f.loop("0", "%count", 1, line)
    return f.text()


def block_name(tiles: int, first: bool) -> str:
    return f"taps_{tiles}{'_first' if first else ''}"


def block(tiles: int, first: bool) -> str:
    """The sums of one or two tiles of pixels with a panel, of which the `first` block fetches more."""
    given = ", ".join(f"ptr %a{t}" for t in range(tiles))
    f = ConvFunction(block_name(tiles, first), f"{given}, ptr %dims, ptr %panel, ptr %acc")
    pixels = [f"%a{t}" for t in range(tiles)]

    def moved(places: list[str], bytes: str) -> list[str]:
        return [f.at(place, bytes, "i8") for place in places]

    def step(s: str, panel: str, places: list[str]) -> list[str]:
        bfloat16.step(f, panel, moved(places, f.mul(s, 2 * DEEP)), f.d["stride"])
        if first:
            bfloat16.fetch(f, panel, "0")
        return [f.at(panel, STEP, "i8")]

    def tap(j: str, panel: str, places: list[str]) -> list[str]:
        here = moved(places, f.product(j, "right"))
        return f.loop("0", f.d["steps"], 1, lambda s, p: step(s, p, here), ("ptr", panel))

    def row(i: str, panel: str) -> list[str]:
        here = moved(pixels, f.product(i, "down"))
        return f.loop("0", f.d["taps"], 1, lambda j, p: tap(j, p, here), ("ptr", panel))

    bfloat16.zero_sums(f, tiles)
    f.loop("0", f.d["kh"], 1, row, ("ptr", "%panel"))
    bfloat16.store_sums(f, tiles)
    return f.text()


def panel() -> str:
    """The rows row .. end - 1 of the result, made from a strip whose first line is `top`, times the panel of 32 output
    channels that begins with the n-th."""
    params = "ptr %strip, ptr %dims, i64 %top, i64 %row, i64 %end, i64 %n, ptr %panel, ptr %bias, ptr %out, ptr %acc"
    f = ConvFunction("rows_by_panel", params)
    high, ow, image = f.d["high"], f.d["ow"], f.mul(f.lines_of(f.d["oh"]), f.product("units", "steps", 2 * DEEP))
    across, first = f.ceil(ow, high), f.div("%row", f.d["oh"])
    line, last = f.product("units", "steps", 2 * DEEP), f.sub(ow, high)
    count, wide = f.min(f.sub(f.d["o"], "%n"), PANEL), f.product("o", 2)
    bias = f.choose(f.test("eq", "%bias", "null", "ptr"), "ptr", "null", f.at("%bias", "%n", "i16"))

    def place(t: str) -> tuple[str, str]:
        """Of a tile: where its pixels lie in the strip, and in the result."""
        y, x = f.add("%row", f.div(t, across)), f.min(f.mul(f.rem(t, across), high), last)
        below = f.sub(f.product(f.rem(y, f.d["oh"]), "sh"), "%top")
        at = f.add(f.mul(f.sub(f.div(y, f.d["oh"]), first), image), f.mul(below, line))
        to = f.add(f.product(f.add(f.mul(y, ow), x), "o"), "%n")
        return f.at("%strip", f.add(at, f.product(x, "stride")), "i8"), f.at("%out", to, "i16")

    def tiles(*numbers: str) -> None:
        places = [place(t) for t in numbers]
        begin, other = (f"@{block_name(len(numbers), way)}" for way in (True, False))
        given = ", ".join(f"ptr {a}" for a, _ in places)
        fetching = f.test("eq", numbers[0], 0)
        f.call(f.choose(fetching, "ptr", begin, other), f"{given}, ptr %dims, ptr %panel, ptr %acc")
        for t, (_, to) in enumerate(places):
            sums = f.at("%acc", t * ACC // 2, "i8")
            f.call("@finish", f"ptr {sums}, ptr {to}, i64 {wide}, i64 {high}, ptr {bias}, i64 {count}")

    every = f.mul(f.sub("%end", "%row"), across)
    pairs = f.down(every, 2)
    f.loop("0", pairs, 2, lambda t: tiles(t, f.add(t, 1)))
    f.when(f.test("slt", pairs, every), lambda: tiles(pairs))
    return f.text()


def whole() -> str:
    """Jobs are rows of the result, or panels."""
    f = ConvFunction("ag_conv_bf16", f"{OPERANDS}, i64 %job0, i64 %job1, ptr %scratch", exported=True)
    f.leave(f.test("sge", "%job0", "%job1"), lambda: None)
    acc, own = f.at("%scratch", CONFIG, "i8"), f.at("%scratch", CONFIG + ACC, "i8")
    memory = f.at(own, f.panel_bytes(), "i8")
    by_panels, packed = f.test("ne", f.d["by_panels"], 0), f.test("ne", f.d["packed"], 0)
    row0, row1 = f.choose(by_panels, "i64", "0", "%job0"), f.choose(by_panels, "i64", f.product("n", "oh"), "%job1")
    n0 = f.choose(by_panels, "i64", f.mul("%job0", PANEL), "0")
    n1 = f.choose(by_panels, "i64", f.min(f.mul("%job1", PANEL), f.d["o"]), f.d["o"])
    depth, image, oh = f.product("kh", "taps", "values"), f.product("h", "row"), f.d["oh"]
    every = f.lines_of(oh)
    of_image = f.mul(every, f.product("units", "steps", 2 * DEEP))
    group = f.d["group"]
    parts = f.ceil(group, f.d["strip"])
    configure(f, "%scratch", f.d["high"])

    def number(row: str) -> str:
        """Of the strip that has this row."""
        return f.add(f.mul(f.div(row, group), parts), f.div(f.rem(row, group), f.d["strip"]))

    def one_strip(k: str) -> None:
        before = f.mul(f.div(k, parts), group)
        start = f.add(before, f.product(f.rem(k, parts), "strip"))
        row = f.max(start, row0)
        end = f.min(f.min(f.add(start, f.d["strip"]), f.add(before, group)), row1)
        first, last = f.div(row, oh), f.div(f.sub(end, 1), oh)
        only = f.test("eq", first, last)
        top = f.choose(only, "i64", f.product(f.rem(row, oh), "sh"), "0")
        count = f.choose(only, "i64", f.lines_of(f.sub(end, row)), every)

        def copied(i: str) -> None:
            x, to = f.at("%x", f.mul(f.add(first, i), image), "i16"), f.at(memory, f.mul(i, of_image), "i8")
            f.call("@copy_lines", f"ptr {x}, ptr %dims, i64 {top}, i64 {count}, ptr {to}")

        def columns(n: str) -> None:
            known = f.at("%weight", f.mul(f.div(n, PANEL), f.panel_bytes()), "i8")
            at = f.choose(packed, "ptr", known, own)
            begin, here = f.at("%weight", f.mul(n, depth), "i16"), f.min(f.sub(f.d["o"], n), PANEL)
            packing = f"ptr {begin}, ptr %dims, i64 {here}, ptr {own}"
            f.when(f.op(f"xor i1 {packed}, true"), lambda: f.call("@pack_taps", packing))
            rows = f"ptr {memory}, ptr %dims, i64 {top}, i64 {row}, i64 {end}"
            f.call("@rows_by_panel", f"{rows}, i64 {n}, ptr {at}, ptr %bias, ptr %out, ptr {acc}")

        f.loop("0", f.add(f.sub(last, first), 1), 1, copied)
        f.loop(n0, n1, PANEL, columns)

    f.loop(number(row0), f.add(number(f.sub(row1, 1)), 1), 1, one_strip)
    f.call("@llvm.x86.tilerelease", "")
    return f.text()
