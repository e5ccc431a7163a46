"""Matrix products in bfloat16 by AMX, the CPU's matrix instructions: sums are float32, and rounded once.

    ag_gemm_bf16_nt   C[m,n] = Σk A[m,k]·B[n,k] (+ bias[n])     y = x Wᵀ with the weight of nn.Linear as it is stored
    ag_gemm_bf16_nn   C[m,n] = Σk A[m,k]·B[k,n] (+ bias[n])     x W; dX = dY W
    ag_gemm_bf16_tn   C[m,n] = Σk A[k,m]·B[k,n] (+ bias[n])     dW = dYᵀ X
    ag_pack_bf16_nt, ag_pack_bf16_nn                            all panels of a weight, once

AMX adds up products of pairs of neighbours in k. So B is read in *panels* of 32 columns, with zeros behind the last
column and the last k: for 32 values of k, two tiles of 16 pairs × 16 columns, as AMX loads them. A weight that keeps its
content is packed once (packing.py); of any other, every thread packs the panels that it multiplies with. A is read where
it lies; where rows are no multiple of 32 long, their ends are copied and filled up with zeros, since a zero of B would not
hide an infinity behind the end. Aᵀ is packed, too.

There are 8 tiles: 2 × 2 sums of 16 × 16, two of A, two of B. Rows are shared out evenly among tiles, which then have 9 to
16 of them, and the last tile overlaps the one before: so one configuration serves a whole product. Each block of 32 rows ×
32 columns is rounded when it is complete.

One core of a Xeon with AMX (Emerald Rapids class, 2.1 GHz, a virtual machine; 2.6 TFLOP/s on tiles alone), torch 2.13, µs
at rows×K→N, weights not in level 2:

                       48×256→256  64×256→1024  64×1024→256  40×320→864  16×768→3072  64×768→3072  384×768→3072  7×896→4864
    packed                     16           50           47          42          226          436          1984         425
    as stored                  22           73           65          60          373          586          2015         689
    oneDNN, packed             39           81           77          67          295          507          2052         612
    torch.mm                   47           98           93          85          459          686          1979         909
    brgemm                     32          138           80         119          464          758          2391

(oneDNN: `mkldnn._linear_pointwise`, as Inductor calls it; brgemm: its micro-kernel `at::native::cpublas::brgemm`, 32
columns at a time from a packed copy.) The first block fetches the panel 4 KiB ahead, which is 5 to 18 % faster.

AVX512-BF16 has no kernel: on this CPU its multiply-adds (`vdpbf16ps`) reach as many FLOP/s as those in float32, and a
kernel with the same panels took 10 times as long as AMX with 64 rows, as long with one row, and twice as long with seven.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from airgraph.engine.native.kernels.gemm import BFLOAT16_FORMS
from airgraph.engine.native.kernels.gemm_packing import transpose_four
from airgraph.engine.native.llvm.builder import Function
from airgraph.plan.sizes import Amount, ceil, choose, less, maximum, minimum

EXPORTS = (*(f"ag_gemm_{form}" for form in BFLOAT16_FORMS), "ag_pack_bf16_nt", "ag_pack_bf16_nn")
SIGNATURE = (
    "ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %c, i64 %ldc, "
    "i64 %m0, i64 %m1, i64 %n0, i64 %n1, i64 %k, ptr %bias, i64 %packed, ptr %scratch"
)
PACK = "ptr %b, i64 %ldb, i64 %n, i64 %k, ptr %to"
DEEP, PANEL, TILE = 32, 32, 16  # values of k in a step, columns of a panel, rows and columns of a tile
STEP = 2 * DEEP * PANEL  # bytes of a panel for one step
ACC = 4 * PANEL * 2 * TILE  # bytes of the sums of a block
CONFIG = 64  # bytes of a configuration of tiles
A_BYTES, MOST_ROWS = 1 << 20, 512  # of A that all panels are multiplied with, before the next rows are
BANDS_TRIED = (2, 4, 8, 16)
SMALL = 32  # times as many multiplications as additions in a product that one thread does (products.SINGLE_THREADED)
AHEAD = 4096  # bytes of a panel between what is read and what is asked for
SHORTS, WORDS, SUMS = "<32 x i16>", "<16 x i32>", "<32 x float>"
DECLARES = f"""
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare {SHORTS} @llvm.masked.load.v32i16.p0(ptr, i32, <32 x i1>, {SHORTS})
declare void @llvm.masked.store.v32i16.p0({SHORTS}, ptr, i32, <32 x i1>)
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)

