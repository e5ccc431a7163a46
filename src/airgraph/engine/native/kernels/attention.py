"""softmax(q·kᵀ·scale + mask)·v in one pass over the keys, for float32 and sizes known only at run time.

    code = build([Unit(source(), EXPORTS)])
    ag_attention_jobs(dims)                          → how many jobs there are; threads share them out
    ag_attention_scratch(dims)                       → the bytes of scratch memory that each thread needs
    ag_attention(q, k, v, mask, out, dims, scale, job0, job1, scratch, lse)

`dims` is an array of int64 in the order of FIELDS, strides in elements; the last dimension of q, k, v and out is
contiguous, and D ≤ MAX_D. mask_kind: 0 none, 1 added float32, 2 bool (false: the key is not seen). `lse`, where not null,
takes each row's log of the sum of exponentials ([B, H, LQ], contiguous), which PyTorch's flash backward asks for. A row
that sees no key gives zeros and lse 0, as PyTorch's CPU kernels do.

**Rows are lanes.** A group of R query rows (16 with AVX-512, 8, 4 or 1) is worked on together, and its scores are laid out
[key][row]. One vector then holds one key's score for every row, so that maximum, exponential and sum need no step across
lanes, any number of keys comes without a tail, and both products are outer products, which load little for each
multiplication:

    scores   s[key][:]  += qᵀ[d][:] · k[key][d]      8 keys: 16 loads for 64 multiplications (R = 8, 4 lanes)
    output   o[row][c:] += v[key][c:] · p[key][row]  8 rows by 2 vectors of columns: 4 loads for 16

(With AVX-512 a group has 16 rows, in all lanes of a vector, and scores have 8 accumulators: 1.35 to 1.45 times as fast as
groups of 8 for heads of 40 and 64 with 197 to 1024 keys, 1.2 with 40 to 50 keys, one core of a Cascade Lake.)

Both have 16 accumulators, where the latency of a multiplication asks for 8 (two a cycle, four cycles each). qᵀ is packed
once for each group, with the scale in it. Whatever is missing repeats something: a group with too few rows its last row
(stored twice, with the same content), a tile with too few keys its last key. A single row (R = 1) has keys in its lanes
instead: dot products, added up across lanes eight keys at a time.

**One query, many heads.** While a model generates, LQ is 1. Then the heads that share a key/value head are the rows of one
group (`fold` swaps the strides), so that keys and values are read once for all of them.

**Many keys.** Scores are kept for a block of keys; from one block to the next the output is rescaled by the quotient of
exp(maximum). Where keys and values leave the first-level cache, a job is up to GROUPS groups that take turns on blocks of
NEAR_KEYS keys. Rows that lie apart (the heads of [B, L, H, D]) are copied together first: their distance is often a power
of two, which leaves them few places in the cache (512 keys, 8 heads of 64: 22.8 ms without the copy, 20.2 with it).

Why not a library: PyTorch's kernel calls a general matrix product for each block; at 48 keys of 64 numbers it takes twice
the time, and three times with one query for four heads of 512 keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import e, log2

from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.builder import vector as vec
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.engine.native.llvm.mathlib import Body, SsaValue, literal, octaves, power_of_two, two_to_the

EXPORTS = ("ag_attention_jobs", "ag_attention_scratch", "ag_attention")
SIZES = ("B", "H", "HK", "LQ", "LK", "D", "DV", "causal", "mask_kind")
STRIDES = (*(f"{x}_{axis}" for x in ("q", "k", "v", "out", "mask") for axis in ("b", "h", "l")), "mask_k")
FIELDS = SIZES + STRIDES
PLAN = ("job_rows", "block_keys", "copies")  # what `fold` adds to them

ROWS = 16  # that scratch memory has room for, in every group
KEY_TILE = 8
LANES = 16  # numbers the exponential works on at a time: several vectors, since each of its steps waits for the last
KEYS = 512  # of a block, where a job is one group
GROUPS = 16  # of a job, at most, where keys and values are more than NEAR_BYTES; then a block has NEAR_KEYS
JOBS = 16  # as many as threads may want: GROUPS is less (4, at least) where there would be fewer
NEAR_BYTES = 32 << 10
NEAR_KEYS = 64
NEAR_D = 256  # longer rows are not copied
MAX_D = 8192

# scratch: scores[KEYS + one tile][ROWS]; of each group maximum[ROWS] and sum[ROWS]; of each group qᵀ; copied k; copied v
STATE_AT = (KEYS + KEY_TILE) * ROWS * 4
PACKED_AT = STATE_AT + GROUPS * 2 * ROWS * 4
SCRATCH_BYTES = PACKED_AT + MAX_D * ROWS * 4 + 2 * NEAR_KEYS * NEAR_D * 4  # the most there is

# lanes of a vector → rows of a group → (rows, vectors of columns) of a tile of the output
OUTPUT_TILES = {
    4: {8: (8, 2), 4: (4, 4), 1: (1, 16)},
    8: {8: (4, 2), 4: (4, 2), 1: (1, 8)},
    16: {16: (8, 2), 8: (8, 2), 4: (4, 4), 1: (1, 8)},
}
BLOCK = 64  # numbers that are transposed at a time


@cache
def source(width: int = 0) -> str:
    """The module's text for vectors of `width` floats: 4 (Arm), 8 (AVX2) or 16 (AVX-512), by default this machine's.

    Scores have rows in their lanes; what the output has in its lanes are columns.
    """
    width = width or vector_lanes()
    most = max(OUTPUT_TILES[width])
    functions = [fold(most), jobs(), scratch_bytes(), copy_rows(), attention(most)]
    functions += map(exp, dict.fromkeys((*OUTPUT_TILES[width], LANES)))
    for rows in OUTPUT_TILES[width]:
        lanes = min(width, 8, BLOCK // rows)
        functions += [pack(rows, lanes), scores(rows, lanes), softmax(rows), output(rows, width), group(rows)]
        functions += [hide_later_keys(rows), *(add_mask(rows, lanes, kind) for kind in (1, 2))]
    return "\n".join(functions) + "\ndeclare float @logf(float)\n"


# -- writing ----------------------------------------------------------------------------------------------------------
def splat(x: float, of: str = "float") -> str:
    return f"splat ({of} {literal(x, of)})"


ONE, NEG_INF = splat(1.0), splat(-float("inf"))


class AttentionWriter(Function):
    """With vectors by their number of lanes; `f("...")` is one instruction."""

    def __call__(self, instruction: str) -> str:
        return self.op(instruction)

    def both(self, a: str, b: str) -> str:
        return self(f"and i1 {a}, {b}")

    def fields(self, dims: str, names: Sequence[str] = FIELDS + PLAN) -> dict[str, str]:
        return {name: self.load("i64", self.at(dims, i, "i64")) for i, name in enumerate(names)}

    def row_starts(self, base: str, stride: str, last: str, rows: int, of: str = "float") -> list[str]:
        """The addresses of a group's rows; those it lacks are its last one."""
        return [self.at(base, self.mul(self.min(last, r), stride), of) for r in range(rows)]

    def load_vector(self, n: int, address: str, of: str = "float") -> str:
        return self(f"load <{n} x {of}>, ptr {address}, align {1 if of == 'i8' else 4}")

    def binary(self, name: str, n: int, a: str, b: str) -> str:
        return self(f"{name} {vec(n)} {a}, {b}")

    def larger(self, n: int, a: str, b: str) -> str:
        return self(f"call {vec(n)} @llvm.maximum.v{n}f32({vec(n)} {a}, {vec(n)} {b})")

    def lanes_where(self, n: int, condition: str, a: str, b: str) -> str:
        return self(f"select <{n} x i1> {condition}, {vec(n)} {a}, {vec(n)} {b}")

    def exp(self, n: int, x: str) -> str:
        return self(f"call {vec(n)} @exp_{n}({vec(n)} {x})")

    def lane(self, n: int, value: str, i: int, to: int) -> str:
        """One of n lanes in all of `to` lanes."""
        return self.shuffle(vec(n), value, "poison", [i] * to)

    def neighbours(self, count: int, address: str, n: int, width: int) -> list[str]:
        """Numbers next to each other in memory, each in n lanes: Arm multiplies by a lane, x86 loads into all lanes."""
        if width == 4 and count > 1:
            lanes = self.load_vector(count, address)
            return [self.lane(count, lanes, i, n) for i in range(count)]
        return [self.splat(vec(n), self.load("float", self.at(address, i))) for i in range(count)]

    def transposed(self, n: int, rows: list[str], of: str = "float") -> str:
        """Rows of n numbers → one vector, [column][row]: the upper half of the rows between the lower, again and again."""
        while len(rows) > 1:
            half = len(rows) // 2
            lanes = [i + n * upper for i in range(n) for upper in (0, 1)]
            rows = [self.shuffle(f"<{n} x {of}>", a, b, lanes) for a, b in zip(rows[:half], rows[half:])]
            n *= 2
        return rows[0]

    def lane_sums(self, n: int, vectors: list[str]) -> str:
        """n vectors of n numbers → the vector of their sums."""
        while len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2]))
            even, odd = ([self.shuffle(vec(n), a, b, range(k, 2 * n, 2)) for a, b in pairs] for k in (0, 1))
            vectors = [self.binary("fadd", n, a, b) for a, b in zip(even, odd)]
        return vectors[0]


