"""Convolution in two dimensions, float32, NCHW: the matrix product of gemm.py with its panels gathered from the image.

    out[o, pixel] = Σk W[o, k] · patch[k, pixel],  k = (channel, kh, kw)

W is read as it is stored, being *rows* of the inner kernel; a *panel* is 8 pixels' patches, P[k][8]. 64 pixels are packed
(128 KiB at a depth of 512, a part of level 2) and multiplied with the output channels, so that a value gathered once is
used O/8 times for a cycle each: gathering at half a cycle a value is 6 % of the work at 64 channels. A job is 16 channels
of such a block; those of one block that a thread does one after the other are one product, packed for once.

Four pixels are gathered at once. Where they come from, for one (kh, kw), is the same in every channel, so it is worked out
once and a loop over the channels follows: one load where they lie side by side, two where every other one is taken
(stride 2), else four, with zeros for the padding. Pixels of one row whose patches have no padding need no tests at all.

A depthwise convolution has no product of matrices in it: a plane is summed up over (kh, kw), 16 pixels of a row at once,
from a copy with its padding, which spares every test for the border.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce

from airgraph.engine.native.kernels.gemm import ADD, LINE, V4, Machine, kernels, merge, run_tile, this_machine
from airgraph.engine.native.llvm.builder import Function, declarations
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import Amount, ceil, choose, equal, maximum, minimum

EXPORTS = ("ag_conv2d", "ag_conv2d_jobs")
SIGNATURE = "ptr %x, ptr %weight, ptr %bias, ptr %out, ptr %dims, i64 %job0, i64 %job1, ptr %scratch"
PIXELS = 64  # in a job
DEEP = 512  # values of a patch in a block, or those of one channel if they are more
MAX_KERNEL = 2048  # kh · kw: a deeper block would not fit in the scratch memory
MAX_GROUPED = 49  # kh · kw of a convolution in groups
CHANNELS = 16  # output channels in a job
ACROSS = 256  # pixels in a row of a depthwise block
WINDOW = PIXELS * MAX_KERNEL  # floats that such a block may see


def slack(host: Machine) -> int:
    """Pixels behind a row of a depthwise block: a vector may stick out."""
    return max(8, host.lanes)


def refuses(sizes: ConvSizes) -> str | None:
    """Why there is no kernel for a convolution of these sizes; None: there is one."""
    most = MAX_GROUPED if sizes.groups > 1 else MAX_KERNEL
    if sizes.kh * sizes.kw > most:
        return f"a convolution kernel of {sizes.kh}×{sizes.kw}, more than {most} elements"
    return None


def jobs(sizes: ConvSizes) -> int:
    """How many jobs a convolution has; ag_conv2d_jobs is the same in machine code."""
    if sizes.groups == sizes.c:
        return sizes.n * sizes.o
    blocks = sizes.n * sizes.groups * -(-sizes.oh * sizes.ow // PIXELS)
    return blocks * -(-sizes.o // sizes.groups // CHANNELS)


def scratch_bytes(sizes: Sequence[Amount], machine: Machine | None = None) -> Amount:
    """What a thread needs for its jobs. `sizes`: numbers in the order of ConvSizes."""
    d, host = dict(zip(ConvSizes._fields, sizes)), machine or this_machine()
    reach_down, reach_right = (d["kh"] - 1) * d["dh"] + 1, (d["kw"] - 1) * d["dw"] + 1
    pitch = (minimum(d["ow"], ACROSS) + slack(host) - 1) * d["sw"] + reach_right
    rows = minimum(maximum(WINDOW // pitch - reach_down, 0) // d["sh"], d["oh"] - 1) * d["sh"] + reach_down
    kernel, mine, pixels = d["kh"] * d["kw"], d["c"] // d["groups"], maximum(d["oh"] * d["ow"], 1)
    rounds = maximum(ceil(mine, maximum(DEEP // kernel, 1)), 1)
    panels = ceil(ceil(pixels, ceil(pixels, PIXELS)), host.panel)
    by_plane = host.tile_bytes + 4 * (rows * pitch + 2 * slack(host))
    by_block = host.tile_bytes + 4 * panels * (ceil(mine, rounds) * kernel * host.panel + LINE)
    return choose(equal(d["groups"], d["c"]), by_plane, by_block)


@cache
def source(machine: Machine | None = None) -> str:
    """The module's text."""
    host = machine or this_machine()
    parts = [
        declarations(host.lanes),
        merge(host, by_row=True),
        *kernels(host, "conv", transposed=False, bias_by_row=True),
    ]
    parts += [quad(host), block(host), cut(host), plane(host), whole(), count()]
    parts += [taps(host, step, fixed=False) for step in (1, 2, None)] + [
        taps(host, step, fixed=True) for step in (1, 2)
    ]
    return "".join(parts)