"""


def packed_bytes(n: int, k: int) -> int:
    """Of a weight in panels."""
    return -(-n // PANEL) * -(-k // DEEP) * STEP


def scratch_bytes(form: str, m: Amount, k: Amount) -> Amount:
    """What a thread needs for any share of a product: see `ScratchParts`."""
    deep = maximum(ceil(k, DEEP), 1) * DEEP
    rows = minimum(ceil(m, PANEL) * PANEL, MOST_ROWS)
    return CONFIG + ACC + rows * 2 * DEEP + deep * 2 * PANEL + (rows_bytes(rows, deep) if form == "bf16_tn" else 0)


def rows_bytes(rows: Amount, deep: Amount) -> Amount:
    """Of Aᵀ, packed."""
    return minimum(rows * deep * 2, maximum(A_BYTES, deep * 2 * PANEL))


def rows_of_band(m: Amount, n: Amount, threads: Amount) -> Amount:
    """Rows that one thread has with each of its panels: all, unless there are so few panels that dividing the rows as well
    saves a tenth of the blocks."""
    columns, blocks = ceil(n, PANEL), maximum(ceil(m, PANEL), 1)
    found, least = blocks, ceil(columns, threads) * blocks
    for count in BANDS_TRIED:
        each = ceil(blocks, count)
        most = ceil(columns * ceil(blocks, each), threads) * each
        better = less(most * 10, least * 9)
        found, least = choose(better, each, found), choose(better, most, least)
    return found * PANEL


@cache
def source() -> str:
    """The module's text."""
    parts = [DECLARES, pack_panel("nt"), pack_panel("nn"), rows_of_panel(), pack("nt"), pack("nn"), ends(), finish()]
    parts += [block(tiles, first) for tiles in (1, 2) for first in (True, False)]
    return "".join([*parts, *(product(form) for form in BFLOAT16_FORMS)])


# -- packing ----------------------------------------------------------------------------------------------------------
def mask(f: Function, count: str) -> str:
    """Of the first `count` of 32 elements."""
    bits = f.sub(f.op(f"shl i64 1, {f.max(f.min(count, 32), 0)}"), 1)
    return f.op(f"bitcast i32 {f.op(f'trunc i64 {bits} to i32')} to <32 x i1>")


def masked_load(f: Function, address: str, bits: str) -> str:
    """Zeros where the mask has none; what it leaves out is not read."""
    given = f"ptr {address}, i32 2, <32 x i1> {bits}, {SHORTS} zeroinitializer"
    return f.op(f"call {SHORTS} @llvm.masked.load.v32i16.p0({given})")


def words_of(f: Function, shorts: str) -> str:
    return f.op(f"bitcast {SHORTS} {shorts} to {WORDS}")


def transposed(f: Function, rows: Sequence[str]) -> list[str]:
    """16 rows of 16 words → their columns."""
    fours = [
        transpose_four(f, WORDS, rows[r : r + 4]) for r in range(0, TILE, 4)
    ]  # of each block of 4 words its columns

    def blocks(a: str, b: str, pattern: Sequence[int]) -> str:
        return f.shuffle(WORDS, a, b, [4 * part + i for part in pattern for i in range(4)])

    found = [""] * TILE
    for c in range(4):
        first, second, third, fourth = (group[c] for group in fours)
        for half, low in enumerate(((0, 1, 4, 5), (2, 3, 6, 7))):
            above, below = blocks(first, second, low), blocks(third, fourth, low)
            found[8 * half + c] = blocks(above, below, (0, 2, 4, 6))
            found[8 * half + 4 + c] = blocks(above, below, (1, 3, 5, 7))
    return found