def exp(n: int) -> str:
    """e^x for x ≤ 0; 0 where that is no normal number; NaN stays.

    log2(e) is one float here: a relative error of |x|·2^-26, for which e^x does not matter where |x| is large.
    """
    b, of = Body(), vec(n)
    f, exponent = octaves(b, b.intrinsic("maximum", SsaValue(b, "%x", of), -88.0), [log2(e)], bias=127)
    y = two_to_the(b, f) * power_of_two(b, exponent)
    head = f"define internal {of} @exp_{n}({of} %x) alwaysinline {{"
    return "\n".join([head, *b.lines, f"  ret {of} {y.name}", "}"])


# -- the steps of one group of rows -----------------------------------------------------------------------------------
def pack(rows: int, width: int) -> str:
    """qᵀ · scale, as [d][row]."""
    f = AttentionWriter(f"pack_{rows}", "ptr %q, i64 %stride, i64 %last, i64 %d, float %scale, ptr %to")
    whole, starts = f.down("%d", width), f.row_starts("%q", "%stride", "%last", rows)
    for n, start, stop in ((width, "0", whole), (1, whole, "%d")):
        factor = f.splat(vec(n * rows), "%scale")
        with f.each(start, stop, n) as loop:
            block = f.transposed(n, [f.load_vector(n, f.at(row, loop.i)) for row in starts])
            f.store(vec(n * rows), f.binary("fmul", n * rows, block, factor), f.at("%to", f.mul(loop.i, rows)))
    return f.text()


