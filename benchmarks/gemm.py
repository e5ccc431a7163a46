"""Matrix products in float32 on one core: what share of its peak each implementation reaches, by shape.

    python benchmarks/gemm.py                                     the shapes of transformer layers, 8 to 384 rows
    python benchmarks/gemm.py --shapes 32x768x3072,64x768x768     rows×K×N
    python benchmarks/gemm.py --rounds 99 --weights 0             weights that stay in the caches

`peak` is what the core does with multiply-adds alone, on registers, in GFLOP/s (the median). The columns are shares of it:

    limit        what no kernel can exceed, because the weight has to be read once from where it lies
    nt, nn       our generated kernel with the weight as nn.Linear stores it, and transposed
    packed       MKL with a packed weight, as our graphs call it
    panels       our kernel of convolutions with a weight packed in panels
    brgemm       oneDNN's micro-kernel (`at::native::cpublas::brgemm`), 64 columns at a time from a packed copy
    torch.mm

A star marks what a graph with frozen or watched parameters chooses. Every call takes another copy of the weight, 16 MiB of
them in all, as in a model with many layers; with panels it is told where the next one lies, as there. Each is used some
times before a batch is timed: other contenders have other copies and leave these in main memory.

Batches of our kernels and of brgemm are called by a native loop, as a graph's are; a call from Python takes two of the 25
microseconds that 32 rows of 256 by 256 need. torch.mm is called from Python.

Time is the thread's own, so other processes cost caches and frequency, but not turns of the scheduler. The core's clock
differs from one moment to the next, on a virtual machine by a third: a contender's batch, of a millisecond, is compared
with batches of the peak just before and just after it, and shown is the median of these shares.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable

import torch

from airgraph.engine.native.kernels import blas, conv_last, gemm, panels
from airgraph.engine.native.kernels.gemm import COLUMNS
from airgraph.engine.native.kernels.products import ProductShape
from airgraph.engine.native.kernels.shared_kernels import Gemm, kernel
from airgraph.engine.native.libtorch import libtorch, symbol
from airgraph.engine.native.llvm.builder import Function, declarations, vector
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.engine.native.llvm.jit import Code, Unit, build
from airgraph.engine.native.packing import PackingBudget
from airgraph.plan.sizes import as_int

ROWS = (8, 16, 32, 64, 128, 384)
LAYERS = ((256, 256), (256, 1024), (768, 768), (768, 3072), (3072, 768), (1024, 1024), (320, 864), (240, 480))
SECONDS = 0.001  # of a batch
BRGEMM, BLOCK = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb", 64
ACCUMULATORS = {16: 24, 8: 12, 4: 24}  # by lanes: half of the registers or more, but not all
WARM = 8  # passes over all copies before a batch is timed: level 3 does not keep what was used once
READERS = 8  # vectors of a weight that are read at once
ITERATIONS = 10_000
i64, ptr = ctypes.c_int64, ctypes.c_void_p
Calls = Callable[[int], None]  # so many calls, each with another copy of the weight
Shape = tuple[int, int, int]


# -- the peak -----------------------------------------------------------------------------------------------------------
def build_limits() -> Code:
    """`peak`: x ← x + a·b, in as many registers as hide the latency of an instruction; `read`: see `reading`."""
    lanes, kind = vector_lanes(), vector(vector_lanes())
    f = Function("peak", "ptr %x, i64 %n", exported=True)
    a, b, *sums = (f.load(kind, f.at("%x", i * lanes)) for i in range(ACCUMULATORS[lanes] + 2))
    with f.each("0", "%n", 1, [(kind, s) for s in sums]) as loop:
        loop.next = [f.fma(kind, a, b, s) for s in loop.carried]
    for i, s in enumerate(loop.carried):
        f.store(kind, s, f.at("%x", i * lanes))
    names = ("peak", "read", "steps", "blocks")
    return build([Unit(declarations(lanes) + f.text() + reading() + stepping() + multiplying(), names)])


def reading() -> str:
    """The sum of n numbers, a multiple of all lanes that are read at once."""
    lanes, kind = vector_lanes(), vector(vector_lanes())
    f = Function("read", "ptr %x, i64 %n, ptr %sum", exported=True)
    with f.each("0", "%n", READERS * lanes, [(kind, "zeroinitializer")] * READERS) as loop:
        vectors = [f.load(kind, f.at(f.at("%x", loop.i), i * lanes)) for i in range(READERS)]
        loop.next = [f.fadd(kind, s, v) for s, v in zip(loop.carried, vectors)]
    total = loop.carried[0]
    for s in loop.carried[1:]:
        total = f.fadd(kind, total, s)
    f.store(kind, total, "%sum")
    return f.text()


def stepping() -> str:
    """%count calls of a step of ours, each with the next of %all tables of operands and of sizes, from row %first on."""
    given = "ptr %step, ptr %tables, i64 %first, i64 %count, i64 %all, i64 %end, ptr %scratch"
    f = Function("steps", given, exported=True)
    with f.each("0", "%count", 1) as loop:
        row = f.row("%tables", f.rem(f.add("%first", loop.i), "%all"), 2)
        table, sizes = f.word(row, 0, "ptr"), f.word(row, 1, "ptr")
        f.call("%step", f"ptr {table}, ptr {sizes}, i64 0, i64 %end, ptr %scratch")
    return f.text()


def multiplying() -> str:
    """%count products by brgemm, as `steps`: of each weight %parts blocks, one row each: columns, block, place in C."""
    given = "ptr %multiply, ptr %rows, i64 %first, i64 %count, i64 %all, i64 %parts, i64 %m, i64 %k, i64 %n, ptr %a"
    f = Function("blocks", given, exported=True)
    with f.each("0", "%count", 1) as loop:
        first = f.mul(f.rem(f.add("%first", loop.i), "%all"), "%parts")
        with f.each("0", "%parts", 1) as part:
            row = f.row("%rows", f.add(first, part.i), 3)
            wide, block, place = f.word(row, 0), f.word(row, 1, "ptr"), f.word(row, 2, "ptr")
            sizes = f"i64 %m, i64 {wide}, i64 %k, i64 %k, i64 {wide}, i64 %n"
            f.call("%multiply", f"{sizes}, i1 zeroext 0, ptr %a, ptr {block}, ptr {place}, i1 zeroext 0")
    return f.text()


def peak_calls(code: Code) -> Calls:
    numbers = torch.full(((ACCUMULATORS[vector_lanes()] + 2) * vector_lanes(),), 0.5)
    call = ctypes.CFUNCTYPE(None, ptr, i64)(code["peak"])

    def calls(count: int) -> None:
        call(numbers.data_ptr(), count * ITERATIONS)
        assert code  # stays loaded

    return calls


def read_calls(code: Code, o: Operands) -> Calls:
    total = torch.zeros(vector_lanes())
    call, turn = ctypes.CFUNCTYPE(None, ptr, i64, ptr)(code["read"]), Turn(len(o.weights))
    numbers = o.n * o.k // (READERS * vector_lanes()) * READERS * vector_lanes()

    def calls(count: int) -> None:
        for _ in range(count):
            call(o.weights[turn.advance(1)].data_ptr(), numbers, total.data_ptr())
        assert code

    return calls


# -- contenders -----------------------------------------------------------------------------------------------------------
class Operands:
    """A and C, and as many copies of the weight [n, k] as fill the given bytes."""

    def __init__(self, shape: Shape, weights: int) -> None:
        self.m, self.k, self.n = shape
        self.a, self.c = torch.randn(self.m, self.k), torch.zeros(self.m, self.n)
        weight = torch.randn(self.n, self.k) / self.k**0.5
        self.weights = [weight.clone() for _ in range(max(1, weights // weight.nbytes))]
        self.wanted = self.a.double() @ weight.double().t()

    def check(self, name: str) -> None:
        error = float((self.c - self.wanted).abs().max())
        if not error < 1e-4:
            raise SystemExit(f"{name} at {self.m}x{self.k}x{self.n} is wrong by {error}")
        self.c.zero_()


def ours(code: Code, o: Operands, form: str, packed: bool = False, in_panels: bool = False) -> Calls:
    """One step of a graph, as a single thread runs it."""
    transposed = form == "nn" and not packed
    known = {Gemm.FORM: gemm.FORMS.index(form), Gemm.BATCH: 1, Gemm.M: o.m, Gemm.N: o.n, Gemm.K: o.k, Gemm.LDA: o.k}
    known |= {Gemm.LDB: o.n if transposed else o.k, Gemm.LDC: o.n, Gemm.SPLIT: COLUMNS}
    copies = [w.t().contiguous() for w in o.weights] if transposed else o.weights
    kept: list[object] = [copies]
    addresses = [w.data_ptr() for w in copies]
    if packed:
        blocks = [blas.PackedWeight(o.m, o.n, o.k, o.n) for _ in o.weights]
        for block, weight in zip(blocks, o.weights):
            block.fill(weight.data_ptr(), True, o.k)
        addresses, known = [b.address for b in blocks], known | {Gemm.BLOCK: o.n, Gemm.PACKED: blas.step()}
        kept += blocks
    scratch_bytes, tables = as_int(gemm.scratch_bytes(form, o.m, o.n, o.k)), [0] * len(addresses)
    if in_panels:
        s, tile = panels.one_by_one(o.m, o.n, o.k), panels.tile_of(product(o.m, o.k, o.n))
        dims = [as_int(x) for x in conv_last.words(s, 1, (0, 1, o.m * o.k, o.k), tile)]
        dims[conv_last.PREPACKED] = 1
        copies = [panels.in_panels(w, s, tile) for w in o.weights]
        addresses = [w.data_ptr() for w in copies]
        known |= {Gemm.PACKED: kernel("step_panels")}
        scratch_bytes = conv_last.offsets(s, tile)["packed"]
        for i, address in enumerate([*addresses[1:], addresses[0]]):
            dims[conv_last.FOLLOWING : conv_last.FOLLOWING + 3] = conv_last.following(s, tile, address)
            kept.append((i64 * len(dims))(*dims))
            tables[i] = ctypes.addressof(kept[-1])
        kept.append(copies)
    scratch = torch.zeros(scratch_bytes // 4 + 64)
    rows = []
    for address, table in zip(addresses, tables):
        held = (i64 * 4)(o.a.data_ptr(), address, o.c.data_ptr(), 0)
        args = (ptr * 4)(*(ctypes.addressof(held) + 8 * i for i in range(4)))
        words = (i64 * Gemm.WORDS)()
        for index, number in {**known, Gemm.PANELS: table}.items():
            words[index] = number
        kept += [held, args, words]
        rows += [ctypes.addressof(args), ctypes.addressof(words)]
    every = (i64 * len(rows))(*rows)
    run = ctypes.CFUNCTYPE(None, ptr, ptr, i64, i64, i64, i64, ptr)(code["steps"])
    step, turn = kernel("step_gemm"), Turn(len(addresses))

    def calls(count: int) -> None:
        run(step, every, turn.advance(count), count, len(addresses), o.n, scratch.data_ptr())
        assert kept and code  # what the tables point to

    return calls


def brgemm(code: Code, o: Operands) -> Calls | None:
    multiply = symbol(libtorch(), BRGEMM)
    if not multiply:
        return None
    packed = [[w[j : j + BLOCK].t().contiguous() for j in range(0, o.n, BLOCK)] for w in o.weights]
    parts = len(packed[0])
    numbers = [
        x
        for row in packed
        for j, b in enumerate(row)
        for x in (b.shape[1], b.data_ptr(), o.c.data_ptr() + 4 * j * BLOCK)
    ]
    rows, turn = (i64 * len(numbers))(*numbers), Turn(len(packed))
    run = ctypes.CFUNCTYPE(None, ptr, ptr, *[i64] * 7, ptr)(code["blocks"])

    def calls(count: int) -> None:
        first = turn.advance(count)
        run(multiply, rows, first, count, len(packed), parts, o.m, o.k, o.n, o.a.data_ptr())
        assert packed and code

    return calls


def torch_mm(o: Operands) -> Calls:
    weights = [w.t() for w in o.weights]
    turn = Turn(len(weights))

    def calls(count: int) -> None:
        for _ in range(count):
            torch.mm(o.a, weights[turn.advance(1)], out=o.c)

    return calls


class Turn:
    """Copies are used one after the other, beginning anywhere: a contender should not find in a cache what another has
    just read."""

    def __init__(self, copies: int) -> None:
        self.next, self.copies = random.randrange(copies), copies

    def advance(self, count: int) -> int:
        """The next of so many."""
        found, self.next = self.next, (self.next + count) % self.copies
        return found


def contenders(code: Code, o: Operands) -> dict[str, Calls | None]:
    return {
        "nt": ours(code, o, "nt"),
        "nn": ours(code, o, "nn"),
        "packed": ours(code, o, "nn", packed=True) if blas.functions() else None,
        "panels": ours(code, o, "nt", in_panels=True),
        "brgemm": brgemm(code, o),
        "torch.mm": torch_mm(o),
    }


# -- measuring ------------------------------------------------------------------------------------------------------------
def speed(calls: Calls, count: int, operations: float) -> float:
    """GFLOP/s by the clock of the thread."""
    start = time.thread_time_ns()
    calls(count)
    return count * operations / max(time.thread_time_ns() - start, 1)


def measure(shape: Shape, rounds: int, weights: int, code: Code) -> tuple[float, dict[str, float]]:
    """The peak in GFLOP/s, and the share that each contender reaches."""
    operands, m, k, n = Operands(shape, weights), *shape
    running = {name: calls for name, calls in contenders(code, operands).items() if calls is not None}
    flops = dict.fromkeys(running, 2.0 * m * k * n)
    flops |= {"peak": 2.0 * ACCUMULATORS[vector_lanes()] * vector_lanes() * ITERATIONS, "limit": 2.0 * m * k * n}
    counts = {}
    for name, calls in running.items():
        calls(1)
        operands.check(name)
    running |= {"peak": peak_calls(code), "limit": read_calls(code, operands)}
    for name, calls in running.items():
        counts[name] = max(1, round(SECONDS * 1e9 * speed(calls, 2, flops[name]) / flops[name]))
    order, shares, peaks = [name for name in running if name != "peak"], {name: list[float]() for name in running}, []

    def peak() -> float:
        peaks.append(speed(running["peak"], counts["peak"], flops["peak"]))
        return peaks[-1]

    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            running[name](WARM * len(operands.weights))
            before = peak()
            found = speed(running[name], counts[name], flops[name])
            shares[name].append(2 * found / (before + peak()))
    return statistics.median(peaks), {
        name: min(statistics.median(shares[name]), 1.0) for name in running if name != "peak"
    }


def product(m: int, k: int, n: int) -> ProductShape:
    return ProductShape(0, 1, m, n, k, k, k, 0, 0, bias=False, unchanging=True, threads=1)


def choice(m: int, k: int, n: int) -> str:
    strategy = PackingBudget().strategy(product(m, k, n), "weight")
    return "nt" if strategy is None else "packed" if strategy.packed else "panels"


def shapes(text: str) -> list[Shape]:
    return [(int(m), int(k), int(n)) for m, k, n in (word.split("x") for word in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [(m, k, n) for k, n in LAYERS for m in ROWS]
    parser.add_argument("--shapes", type=shapes, default=default, metavar="MxKxN,…")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--weights", type=float, default=16, metavar="MIB", help="of all copies of a weight")
    options = parser.parse_args()
    torch.set_num_threads(1)
    code = build_limits()
    names = ("limit", "nt", "nn", "packed", "panels", "brgemm", "torch.mm")
    print(f"{'rows×K→N':<16}{'peak':>6}" + "".join(f"{name:>10}" for name in names) + "   % of the peak")
    for m, k, n in options.shapes:
        peak, found = measure((m, k, n), options.rounds, int(options.weights * 2**20), code)
        chosen = choice(m, k, n)
        cells = (f"{100 * found[c]:.0f}{'*' if c == chosen else ' '}" if c in found else "–" for c in names)
        print(f"{f'{m}×{k}→{n}':<16}{peak:>6.0f}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