def store_words(f: Function, value: str, address: str) -> None:
    f.do(f"store {WORDS} {value}, ptr {address}, align 4")


def pack_panel(form: str) -> str:
    """32 columns of B, of which `count` exist, as tiles; b: where the first of them begins."""
    f = Function(f"pack_panel_{form}", "ptr %b, i64 %ldb, i64 %count, i64 %k, ptr %to")
    columns, last, bottom = mask(f, "%count"), f.sub("%count", 1), f.sub("%k", 1)

    def along_rows(k: str, to: str) -> None:
        deep = mask(f, f.sub("%k", k))
        for half in range(2):
            rows = []
            for i in range(half * TILE, half * TILE + TILE):
                row = f.at(f.at("%b", f.mul(f.min(str(i), last), "%ldb"), "i16"), k, "i16")
                bits = f.choose(f.test("sgt", "%count", i), "<32 x i1>", deep, "zeroinitializer")
                rows.append(words_of(f, masked_load(f, row, bits)))
            for i, column in enumerate(transposed(f, rows)):
                store_words(f, column, f.at(to, half * STEP // 2 + 64 * i, "i8"))

    def pair(k: str, to: str) -> None:
        both = []
        for row in (k, f.add(k, 1)):
            there = f.choose(f.test("slt", row, "%k"), "<32 x i1>", columns, "zeroinitializer")
            both.append(masked_load(f, f.at("%b", f.mul(f.min(row, bottom), "%ldb"), "i16"), there))
        for half in range(2):
            woven = f.shuffle(
                SHORTS, both[0], both[1], [x for i in range(16 * half, 16 * half + 16) for x in (i, 32 + i)]
            )
            store_words(f, words_of(f, woven), f.at(to, half * STEP // 2, "i8"))

    def step(k: str, to: str) -> list[str]:
        if form == "nt":
            along_rows(k, to)
        else:
            f.loop("0", str(DEEP), 2, lambda i: pair(f.add(k, i), f.at(to, f.mul(i, 32), "i8")))
        return [f.at(to, STEP, "i8")]

    f.loop("0", "%k", DEEP, step, ("ptr", "%to"))
    return f.text()


def rows_of_panel() -> str:
    """A panel of Aᵀ as 32 rows of A, `ldt` bytes apart."""
    f = Function("rows_of_panel", "ptr %panel, i64 %steps, ptr %to, i64 %ldt")

    def step(s: str) -> None:
        for half in range(2):
            tile = f.at(f.at("%panel", f.mul(s, STEP), "i8"), half * STEP // 2, "i8")
            rows = [f.op(f"load {WORDS}, ptr {f.at(tile, 64 * i, 'i8')}, align 4") for i in range(TILE)]
            for i, row in enumerate(transposed(f, rows)):
                place = f.at("%to", f.mul("%ldt", half * TILE + i), "i8")
                store_words(f, row, f.at(place, f.mul(s, 2 * DEEP), "i8"))

    f.loop("0", "%steps", 1, step)
    return f.text()


def pack(form: str) -> str:
    """All panels of B."""
    f = Function(f"ag_pack_bf16_{form}", PACK, exported=True)
    apart = f.mul(f.ceil("%k", DEEP), STEP)

    def panel(n: str) -> None:
        to = f.at("%to", f.mul(f.div(n, PANEL), apart), "i8")
        f.call(f"@pack_panel_{form}", panel_operands(f, form, "%b", n, "%n", to))

    f.loop("0", "%n", PANEL, panel)
    return f.text()


def panel_operands(f: Function, form: str, b: str, n: str, end: str, to: str) -> str:
    begin = f.at(b, f.mul(n, "%ldb") if form == "nt" else n, "i16")
    return f"ptr {begin}, i64 %ldb, i64 {f.min(f.sub(end, n), PANEL)}, i64 %k, ptr {to}"


def ends() -> str:
    """What is left of rows behind the last whole step, with zeros behind."""
    f = Function("ends", "ptr %a, i64 %lda, i64 %rows, i64 %left, ptr %to")
    bits = mask(f, "%left")

    def row(i: str) -> None:
        value = masked_load(f, f.at("%a", f.mul(i, "%lda"), "i8"), bits)
        store_words(f, words_of(f, value), f.at("%to", f.mul(i, 2 * DEEP), "i8"))

    f.loop("0", "%rows", 1, row)
    return f.text()


# -- blocks -----------------------------------------------------------------------------------------------------------
def block_name(tiles: int, first: bool) -> str:
    return f"block_{tiles}{'_first' if first else ''}"


def block(tiles: int, first: bool) -> str:
    """The sums of one or two tiles of rows with a panel, of which the `first` block fetches more. Behind `whole` steps come
    the ends of the rows, where there are some."""
    given = [f"ptr %a{t}, ptr %end{t}" for t in range(tiles)]
    rest = "i64 %lda, ptr %panel, i64 %whole, i64 %left, ptr %acc"
    f = Function(block_name(tiles, first), f"{', '.join(given)}, {rest}")

    def whole(s: str) -> None:
        rows = [f.at(f"%a{t}", f.mul(s, 2 * DEEP), "i8") for t in range(tiles)]
        step(f, f.at("%panel", f.mul(s, STEP), "i8"), rows, "%lda")
        if first:
            fetch(f, "%panel", f.mul(s, STEP))

    zero_sums(f, tiles)
    f.loop("0", "%whole", 1, whole)
    rest = f.at("%panel", f.mul("%whole", STEP), "i8")
    ending = [f"%end{t}" for t in range(tiles)]
    f.when(f.test("sgt", "%left", 0), lambda: step(f, rest, ending, 2 * DEEP))
    store_sums(f, tiles)
    return f.text()


def step(f: Function, panel: str, rows: Sequence[str], stride: str | int) -> None:
    """32 values of k, of one or two tiles of rows and a panel."""

    def load(tile: int, address: str, stride: str | int) -> None:
        f.do(f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr {address}, i64 {stride})")

    load(6, panel, 64)
    load(7, f.at(panel, STEP // 2, "i8"), 64)
    for t, row in enumerate(rows):
        load(4 + t, row, stride)
        for half in range(2):
            f.do(f"call void @llvm.x86.tdpbf16ps(i8 {2 * t + half}, i8 {4 + t}, i8 {6 + half})")


def fetch(f: Function, panel: str, at: str) -> None:
    """What a panel has behind the step that begins there, far enough to be there in time."""
    for line in range(0, STEP, 64):
        f.prefetch(panel, f.add(at, AHEAD + line), "i8")


def zero_sums(f: Function, tiles: int) -> None:
    for tile in range(2 * tiles):
        f.do(f"call void @llvm.x86.tilezero(i8 {tile})")


def store_sums(f: Function, tiles: int) -> None:
    for tile in range(2 * tiles):
        place = f.at("%acc", tile // 2 * ACC // 2 + tile % 2 * 64, "i8")
        f.do(f"call void @llvm.x86.tilestored64(i8 {tile}, ptr {place}, i64 {4 * PANEL})")


def finish() -> str:
    """c = sums + bias, rounded, for `rows` rows and the columns of the mask."""
    f = Function("finish", "ptr %acc, ptr %c, i64 %ldc, i64 %rows, ptr %bias, i64 %count")
    bits = mask(f, "%count")

    def given() -> list[str]:
        wide = f.op(f"zext {SHORTS} {masked_load(f, '%bias', bits)} to <32 x i32>")
        return [f.op(f"bitcast <32 x i32> {f.op(f'shl <32 x i32> {wide}, splat (i32 16)')} to {SUMS}")]

    (bias,) = f.when(f.test("ne", "%bias", "null", "ptr"), given, (SUMS, "zeroinitializer"))

    def row(i: str) -> None:
        sums = f.op(f"load {SUMS}, ptr {f.at('%acc', f.mul(i, 4 * PANEL), 'i8')}, align 4")
        short = f.op(f"fptrunc {SUMS} {f.fadd(SUMS, sums, bias)} to <32 x bfloat>")
        value = f.op(f"bitcast <32 x bfloat> {short} to {SHORTS}")
        place = f.at("%c", f.mul(i, "%ldc"), "i8")
        f.call("@llvm.masked.store.v32i16.p0", f"{SHORTS} {value}, ptr {place}, i32 2, <32 x i1> {bits}")

    f.loop("0", "%rows", 1, row)
    return f.text()


# -- the whole product ------------------------------------------------------------------------------------------------
class ScratchParts:
    """Where the parts of a thread's scratch memory begin: the configuration of the tiles, the sums of a block, a packed
    panel, the ends of rows, Aᵀ."""

    def __init__(self, f: Function, steps: str) -> None:
        self.config, self.acc = "%scratch", f.at("%scratch", CONFIG, "i8")
        self.panel = f.at("%scratch", CONFIG + ACC, "i8")
        self.ends = f.at(self.panel, f.mul(steps, STEP), "i8")
        self.rows = f.at(self.ends, f.mul(f.min(f.mul(f.ceil(f.sub("%m1", "%m0"), PANEL), PANEL), MOST_ROWS), 64), "i8")


class RowsOfA(NamedTuple):
    """Some rows of A as blocks read them: where, bytes from one to the next, how many, rows of a tile (all tiles have
    nearly as many), whole steps, values behind these."""

    at: str
    apart: str
    rows: str
    high: str
    whole: str
    left: str


def product(form: str) -> str:
    """Some rows of A, then panels, then blocks of these rows."""
    f = Function(f"ag_gemm_{form}", SIGNATURE, exported=True)
    f.leave(f.test("sge", "%m0", "%m1"), lambda: None)
    steps = f.ceil("%k", DEEP)
    parts = ScratchParts(f, steps)
    fit = f.mul(f.div(str(A_BYTES // (2 * DEEP * PANEL)), f.max(steps, 1)), PANEL)
    most = f.min(f.max(fit, PANEL), MOST_ROWS)

    def chunk(m: str) -> None:
        rows = rows_of_a(f, form, m, f.min(f.sub("%m1", m), most), parts)
        configure(f, parts.config, rows.high)
        f.loop("%n0", "%n1", PANEL, lambda n: panel(f, form, m, n, rows, parts))

    f.loop("%m0", "%m1", most, chunk)
    f.call("@llvm.x86.tilerelease", "")
    return f.text()


def configure(f: Function, config: str, rows: str) -> None:
    """Six tiles of so many rows, and the two of B."""
    bytes_of_rows = 64 * 0x0001_0001_0001_0001
    of_tiles = f.op(f"or i64 {f.mul(rows, 0x0000_0101_0101_0101)}, {TILE << 56 | TILE << 48}")
    for i, word in enumerate(("1", "0", str(bytes_of_rows), str(bytes_of_rows), "0", "0", of_tiles, "0")):
        f.set(config, i, word)
    f.call("@llvm.x86.ldtilecfg", f"ptr {config}")


def rows_of_a(f: Function, form: str, m: str, count: str, parts: ScratchParts) -> RowsOfA:
    whole, left = f.div("%k", DEEP), f.rem("%k", DEEP)
    high = f.ceil(count, f.ceil(count, TILE))
    if form == "bf16_tn":
        steps, apart = f.ceil("%k", DEEP), f.mul(f.ceil("%k", DEEP), 2 * DEEP)
        f.loop("0", count, PANEL, lambda i: packed_rows(f, f.add(m, i), f.sub(count, i), parts, i, apart))
        return RowsOfA(parts.rows, apart, count, high, steps, "0")
    at, apart = f.at("%a", f.mul(m, "%lda"), "i16"), f.mul("%lda", 2)
    behind = f.at(at, f.mul(whole, DEEP), "i16")
    given = f"ptr {behind}, i64 {apart}, i64 {count}, i64 {left}, ptr {parts.ends}"
    f.when(f.test("sgt", left, 0), lambda: f.call("@ends", given))
    return RowsOfA(at, apart, count, high, whole, left)


def packed_rows(f: Function, m: str, count: str, parts: ScratchParts, number: str, apart: str) -> None:
    """Up to 32 rows of A, from Aᵀ."""
    given = f"ptr {f.at('%a', m, 'i16')}, i64 %lda, i64 {f.min(count, PANEL)}, i64 %k, ptr {parts.panel}"
    f.call("@pack_panel_nn", given)
    to = f.at(parts.rows, f.mul(number, apart), "i8")
    f.call("@rows_of_panel", f"ptr {parts.panel}, i64 {f.ceil('%k', DEEP)}, ptr {to}, i64 {apart}")


def panel(f: Function, form: str, m: str, n: str, rows: RowsOfA, parts: ScratchParts) -> None:
    """All blocks of some rows with one panel."""
    of_b = "nt" if form == "bf16_nt" else "nn"
    there = f.test("ne", "%packed", 0)
    known = f.at("%b", f.mul(f.div(n, PANEL), f.mul(f.ceil("%k", DEEP), STEP)), "i8")
    packing = panel_operands(f, of_b, "%b", n, "%n1", parts.panel)
    f.when(f.op(f"xor i1 {there}, true"), lambda: f.call(f"@pack_panel_{of_b}", packing))
    at = f.choose(there, "ptr", known, parts.panel)
    count, last = f.min(f.sub("%n1", n), PANEL), f.sub(rows.rows, rows.high)
    bias = f.choose(f.test("eq", "%bias", "null", "ptr"), "ptr", "null", f.at("%bias", n, "i16"))

    def ready(row: str, acc: str) -> None:
        place = f.at(f.at("%c", f.mul(f.add(m, row), "%ldc"), "i16"), n, "i16")
        f.call("@finish", f"ptr {acc}, ptr {place}, i64 {f.mul('%ldc', 2)}, i64 {rows.high}, ptr {bias}, i64 {count}")

    def tiles(*starts: str) -> None:
        places = [
            f"ptr {f.at(rows.at, f.mul(row, rows.apart), 'i8')}, ptr {f.at(parts.ends, f.mul(row, 2 * DEEP), 'i8')}"
            for row in starts
        ]
        rest = f"i64 {rows.apart}, ptr {at}, i64 {rows.whole}, i64 {rows.left}, ptr {parts.acc}"
        fetch = f.op(f"and i1 {there}, {f.test('eq', starts[0], 0)}")
        first, other = (f"@{block_name(len(starts), way)}" for way in (True, False))
        f.call(f.choose(fetch, "ptr", first, other), ", ".join([*places, rest]))
        for t, row in enumerate(starts):
            ready(row, f.at(parts.acc, t * ACC // 2, "i8"))

    two = f.mul(rows.high, 2)
    pairs = f.mul(f.div(f.ceil(rows.rows, rows.high), 2), two)
    f.loop("0", pairs, two, lambda i: tiles(i, f.min(f.add(i, rows.high), last)))
    f.when(f.test("slt", pairs, rows.rows), lambda: tiles(f.min(pairs, last)))