def scores(rows: int, width: int) -> str:
    """s[key][row] = Σ_d k[key][d] · qᵀ[d][row] for n keys, rounded up to whole tiles."""
    f = AttentionWriter(f"scores_{rows}", "ptr %q, ptr %k, i64 %stride, i64 %n, i64 %d, ptr %s")
    lanes = rows if rows > 1 else width
    whole, last = f.down("%d", width), f.sub("%n", 1)
    with f.each("0", "%n", KEY_TILE) as tile:
        keys = [f.at("%k", f.mul(f.min(f.add(tile.i, j), last), "%stride")) for j in range(KEY_TILE)]
        sums = ["zeroinitializer"] * KEY_TILE
        for n, start, stop in ((width, "0", whole), (1, whole, "%d")):
            with f.each(start, stop, n, [(vec(lanes), x) for x in sums]) as loop:
                q, here = f.at("%q", f.mul(loop.i, rows)), [f.at(key, loop.i) for key in keys]
                add = add_outer if rows > 1 else add_products
                loop.next = add(f, loop.carried, q, here, n, lanes, width)
            sums = loop.carried
        if rows == 1:
            sums = [f.lane_sums(width, sums[j : j + width]) for j in range(0, KEY_TILE, width)]
        for j, x in enumerate(sums):
            f.store(vec(lanes), x, f.at("%s", f.add(f.mul(tile.i, rows), j * lanes)))
    return f.text()


