"""The LLVM text of the kernels of conv_last.py, which says what they do and how their work is divided."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from airgraph.engine.native.kernels import conv_depthwise, conv_rows, winograd
from airgraph.engine.native.kernels.conv_last import (
    BY_ELEMENT,
    DEPTHWISE,
    DIMS,
    NO_EPILOGUE,
    PLANES,
    SLOTS,
    TABLE,
    TILES,
    ConvTile,
    this_tile,
)
from airgraph.engine.native.kernels.conv_last_function import LINE, OPERANDS, SIGNATURE, LastFunction, micro_name
from airgraph.engine.native.llvm.builder import Function, declarations

EXPORTS = ("ag_conv_last", "ag_conv_pack")
INDEX = f"<{SLOTS} x i64>"


@cache
def source(tile: ConvTile | None = None) -> str:
    """The module's text."""
    host = tile or this_tile()
    kind, bits = host.kind, f"<{host.lanes} x i1>"
    masked = [
        f"declare {kind} @llvm.masked.load.v{host.lanes}f32.p0(ptr, i32, {bits}, {kind})",
        f"declare void @llvm.masked.store.v{host.lanes}f32.p0({kind}, ptr, i32, {bits})\n",
    ]
    parts = [declarations(host.lanes), "\n".join(masked)]
    parts += [] if host.masks else [load_some(host), store_some(host)]
    parts += [pack(host), pack_panel(host), pack_all(host)]
    parts += [of_tile(tile) for tile in TILES[host.lanes]]
    parts += [positions(host), tables(host), planes(host), epilogue(host), strips(host)]
    others = [module.source(host) for module in (conv_rows, conv_depthwise, winograd)]
    return "".join([*parts, *others, whole(host)])


def of_tile(host: ConvTile) -> str:
    parts = [micro(host, host.rows[0], v) for v in range(1, host.vectors + 1)]
    parts += [micro(host, host.rows[1], host.vectors)]
    parts += [micro(host, host.rows[0], v, ahead=True) for v in range(1, host.vectors + 1)] if host.fetches else []
    return "".join([*parts, plain_table(host), block(host), product(host)])


# -- vectors of which only a part exists, where the CPU has no masks -----------------------------------------------------
def load_some(host: ConvTile) -> str:
    """The first `left` lanes, and zeros."""
    f = LastFunction(host, "load_some", "ptr %from, i64 %left", result=host.kind)
    found = "zeroinitializer"
    for i in range(host.lanes - 1):
        there = f.test("slt", str(i), "%left")
        one = f.either(there, "float", partial(f.load, "float", f.at("%from", i)), "0.0")
        found = f.op(f"insertelement {host.kind} {found}, float {one}, i64 {i}")
    return f.text(f"{host.kind} {found}")


def store_some(host: ConvTile) -> str:
    f = LastFunction(host, "store_some", f"{host.kind} %value, ptr %to, i64 %left")
    for i in range(host.lanes - 1):
        one = f.op(f"extractelement {host.kind} %value, i64 {i}")
        f.when(f.test("slt", str(i), "%left"), partial(f.store, "float", one, f.at("%to", i)))
    return f.text()


# -- the inner kernel -------------------------------------------------------------------------------------------------
MICRO = (
    "ptr %table, i64 %taps, i64 %shift, i64 %deep, ptr %panel, ptr %to, i64 %apart, i64 %count, i64 %left, ptr %bias, "
    "ptr %next, i64 %pace, i1 %more"
)


