"""Matrix multiplication in float32, written as LLVM text with sizes known at run time: compiled once for a process.

    ag_gemm_nt   C[m,n] = Σk A[m,k]·B[n,k]      y = x Wᵀ with the weight of nn.Linear as it is stored
    ag_gemm_nn   C[m,n] = Σk A[m,k]·B[k,n]      x W; dX = dY W; attention's P V
    ag_gemm_tn   C[m,n] = Σk A[k,m]·B[k,n]      dW = dYᵀ X

halves.py has nt for a few rows of A and a B in half precision. One inner kernel serves these three. It multiplies *rows*
R[r][k], read where they lie, with a *panel* P[k][lanes], packed:

    tile[r][lane] += R[r][k] · P[k][lane]        8 rows × 8 lanes = 16 accumulators of 4 lanes on Arm

Four steps of k take 8 vectors of R and 8 of P for 64 multiply-adds (`fmla` by element): 16 loads beside 32 cycles of
arithmetic, 81 instructions where the core could issue 128. What is packed is the operand that is small or used often:

    nt   rows = B (the weight, read once, never copied), panel = Aᵀ; 4×4 shuffles transpose the tile when it is stored
    nn   rows = A, panel = B
    tn   rows = Aᵀ (transposed, 8 or 12 rows at a time into level 1), panel = B

AVX-512 has tiles of 12 rows × 32 lanes. One core of a Xeon (Sapphire Rapids), GFLOP/s at rows×K→N 256×512→512, 384×768→768,
32×1024→1024, 56×288→1152: 148, 150, 138, 136 (MKL: 156, 160, 134, 172; the AVX2 kernel: 86, 85, 82, 82). Tiles of 8, 10 and
14 rows, blocks of 256 and prefetching the next tile's rows were no faster. With AVX2, tn on a Zen 3 core reaches 0.8 to
1.05 of MKL's speed at 32 to 768 rows; transposing 12 instead of 6 rows at once made it 1.05 times as fast.

A block is KC = 512 deep (8 rows and a panel: 32 KiB of a 64 KiB level 1) and 256 lanes wide (512 KiB of a 1 MiB level 2).
A few rows of A are no matrix: nt takes dot products along k (up to three rows on Arm, four with AVX2, eight with AVX-512,
where a tile would use so many of its 16 lanes), nn adds up scaled rows of B (up to three); both read B once, in order.

Tiles that stick out are computed in full (rows repeat the last one, lanes are zero) into scratch memory, and the part that
exists is merged into C. Unused lanes must not hold whatever was in memory: x86 takes a microcode assist for every operation
on a subnormal number, which made products with half a tile of garbage seven times as slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce

from airgraph.engine.native.kernels.gemm_packing import (
    V4,
    clear,
    copy,
    gather,
    transpose,
    transpose_four,
    transpose_two,
)
from airgraph.engine.native.llvm.builder import Function, Typed, declarations, vector, width
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.plan.sizes import Amount, ceil, choose, less, maximum, minimum

FLOAT_FORMS = ("nt", "nn", "tn")
ELEMENTS = {"nt_bf16": "i16", "nt_half": "half"}  # of B, in the forms of halves.py
BFLOAT16_FORMS = ("bf16_nt", "bf16_nn", "bf16_tn")  # those of bfloat16.py
FORMS = (*FLOAT_FORMS, *ELEMENTS, *BFLOAT16_FORMS)
EXPORTS = tuple([f"ag_gemm_{form}" for form in FLOAT_FORMS])
SIGNATURE = (
    "ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %c, i64 %ldc, "
    "i64 %m0, i64 %m1, i64 %n0, i64 %n1, i64 %k, ptr %bias, i64 %beta, ptr %scratch"
)
MICRO = "ptr %rows, i64 %ldr, i64 %last, ptr %panel, i64 %k, ptr %c, i64 %ldc, ptr %bias, i64 %flags"
KC, WIDE = 512, 256  # the depth and the lanes of a packed block
ROWS_BYTES = 4 * KC * 16
ADD = 1  # a flag: C is added to
V2 = vector(2)
LINE = 16  # floats in a line of the cache
AHEAD = {1: 256, 2: 512}  # floats between what is read and what is asked for, by the rows that are read at once
SHORT = 512  # numbers in a row of B up to which two are read at once on any machine
COLUMNS, ROWS, BATCH, BANDS = range(4)  # what threads divide; bands: rows and columns (panels.py)
Piece = tuple[int, int, str, str]  # (row of C, column of C, type, value): consecutive columns in a vector


@dataclass(frozen=True)
class Machine:
    """Tile sizes by registers: 32 of 4 lanes on Arm, 16 of 8 lanes with AVX2, 32 of 16 lanes with AVX-512."""

    lanes: int
    rows: tuple[int, int]  # of a tile, and of a small one
    vectors: int  # in a row of a tile
    deep: int  # rows of B added up at once
    by_element: bool  # a multiply-add can take one lane of a vector for all
    dots: int  # rows of A up to which nt is dot products
    row_by_row: bool  # with rows of B of more than SHORT numbers, one at a time

    @property
    def kind(self) -> str:
        return vector(self.lanes)

    @property
    def masks(self) -> bool:
        """A vector can be stored in part, by one instruction."""
        return self.lanes == 16

    @property
    def panel(self) -> int:
        return self.lanes * self.vectors

    @property
    def side(self) -> int:
        """The row length of a tile in scratch memory."""
        return max(16, self.panel)

    @property
    def turned(self) -> int:
        """Rows of Aᵀ that are transposed at once: of whole tiles and of whole blocks of four, since a single column takes
        as long as four."""
        return self.rows[0] * (1 if self.rows[0] % 4 == 0 else 2)

    @property
    def tile_bytes(self) -> int:
        return 4 * self.side * self.side

    @property
    def scratch_bytes(self) -> int:
        """The most that a product needs."""
        return self.tile_bytes + ROWS_BYTES + 4 * (KC + 2) * WIDE


NEON = Machine(lanes=4, rows=(8, 4), vectors=2, deep=4, by_element=True, dots=3, row_by_row=True)
AVX2 = Machine(lanes=8, rows=(6, 4), vectors=2, deep=4, by_element=False, dots=4, row_by_row=False)
AVX512 = Machine(lanes=16, rows=(12, 4), vectors=2, deep=4, by_element=False, dots=8, row_by_row=False)
MACHINES = {machine.lanes: machine for machine in (NEON, AVX2, AVX512)}


def this_machine() -> Machine:
    return MACHINES[vector_lanes()]


def scratch_bytes(form: str, m: Amount, n: Amount, k: Amount, machine: Machine | None = None) -> Amount:
    """What a thread needs for any share of this product; `Machine.scratch_bytes` is the most there is."""
    host = machine or this_machine()
    if form in ELEMENTS:
        return host.tile_bytes
    deep = 4 * ceil(ceil(k, maximum(ceil(k, KC), 1)), 4)
    panels = ceil(minimum(m if form == "nt" else n, WIDE), host.panel)
    blocks = host.tile_bytes + ROWS_BYTES + 4 * panels * (deep * host.panel + LINE)
    return blocks if form == "tn" else choose(less(m, 4), host.tile_bytes, blocks)


@cache
def source(machine: Machine | None = None) -> str:
    """The module's text."""
    host = machine or this_machine()
    parts = [declarations(host.lanes), transpose(), clear(host), merge(host), copy(host), gather(host)]
    parts += kernels(host, "nt", transposed=True) + kernels(host, "nn", transposed=False)
    together = (1, 2) if host.row_by_row else (2,)
    parts += [dots(host, m, rows) for m in range(1, host.dots + 1) for rows in together]
    parts += [sweeps(host, m) for m in (1, 2, 3)]
    parts += [product(host, form) for form in FLOAT_FORMS]
    return "".join(parts)


