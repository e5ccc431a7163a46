"""Convolutions of 3 × 3 by Winograd's F(2×2, 3×3): 16 multiplications for four pixels instead of 36.

    out = Aᵀ [(G w Gᵀ) ∘ (Bᵀ x B)] A        for each square of 2 × 2 pixels, from 4 × 4 of the image

A thread takes some squares at a time. What is added up over the channels is a product of matrices for each of the 16 places
of a square: [squares, channels] × [channels, output channels], by the inner kernel of conv_last_kernels.py. The weights are
transformed when they are packed, in float64, so this is for weights that are packed before a call.

One core of a Cascade Lake, plain / this, packed weights, milliseconds, medians of 15 alternating calls: 64 channels at 56²
1.27 / 0.80, 128 at 28² 1.22 / 0.75, 256 at 14² 1.31 / 0.74, 320 at 32² 11.0 / 5.6, 512 at 7² 1.59 / 1.72 (16 squares, which
is too few), 16 images of it 21.0 / 13.5, 32 at 56² 0.40 / 0.28, 16 at 56² 0.19 / 0.16. The largest error against float64 is
0.3 to 0.7 of oneDNN's, the plain kernel's 0.4 to 1.5: sums have fewer terms. But an infinity, or a number near the largest,
makes all four pixels NaN: AIRGRAPH_WINOGRAD=off computes all convolutions plainly.

One core of a Neoverse-N1, plain / this: 64 channels at 56² 6.85 / 3.41, 128 at 28² 6.70 / 3.14, 256 at 14² 6.52 / 3.16, 512
at 7² 6.76 / 4.12 (16 squares are enough here: arithmetic takes longer than reading the weights). With AVX2 they are, too:
a small ResNet on a Zen 3 took 1.12 ms when such layers were computed plainly and takes 0.93 (two threads).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from airgraph.config import KNOBS
from airgraph.engine.native.kernels.conv_last import IN_CACHE, SLOTS, TABLE, ConvTile, mode_of, split
from airgraph.engine.native.kernels.conv_last_function import SIGNATURE, LastFunction
from airgraph.plan.convolution import ConvSizes

PLACES = 16  # of a square of 4 × 4
LEAST = 16  # channels
FEW = {
    16: 4,
    8: 2,
    4: 2,
}  # tiles of a thread, by lanes: with fewer, reading the weights (there are 16 / 9) takes too long
TILES, SCRATCH = (
    9,
    4 << 20,
)  # tiles of a block, at most, and the bytes of its squares before and after they are multiplied
APART = 16  # floats between the matrices of two places, which would share lines of the cache otherwise
G = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))


def pays(s: ConvSizes, threads: int, tile: ConvTile) -> bool:
    plain = (s.kh, s.kw, s.sh, s.sw, s.dh, s.dw, s.groups) == (3, 3, 1, 1, 1, 1, 1) and mode_of(s) == TABLE
    if not plain or min(s.c, s.o) < LEAST or KNOBS["AIRGRAPH_WINOGRAD"].get() == "off":
        return False
    return squares(s) >= FEW[tile.lanes] * tile.rows[0] * (1 if split(s, threads, tile) else threads)


def squares(s: ConvSizes) -> int:
    return s.n * -(-s.oh // 2) * -(-s.ow // 2)


def block(s: ConvSizes, tile: ConvTile) -> int:
    """How many squares a thread takes at a time."""
    rows = tile.rows[0]
    most = SCRATCH // (4 * PLACES * (s.c + s.o)) // rows * rows
    return min(max(most, 2 * rows), TILES * rows, -(-squares(s) // rows) * rows)


def packed_numbers(s: ConvSizes, tile: ConvTile) -> int:
    return PLACES * -(-s.o // tile.panel) * tile.panel * s.c


def widths(s: ConvSizes, tile: ConvTile) -> tuple[int, int]:
    """Floats of a square's place: channels, and output channels."""
    return -(-s.c // tile.lanes) * tile.lanes, -(-s.o // tile.lanes) * tile.lanes


def scratch_bytes(s: ConvSizes, tile: ConvTile, count: int) -> int:
    """A table of addresses, and so many squares before and after they are multiplied."""
    return 8 * SLOTS * count // tile.rows[0] + 4 * PLACES * sum(count * width + APART for width in widths(s, tile))


def in_panels(weight: torch.Tensor, tile: ConvTile) -> torch.Tensor:
    """From weight[o, c, 3, 3]: for each place the panels of a convolution of 1 × 1 (panels.py)."""
    o, c = weight.shape[:2]
    g = torch.tensor(G, dtype=torch.float64)
    places = weight.double().reshape(o * c, 9) @ torch.kron(g, g).t()  # G w Gᵀ
    padded = F.pad(places.float().reshape(o, c, PLACES), (0, 0, 0, 0, 0, -o % tile.panel))
    return padded.reshape(-1, tile.panel, c, PLACES).permute(3, 0, 2, 1).contiguous()


def pack(weight: torch.Tensor, tile: ConvTile, to: torch.Tensor) -> None:
    to.view(-1).copy_(in_panels(weight, tile).view(-1))


# -- the kernel -------------------------------------------------------------------------------------------------------
def source(host: ConvTile) -> str:
    return "".join(part(host) for part in (before, products, after, epilogues, whole))


SQUARES = "ptr %dims, i64 %first, i64 %count"


class Square(NamedTuple):
    """The image it is of, and the first row and column of the result."""

    image: str
    row: str
    column: str


def square_at(f: LastFunction, d: dict[str, str], number: str) -> Square:
    high, wide = (f.ceil(d[name], 2) for name in ("oh", "ow"))
    line = f.div(number, wide)
    return Square(f.div(line, high), f.mul(f.rem(line, high), 2), f.mul(f.rem(number, wide), 2))


def matrix(f: LastFunction, d: dict[str, str], channels: str) -> tuple[str, str]:
    """Floats from one square of a block to the next, and from one place to the next; see `scratch_bytes`."""
    width = f.mul(f.ceil(d[channels], f.host.lanes), f.host.lanes)
    return width, f.add(f.mul(d["squares"], width), APART)


def before(host: ConvTile) -> str:
    """to[place][square][channel] = (Bᵀ x B)[place], zeros behind the last channel."""
    f = LastFunction(host, "winograd_before", f"ptr %x, {SQUARES}, ptr %zeros, ptr %to, i64 %width, i64 %apart")
    d, kind = f.dims(), host.kind

    def combined(a: str, b: str, c: str, d: str) -> list[str]:
        less, more = (f"fsub {kind} {{}}, {{}}".format, f"fadd {kind} {{}}, {{}}".format)
        return [f.op(less(a, c)), f.op(more(b, c)), f.op(less(c, b)), f.op(less(b, d))]

    def square(t: str) -> None:
        at = square_at(f, d, f.add("%first", t))
        image = f.at("%x", f.mul(at.image, d["xn"]))
        lines = [f.sub(f.add(at.row, i), d["ph"]) for i in range(4)]
        columns = [f.sub(f.add(at.column, i), d["pw"]) for i in range(4)]
        high, wide = ([f.test("ult", i, d[name]) for i in which] for which, name in ((lines, "h"), (columns, "w")))

        def place(i: int, j: int) -> str:
            far = f.add(f.mul(lines[i], d["xh"]), f.mul(columns[j], d["xw"]))
            inside = f.op(f"and i1 {high[i]}, {wide[j]}")
            return f.choose(inside, "ptr", f.beyond(image, f.mul(far, 4)), "%zeros")

        places = [[place(i, j) for j in range(4)] for i in range(4)]
        to = f.at("%to", f.mul(t, "%width"))

        def channels(c: str, mask: str | None) -> None:
            x = [combined(*(f.load_part(f.at(p, c), mask) for p in line)) for line in places]
            for j, column in enumerate(zip(*x)):
                for i, value in enumerate(combined(*column)):
                    f.store(kind, value, f.at(f.at(to, f.mul("%apart", 4 * i + j)), c))

        f.each_vector("0", d["c"], channels)

    f.loop("0", "%count", 1, square)
    return f.text()


def after(host: ConvTile) -> str:
    """out = Aᵀ from[place][square][channel] A + bias, of some channels, as far as it is inside of the image."""
    params = f"ptr %from, i64 %width, i64 %apart, {SQUARES}, i64 %low, i64 %high, ptr %bias, ptr %out"
    f = LastFunction(host, "winograd_after", params)
    d, kind = f.dims(), host.kind
    biased = f.test("ne", "%bias", "null", "ptr")

    def combined(a: str, b: str, c: str, d: str) -> list[str]:
        first = f.fadd(kind, f.fadd(kind, a, b), c)
        return [first, f.op(f"fsub {kind} {f.op(f'fsub {kind} {b}, {c}')}, {d}")]

    def square(t: str) -> None:
        at = square_at(f, d, f.add("%first", t))
        source = f.at("%from", f.mul(t, "%width"))

        def pixel(i: int, j: int) -> str:
            """Behind the last row or column: where nothing is read any more."""
            row, column = f.add(at.row, i), f.add(at.column, j)
            inside = f.op(f"and i1 {f.test('slt', row, d['oh'])}, {f.test('slt', column, d['ow'])}")
            number = f.add(f.mul(f.add(f.mul(at.image, d["oh"]), row), d["ow"]), column)
            return f.choose(inside, "ptr", f.beyond("%out", f.mul(f.mul(number, d["o"]), 4)), source)

        pixels = [[pixel(i, j) for j in range(2)] for i in range(2)]

        def channels(o: str, mask: str | None) -> None:
            bias = f.either(biased, kind, lambda: f.load_part(f.at("%bias", o), mask), "zeroinitializer")
            m = [f.load_part(f.at(f.at(source, f.mul("%apart", i)), o), mask) for i in range(PLACES)]
            x = [combined(*m[4 * i : 4 * i + 4]) for i in range(4)]
            for j, column in enumerate(zip(*x)):
                for i, value in enumerate(combined(*column)):
                    f.store_part(f.fadd(kind, value, bias), f.at(pixels[i][j], o), mask)

        f.each_vector("%low", "%high", channels)

    f.loop("0", "%count", 1, square)
    return f.text()


def products(host: ConvTile) -> str:
    """to[place][square] = from[place][square] × the weights of panels low .. high - 1, of `count` squares.

    `table`: room for the addresses of the squares, as the inner kernel reads them.
    """
    params = "ptr %weight, ptr %dims, i64 %count, i64 %low, i64 %high, ptr %table, ptr %from, ptr %to"
    f = LastFunction(host, "winograd_products", params)
    d, rows = f.dims(), host.rows[0]
    (given, given_apart), (made, made_apart) = matrix(f, d, "c"), matrix(f, d, "o")
    tiles, pace, panels, size = (
        f.ceil("%count", rows),
        f.pace("%count"),
        f.ceil(d["o"], host.panel),
        f.mul(d["c"], host.panel),
    )
    far = f.test("sgt", f.mul(f.mul(panels, size), 4 * PLACES), IN_CACHE)

    def line(tile: str) -> None:
        for slot in range(SLOTS):
            number = f.min(f.add(f.mul(tile, rows), min(slot, rows - 1)), f.sub("%count", 1))
            place = f.at("%from", f.mul(number, given))
            f.do(f"store ptr {place}, ptr {f.at('%table', f.add(f.mul(tile, SLOTS), slot), 'i64')}, align 8")

    f.loop("0", tiles, 1, line)

    def panel(place: str, part: str) -> None:
        o, start = f.mul(part, host.panel), f.mul(place, panels)
        left, over = f.sub(d["o"], o), f.test("eq", f.add(part, 1), "%high")
        weights = f.at("%weight", f.mul(f.add(start, part), size))
        upcoming = f.choose(over, "i64", f.add(f.add(start, panels), "%low"), f.add(f.add(start, part), 1))
        following = f.beyond("%weight", f.mul(f.mul(upcoming, size), 4))
        large, small = f.micros(left, far, pace)
        to, shift = f.at(f.at("%to", f.mul(place, made_apart)), o), f.mul(f.mul(place, given_apart), 4)

        def tile(number: str) -> None:
            here = f.sub("%count", f.mul(number, rows))
            lines, into = f.at("%table", f.mul(number, SLOTS), "i64"), f.at(to, f.mul(f.mul(number, rows), made))
            ahead = f.beyond(following, f.mul(f.mul(number, d["c"]), pace))
            where = f"ptr {lines}, i64 1, i64 {shift}, i64 {d['c']}, ptr {weights}, ptr {into}, i64 {made}"
            rest = f"i64 {f.min(here, rows)}, i64 {left}, ptr null, ptr {ahead}, i64 {pace}, i1 false"
            f.call(f.choose(f.test("sle", here, host.rows[1]), "ptr", small, large), f"{where}, {rest}")

        f.loop("0", tiles, 1, tile)

    f.loop("0", str(PLACES), 1, lambda place: f.loop("%low", "%high", 1, lambda part: panel(place, part)) and None)
    return f.text()


def epilogues(host: ConvTile) -> str:
    """Of the pixels of some squares, and of channels low .. high - 1."""
    f = LastFunction(host, "winograd_epilogues", f"{SQUARES}, i64 %low, i64 %high")
    d = f.dims()
    high, wide = (f.ceil(d[name], 2) for name in ("oh", "ow"))
    until = f.add("%first", "%count")

    def row(number: str) -> None:
        """Of squares: two rows of pixels."""
        start = f.mul(number, wide)
        left, right = f.max(f.sub("%first", start), 0), f.min(f.sub(until, start), wide)
        image, i = f.div(number, high), f.mul(f.rem(number, high), 2)
        stop = f.min(f.mul(right, 2), d["ow"])

        def pixels(j: str) -> None:
            begin = f.mul(f.add(f.mul(image, d["oh"]), j), d["ow"])
            p, end = f.add(begin, f.mul(left, 2)), f.add(begin, stop)
            f.call("@epilogue", f"ptr %dims, i64 {p}, i64 {end}, i64 %low, i64 %high")

        f.loop(i, f.min(f.add(i, 2), d["oh"]), 1, pixels)

    f.loop(f.div("%first", wide), f.ceil(until, wide), 1, row)
    return f.text()


def whole(host: ConvTile) -> str:
    """Jobs are pixels, and the squares are divided like them; or panels."""
    f = LastFunction(host, "winograd", SIGNATURE)
    d, rows = f.dims(), host.rows[0]
    pixels = f.mul(d["n"], f.mul(d["oh"], d["ow"]))
    every = f.mul(d["n"], f.mul(f.ceil(d["oh"], 2), f.ceil(d["ow"], 2)))
    by_panels, panels = f.test("ne", d["split"], 0), f.ceil(d["o"], host.panel)
    begin, end = (f.div(f.mul(job, every), pixels) for job in ("%job0", "%job1"))
    first, last = f.choose(by_panels, "i64", "0", begin), f.choose(by_panels, "i64", every, end)
    panel0, panel1 = f.choose(by_panels, "i64", "%job0", "0"), f.choose(by_panels, "i64", "%job1", panels)
    low, high = f.mul(panel0, host.panel), f.min(f.mul(panel1, host.panel), d["o"])
    mine = f.sub(last, first)
    blocks = f.max(f.ceil(mine, d["squares"]), 1)
    block = f.mul(f.ceil(f.ceil(mine, blocks), rows), rows)  # all of about the same size
    (given, given_apart), (made, made_apart) = matrix(f, d, "c"), matrix(f, d, "o")
    table, zeros = f.part(d, "packed"), f.part(d, "zeros")
    squares = f.at(table, f.mul(f.div(d["squares"], rows), SLOTS), "i64")
    results = f.at(squares, f.mul(given_apart, PLACES))

    def some(t: str) -> None:
        count = f.min(f.sub(last, t), block)
        which, channels = f"ptr %dims, i64 {t}, i64 {count}", f"i64 {low}, i64 {high}"
        f.call("@winograd_before", f"ptr %x, {which}, ptr {zeros}, ptr {squares}, i64 {given}, i64 {given_apart}")
        memory = f"ptr {table}, ptr {squares}, ptr {results}"
        f.call("@winograd_products", f"ptr %weight, ptr %dims, i64 {count}, i64 {panel0}, i64 {panel1}, {memory}")
        made_of = f"ptr {results}, i64 {made}, i64 {made_apart}, {which}, {channels}"
        f.call("@winograd_after", f"{made_of}, ptr %bias, ptr %out")
        f.call("@winograd_epilogues", f"{which}, {channels}")

    f.loop(first, last, block, some)
    return f.text()