def micro(host: ConvTile, rows: int, vectors: int, ahead: bool = False) -> str:
    """count ≤ rows pixels times `left` channels of a panel; `shift`: bytes to the channels of the group. `more`: their
    sum is added to what is there. `ahead`: meanwhile a part of the next weights, from `next` on, comes nearer, `pace` bytes
    with every value."""
    f = LastFunction(host, micro_name(rows, vectors, ahead), MICRO)
    masks = f.masks("%left", vectors)

    def biased() -> list[str]:
        return [f.load_part(f.at("%bias", v * host.lanes), m) for v, m in enumerate(masks)]

    first = f.when(f.test("ne", "%bias", "null", "ptr"), biased, *[(host.kind, "zeroinitializer")] * vectors)

    def values(
        places: Sequence[str], panel: str, upcoming: str, start: str, stop: str, deep: int, acc: Sequence[str]
    ) -> list[str]:
        def body(i: str, *tile: str) -> list[str]:
            out = list(tile)
            held = [f.load(host.kind, f.at(place, i)) for place in places] if deep > 1 and host.by_element else []
            for j in range(deep):
                k = f.add(i, j)
                if ahead:
                    f.prefetch_far(upcoming, f.mul(k, "%pace"))
                line = f.at(panel, f.mul(k, host.panel))
                for v in range(vectors) if host.near else ():
                    f.prefetch(line, host.near * host.panel + v * host.lanes)
                lanes = [f.load(host.kind, f.at(line, v * host.lanes)) for v in range(vectors)]
                for r, place in enumerate(places):
                    one = f.lane(held[r], j) if held else f.splat(host.kind, f.load("float", f.at(place, k)))
                    for v in range(vectors):
                        out[r * vectors + v] = f.fma(host.kind, lanes[v], one, out[r * vectors + v])
            return out

        return f.loop(start, stop, deep, body, *[(host.kind, a) for a in acc])

    def tap(t: str, panel: str, upcoming: str, *acc: str) -> list[str]:
        line = f.at("%table", f.mul(t, SLOTS), "i64")
        places = [f.at(f.op(f"load ptr, ptr {f.at(line, r, 'i64')}"), "%shift", "i8") for r in range(rows)]
        whole = f.down("%deep", host.deep)
        found = values(places, panel, upcoming, "0", whole, host.deep, acc)
        if host.deep > 1:
            found = values(places, panel, upcoming, whole, "%deep", 1, found)
        return [f.at(panel, f.mul("%deep", host.panel)), f.beyond(upcoming, f.mul("%deep", "%pace")), *found]

    start = [(host.kind, first[v]) for _ in range(rows) for v in range(vectors)]
    _, _, *sums = f.loop("0", "%taps", 1, tap, ("ptr", "%panel"), ("ptr", "%next"), *start)

    def added() -> list[str]:
        lines = [f.at("%to", f.mul("%apart", f.min(str(r), f.sub("%count", 1)))) for r in range(rows)]
        there = [f.load_part(f.at(line, v * host.lanes), m) for line in lines for v, m in enumerate(masks)]
        return [f.op(f"fadd {host.kind} {a}, {b}") for a, b in zip(sums, there)]

    tile = f.when("%more", added, *[(host.kind, value) for value in sums])

    def stores(masks: Sequence[str | None]) -> None:
        for r in range(rows):
            f.when(f.test("slt", str(r), "%count"), partial(store, r, masks))

    def store(r: int, masks: Sequence[str | None]) -> None:
        place = f.at("%to", f.mul("%apart", r))
        for v, m in enumerate(masks):
            f.store_part(tile[r * vectors + v], f.at(place, v * host.lanes), m)

    f.with_masks("%left", masks, stores)
    return f.text()


# -- weights ------------------------------------------------------------------------------------------------------------
def pack(host: ConvTile) -> str:
    """to[place(k)][lane] = from[lane][k] for k < depth and a vector of lanes, zeros in those from `rows` on; `panel`: how
    many there are in a panel.

    A value of channel c and tap t is k = c · taps + t in a weight, and t · channels + c in a panel.
    """
    params = "ptr %from, i64 %depth, i64 %rows, i64 %taps, i64 %channels, ptr %to, i64 %panel"
    f = LastFunction(host, "pack", params)

    def square(k: str, tap: str, channel: str) -> list[str]:
        places, inside = list[tuple[str, str]](), f.mask(f.sub("%depth", k))
        for i in range(host.lanes):
            place = f.at("%to", f.mul(f.add(f.mul(tap, "%channels"), channel), "%panel"))
            places.append((f.test("slt", f.add(k, i), "%depth"), place))
            over = f.test("eq", f.add(tap, 1), "%taps")
            channel = f.choose(over, "i64", f.add(channel, 1), channel)
            tap = f.choose(over, "i64", "0", f.add(tap, 1))
        lines = [line(k, number, inside) for number in range(host.lanes)]
        for column, (present, place) in zip(transposed(f, host, lines), places):
            f.when(present, partial(f.store, host.kind, column, place))
        return [tap, channel]

    def line(k: str, number: int, inside: str) -> str:
        place = f.at(f.at("%from", f.mul("%depth", number)), k)
        f.prefetch(place, LINE)
        return f.load_part(place, f.mask_where(f.test("slt", str(number), "%rows"), inside))

    f.loop("0", "%depth", host.lanes, square, ("i64", "0"), ("i64", "0"))
    return f.text()