# -- the inner kernel -------------------------------------------------------------------------------------------------
def kernels(host: Machine, stem: str, transposed: bool) -> list[str]:
    return [micro(host, stem, r, p, transposed) for r in host.rows for p in (host.vectors, 1)]


def kernel_name(stem: str, rows: int, vectors: int) -> str:
    return f"{stem}_{rows}x{vectors}"


def micro(host: Machine, stem: str, rows: int, vectors: int, transposed: bool) -> str:
    """tile = rows · panel, then + bias, + C, as asked; row i is row min(i, last), which exists."""
    f = Function(kernel_name(stem, rows, vectors), MICRO)
    row = [f.at("%rows", f.mul(f.min(str(i), "%last"), "%ldr")) for i in range(rows)]

    def step(i: str, acc: Sequence[str], elements: Callable[[str, int], str], deep: int) -> list[str]:
        tile = list(acc)
        held = [f.load(V4, f.at(p, i)) for p in row] if deep > 1 and host.by_element else []
        for j in range(deep):
            line = f.at("%panel", f.mul(f.add(i, j), host.panel))
            lanes = [f.load(host.kind, f.at(line, v * host.lanes)) for v in range(vectors)]
            for r in range(rows):
                one = f.shuffle(V4, held[r], "poison", [j] * 4) if held else elements(row[r], j)
                for v in range(vectors):
                    tile[r * vectors + v] = f.fma(host.kind, lanes[v], one, tile[r * vectors + v])
        return tile

    def loop(start: str, stop: str, deep: int, acc: Sequence[str]) -> list[str]:
        def body(i: str, *values: str) -> list[str]:
            return step(i, values, lambda p, j: f.splat(host.kind, f.load("float", f.at(p, f.add(i, j)))), deep)

        return f.loop(start, stop, deep, body, *[(host.kind, a) for a in acc])

    whole = f.down("%k", 4)
    tile = loop(whole, "%k", 1, loop("0", whole, 4, ["zeroinitializer"] * (rows * vectors)))
    lines = [tile[r * vectors : (r + 1) * vectors] for r in range(rows)]
    if transposed:
        finish_transposed(f, host, lines)
    else:
        finish(f, straight_pieces(host, lines))
    return f.text()