def both(f: Function, conditions: Sequence[str]) -> str:
    return reduce(lambda a, b: f.op(f"and i1 {a}, {b}"), conditions)


def sizes(f: Function) -> dict[str, str]:
    return {name: f.load("i64", f.at("%dims", i, "i64")) for i, name in enumerate(ConvSizes._fields)}


# -- the jobs ---------------------------------------------------------------------------------------------------------
def split(f: Function, d: dict[str, str]) -> tuple[str, str]:
    """Blocks of pixels in a plane, blocks of output channels in a group."""
    return f.ceil(f.mul(d["oh"], d["ow"]), PIXELS), f.ceil(f.div(d["o"], d["groups"]), CHANNELS)


def count() -> str:
    f = Function("ag_conv2d_jobs", "ptr %dims", "i64", exported=True)
    d = sizes(f)
    blocks, parts = split(f, d)
    general = f.mul(f.mul(f.mul(d["n"], d["groups"]), blocks), parts)
    answer = f.choose(f.test("eq", d["groups"], d["c"]), "i64", f.mul(d["n"], d["o"]), general)
    return f.text(f"i64 {answer}")


def whole() -> str:
    f = Function("ag_conv2d", SIGNATURE, exported=True)
    d = sizes(f)
    operands = "ptr %x, ptr %weight, ptr %bias, ptr %out, ptr %dims"

    def planes() -> None:
        f.loop("%job0", "%job1", 1, lambda j: f.call("@plane", f"{operands}, i64 {j}, ptr %scratch"))

    def block(b: str) -> None:
        start = f.mul(b, parts)
        first, last = f.max(f.sub("%job0", start), 0), f.min(f.sub("%job1", start), parts)
        f.call("@block", f"{operands}, i64 {b}, i64 {first}, i64 {last}, ptr %scratch")

    f.leave(f.test("eq", d["groups"], d["c"]), planes)
    f.leave(f.test("sge", "%job0", "%job1"), lambda: None)
    parts = split(f, d)[1]
    f.loop(f.div("%job0", parts), f.ceil("%job1", parts), 1, block)
    return f.text()


