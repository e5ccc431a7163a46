"""The LLVM text of first layers, whose few channels are copied as planes with the padding around them (conv_last.py).

The pixels of a row of the result read columns of the planes that lie a fixed step apart: with the kernel's width and the
step known, one address and constant offsets serve all pixels of a tile and all columns of the kernel. A table of addresses
costs more than the products here: a row of a 3 × 3 kernel has three values. There are variants for one, two and four
vectors of output channels. Half of the registers hold sums: with more pixels in a tile LLVM spills some of them in every
iteration.

One core of a Cascade Lake with AVX-512, microseconds, by a table / by rows of 12 and 6 pixels with two and four vectors
(the best of 72 alternating calls, packed weights): 3 × 3 with stride 2 on 3 channels at 224², 16 channels 934 / 165, 32
channels 1113 / 451; 3 × 3 with stride 1, 3→64 at 56² 291 / 194, 4→320 at 32² 618 / 345; 7 × 7 with stride 2, 3→32 at 56²
167 / 125. Rows of 12 and 6 / of 8 and 4 pixels (whole models of one layer, medians of nine alternating batches): 3→32 at
224² 783 / 457, 3→64 at 56² 218 / 191, 4→320 at 32² 529 / 376, 7 × 7 3→32 at 56² 134 / 106; 7 × 7 3→64 at 224² by a table
/ by rows 4743 / 3278. One core of a Zen 3 with AVX2, two vectors by 6 / 4 pixels: 7 × 7 with stride 2, 3→32 at 56²
273 / 117, 3→64 at 112² 2132 / 932, 3 × 3 with stride 1, 3→32 at 56² 183 / 102.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from airgraph.engine.native.kernels.conv_last import ConvTile
from airgraph.engine.native.kernels.conv_last_function import LastFunction

SHAPES = ((3, 1), (3, 2), (7, 2))  # the kernel's width, the step from a pixel to the next
PIXELS = {16: {4: 4, 2: 8, 1: 14}, 8: {2: 4, 1: 8}, 4: {2: 8, 1: 12}}  # in a tile, by lanes and vectors
PARAMS = "ptr %from, i64 %plane, i64 %line, ptr %panel, ptr %bias, ptr %to, ptr %dims, i64 %count, i64 %left"


class Place(NamedTuple):
    """Where the patches of a row of pixels begin, and the floats from a plane and from a line to the next."""

    start: str
    plane: str
    line: str


def name(kw: int, step: int, vectors: int) -> str:
    return f"row_{kw}_{step}_{vectors}"


def source(host: ConvTile) -> str:
    parts = [pixels(host, kw, step, v) for kw, step in SHAPES for v in PIXELS[host.lanes]]
    return "".join([*parts, one_pixel(host)])


def kernels_of(f: LastFunction, d: dict[str, str]) -> tuple[dict[int, str], str]:
    """The functions for a convolution, by vectors, and whether there are those it needs."""
    found = dict.fromkeys(PIXELS[f.host.lanes], "null")
    whole = f.op(f"and i1 {f.test('eq', d['groups'], 1)}, {f.test('eq', d['dw'], 1)}")
    for kw, step in SHAPES:
        fits = f.op(f"and i1 {f.test('eq', d['kw'], kw)}, {f.test('eq', d['sw'], step)}")
        fits = f.op(f"and i1 {fits}, {whole}")
        for v in found:
            found[v] = f.choose(fits, "ptr", "@" + name(kw, step, v), found[v])
    return found, f.test("ne", for_channels(f, found, d["o"]), "null", "ptr")


def for_channels(f: LastFunction, kernels: dict[int, str], left: str) -> str:
    """The function with just enough vectors for so many output channels of a panel."""
    found = kernels[f.host.vectors]
    for v in sorted(kernels, reverse=True):
        found = f.choose(f.test("sle", left, v * f.host.lanes), "ptr", kernels[v], found)
    return found


def row(
    f: LastFunction, kernels: dict[int, str], d: dict[str, str], at: Place, packed: str, to: str, count: str
) -> None:
    """`count` pixels of a row, all output channels; the weights are packed."""
    found = f.panels(d)

    def panel(number: str) -> None:
        channel = f.mul(number, f.host.panel)
        left = f.sub(d["o"], channel)
        where = f"ptr {at.start}, i64 {at.plane}, i64 {f.mul(at.line, d['dh'])}, ptr {f.panel(packed, number, found)}"
        rest = f"ptr {f.beside('%bias', channel)}, ptr {f.at(to, channel)}, ptr %dims, i64 {count}, i64 {left}"
        f.call(for_channels(f, kernels, left), f"{where}, {rest}")

    f.loop("0", found.parts, 1, panel)


def pixels(host: ConvTile, kw: int, step: int, vectors: int) -> str:
    """`count` pixels and `left` channels. The last tile overlaps the one before it."""
    f = LastFunction(host, name(kw, step, vectors), PARAMS)
    d, many = f.dims(), PIXELS[host.lanes][vectors]
    masks = f.masks("%left", vectors)

    def biased() -> list[str]:
        return [f.load_part(f.at("%bias", v * host.lanes), m) for v, m in enumerate(masks)]

    first = f.when(f.test("ne", "%bias", "null", "ptr"), biased, *[(host.kind, "zeroinitializer")] * vectors)

    def few() -> None:
        def one(i: str) -> None:
            def vector(v: str) -> None:
                bias, to = f.beside("%bias", v), f.at(f.at("%to", f.mul(i, d["o"])), v)
                where = f"ptr {f.at('%from', f.mul(i, step))}, i64 %plane, i64 %line, ptr {f.at('%panel', v)}"
                f.call("@one_pixel", f"{where}, ptr {bias}, ptr {to}, ptr %dims, i64 1, i64 {f.sub('%left', v)}")

            f.loop("0", f.min("%left", host.panel), host.lanes, vector)

        f.loop("0", "%count", 1, one)

    f.leave(f.test("slt", "%count", many), few)
    last = f.sub("%count", many)

    def tile(i: str) -> None:
        i = f.min(i, last)
        start = f.at("%from", f.mul(i, step))

        def plane(c: str, panel: str, *acc: str) -> list[str]:
            image = f.at(start, f.mul(c, "%plane"))

            def line(kh: str, panel: str, *acc: str) -> list[str]:
                values, out = Columns(f, f.at(image, f.mul(kh, "%line")), (many - 1) * step + kw), list(acc)
                for k in range(kw):
                    lanes = [f.load(host.kind, f.at(panel, k * host.panel + v * host.lanes)) for v in range(vectors)]
                    for p in range(many):
                        one = values.spread(p * step + k)
                        for v in range(vectors):
                            out[p * vectors + v] = f.fma(host.kind, lanes[v], one, out[p * vectors + v])
                return [f.at(panel, kw * host.panel), *out]

            return f.loop("0", d["kh"], 1, line, ("ptr", panel), *[(host.kind, a) for a in acc])

        sums = [(host.kind, first[v]) for _ in range(many) for v in range(vectors)]
        _, *found = f.loop("0", d["c"], 1, plane, ("ptr", "%panel"), *sums)

        def stores(masks: Sequence[str | None]) -> None:
            for p in range(many):
                place = f.at("%to", f.mul(f.add(i, p), d["o"]))
                for v, m in enumerate(masks):
                    f.store_part(found[p * vectors + v], f.at(place, v * host.lanes), m)

        f.with_masks("%left", masks, stores)

    f.loop("0", "%count", many, tile)
    return f.text()


class Columns:
    """So many numbers of a row, each in all lanes of a vector."""

    def __init__(self, f: LastFunction, row: str, count: int) -> None:
        self.f, self.row = f, row
        lanes = f.host.lanes
        starts = [min(i, count - lanes) for i in range(0, count, lanes)] if f.host.by_element else []
        self.held = [(start, f.load(f.host.kind, f.at(row, start))) for start in starts]

    def spread(self, column: int) -> str:
        kind = self.f.host.kind
        if not self.held:
            return self.f.splat(kind, self.f.load("float", self.f.at(self.row, column)))
        start, values = self.held[column // self.f.host.lanes]
        return self.f.lane(values, column - start)


def one_pixel(host: ConvTile) -> str:
    """One pixel and up to a vector of channels, for a kernel of any width: what is left of a short row."""
    f = LastFunction(host, "one_pixel", PARAMS)
    d, mask = f.dims(), f.mask("%left")
    first = f.either(
        f.test("ne", "%bias", "null", "ptr"), host.kind, lambda: f.load_part("%bias", mask), "zeroinitializer"
    )

    def tap(k: str, acc: str) -> list[str]:
        lines, column = f.div(k, d["kw"]), f.rem(k, d["kw"])
        plane, line = f.div(lines, d["kh"]), f.rem(lines, d["kh"])
        at = f.add(f.add(f.mul(plane, "%plane"), f.mul(line, "%line")), column)
        one = f.splat(host.kind, f.load("float", f.at("%from", at)))
        return [f.fma(host.kind, f.load(host.kind, f.at("%panel", f.mul(k, host.panel))), one, acc)]

    depth = f.mul(d["c"], f.mul(d["kh"], d["kw"]))
    (found,) = f.loop("0", depth, 1, tap, (host.kind, first))
    f.store_part(found, "%to", mask)
    return f.text()