def add_outer(f: AttentionWriter, sums: list[str], q: str, keys: list[str], n: int, rows: int, width: int) -> list[str]:
    ks = [f.neighbours(n, key, rows, width) for key in keys]
    for i in range(n):
        a = f.load_vector(rows, f.at(q, i * rows))
        sums = [f.fma(vec(rows), a, k[i], x) for k, x in zip(ks, sums)]
    return sums


def add_products(
    f: AttentionWriter, sums: list[str], q: str, keys: list[str], n: int, lanes: int, width: int
) -> list[str]:
    """Whole vectors, or one number with zeros behind it."""
    a, *ks = [f.load_vector(n, x) if n == width else f.first(vec(lanes), f.load("float", x)) for x in (q, *keys)]
    return [f.fma(vec(lanes), a, k, x) for k, x in zip(ks, sums)]


def add_mask(rows: int, width: int, kind: int) -> str:
    """s += mask; where the mask's keys are neighbours, whole vectors of them at a time."""
    f = AttentionWriter(f"mask_{kind}_{rows}", "ptr %mask, i64 %stride, i64 %step, i64 %last, i64 %n, ptr %s")
    of = "float" if kind == 1 else "i8"
    starts = f.row_starts("%mask", "%stride", "%last", rows, of)
    whole = f.choose(f.test("eq", "%step", 1), "i64", f.down("%n", width), "0")
    for n, start, stop in ((width, "0", whole), (1, whole, "%n")):
        with f.each(start, stop, n) as loop:
            at, size = f.mul(loop.i, "%step"), n * rows
            block = f.transposed(n, [f.load_vector(n, f.at(row, at, of), of) for row in starts], of)
            if kind == 2:
                hidden = f(f"icmp eq <{size} x i8> {block}, zeroinitializer")
                block = f.lanes_where(size, hidden, NEG_INF, "zeroinitializer")
            s = f.at("%s", f.mul(loop.i, rows))
            f.store(vec(size), f.binary("fadd", size, f.load_vector(size, s), block), s)
    return f.text()


def hide_later_keys(rows: int) -> str:
    """s[key][row] = -inf where the key comes after the row; both are counted from the block's first key."""
    f = AttentionWriter(f"causal_{rows}", "i64 %row, i64 %last, i64 %n, ptr %s")
    with f.each(f.max(f.add("%row", 1), 0), "%n", 1) as loop:
        for r in range(rows):
            later = f.test("sgt", loop.i, f.add("%row", f.min("%last", r)))
            s = f.at("%s", f.add(f.mul(loop.i, rows), r))
            f.store("float", f.choose(later, "float", literal(-float("inf"), "float"), f.load("float", s)), s)
    return f.text()