# -- as a product of matrices -----------------------------------------------------------------------------------------
def block(host: Machine) -> str:
    """One block of pixels of one image and group, times some blocks of output channels."""
    params = "ptr %x, ptr %weight, ptr %bias, ptr %out, ptr %dims, i64 %block, i64 %first, i64 %last, ptr %scratch"
    f = Function("block", params)
    d = sizes(f)
    blocks, _ = split(f, d)
    group_in, group_out = f.div(d["c"], d["groups"]), f.div(d["o"], d["groups"])
    kernel, pixels, image = f.mul(d["kh"], d["kw"]), f.mul(d["oh"], d["ow"]), f.mul(d["h"], d["w"])
    depth = f.mul(group_in, kernel)

    here, rest = f.rem("%block", blocks), f.div("%block", blocks)
    group, n = f.rem(rest, d["groups"]), f.div(rest, d["groups"])
    span = f.mul(f.ceil(f.ceil(pixels, blocks), host.panel), host.panel)
    p0 = f.mul(here, span)
    p1 = f.min(f.add(p0, span), pixels)
    o0, o1 = f.mul("%first", CHANNELS), f.min(f.mul("%last", CHANNELS), group_out)
    first_out = f.mul(group, group_out)
    here = f.at("%x", f.mul(f.add(f.mul(n, d["c"]), f.mul(group, group_in)), image))
    image_out = f.at("%out", f.mul(f.add(f.mul(n, d["o"]), first_out), pixels))
    weight, panels = f.at("%weight", f.mul(first_out, depth)), f.at("%scratch", host.tile_bytes, "i8")
    bias = f.beside("%bias", first_out)
    rounds = f.max(f.ceil(group_in, f.max(f.div(str(DEEP), kernel), 1)), 1)
    each = f.ceil(group_in, rounds)

    def deep(round_: str) -> None:
        c0 = f.mul(round_, each)
        wide = f.max(f.min(f.sub(group_in, c0), each), 0)
        k = f.mul(wide, kernel)
        apart = f.add(f.mul(k, host.panel), LINE)
        start = f.test("eq", round_, 0)
        flags = f.choose(start, "i64", "0", str(ADD))
        now = f.choose(start, "ptr", bias, "null")
        image_here = f.at(here, f.mul(c0, image))

        def panel_of(p: str) -> str:
            return f.at(panels, f.mul(f.div(f.sub(p, p0), host.panel), apart))

        def pack(p: str) -> None:
            to = f.at(panel_of(p), f.rem(p, host.panel))
            f.call("@quad", f"ptr {image_here}, ptr %dims, i64 {p}, i64 {wide}, ptr {to}")

        def band(o: str) -> None:
            rows = f.at(f.at(weight, f.mul(o, depth)), f.mul(c0, kernel))
            some = (rows, depth, f.min(f.sub(o1, o), host.rows[0]))

            def tile(p: str) -> None:
                place = f.at(f.at(image_out, f.mul(o, pixels)), p)
                lanes = (panel_of(p), k, f.sub(p1, p))
                run_tile(f, host, "conv", some, lanes, (place, pixels), f.beside(now, o), flags)

            f.loop(p0, p1, host.panel, tile)

        f.loop(p0, f.add(p0, f.mul(f.ceil(f.sub(p1, p0), host.panel), host.panel)), 4, pack)  # zeros behind p1
        f.loop(o0, o1, host.rows[0], band)

    f.loop("0", rounds, 1, deep)
    return f.text()


