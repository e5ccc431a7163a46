"""The LLVM text of depthwise convolutions with channels last (conv_last.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from airgraph.engine.native.kernels.conv_last import ConvTile
from airgraph.engine.native.kernels.conv_last_function import OPERANDS, SIGNATURE, LastFunction

ACROSS = 8  # pixels in a tile
TAPS = (3, 5, 7)  # in a row
STEPS = (1, 2)
ACROSS_PARAMS = (
    "ptr %image, ptr %taps, ptr %bias, ptr %to, ptr %dims, ptr %zeros, i64 %top, i64 %left, i64 %count, i64 %channels"
)


def across(host: ConvTile, kw: int | None, step: int | None) -> str:
    """`count` pixels of a row and up to a vector of channels; the patch of the first begins at row %top, column %left.

    Without masks a part of a vector is for `across_any`."""
    f = LastFunction(host, across_name(kw, step), ACROSS_PARAMS)
    d = f.dims()
    mask = f.mask("%channels") if host.masks or kw is None else None
    first = f.either(
        f.test("ne", "%bias", "null", "ptr"), host.kind, lambda: f.load_part("%bias", mask), "zeroinitializer"
    )

    def value(row: str, column: str) -> str:
        inside = f.test("ult", column, d["w"])
        place = f.op(f"getelementptr float, ptr {row}, i64 {f.mul(column, d['xw'])}")
        return f.load_part(f.choose(inside, "ptr", place, "%zeros"), mask)

    def known(row: str, weights: str, left: str, acc: Sequence[str]) -> list[str]:
        assert kw is not None and step is not None
        out, seen = list(acc), {}
        lanes = [f.load(host.kind, f.at(weights, k * host.panel)) for k in range(kw)]
        for j in range((ACROSS - 1) * step + kw):
            seen = {j: value(row, f.add(left, j))}
            for k in range(kw):
                pixel, rest = divmod(j - k, step)
                if rest == 0 and 0 <= pixel < ACROSS:
                    out[pixel] = f.fma(host.kind, lanes[k], seen[j], out[pixel])
        return out

    def unknown(row: str, weights: str, left: str, acc: Sequence[str]) -> list[str]:
        def tap(k: str, *tile: str) -> list[str]:
            lanes = f.load(host.kind, f.at(weights, f.mul(k, host.panel)))
            column = f.add(left, f.mul(k, d["dw"]))
            columns = [f.add(column, f.mul(d["sw"], i)) for i in range(ACROSS)]
            return [f.fma(host.kind, lanes, value(row, c), a) for c, a in zip(columns, tile)]

        return f.loop("0", d["kw"], 1, tap, *[(host.kind, a) for a in acc])

    def tile(i: str) -> None:
        left = f.add("%left", f.mul(i, d["sw"]))

        def line(kh: str, *acc: str) -> list[str]:
            at = f.add("%top", f.mul(kh, d["dh"]))
            row = f.op(f"getelementptr float, ptr %image, i64 {f.mul(at, d['xh'])}")
            weights = f.at("%taps", f.mul(f.mul(kh, d["kw"]), host.panel))
            sums = known if kw is not None else unknown
            kept = [(host.kind, a) for a in acc]
            return f.when(f.test("ult", at, d["h"]), lambda: sums(row, weights, left, acc), *kept)

        found = f.loop("0", d["kh"], 1, line, *[(host.kind, first)] * ACROSS)
        for j, pixel in enumerate(found):
            place = f.at("%to", f.mul(f.add(i, j), d["o"]))
            f.when(f.test("slt", f.add(i, j), "%count"), partial(f.store_part, pixel, place, mask))

    f.loop("0", "%count", ACROSS, tile)
    return f.text()


def across_name(kw: int | None, step: int | None) -> str:
    return f"across_{kw}_{step}" if kw is not None else "across_any"


def segment(host: ConvTile) -> str:
    """Pixels p .. stop - 1 of one row, channels c .. end - 1, whose taps are packed at %packed."""
    f = LastFunction(host, "segment", f"{OPERANDS}, i64 %p, i64 %stop, i64 %c, i64 %end, ptr %packed, ptr %scratch")
    d = f.dims()
    rows, ow = f.div("%p", d["ow"]), f.rem("%p", d["ow"])
    n, oh = f.div(rows, d["oh"]), f.rem(rows, d["oh"])
    top, left = (f.sub(f.mul(a, d[b]), d[c]) for a, b, c in ((oh, "sh", "ph"), (ow, "sw", "pw")))
    image, zeros = f.at("%x", f.mul(n, d["xn"])), f.part(d, "zeros")
    dense, kernel = f.test("eq", d["dw"], 1), f"@{across_name(None, None)}"
    for kw in TAPS:
        for step in STEPS:
            fits = f.op(f"and i1 {f.test('eq', d['kw'], kw)}, {f.test('eq', d['sw'], step)}")
            kernel = f.choose(f.op(f"and i1 {fits}, {dense}"), "ptr", f"@{across_name(kw, step)}", kernel)
    deep = f.mul(d["kh"], d["kw"])

    def lanes(c: str) -> None:
        channels, across_some = f.sub("%end", c), f"@{across_name(None, None)}"
        fits = "true" if host.masks else f.test("sge", channels, host.lanes)
        number = f.sub(c, "%c")
        panel = f.mul(f.mul(f.div(number, host.panel), host.panel), deep)
        taps = f.at(f.at("%packed", panel), f.rem(number, host.panel))
        to = f.at(f.at("%out", f.mul("%p", d["o"])), c)
        where = f"ptr {f.at(image, c)}, ptr {taps}, ptr {f.beside('%bias', c)}, ptr {to}, ptr %dims, ptr {zeros}"
        rest = f"i64 {top}, i64 {left}, i64 {f.sub('%stop', '%p')}, i64 {channels}"
        f.call(f.choose(fits, "ptr", kernel, across_some), f"{where}, {rest}")

    f.loop("%c", "%end", host.lanes, lanes)
    return f.text()


def depthwise(host: ConvTile) -> str:
    """As ag_conv_last, row by row."""
    f = LastFunction(host, "depthwise", SIGNATURE)
    d = f.dims()
    scratch, found = f.part(d, "packed"), f.panels(d)
    pixels = f.mul(d["n"], f.mul(d["oh"], d["ow"]))
    by_panels = f.test("eq", d["split"], 1)
    c0 = f.choose(by_panels, "i64", f.mul("%job0", host.panel), "0")
    c1 = f.choose(by_panels, "i64", f.min(f.mul("%job1", host.panel), d["c"]), d["c"])
    p0, p1 = f.choose(by_panels, "i64", "0", "%job0"), f.choose(by_panels, "i64", pixels, "%job1")

    first, packs = f.div(c0, host.panel), f.test("eq", d["prepacked"], 0)
    packed = f.choose(packs, "ptr", scratch, f.panel("%weight", first, found))

    def one(j: str) -> None:
        f.call("@pack_panel", f"ptr %weight, ptr %dims, i64 {f.add(first, j)}, ptr {f.panel(scratch, j, found)}")

    def row(r: str) -> None:
        p = f.max(f.mul(r, d["ow"]), p0)
        stop = f.min(f.mul(f.add(r, 1), d["ow"]), p1)
        f.call("@segment", f"{OPERANDS}, i64 {p}, i64 {stop}, i64 {c0}, i64 {c1}, ptr {packed}, ptr %scratch")
        f.call("@epilogue", f"ptr %dims, i64 {p}, i64 {stop}, i64 {c0}, i64 {c1}")

    f.when(packs, lambda: f.loop("0", f.ceil(f.sub(c1, c0), host.panel), 1, one) and None)
    f.loop(f.div(p0, d["ow"]), f.ceil(p1, d["ow"]), 1, row)
    return f.text()


def source(host: ConvTile) -> str:
    kernels = [across(host, kw, step) for kw in TAPS for step in STEPS] + [across(host, None, None)]
    return "".join([*kernels, segment(host), depthwise(host)])