def pack_panel(host: ConvTile) -> str:
    f = LastFunction(host, "pack_panel", "ptr %weight, ptr %dims, i64 %number, ptr %to")
    d = f.dims()
    width = f.width(d)
    p = f.panels(d, width)
    group, start = f.div("%number", p.parts), f.mul(f.rem("%number", p.parts), width)
    taps = f.choose(f.test("eq", d["mode"], TABLE), "i64", p.taps, "1")  # else as they are stored
    run = f.div(p.depth, taps)

    def some(lane: str) -> None:
        first = f.add(start, lane)
        weights = f.at("%weight", f.mul(f.add(f.mul(group, p.made), first), p.depth))
        size = f"i64 {p.depth}, i64 {f.sub(p.made, first)}, i64 {taps}, i64 {run}"
        f.call("@pack", f"ptr {weights}, {size}, ptr {f.at('%to', lane)}, i64 {width}")

    f.loop("0", width, host.lanes, some)
    return f.text()


def pack_all(host: ConvTile) -> str:
    """For a frame that keeps packed weights, for any tile."""
    f = LastFunction(host, "ag_conv_pack", "ptr %weight, ptr %dims, ptr %to", exported=True)
    d = f.dims()
    width = f.width(d)
    p = f.panels(d, width)

    def one(j: str) -> None:
        to = f.at("%to", f.mul(j, f.mul(p.depth, width)))
        f.call("@pack_panel", f"ptr %weight, ptr %dims, i64 {j}, ptr {to}")

    f.loop("0", f.mul(p.groups, p.parts), 1, one)
    return f.text()


def transposed(f: Function, host: ConvTile, rows: Sequence[str]) -> list[str]:
    """By halves: blocks of 1, 2, 4 … lanes change places with those of the row as far away."""
    lines, size = list(rows), 1
    while size < host.lanes:
        for i in [i for i in range(host.lanes) if not i & size]:
            a, b = lines[i], lines[i + size]
            low = [j if not j & size else host.lanes + j - size for j in range(host.lanes)]
            high = [j + size if not j & size else host.lanes + j for j in range(host.lanes)]
            lines[i], lines[i + size] = f.shuffle(host.kind, a, b, low), f.shuffle(host.kind, a, b, high)
        size *= 2
    return lines


# -- where patches lie ------------------------------------------------------------------------------------------------
BLOCK = "ptr %x, ptr %dims, i64 %p, i64 %last, ptr %scratch"


def numbers(values: Sequence[int]) -> str:
    return "<" + ", ".join(f"i64 {v}" for v in values) + ">"


def positions(host: ConvTile) -> str:
    """For the pixels of a block: the row and the column of the image where the patch begins, and its place in x.

    The slots of a tile behind its pixels, and those behind the last pixel, repeat the one before them.
    """
    f = LastFunction(host, "positions", "ptr %dims, i64 %p, i64 %last, ptr %scratch")
    d = f.dims()
    place, slots = f.part(d, "positions"), f.mul(d["tiles"], SLOTS)

    def slot(s: str, q: str, n: str, oh: str, ow: str) -> list[str]:
        row, column = (f.sub(f.mul(a, d[b]), d[c]) for a, b, c in ((oh, "sh", "ph"), (ow, "sw", "pw")))
        at = f.add(f.add(f.mul(n, d["xn"]), f.mul(row, d["xh"])), f.mul(column, d["xw"]))
        for i, value in enumerate((row, column, at)):
            f.do(f"store i64 {value}, ptr {f.at(place, f.add(s, f.mul(slots, i)), 'i64')}")
        within = f.op(f"and i64 {s}, {SLOTS - 1}")
        moves = f.op(f"or i1 {f.test('slt', within, host.rows[0] - 1)}, {f.test('eq', within, SLOTS - 1)}")
        moves = f.op(f"and i1 {moves}, {f.test('slt', q, '%last')}")
        one = f.op(f"zext i1 {moves} to i64")
        ow = f.add(ow, one)
        over = f.test("eq", ow, d["ow"])
        oh = f.choose(over, "i64", f.add(oh, 1), oh)
        below = f.test("eq", oh, d["oh"])
        ow, oh = f.choose(over, "i64", "0", ow), f.choose(below, "i64", "0", oh)
        return [f.add(q, one), f.choose(below, "i64", f.add(n, 1), n), oh, ow]

    rows = f.div("%p", d["ow"])
    start = [("i64", v) for v in ("%p", f.div(rows, d["oh"]), f.rem(rows, d["oh"]), f.rem("%p", d["ow"]))]
    f.loop("0", slots, 1, slot, *start)
    return f.text()