def quad(host: Machine) -> str:
    """The patches of pixels p .. p+3 in `wide` channels, into four lanes of a panel."""
    f = Function("quad", "ptr %x, ptr %dims, i64 %p, i64 %wide, ptr %to")
    d = sizes(f)
    image, pixels = f.mul(d["h"], d["w"]), f.mul(d["oh"], d["ow"])
    pitch = f.mul(f.mul(d["kh"], d["kw"]), host.panel)
    places = [f.add("%p", lane) for lane in range(4)]
    tops = [f.sub(f.mul(f.div(p, d["ow"]), d["sh"]), d["ph"]) for p in places]
    lefts = [f.sub(f.mul(f.rem(p, d["ow"]), d["sw"]), d["pw"]) for p in places]
    present = [f.test("slt", p, pixels) for p in places]

    def each_spot(spot: Callable[[str, str], None]) -> None:
        f.loop("0", d["kh"], 1, lambda kh: f.loop("0", d["kw"], 1, lambda kw: spot(kh, kw)))

    def each_channel(kh: str, kw: str, value: Callable[[str], str]) -> None:
        def body(_: str, source: str, place: str) -> list[str]:
            f.store(V4, value(source), place)
            return [f.at(source, image), f.at(place, pitch)]

        to = f.at("%to", f.mul(f.add(f.mul(kh, d["kw"]), kw), host.panel))
        f.loop("0", "%wide", 1, body, ("ptr", "%x"), ("ptr", to))

    def offset(lane: int, kh: str, kw: str) -> tuple[str, str]:
        row, column = f.add(tops[lane], f.mul(kh, d["dh"])), f.add(lefts[lane], f.mul(kw, d["dw"]))
        inside = both(f, [f.test("ult", row, d["h"]), f.test("ult", column, d["w"]), present[lane]])
        return inside, f.choose(inside, "i64", f.add(f.mul(row, d["w"]), column), "0")

    def careful(kh: str, kw: str) -> None:
        lanes = [offset(lane, kh, kw) for lane in range(4)]
        beside = both(f, [*(ok for ok, _ in lanes), f.test("eq", f.sub(lanes[3][1], lanes[0][1]), 3)])

        def any_four(source: str) -> str:
            out = "poison"
            for lane, (ok, where) in enumerate(lanes):
                value = f.choose(ok, "float", f.load("float", f.at(source, where)), "0.0")
                out = f.op(f"insertelement {V4} {out}, float {value}, i64 {lane}")
            return out

        f.when(beside, lambda: each_channel(kh, kw, lambda source: f.load(V4, f.at(source, lanes[0][1]))))
        f.when(f.op(f"xor i1 {beside}, true"), lambda: each_channel(kh, kw, any_four))

    def plain(step: int) -> Callable[[str, str], None]:
        def spot(kh: str, kw: str) -> None:
            row, column = f.add(tops[0], f.mul(kh, d["dh"])), f.add(lefts[0], f.mul(kw, d["dw"]))
            where = f.add(f.mul(row, d["w"]), column)
            each_channel(kh, kw, lambda source: four(f, f.at(source, where), step))

        return spot

    low, right = f.add(tops[0], f.mul(f.sub(d["kh"], 1), d["dh"])), f.add(lefts[3], f.mul(f.sub(d["kw"], 1), d["dw"]))
    ends = [f.test("ult", v, d[n]) for v, n in ((tops[0], "h"), (low, "h"), (lefts[0], "w"), (right, "w"))]
    clear = both(f, [*ends, f.test("eq", tops[0], tops[3]), f.test("sle", lefts[0], lefts[3]), present[3]])
    for step in (1, 2):
        f.leave(both(f, [clear, f.test("eq", d["sw"], step)]), partial(each_spot, plain(step)))
    each_spot(careful)
    return f.text()


def four(f: Function, address: str, step: int) -> str:
    """Four values, or every other one of seven, and no memory beyond them."""
    near = f.load(V4, address)
    return near if step == 1 else f.shuffle(V4, near, f.load(V4, f.at(address, 3)), (0, 2, 5, 7))