def straight_pieces(host: Machine, lines: Sequence[Sequence[str]]) -> list[Piece]:
    return [(r, v * host.lanes, host.kind, value) for r, line in enumerate(lines) for v, value in enumerate(line)]


def finish_transposed(f: Function, host: Machine, lines: Sequence[Sequence[str]]) -> None:
    """+ bias, + C, then the tile with its rows as columns: a block is stored as soon as it is transposed.

    (All blocks at once, behind one branch for each addend, were 96 values with AVX-512: memory in place of registers.)
    """
    kinds = [host.kind] * (len(lines) * len(lines[0]))

    def biased() -> list[str]:
        each = [f.splat(host.kind, f.load("float", f.at("%bias", r))) for r in range(len(lines))]
        return [f.fadd(host.kind, value, bias) for line, bias in zip(lines, each) for value in line]

    flat = [value for line in lines for value in line]
    flat = f.when(f.test("ne", "%bias", "null", "ptr"), biased, *zip(kinds, flat))
    across = len(lines[0])
    lines = [flat[at : at + across] for at in range(0, len(flat), across)]

    def store(add: bool) -> None:
        for i, j, kind, value in transposed_pieces(f, host, lines):
            place = f.at(f.at("%c", f.mul("%ldc", i)), j)
            f.store(kind, f.fadd(kind, value, f.load(kind, place)) if add else value, place)

    adds = f.bit("%flags", ADD)
    f.when(adds, lambda: store(True))
    f.when(f.op(f"xor i1 {adds}, true"), lambda: store(False))