def plain_table(host: ConvTile) -> str:
    """Of a 1 × 1 convolution that reads every pixel: one address follows the other."""
    f = LastFunction(host, host.named("plain_table"), BLOCK)
    d = f.dims()
    table, base = f.part(d, "tables"), f.spread(f.op("ptrtoint ptr %x to i64"), SLOTS)
    step, last = f.spread(f.mul(d["xw"], 4), SLOTS), f.spread("%last", SLOTS)

    def tile(t: str) -> None:
        first = f.spread(f.add("%p", f.mul(t, host.rows[0])), SLOTS)
        pixel = f.op(f"add {INDEX} {first}, {numbers([min(i, host.rows[0] - 1) for i in range(SLOTS)])}")
        behind = f.op(f"icmp sgt {INDEX} {pixel}, {last}")
        pixel = f.op(f"select <{SLOTS} x i1> {behind}, {INDEX} {last}, {INDEX} {pixel}")
        place = f.op(f"add {INDEX} {base}, {f.op(f'mul {INDEX} {pixel}, {step}')}")
        f.do(f"store {INDEX} {place}, ptr {f.at(table, f.mul(t, SLOTS), 'i64')}, align 8")

    f.loop("0", d["tiles"], 1, tile)
    return f.text()


def tables(host: ConvTile) -> str:
    """For every tile and tap the addresses of the pixels' channels; zeros where a tap lies in the padding. Of planes: the
    addresses of a pixel's columns, for every plane of a group and every row."""
    f = LastFunction(host, "tables", "ptr %x, ptr %dims, ptr %scratch")
    d = f.dims()
    table, place, taps = f.part(d, "tables"), f.part(d, "positions"), f.panels(d).taps
    of_planes = f.test("eq", d["mode"], PLANES)
    count = f.choose(of_planes, "i64", f.div(d["c"], d["groups"]), "1")
    beside = f.op(f"and i1 {of_planes}, {f.test('eq', d['dw'], 1)}")
    columns_apart = f.choose(beside, "i64", "1", d["kw"])
    zeros = f.spread(f.op(f"ptrtoint ptr {f.part(d, 'zeros')} to i64"), SLOTS)
    base = f.spread(f.op("ptrtoint ptr %x to i64"), SLOTS)
    high, wide = f.spread(d["h"], SLOTS), f.spread(d["w"], SLOTS)

    def tile(t: str) -> None:
        def held(i: int) -> str:
            at = f.at(place, f.mul(f.add(t, f.mul(d["tiles"], i)), SLOTS), "i64")
            return f.op(f"load {INDEX}, ptr {at}, align 8")

        rows, columns, at = held(0), held(1), held(2)
        start = f.op(f"add {INDEX} {base}, {f.op(f'shl {INDEX} {at}, {numbers([2] * SLOTS)}')}")

        def tap(c: str, kh: str, kw: str) -> None:
            down, right = f.mul(kh, d["dh"]), f.mul(kw, d["dw"])
            row, column = (f.op(f"add {INDEX} {a}, {f.spread(b, SLOTS)}") for a, b in ((rows, down), (columns, right)))
            within = [f.op(f"icmp ult {INDEX} {a}, {b}") for a, b in ((row, high), (column, wide))]
            inside = f.op(f"and <{SLOTS} x i1> {within[0]}, {within[1]}")
            far = f.mul(f.add(f.mul(c, d["xc"]), f.add(f.mul(down, d["xh"]), f.mul(right, d["xw"]))), 4)
            address = f.op(f"add {INDEX} {start}, {f.spread(far, SLOTS)}")
            found = f.op(f"select <{SLOTS} x i1> {inside}, {INDEX} {address}, {INDEX} {zeros}")
            line = f.add(f.mul(c, d["kh"]), kh)
            number = f.add(f.mul(t, taps), f.add(f.mul(line, columns_apart), kw))
            f.do(f"store {INDEX} {found}, ptr {f.at(table, f.mul(number, SLOTS), 'i64')}, align 8")

        def plane(c: str) -> None:
            f.loop("0", d["kh"], 1, lambda kh: f.loop("0", columns_apart, 1, lambda kw: tap(c, kh, kw)))

        f.loop("0", count, 1, plane)

    f.loop("0", d["tiles"], 1, tile)
    return f.text()