def softmax(rows: int) -> str:
    """s = exp(s - maximum) and the state brought up to date; gives what the output so far must be scaled by."""
    f = AttentionWriter(f"softmax_{rows}", "ptr %s, i64 %n, ptr %state", vec(rows))
    f.store(vec(LANES), NEG_INF, f.at("%s", f.mul("%n", rows)))  # the last step goes beyond the last key
    with f.each("0", "%n", LANES // rows, [(vec(LANES), NEG_INF)]) as loop:
        loop.next = [f.larger(LANES, loop.carried[0], f.load_vector(LANES, f.at("%s", f.mul(loop.i, rows))))]
    sum_at = f.at("%state", ROWS)
    old, old_sum = f.load_vector(rows, "%state"), f.load_vector(rows, sum_at)
    top = f.larger(rows, old, by_halves(f, f.larger, rows, loop.carried[0]))
    f.store(vec(rows), top, "%state")
    top = finite(f, rows, top)
    scale = f.exp(rows, f.binary("fsub", rows, old, top))
    tops = f.shuffle(vec(rows), top, "poison", [lane % rows for lane in range(LANES)])
    with f.each("0", "%n", LANES // rows, [(vec(LANES), "zeroinitializer")]) as loop:
        s = f.at("%s", f.mul(loop.i, rows))
        p = f.exp(LANES, f.binary("fsub", LANES, f.load_vector(LANES, s), tops))
        f.store(vec(LANES), p, s)
        loop.next = [f.binary("fadd", LANES, loop.carried[0], p)]
    total = by_halves(f, lambda n, a, b: f.binary("fadd", n, a, b), rows, loop.carried[0])
    f.store(vec(rows), f.fma(vec(rows), old_sum, scale, total), sum_at)
    return f.text(f"{vec(rows)} {scale}")


def finite(f: AttentionWriter, n: int, top: str) -> str:
    """The maximum, or 0 where no key is seen: -inf - 0 is -inf, but -inf - -inf would be NaN."""
    return f.lanes_where(n, f.binary("fcmp oeq", n, top, NEG_INF), "zeroinitializer", top)


def by_halves(f: AttentionWriter, combine: Callable[[int, str, str], str], rows: int, value: str) -> str:
    """LANES lanes, several for each row → one for each row."""
    n = LANES
    while n > rows:
        n //= 2
        low, high = (f.shuffle(vec(2 * n), value, "poison", range(k, k + n)) for k in (0, n))
        value = combine(n, low, high)
    return value


def output(rows: int, width: int) -> str:
    """o[row] = (o[row] · scale[row] + Σ_key p[key][row] · v[key]) · factor[row]; o is not read where `first`."""
    f = AttentionWriter(
        f"output_{rows}",
        "ptr %p, i64 %n, ptr %v, i64 %stride, i64 %dv, ptr %o, i64 %o_stride, i64 %last, i1 %first, "
        f"{vec(rows)} %scale, {vec(rows)} %factor",
    )
    high, most = OUTPUT_TILES[width][rows]
    starts = f.row_starts("%o", "%o_stride", "%last", rows)
    column = "0"
    tiles = [(c, width) for c in sorted({most, min(most, 4), 1}, reverse=True)]
    for vectors, n in [*tiles, *((1, n) for n in (8, 4) if n < width), (1, 1)]:
        stop = f.add(column, f.down(f.sub("%dv", column), vectors * n))
        with f.each(column, stop, vectors * n) as loop:
            # rows repeat only inside the last part: what is stored twice was read before
            here = [f.at(row, loop.i) for row in starts]
            for row in range(0, rows, high):
                output_tile(f, rows, width, range(row, row + high), here, loop.i, vectors, n)
        column = stop
    return f.text()


def output_tile(
    f: AttentionWriter, rows: int, width: int, part: range, starts: list[str], column: str, vectors: int, n: int
) -> None:
    places = [f.at(starts[r], c * n) for r in part for c in range(vectors)]
    scale, factor = ([f.lane(rows, x, r, n) for r in part] for x in ("%scale", "%factor"))

    v = f.at("%v", column)
    with f.each("0", "%n", 1, [(vec(n), "zeroinitializer")] * len(places)) as loop:
        here = f.at(v, f.mul(loop.i, "%stride"))
        vs = [f.load_vector(n, f.at(here, c * n)) for c in range(vectors)]
        ps = f.neighbours(len(part), f.at("%p", f.add(f.mul(loop.i, rows), part.start)), n, width)
        loop.next = [f.fma(vec(n), vs[i % vectors], ps[i // vectors], x) for i, x in enumerate(loop.carried)]
    sums = loop.carried

    def with_old() -> list[str]:
        old = [f.load_vector(n, o) for o in places]
        return [f.fma(vec(n), x, scale[i // vectors], y) for i, (x, y) in enumerate(zip(old, sums))]

    sums = f.when(f("xor i1 %first, true"), with_old, *[(vec(n), x) for x in sums])
    for i, (x, o) in enumerate(zip(sums, places)):
        f.store(vec(n), f.binary("fmul", n, x, factor[i // vectors]), o)


def group(rows: int) -> str:
    """One group of rows (%row to %row + %last) and one block of keys (from %key on)."""
    f = AttentionWriter(
        f"group_{rows}",
        "ptr %q, ptr %k, ptr %v, ptr %mask, ptr %o, ptr %dims, float %scale, i64 %row, i64 %last, i64 %key, "
        "ptr %s, ptr %state, ptr %packed, ptr %lse",
    )
    get, some, sum_at = f.fields("%dims"), vec(rows), f.at("%state", ROWS)
    past = f.add(f.add("%row", "%last"), 1)
    seen = f.min(get["LK"], f.choose(f.test("eq", get["causal"], 0), "i64", get["LK"], past))
    left, first = f.sub(seen, "%key"), f.test("eq", "%key", 0)
    n = f.min(left, get["block_keys"])
    with f.given(first):
        f.do(f"call void @pack_{rows}(ptr %q, i64 {get['q_l']}, i64 %last, i64 {get['D']}, float %scale, ptr %packed)")
        f.store(some, NEG_INF, "%state")
        f.store(some, "zeroinitializer", sum_at)
    with f.given(f(f"or i1 {first}, {f.test('sgt', left, 0)}")):  # the first block even where there are no keys
        f.do(f"call void @scores_{rows}(ptr %packed, ptr %k, i64 {get['k_l']}, i64 {n}, i64 {get['D']}, ptr %s)")
        for kind in (1, 2):
            with f.given(f.test("eq", get["mask_kind"], kind)):
                strides = f"i64 {get['mask_l']}, i64 {get['mask_k']}"
                f.do(f"call void @mask_{kind}_{rows}(ptr %mask, {strides}, i64 %last, i64 {n}, ptr %s)")
        with f.given(f.test("ne", get["causal"], 0)):
            f.do(f"call void @causal_{rows}(i64 {f.sub('%row', '%key')}, i64 %last, i64 {n}, ptr %s)")
        scale = f(f"call {some} @softmax_{rows}(ptr %s, i64 {n}, ptr %state)")
        final, total = f.test("eq", n, left), f.load_vector(rows, sum_at)
        total = f.lanes_where(rows, f.binary("fcmp oeq", rows, total, "zeroinitializer"), ONE, total)
        factor = f.choose(final, some, f.binary("fdiv", rows, ONE, total), ONE)
        f.do(
            f"call void @output_{rows}(ptr %s, i64 {n}, ptr %v, i64 {get['v_l']}, i64 {get['DV']}, ptr %o, "
            f"i64 {get['out_l']}, i64 %last, i1 {first}, {some} {scale}, {some} {factor})"
        )
        with f.given(f.both(final, f.test("ne", "%lse", "null", "ptr"))):
            top = finite(f, rows, f.load_vector(rows, "%state"))
            with f.each("0", f.add("%last", 1), 1) as loop:
                a, b = (f(f"extractelement {some} {x}, i64 {loop.i}") for x in (top, total))
                sum_log = f(f"call float @logf(float {b})")
                f.store("float", f.fadd("float", a, sum_log), f.at("%lse", loop.i))
    return f.text()


# -- all rows ---------------------------------------------------------------------------------------------------------
def fold(most: int) -> str:
    """dims → dims in which one query's heads that share a key/value head are rows, and the PLAN. `most`: rows of the
    largest group."""
    f = AttentionWriter("fold", "ptr %dims, ptr %to")
    get = f.fields("%dims", FIELDS)
    one, share = f.test("eq", get["LQ"], 1), f.div(get["H"], f.max(get["HK"], 1))
    visible = f.choose(f.test("eq", get["causal"], 0), "i64", get["LK"], f.min(get["LK"], 1))
    folded = {"H": get["HK"], "LQ": share, "LK": visible, "causal": "0"}
    for x in ("q", "out", "mask"):
        folded |= {f"{x}_h": f.mul(get[f"{x}_h"], share), f"{x}_l": get[f"{x}_h"]}
    result = get | {name: f.choose(one, "i64", value, get[name]) for name, value in folded.items()}

    size = f.mul(f.mul(get["LK"], f.add(get["D"], get["DV"])), 4)
    many = f.both(f.test("sgt", size, NEAR_BYTES), f.test("sgt", get["LQ"], most))
    rows = f.mul(f.mul(get["B"], get["H"]), get["LQ"])
    groups = f.min(f.max(f.div(rows, most * JOBS), 4), GROUPS)
    room = f.max(f.div(str(MAX_D), f.max(get["D"], 1)), 1)  # in scratch, for their qᵀ
    result["job_rows"] = f.choose(many, "i64", f.mul(f.min(groups, room), most), str(most))
    result["block_keys"] = f.choose(many, "i64", str(NEAR_KEYS), str(KEYS))
    apart = f(f"or i1 {f.test('ne', get['k_l'], get['D'])}, {f.test('ne', get['v_l'], get['DV'])}")
    short = f.test("sle", f.max(get["D"], get["DV"]), NEAR_D)
    result["copies"] = f(f"zext i1 {f.both(many, f.both(apart, short))} to i64")
    for i, name in enumerate(FIELDS + PLAN):
        f.store("i64", result[name], f.at("%to", i, "i64"))
    return f.text()


def folded_fields(f: AttentionWriter) -> tuple[str, dict[str, str]]:
    dims = f(f"alloca [{len(FIELDS + PLAN)} x i64]")
    f.do(f"call void @fold(ptr %dims, ptr {dims})")
    return dims, f.fields(dims)


def jobs() -> str:
    f = AttentionWriter("ag_attention_jobs", "ptr %dims", "i64", exported=True)
    _, get = folded_fields(f)
    return f.text(f"i64 {f.mul(f.mul(get['B'], get['H']), f.ceil(get['LQ'], get['job_rows']))}")


def near_at(f: AttentionWriter, get: dict[str, str]) -> tuple[str, str, str]:
    """Where in scratch, in bytes, copied keys and values begin, and where they end; they are behind the packed queries."""
    keys = f.add(f.mul(f.mul(get["job_rows"], get["D"]), 4), PACKED_AT)
    values = f.add(keys, f.mul(get["D"], 4 * NEAR_KEYS))
    return keys, values, f.add(values, f.mul(get["DV"], 4 * NEAR_KEYS))


def scratch_bytes() -> str:
    f = AttentionWriter("ag_attention_scratch", "ptr %dims", "i64", exported=True)
    _, get = folded_fields(f)
    start, _, end = near_at(f, get)
    return f.text(f"i64 {f.choose(f.test('ne', get['copies'], 0), 'i64', end, start)}")


def copy_rows() -> str:
    f = AttentionWriter("copy_rows", "ptr %from, i64 %stride, i64 %n, i64 %d, ptr %to")
    size = f.mul("%d", 4)
    with f.each("0", "%n", 1) as loop:
        to, row = f.at("%to", f.mul(loop.i, "%d")), f.at("%from", f.mul(loop.i, "%stride"))
        f.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {row}, i64 {size}, i1 false)")
    return f.text()


def attention(most: int) -> str:
    f = AttentionWriter(
        "ag_attention",
        "ptr %q, ptr %k, ptr %v, ptr %mask, ptr %out, ptr %dims, float %scale, i64 %job0, i64 %job1, "
        "ptr %scratch, ptr %lse",
        exported=True,
    )
    dims, get = folded_fields(f)
    blocks, share = f.ceil(get["LQ"], get["job_rows"]), f.div(get["H"], f.max(get["HK"], 1))
    mask_bytes = f.choose(f.test("eq", get["mask_kind"], 2), "i64", "1", "4")
    copies = f.test("ne", get["copies"], 0)
    copied = [f.at("%scratch", place, "i8") for place in near_at(f, get)[:2]]
    with f.given(copies):  # the groups find the copies' strides in place of the originals'
        for name, d in (("k_l", "D"), ("v_l", "DV")):
            f.store("i64", get[d], f.at(dims, FIELDS.index(name), "i64"))

    with f.each("%job0", "%job1", 1) as job:
        head = f.div(job.i, blocks)
        b, h, row0 = f.div(head, get["H"]), f.rem(head, get["H"]), f.mul(f.rem(job.i, blocks), get["job_rows"])

        def start(name: str, h: str, bytes: str = "4") -> str:
            offset = f.add(f.mul(b, get[f"{name}_b"]), f.mul(h, get[f"{name}_h"]))
            return f.at(f"%{name}", f.mul(offset, bytes), "i8")

        q, out, masks = start("q", h), start("out", h), start("mask", h, mask_bytes)
        k, v = (start(name, f.div(h, share)) for name in ("k", "v"))
        lse = f.choose(f.test("eq", "%lse", "null", "ptr"), "ptr", "null", f.at("%lse", f.mul(head, get["LQ"])))
        row1 = f.min(f.add(row0, get["job_rows"]), get["LQ"])
        seen = f.min(get["LK"], f.choose(f.test("eq", get["causal"], 0), "i64", get["LK"], row1))
        with f.each("0", f.max(seen, 1), get["block_keys"]) as block:
            ks, vs = f.at(k, f.mul(block.i, get["k_l"])), f.at(v, f.mul(block.i, get["v_l"]))
            with f.given(copies):
                n = f.min(f.sub(seen, block.i), get["block_keys"])
                for rows, stride, d, to in ((ks, "k_l", "D", copied[0]), (vs, "v_l", "DV", copied[1])):
                    f.do(f"call void @copy_rows(ptr {rows}, i64 {get[stride]}, i64 {n}, i64 {get[d]}, ptr {to})")
            ks, vs = (f.choose(copies, "ptr", near, far) for near, far in zip(copied, (ks, vs)))
            mask = f.at(masks, f.mul(f.mul(block.i, get["mask_k"]), mask_bytes), "i8")
            moving = [(q, get["q_l"], "4"), (mask, get["mask_l"], mask_bytes), (out, get["out_l"], "4")]
            groups_of_job(f, get, (row0, row1), block.i, moving, (ks, vs, dims, lse), most)
    return f.text()


def groups_of_job(
    f: AttentionWriter,
    get: dict[str, str],
    span: tuple[str, str],
    key: str,
    moving: list[tuple[str, str, str]],
    shared: tuple[str, str, str, str],
    most: int,
) -> None:
    """`most` rows at a time: 9 to 16 of them in sixteen lanes, 6 to 8 in eight; 2 to 5 in four lanes, and the fifth alone.

    `moving`: what goes on from row to row, as (address, elements from one row to the next, bytes of one).
    """
    (row0, row1), (k, v, dims, lse) = span, shared
    with f.each(row0, row1, most) as slot:
        index = f.sub(slot.i, row0)
        state = f.at("%scratch", f.add(f.mul(index, 2 * ROWS // most), STATE_AT // 4))
        packed = f.at("%scratch", f.add(f.mul(index, get["D"]), PACKED_AT // 4))
        left = f.min(f.sub(row1, slot.i), most)
        few = f.both(f.test("sge", left, 2), f.test("sle", left, 5))
        one_more = f(f"or i1 {f.test('eq', left, 1)}, {f.test('eq', left, 5)}")
        eight = f.both(f.test("sge", left, 6), f.test("sle", left, 8))
        larger = [(most, f.test("sgt", left, 8), 0)] if most > 8 else []
        for rows, condition, done in (*larger, (8, eight, 0), (4, few, 0), (1, one_more, 4)):
            with f.given(condition):
                skip = f.min(f.sub(left, 1), done)
                row, last = f.add(slot.i, skip), f.min(f.sub(f.sub(left, skip), 1), rows - 1)
                q, mask, out = (f.at(base, f.mul(f.mul(row, step), size), "i8") for base, step, size in moving)
                lse_at = f.choose(f.test("eq", lse, "null", "ptr"), "ptr", "null", f.at(lse, row))
                f.do(
                    f"call void @group_{rows}(ptr {q}, ptr {k}, ptr {v}, ptr {mask}, ptr {out}, ptr {dims}, float %scale, "
                    f"i64 {row}, i64 {last}, i64 {key}, ptr %scratch, ptr {f.at(state, skip)}, "
                    f"ptr {f.at(packed, f.mul(skip, get['D']))}, ptr {lse_at})"
                )