# -- depthwise --------------------------------------------------------------------------------------------------------
def plane(host: Machine) -> str:
    """One output plane, in blocks: copy the part of the image that a block sees, with its padding, then add it up."""
    f = Function("plane", "ptr %x, ptr %weight, ptr %bias, ptr %out, ptr %dims, i64 %job, ptr %scratch")
    d = sizes(f)
    o, n = f.rem("%job", d["o"]), f.div("%job", d["o"])
    channel = f.add(f.mul(n, d["c"]), f.div(o, f.div(d["o"], d["c"])))
    image = f.at("%x", f.mul(channel, f.mul(d["h"], d["w"])))
    out = f.at("%out", f.mul("%job", f.mul(d["oh"], d["ow"])))
    weight = f.at("%weight", f.mul(o, f.mul(d["kh"], d["kw"])))
    bias = f.either(f.test("ne", "%bias", "null", "ptr"), "float", lambda: f.load("float", f.at("%bias", o)), "0.0")
    window = f.at("%scratch", host.tile_bytes, "i8")
    reach_down, reach_right = (f.add(f.mul(f.sub(d[k], 1), d[s]), 1) for k, s in (("kh", "dh"), ("kw", "dw")))
    across = f.min(d["ow"], ACROSS)
    pitch = f.add(f.mul(f.add(across, slack(host) - 1), d["sw"]), reach_right)
    down = f.add(f.div(f.max(f.sub(f.div(str(WINDOW), pitch), reach_down), 0), d["sh"]), 1)

    square = both(f, [f.test("eq", d["kh"], 3), f.test("eq", d["kw"], 3)])
    steps = {step: f.test("eq", d["sw"], step) for step in (1, 2)}
    kernel = "@taps_any"
    for name, condition in [(f"@taps_{s}", c) for s, c in steps.items()]:
        kernel = f.choose(condition, "ptr", name, kernel)
    for name, condition in [(f"@taps_{s}_3x3", both(f, [c, square])) for s, c in steps.items()]:
        kernel = f.choose(condition, "ptr", name, kernel)

    def block(oh: str, ow: str) -> None:
        high, wide = f.min(f.sub(d["oh"], oh), down), f.min(f.sub(d["ow"], ow), across)
        top, left = f.sub(f.mul(oh, d["sh"]), d["ph"]), f.sub(f.mul(ow, d["sw"]), d["pw"])
        seen = f.add(f.mul(f.sub(high, 1), d["sh"]), reach_down)
        f.call(
            "@cut",
            f"ptr {image}, i64 {d['h']}, i64 {d['w']}, i64 {top}, i64 {left}, i64 {seen}, ptr {window}, i64 {pitch}",
        )

        def row(i: str) -> None:
            source, to = (
                f.at(window, f.mul(f.mul(i, d["sh"]), pitch)),
                f.at(f.at(out, f.mul(f.add(oh, i), d["ow"])), ow),
            )
            where = f"ptr {source}, i64 {pitch}, ptr {to}, i64 {wide}"
            f.call(kernel, f"{where}, ptr {weight}, float {bias}, ptr %dims, ptr %scratch")

        f.loop("0", high, 1, row)

    f.loop("0", d["oh"], down, lambda oh: f.loop("0", d["ow"], across, lambda ow: block(oh, ow)))
    return f.text()


def cut(host: Machine) -> str:
    """to[i][j] = image[top + i][left + j] for i < rows, j < pitch; zero outside of the image."""
    params = "ptr %image, i64 %h, i64 %w, i64 %top, i64 %left, i64 %rows, ptr %to, i64 %pitch"
    f = Function("cut", params)
    first = f.min(f.max(f.sub("0", "%left"), 0), "%pitch")
    last = f.max(f.min(f.sub("%w", "%left"), "%pitch"), first)
    bulk = f.add(first, f.down(f.sub(last, first), host.lanes))

    def row(i: str) -> None:
        ih = f.add("%top", i)
        inside, to = f.test("ult", ih, "%h"), f.at("%to", f.mul(i, "%pitch"))
        source = f.op(f"getelementptr float, ptr %image, i64 {f.add(f.mul(ih, '%w'), '%left')}")
        some = [f.choose(inside, "i64", value, "%pitch") for value in (first, bulk, last)]

        def part(j: str, kind: str) -> None:
            f.store(kind, f.load(kind, f.at(source, j)), f.at(to, j))

        def zero(j: str) -> None:
            f.store("float", "0.0", f.at(to, j))

        f.loop("0", some[0], 1, zero)
        f.loop(some[0], some[1], host.lanes, lambda j: part(j, host.kind))
        f.loop(some[1], some[2], 1, lambda j: part(j, "float"))
        f.loop(some[2], "%pitch", 1, zero)

    f.loop("0", "%rows", 1, row)
    return f.text()