def planes(host: ConvTile) -> str:
    """Rows from %top on of all planes of an image, in %to, with the padding around them; %lines of each."""
    f = LastFunction(host, "planes", "ptr %x, ptr %dims, i64 %top, i64 %lines, ptr %to")
    d = f.dims()
    pitch = f.pitch(d)
    beside = f.test("eq", d["xw"], 1)

    def line(c: str, i: str) -> None:
        row, to = f.add("%top", i), f.at("%to", f.mul(f.add(f.mul(c, "%lines"), i), pitch))
        f.loop("0", pitch, host.lanes, lambda j: f.store(host.kind, "zeroinitializer", f.at(to, j)))

        def copy() -> None:
            source = f.at("%x", f.add(f.mul(c, d["xc"]), f.mul(row, d["xh"])))
            inner = f.at(to, d["pw"])

            def some(j: str, mask: str | None) -> None:
                f.store_part(f.load_part(f.at(source, j), mask), f.at(inner, j), mask)

            def one(j: str) -> None:
                f.store("float", f.load("float", f.at(source, f.mul(j, d["xw"]))), f.at(inner, j))

            f.when(beside, lambda: f.each_vector("0", d["w"], some))
            f.when(f.op(f"xor i1 {beside}, true"), lambda: f.loop("0", d["w"], 1, one) and None)

        f.when(f.test("ult", row, d["h"]), copy)

    f.loop("0", d["c"], 1, lambda c: f.loop("0", "%lines", 1, lambda i: line(c, i)))
    return f.text()


# -- as a product of matrices -----------------------------------------------------------------------------------------
def is_plain(f: LastFunction, d: dict[str, str]) -> str:
    """Whether it is a 1 × 1 convolution that reads every pixel, one behind the other."""
    plain = f.test("eq", d["mode"], TABLE)
    ones = [f.test("eq", d[name], 1) for name in ("kh", "kw", "sh", "sw")]
    ones += [f.test("eq", d[name], 0) for name in ("ph", "pw")]
    ones += [f.test("eq", f.mul(d["w"], d["xw"]), d["xh"]), f.test("eq", f.mul(d["h"], d["xh"]), d["xn"])]
    ones += [f.test("eq", d["oh"], d["h"]), f.test("eq", d["ow"], d["w"])]
    for condition in ones:
        plain = f.op(f"and i1 {plain}, {condition}")
    return plain