def transposed_pieces(f: Function, host: Machine, lines: Sequence[Sequence[str]]) -> Iterator[Piece]:
    """The tile with its rows as columns: blocks of 4 lanes × 4 (or 2) rows, all blocks of a vector at once."""
    for v in range(len(lines[0])):
        for r in range(0, len(lines), 4):
            some = [line[v] for line in lines[r : r + 4]]
            transposed = transpose_four(f, host.kind, some) if len(some) == 4 else transpose_two(f, host.kind, some)
            wide = len(some)
            for part in range(host.lanes // 4):
                for i, value in enumerate(transposed):
                    piece = part_of(f, host.lanes // 4 * wide, value, part * wide, wide)
                    yield v * host.lanes + 4 * part + i, r, vector(wide), piece


def part_of(f: Function, lanes: int, value: str, start: int, count: int) -> str:
    return value if lanes == count else f.shuffle(vector(lanes), value, "poison", range(start, start + count))


def finish(f: Function, pieces: Sequence[Piece]) -> None:
    """+ bias, + C: each a branch around all pieces; then the stores."""
    kinds = [kind for _, _, kind, _ in pieces]
    address = [f.at(f.at("%c", f.mul("%ldc", i)), j) for i, j, _, _ in pieces]

    def typed(values: Sequence[str]) -> list[Typed]:
        return list(zip(kinds, values))

    def biased() -> list[str]:
        return [f.fadd(kind, value, f.load(kind, f.at("%bias", j))) for _, j, kind, value in pieces]

    def added() -> list[str]:
        return [f.fadd(t, v, f.load(t, p)) for (t, v), p in zip(typed(values), address)]

    values = [value for _, _, _, value in pieces]
    values = f.when(f.test("ne", "%bias", "null", "ptr"), biased, *typed(values))
    values = f.when(f.bit("%flags", ADD), added, *typed(values))
    for (kind, value), place in zip(typed(values), address):
        f.store(kind, value, place)


def merge(host: Machine) -> str:
    """C[i,j] = tile[i,j] + bias + C[i,j] for the part of a tile that exists, four columns at a time."""
    f = Function("merge", "ptr %tile, ptr %c, i64 %ldc, i64 %rows, i64 %columns, ptr %bias, i64 %flags")
    zero = {"float": "0.0", V4: "zeroinitializer"}

    def cells(i: str, j: str, kind: str) -> None:
        place = f.at(f.at("%c", f.mul(i, "%ldc")), j)
        value = f.load(kind, f.at("%tile", f.add(f.mul(i, host.side), j)))
        value = f.fadd(kind, value, f.either(biased, kind, lambda: f.load(kind, f.at("%bias", j)), zero[kind]))
        value = f.either(adds, kind, lambda: f.fadd(kind, value, f.load(kind, place)), value)
        f.store(kind, value, place)

    def row(i: str) -> None:
        f.loop("0", fours, 4, lambda j: cells(i, j, V4))
        f.loop(fours, "%columns", 1, lambda j: cells(i, j, "float"))

    biased, adds = f.test("ne", "%bias", "null", "ptr"), f.bit("%flags", ADD)
    fours = f.down("%columns", 4)
    f.loop("0", "%rows", 1, row)
    return f.text()


# -- few rows ---------------------------------------------------------------------------------------------------------
def dots(host: Machine, m: int, together: int, form: str = "nt") -> str:
    """nt with few rows: dot products with one or two rows of B at a time (`together`).

    Pairs are as fast as B arrives on x86-64: 27 GB/s from level 3 with the prefetch, 18 GB/s with eight rows and none. From
    memory one row of A takes two cores of a Xeon with AMX 23 to 24 GB/s in pairs, 22 row by row (25 without computing
    anything), eight rows of 2048 numbers 18 and 15. On Arm the order of memory counts: two Neoverse-N1 cores read weights
    of 300 MB at 33 GB/s row by row (35 without computing anything), at 22 in pairs; from caches pairs of short rows are
    1.1 to 1.3 times as fast.
    """
    f = Function(f"{form}_dots_{m}x{together}", SIGNATURE)
    element = ELEMENTS.get(form, "float")
    line = LINE if element == "float" else 2 * LINE  # elements in a line of the cache
    kind, sums = host.kind, 8 // m if together == 1 else 2 if m <= 3 else 1  # sums of two rows: as many as hide latency
    long = max(LINE, 2 * host.lanes, sums * host.lanes)
    mine = [f.at("%a", f.mul(f.add("%m0", i), "%lda")) for i in range(m)]

    def totals(theirs: Sequence[str]) -> list[list[str]]:
        """For each of these rows of B its products with the rows of A, still in lanes."""
        every = [(r, i, u) for r in range(len(theirs)) for i in range(m) for u in range(sums)]
        place = {key: at for at, key in enumerate(every)}

        def step(k: str, acc: Sequence[str], lanes: int, vectors: int) -> list[str]:
            out = list(acc)
            for p in theirs if vectors > 1 else ():
                for at in range(0, long, line):
                    f.prefetch(p, f.add(k, AHEAD[together] * line // LINE + at), element)
            for u in range(vectors):
                ys = [numbers(f, kind, lanes, element, f.at(p, f.add(k, u * lanes), element)) for p in theirs]
                for i, p in enumerate(mine):
                    x = numbers(f, kind, lanes, "float", f.at(p, f.add(k, u * lanes)))
                    for r, y in enumerate(ys):
                        at = place[r, i, u % sums]
                        out[at] = f.fma(kind, y, x, out[at])
            return out

        def loop(start: str, stop: str, lanes: int, vectors: int, acc: Sequence[str]) -> list[str]:
            carried = [(kind, a) for a in acc]
            return f.loop(start, stop, lanes * vectors, lambda k, *v: step(k, v, lanes, vectors), *carried)

        lines, whole = f.down("%k", long), f.down("%k", host.lanes)
        acc = loop("0", lines, host.lanes, long // host.lanes, ["zeroinitializer"] * len(every))
        acc = loop(whole, "%k", 1, 1, loop(lines, whole, host.lanes, 1, acc))
        parts = [acc[at : at + sums] for at in range(0, len(acc), sums)]
        added = [reduce(partial(f.fadd, kind), part) for part in parts]
        return [added[r * m : (r + 1) * m] for r in range(len(theirs))]

    def pair(n: str, j: str, last: str) -> None:
        theirs = [f.at("%b", f.mul(f.add(n, at), "%ldb"), element) for at in (j, f.min(f.add(j, 1), last))]
        first, second = totals(theirs) if together == 2 else (totals([p])[0] for p in theirs)
        for i in range(m):
            f.store(V2, sum_two(f, host.lanes, first[i], second[i]), f.at("%scratch", f.add(j, i * host.side)))

    def block(n: str) -> None:
        columns = f.min(f.sub("%n1", n), host.side)
        last = f.sub(columns, 1)
        f.loop("0", columns, 2, lambda j: pair(n, j, last))
        place = f.at(f.at("%c", f.mul("%m0", "%ldc")), n)
        bias = f.beside("%bias", n)
        f.call("@merge", f"ptr %scratch, ptr {place}, i64 %ldc, i64 {m}, i64 {columns}, ptr {bias}, i64 %beta")

    f.loop("%n0", "%n1", host.side, block)
    return f.text()


def numbers(f: Function, kind: str, lanes: int, element: str, address: str) -> str:
    """So many elements as a vector of floats, or a single one in its first lane."""
    if element == "float":
        return f.load(kind, address) if lanes > 1 else f.first(kind, f.load("float", address))
    given, wide = (f"<{width(kind)} x {of}>" for of in (element, "i32"))
    value = f.op(f"load {given if lanes > 1 else element}, ptr {address}, align 2")
    if lanes == 1:
        value = f.op(f"insertelement {given} zeroinitializer, {element} {value}, i64 0")
    if element == "half":
        return f.op(f"fpext {given} {value} to {kind}")
    bits = f.op(f"shl {wide} {f.op(f'zext {given} {value} to {wide}')}, splat (i32 16)")
    return f.op(f"bitcast {wide} {bits} to {kind}")


def sum_two(f: Function, lanes: int, a: str, b: str) -> str:
    """The sums over the lanes of two vectors, as a vector of two."""
    while lanes > 4:
        half = lanes // 2
        a, b = (f.fadd(vector(half), *(part_of(f, lanes, v, at, half) for at in (0, half))) for v in (a, b))
        lanes = half
    both = f.fadd(V4, f.shuffle(V4, a, b, (0, 1, 4, 5)), f.shuffle(V4, a, b, (2, 3, 6, 7)))
    return f.fadd(V2, f.shuffle(V4, both, both, (0, 2)), f.shuffle(V4, both, both, (1, 3)))


def sweeps(host: Machine, m: int) -> str:
    """nn with m ≤ 3 rows: C[i,:] += Σj A[i,j]·B[j,:], several rows of B in one pass over C."""
    f = Function(f"sweeps_{m}", SIGNATURE)
    lines = [f.at("%c", f.mul(f.add("%m0", i), "%ldc")) for i in range(m)]
    mine = [f.at("%a", f.mul(f.add("%m0", i), "%lda")) for i in range(m)]
    whole = f.add("%n0", f.down(f.sub("%n1", "%n0"), LINE))

    def start(n: str) -> None:
        bias = f.either(f.test("ne", "%bias", "null", "ptr"), "float", lambda: f.load("float", f.at("%bias", n)), "0.0")
        for line in lines:
            place = f.at(line, n)
            old = f.either(f.bit("%beta", ADD), "float", partial(f.load, "float", place), "0.0")
            f.store("float", f.fadd("float", bias, old), place)

    def sweep(k: str, deep: int) -> None:
        theirs = [f.at("%b", f.mul(f.add(k, j), "%ldb")) for j in range(deep)]
        scale = [[f.load("float", f.at(p, f.add(k, j))) for j in range(deep)] for p in mine]

        def body(n: str, kind: str) -> None:
            out = [f.load(kind, f.at(line, n)) for line in lines]
            for j, p in enumerate(theirs):
                y = f.load(kind, f.at(p, n))
                for i in range(m):
                    one = scale[i][j] if kind == "float" else f.splat(kind, scale[i][j])
                    out[i] = f.fma(kind, y, one, out[i])
            for line, value in zip(lines, out):
                f.store(kind, value, f.at(line, n))

        def long(n: str) -> None:
            for p in theirs:
                f.prefetch(p, f.add(n, 4 * LINE))
            body(n, vector(LINE))

        f.loop("%n0", whole, LINE, long)
        f.loop(whole, "%n1", 1, lambda n: body(n, "float"))

    f.loop("%n0", "%n1", 1, start)
    bulk = f.down("%k", host.deep)
    f.loop("0", bulk, host.deep, lambda k: sweep(k, host.deep))
    f.loop(bulk, "%k", 1, lambda k: sweep(k, 1))
    return f.text()


def leave_few_rows(f: Function, host: Machine, kind: str) -> None:
    """Out of a product with so few rows (or none) that one of these computes it."""
    high = f.sub("%m1", "%m0")
    f.leave(f.test("sle", high, 0), lambda: None)
    for m in range(1, {"nt": host.dots, "nn": 3, "tn": 0}[kind] + 1):
        few = f"@sweeps_{m}" if kind == "nn" else f"@nt_dots_{m}x2"
        if kind == "nt" and host.row_by_row:
            few = f.choose(f.test("sgt", "%k", SHORT), "ptr", f"@nt_dots_{m}x1", few)
        f.leave(f.test("eq", high, m), partial(f.call, few, SIGNATURE))


# -- the whole product ------------------------------------------------------------------------------------------------
def product(host: Machine, kind: str) -> str:
    """Blocks of k, of lanes, of rows, and over the panels of the block; rows and lanes as above."""
    f = Function(f"ag_gemm_{kind}", SIGNATURE, exported=True)
    leave_few_rows(f, host, kind)
    rows, lanes = (("%n0", "%n1"), ("%m0", "%m1")) if kind == "nt" else (("%m0", "%m1"), ("%n0", "%n1"))
    held, panels = (f.at("%scratch", host.tile_bytes + at, "i8") for at in (0, ROWS_BYTES))
    parts = f.max(f.ceil("%k", KC), 1)
    deep = f.down(f.add(f.ceil("%k", parts), 3), 4)

    def block(part: str) -> None:
        k0 = f.mul(part, deep)
        k = f.min(f.sub("%k", k0), deep)
        apart = f.add(f.mul(k, host.panel), LINE)  # never a power of two, for which caches have few places
        first = f.test("eq", part, 0)
        bias, flags = f.choose(first, "ptr", "%bias", "null"), f.choose(first, "i64", "%beta", "1")

        def strip(p0: str) -> None:
            p1 = f.min(f.add(p0, WIDE), lanes[1])
            if kind == "nt":
                f.loop(p0, p1, host.panel, lambda p: pack(p, p0, p1))
            else:
                corner = f.at(f.at("%b", f.mul(k0, "%ldb")), p0)
                wide = f.sub(p1, p0)
                f.call("@copy", f"ptr {corner}, i64 %ldb, ptr {panels}, i64 {apart}, i64 {k}, i64 {wide}")
            if kind == "tn":
                f.loop(rows[0], rows[1], host.turned, lambda r: turned(r, p0, p1))
            else:
                f.loop(rows[0], rows[1], host.rows[0], lambda r: band(r, p0, p1))

        def panel_of(p: str, p0: str) -> str:
            return f.at(panels, f.mul(f.div(f.sub(p, p0), host.panel), apart))

        def pack(p: str, p0: str, p1: str) -> None:
            count = f.min(f.sub(p1, p), host.panel)
            corner = f.at(f.at("%a", f.mul(p, "%lda")), k0)
            to = panel_of(p, p0)
            f.call("@transpose", f"ptr {corner}, i64 %lda, ptr {to}, i64 {host.panel}, i64 {count}, i64 {k}")
            partial_panel = f.test("slt", count, host.panel)
            f.when(partial_panel, lambda: f.call("@clear", f"ptr {to}, i64 {k}, i64 {count}"))

        def turned(first: str, p0: str, p1: str) -> None:
            end = f.min(f.add(first, host.turned), rows[1])
            corner = f.at(f.at("%a", f.mul(k0, "%lda")), first)
            f.call("@transpose", f"ptr {corner}, i64 %lda, ptr {held}, i64 {k}, i64 {k}, i64 {f.sub(end, first)}")

            def one(r: str) -> None:
                tiles(f.at(held, f.mul(f.sub(r, first), k)), k, r, f.min(f.sub(end, r), host.rows[0]), p0, p1)

            f.loop(first, end, host.rows[0], one)

        def band(r: str, p0: str, p1: str) -> None:
            count = f.min(f.sub(rows[1], r), host.rows[0])
            matrix, stride = ("%b", "%ldb") if kind == "nt" else ("%a", "%lda")
            here = f.at(f.at(matrix, f.mul(r, stride)), k0)
            crowded = f.op(f"and i1 {f.test('eq', f.rem(stride, 4096), 0)}, {f.test('sge', f.sub(p1, p0), 64)}")
            lying = f"ptr {here}, i64 {stride}, ptr {held}, i64 {count}, i64 {k}"
            f.when(crowded, lambda: f.call("@gather", lying))
            here, stride = f.choose(crowded, "ptr", held, here), f.choose(crowded, "i64", k, stride)
            tiles(here, stride, r, count, p0, p1)

        def tiles(here: str, stride: str, r: str, count: str, p0: str, p1: str) -> None:
            f.loop(p0, p1, host.panel, lambda p: tile(here, stride, r, count, p, panel_of(p, p0), f.sub(p1, p)))

        def tile(here: str, stride: str, r: str, count: str, p: str, panel: str, left: str) -> None:
            i, j = (p, r) if kind == "nt" else (r, p)
            place = f.at(f.at("%c", f.mul(i, "%ldc")), j)
            stem = "nt" if kind == "nt" else "nn"
            run_tile(f, host, stem, (here, stride, count), (panel, k, left), (place, "%ldc"), f.beside(bias, j), flags)

        f.loop(lanes[0], lanes[1], WIDE, strip)

    f.loop("0", parts, 1, block)
    return f.text()


def run_tile(
    f: Function,
    host: Machine,
    stem: str,
    some_rows: tuple[str, str, str],  # where, how far apart, how many
    some_lanes: tuple[str, str, str],  # the panel, its depth, how many lanes are left
    to: tuple[str, str],  # where in C, and its row length
    bias: str,
    flags: str,
) -> None:
    """The kernel of the fitting size; by way of scratch memory where the tile sticks out."""
    (rows, ldr, count), (panel, k, left), (place, ldc) = some_rows, some_lanes, to
    low, thin = f.test("sle", count, host.rows[1]), f.test("sle", left, host.lanes)

    def pick(r: int) -> str:
        wide, narrow = (f"@{kernel_name(stem, r, v)}" for v in (host.vectors, 1))
        return f.choose(thin, "ptr", narrow, wide)

    kernel = f.choose(low, "ptr", pick(host.rows[1]), pick(host.rows[0]))
    full_rows = f.choose(low, "i64", str(host.rows[1]), str(host.rows[0]))
    full_lanes = f.choose(thin, "i64", str(host.lanes), str(host.panel))
    ragged = f.op(f"or i1 {f.test('slt', count, full_rows)}, {f.test('slt', left, full_lanes)}")
    where, pitch = f.choose(ragged, "ptr", "%scratch", place), f.choose(ragged, "i64", str(host.side), ldc)
    now, how = f.choose(ragged, "ptr", "null", bias), f.choose(ragged, "i64", "0", flags)
    last, shown = f.sub(count, 1), f.min(left, host.panel)
    operands = f"ptr {rows}, i64 {ldr}, i64 {last}, ptr {panel}, i64 {k}"
    f.call(kernel, f"{operands}, ptr {where}, i64 {pitch}, ptr {now}, i64 {how}")
    height, across = (shown, count) if stem == "nt" else (count, shown)
    shape = f"i64 {ldc}, i64 {height}, i64 {across}"
    f.when(ragged, lambda: f.call("@merge", f"ptr %scratch, ptr {place}, {shape}, ptr {bias}, i64 {flags}"))