def taps(host: Machine, step: int | None, fixed: bool) -> str:
    """One row of a block: sums over (kh, kw), four vectors at a time; with nine weights in registers where it is 3 × 3."""
    name = f"taps_{step or 'any'}{'_3x3' if fixed else ''}"
    f = Function(name, "ptr %x, i64 %pitch, ptr %out, i64 %wide, ptr %weight, float %bias, ptr %dims, ptr %scratch")
    d, kind = sizes(f), host.kind
    down, stride = f.mul(d["dh"], "%pitch"), str(step) if step else d["sw"]
    start = f.splat(kind, "%bias")
    held = [f.splat(kind, f.load("float", f.at("%weight", i))) for i in range(9 if fixed else 0)]

    def spot(x: str, scale: str, sums: Sequence[str]) -> list[str]:
        vectors = [f.at(x, f.mul(stride, v * host.lanes)) for v in range(len(sums))]
        return [f.fma(kind, strided(f, host, p, step, stride), scale, s) for p, s in zip(vectors, sums)]

    def small(x: str, sums: Sequence[str]) -> list[str]:
        rows = [x, f.at(x, down), f.at(x, f.mul(down, 2))]
        for kh in range(3):
            for kw in range(3):
                sums = spot(f.at(rows[kh], f.mul(d["dw"], kw)), held[3 * kh + kw], sums)
        return list(sums)

    def general(x: str, sums: Sequence[str]) -> list[str]:
        def line(kh: str, *sums: str) -> list[str]:
            row, scale = f.at(x, f.mul(kh, down)), f.at("%weight", f.mul(kh, d["kw"]))

            def tap(kw: str, *sums: str) -> list[str]:
                return spot(f.at(row, f.mul(kw, d["dw"])), f.splat(kind, f.load("float", f.at(scale, kw))), sums)

            return f.loop("0", d["kw"], 1, tap, *[(kind, s) for s in sums])

        return f.loop("0", d["kh"], 1, line, *[(kind, s) for s in sums])

    def some(ow: str, vectors: int, to: str) -> None:
        sums = (small if fixed else general)(f.at("%x", f.mul(ow, stride)), [start] * vectors)
        for v, value in enumerate(sums):
            f.store(kind, value, f.at(to, v * host.lanes))

    def masked(ow: str) -> None:
        (value,) = (small if fixed else general)(f.at("%x", f.mul(ow, stride)), [start])
        left = f.op(f"insertelement <{host.lanes} x i64> poison, i64 {f.sub('%wide', ow)}, i64 0")
        count = f.shuffle(f"<{host.lanes} x i64>", left, "poison", [0] * host.lanes)
        numbers = ", ".join(f"i64 {lane}" for lane in range(host.lanes))
        mask = f.op(f"icmp slt <{host.lanes} x i64> <{numbers}>, {count}")
        arguments = f"{kind} {value}, ptr {f.at('%out', ow)}, i32 4, <{host.lanes} x i1> {mask}"
        f.do(f"call void @llvm.masked.store.v{host.lanes}f32.p0({arguments})")

    def rest(ow: str) -> None:
        if host.masks:
            masked(ow)
            return
        some(ow, 1, "%scratch")
        f.loop(
            ow, "%wide", 1, lambda j: f.store("float", f.load("float", f.at("%scratch", f.sub(j, ow))), f.at("%out", j))
        )

    four, ones = f.down("%wide", 4 * host.lanes), f.down("%wide", host.lanes)
    f.loop("0", four, 4 * host.lanes, lambda ow: some(ow, 4, f.at("%out", ow)))
    f.loop(four, ones, host.lanes, lambda ow: some(ow, 1, f.at("%out", ow)))
    f.loop(ones, "%wide", host.lanes, rest)
    return f.text()


def strided(f: Function, host: Machine, address: str, step: int | None, stride: str) -> str:
    """A vector of every value, of every other one, or of what lies a stride apart."""
    if step is None:
        out = "poison"
        for lane in range(host.lanes):
            value = f.load("float", f.at(address, f.mul(stride, lane)))
            out = f.op(f"insertelement {host.kind} {out}, float {value}, i64 {lane}")
        return out
    near = f.load(host.kind, address)
    if step == 1:
        return near
    far = f.load(host.kind, f.at(address, host.lanes))
    return f.shuffle(host.kind, near, far, range(0, 2 * host.lanes, 2))