def block(host: ConvTile) -> str:
    """Pixels p .. stop - 1, at most a block of them, times panels first .. end - 1, whose weights lie at %packed. %next:
    what is read after them (null: nobody knows), and fetched with the last panel."""
    params = f"{OPERANDS}, i64 %p, i64 %stop, i64 %first, i64 %end, ptr %packed, ptr %next, ptr %scratch"
    f = LastFunction(host, host.named("block"), params)
    d = f.dims()
    last, count = f.sub("%stop", 1), f.sub("%stop", "%p")

    def plain_rows() -> None:
        f.call(f"@{host.named('plain_table')}", f"ptr %x, ptr %dims, i64 %p, i64 {last}, ptr %scratch")

    def any_table() -> None:
        f.call("@positions", f"ptr %dims, i64 %p, i64 {last}, ptr %scratch")
        f.call("@tables", "ptr %x, ptr %dims, ptr %scratch")

    if host.number:
        plain_rows()
    else:
        plain = is_plain(f, d)
        f.when(plain, plain_rows)
        f.when(f.op(f"xor i1 {plain}, true"), any_table)
    table = f.part(d, "tables")
    found = f.panels(d)
    taps, deep, of_planes = found.taps, found.run, f.test("eq", d["mode"], PLANES)
    pace = f.pace(count)
    many, chunk, far = f.test("sgt", taps, 1), d["chunk"], f.test("ne", d["far"], 0)

    def panel(number: str) -> None:
        group, part = f.div(number, found.parts), f.rem(number, found.parts)
        o = f.channel(number, found)
        left = f.sub(found.made, f.mul(part, host.panel))
        all_weights = f.panel("%packed", f.sub(number, "%first"), found)
        own = f.mul(group, f.choose(of_planes, "i64", f.mul(f.div(d["c"], d["groups"]), d["xc"]), deep))
        over = f.test("eq", f.add(number, 1), "%end")
        f.loop("0", found.depth, chunk, lambda k: several(k, over, own, o, left, all_weights))

    def several(k: str, over: str, channel: str, o: str, left: str, all_weights: str) -> None:
        """The values from k on, of all tiles: whole taps, or channels of the only one."""
        first = f.choose(many, "i64", f.div(k, deep), "0")
        count_taps = f.choose(many, "i64", f.min(f.sub(taps, first), f.div(chunk, deep)), "1")
        run = f.choose(many, "i64", deep, f.min(f.sub(deep, k), chunk))
        shift = f.mul(f.add(channel, f.choose(many, "i64", "0", k)), 4)
        weights = f.at(all_weights, f.mul(k, host.panel))
        part = f.mul(count_taps, run)
        after, more = f.beyond(weights, f.mul(part, 4 * host.panel)), f.test("sgt", k, 0)
        over = f.op(f"and i1 {over}, {f.test('sge', f.add(k, chunk), found.depth)}")
        after = f.choose(over, "ptr", "%next", after)
        fetches = f.op(f"and i1 {far}, {f.test('ne', after, 'null', 'ptr')}")
        bias = f.choose(more, "ptr", "null", f.beside("%bias", o))
        large, small = f.micros(left, fetches, pace)

        def tile(p: str) -> None:
            number, here = f.div(p, host.rows[0]), f.sub(count, p)
            low = f.test("sle", here, host.rows[1])
            ahead = f.beyond(after, f.mul(f.mul(number, part), pace))
            lines = f.at(table, f.mul(f.add(f.mul(number, taps), first), SLOTS), "i64")
            to = f.at(f.at("%out", f.mul(f.add("%p", p), d["o"])), o)
            where = f"ptr {lines}, i64 {count_taps}, i64 {shift}, i64 {run}, ptr {weights}, ptr {to}, i64 {d['o']}"
            rest = f"i64 {f.min(here, host.rows[0])}, i64 {left}, ptr {bias}, ptr {ahead}, i64 {pace}, i1 {more}"
            f.call(f.choose(low, "ptr", small, large), f"{where}, {rest}")

        f.loop("0", count, host.rows[0], tile)

    f.loop("%first", "%end", 1, panel)
    return f.text()


def product(host: ConvTile) -> str:
    """Some rows and columns of a product of matrices, as a convolution of 1 × 1 whose weight is packed. With the last panel
    come the first weights that this thread is likely to need next: its own of the next block, or of the next product."""
    params = f"{OPERANDS}, i64 %row0, i64 %row1, i64 %panel0, i64 %panel1, ptr %scratch"
    f = LastFunction(host, host.named("product"), params)
    d = f.dims()
    block, found = f.mul(d["tiles"], host.rows[0]), f.panels(d)
    packed = f.panel("%weight", "%panel0", found)

    def begin() -> list[str]:
        number = f.div(f.mul("%panel0", d["next_panels"]), found.parts)
        address = f.op(f"inttoptr i64 {d['next']} to ptr")
        return [f.beyond(address, f.mul(number, d["next_bytes"]))]

    (following,) = f.when(f.test("ne", d["next"], 0), begin, ("ptr", "null"))

    def some(p: str) -> None:
        stop = f.min(f.add(p, block), "%row1")
        after = f.choose(f.test("eq", stop, "%row1"), "ptr", following, packed)
        which = f"i64 {p}, i64 {stop}, i64 %panel0, i64 %panel1"
        f.call(f"@{host.named('block')}", f"{OPERANDS}, {which}, ptr {packed}, ptr {after}, ptr %scratch")

    f.loop("%row0", "%row1", block, some)
    return f.text()


def epilogue(host: ConvTile) -> str:
    """Of pixels p .. stop - 1 and channels c .. end - 1, if there is one."""
    f = LastFunction(host, "epilogue", "ptr %dims, i64 %p, i64 %stop, i64 %c, i64 %end")
    columns = f.op("alloca [2 x i64]")
    d = f.dims()
    f.leave(f.test("eq", d["epilogue"], NO_EPILOGUE), lambda: None)
    function, arguments, numbers = (
        f.op(f"inttoptr i64 {d[name]} to ptr") for name in ("function", "arguments", "numbers")
    )
    by_element = f.test("eq", d["epilogue"], BY_ELEMENT)
    whole = f.test("eq", f.sub("%end", "%c"), d["o"])

    def elements(first: str, last: str) -> None:
        f.call(function, f"ptr {arguments}, ptr {numbers}, i64 {first}, i64 {last}, ptr {columns}")

    def one(pixel: str) -> None:
        start = f.mul(pixel, d["o"])
        elements(f.add(start, "%c"), f.add(start, "%end"))

    def all_channels() -> None:
        elements(f.mul("%p", d["o"]), f.mul("%stop", d["o"]))

    f.leave(f.op(f"and i1 {by_element}, {whole}"), all_channels)

    def some_channels() -> None:
        f.loop("%p", "%stop", 1, one)

    f.leave(by_element, some_channels)
    for i, value in enumerate(("%c", "%end")):
        f.do(f"store i64 {value}, ptr {f.at(columns, i, 'i64')}")
    elements("%p", "%stop")
    return f.text()


def strips(host: ConvTile) -> str:
    """Pixels job0 .. job1 - 1 of a convolution with few channels, some rows at a time: these are copied as planes with the
    padding around them, of which the block sees a convolution without padding."""
    f = LastFunction(host, "strips", f"{SIGNATURE}, ptr %packed")
    inner = f.op(f"alloca [{len(DIMS)} x i64]")
    d = f.dims()
    for i, name in enumerate(DIMS):
        f.do(f"store i64 {d[name]}, ptr {f.at(inner, i, 'i64')}")
    memory, found, pitch = f.part(d, "planes"), f.panels(d), f.pitch(d)
    block, every = f.mul(d["tiles"], host.rows[0]), f.mul(found.groups, found.parts)
    reach = f.add(f.mul(f.sub(d["kh"], 1), d["dh"]), 1)

    def set_inner(values: dict[str, str]) -> None:
        for name, value in values.items():
            f.do(f"store i64 {value}, ptr {f.at(inner, DIMS.index(name), 'i64')}")

    kernels, by_rows = conv_rows.kernels_of(f, d)
    set_inner({"n": "1", "w": pitch, "ph": "0", "pw": "0", "xn": "0", "xh": pitch, "xw": "1"})
    first, last = f.div("%job0", d["ow"]), f.ceil("%job1", d["ow"])

    def image(n: str) -> None:
        start, end = f.mul(n, d["oh"]), f.mul(f.add(n, 1), d["oh"])

        def some(r: str) -> None:
            rows = f.min(f.sub(f.min(end, last), r), d["strip"])
            lines = f.add(f.mul(f.sub(rows, 1), d["sh"]), reach)
            top = f.sub(f.mul(f.sub(r, start), d["sh"]), d["ph"])
            f.call("@planes", f"ptr {f.at('%x', f.mul(n, d['xn']))}, ptr %dims, i64 {top}, i64 {lines}, ptr {memory}")
            set_inner({"h": lines, "xc": f.mul(lines, pitch), "oh": rows})
            before = f.mul(r, d["ow"])
            low = f.max(f.sub("%job0", before), 0)
            high = f.min(f.sub("%job1", before), f.mul(rows, d["ow"]))
            out = f.at("%out", f.mul(before, d["o"]))

            def one(p: str) -> None:
                until = f.min(f.add(p, block), high)
                operands = f"ptr {memory}, ptr %weight, ptr %bias, ptr {out}, ptr {inner}"
                which = f"i64 {p}, i64 {until}, i64 0, i64 {every}, ptr %packed, ptr null"
                f.call("@block", f"{operands}, {which}, ptr %scratch")
                pixels = f"i64 {f.add(before, p)}, i64 {f.add(before, until)}"
                f.call("@epilogue", f"ptr %dims, {pixels}, i64 0, i64 {d['o']}")

            def row(q: str) -> None:
                p, until = f.max(f.mul(q, d["ow"]), low), f.min(f.mul(f.add(q, 1), d["ow"]), high)
                skipped = f.add(f.mul(f.mul(q, d["sh"]), pitch), f.mul(f.rem(p, d["ow"]), d["sw"]))
                place = conv_rows.Place(f.at(memory, skipped), f.mul(lines, pitch), pitch)
                conv_rows.row(f, kernels, d, place, "%packed", f.at(out, f.mul(p, d["o"])), f.sub(until, p))
                pixels = f"i64 {f.add(before, p)}, i64 {f.add(before, until)}"
                f.call("@epilogue", f"ptr %dims, {pixels}, i64 0, i64 {d['o']}")

            def all_rows() -> None:
                f.loop(f.div(low, d["ow"]), f.ceil(high, d["ow"]), 1, row)

            f.when(by_rows, all_rows)
            f.loop(low, f.choose(by_rows, "i64", low, high), block, one)

        f.loop(f.max(start, first), f.min(end, last), d["strip"], some)

    f.loop(f.div(first, d["oh"]), f.ceil(last, d["oh"]), 1, image)
    return f.text()


def whole(host: ConvTile) -> str:
    """Jobs are pixels, or panels."""
    f = LastFunction(host, "ag_conv_last", SIGNATURE, exported=True)
    d = f.dims()
    f.leave(f.test("sge", "%job0", "%job1"), lambda: None)
    deep = f.test("eq", d["mode"], DEPTHWISE)
    zeros = f.part(d, "zeros")
    size = f.choose(deep, "i64", str(host.lanes), d["c"])
    f.loop("0", size, 1, lambda i: f.store("float", "0.0", f.at(zeros, i)))
    f.leave(deep, lambda: f.call("@depthwise", SIGNATURE))
    scratch, found = f.part(d, "packed"), f.panels(d)
    pixels, block = f.mul(d["n"], f.mul(d["oh"], d["ow"])), f.mul(d["tiles"], host.rows[0])
    packs, ready = f.test("eq", d["prepacked"], 0), f.test("ne", d["prepacked"], 0)
    by_squares = f.op(f"and i1 {ready}, {f.test('ne', d['squares'], 0)}")
    f.leave(by_squares, lambda: f.call("@winograd", SIGNATURE))

    def one_block(p: str, stop: str, first: str, end: str, packed: str) -> None:
        until = f.min(f.add(p, block), stop)
        which = f"i64 {p}, i64 {until}, i64 {first}, i64 {end}, ptr {packed}, ptr null"
        f.call("@block", f"{OPERANDS}, {which}, ptr %scratch")
        channels = f"i64 {f.channel(first, found)}, i64 {f.channel(end, found)}"
        f.call("@epilogue", f"ptr %dims, i64 {p}, i64 {until}, {channels}")

    def by_panels() -> None:
        def panel(j: str) -> None:
            f.call("@pack_panel", f"ptr %weight, ptr %dims, i64 {j}, ptr {scratch}")
            f.loop("0", pixels, block, lambda p: one_block(p, pixels, j, f.add(j, 1), scratch))

        def every_panel(p: str) -> None:
            one_block(p, pixels, "%job0", "%job1", f.panel("%weight", "%job0", found))

        f.when(packs, lambda: f.loop("%job0", "%job1", 1, panel) and None)
        f.when(ready, lambda: f.loop("0", pixels, block, every_panel) and None)

    f.leave(f.test("eq", d["split"], 1), by_panels)
    f.when(packs, lambda: f.call("@ag_conv_pack", f"ptr %weight, ptr %dims, ptr {scratch}"))
    packed, every = f.choose(ready, "ptr", "%weight", scratch), f.mul(found.groups, found.parts)
    of_planes = f.test("eq", d["mode"], PLANES)
    f.leave(of_planes, lambda: f.call("@strips", f"{SIGNATURE}, ptr {packed}"))
    f.loop("%job0", "%job1", block, lambda p: one_block(p, "%job1", "0", every, packed))
    return f.text()
