"""Matrix products by MKL, which libtorch_cpu contains on x86-64: weights that keep their content are packed once.

    weight = PackedWeight(m, n, k, block)          blocks of `block` columns, in MKL's own layout
    weight.fill(address, transposed, ldb)
    step()                                         → step_gemm (shared_kernels.py) for such a weight

Every call of MKL runs in the thread that makes it: the threads of a graph's parallel region share out the blocks. A bias is
written to the result first, and the product is added to it. MKL wants the number of rows when it packs, so products with a
symbolic number of rows stay with the generated kernel.

One core of a Xeon (Cascade Lake, AVX-512), GFLOP/s by the clock of the thread, at rows×K→N, weights not in level 2:

                 64×768→3072  64×3072→768  56×288→1152  384×768→3072  32×1024→1024  8×768→3072  1×768→3072
    packed MKL           114          109          109           130            78          40           6
    generated             82           78           80            83            58          27           5
    MKL unpacked          80           65           81           117            41          19           6
    brgemm                89           51           80           114            70          31           4

(brgemm: oneDNN's micro-kernel, 64 columns at a time from a packed copy.) A generated kernel for packed weights reached 93,
89, 93, 107, 71, 40, 6. With fewer than four rows packing gains nothing. Most weights below 2 MiB are in panels (panels.py).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from functools import cache

from airgraph.engine.native.kernels.shared_kernels import Gemm
from airgraph.engine.native.libtorch import libtorch, symbol
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.engine.native.llvm.jit import Code, Unit, build

SYMBOLS = ("cblas_sgemm_pack_get_size", "cblas_sgemm_pack", "cblas_sgemm_compute", "MKL_Set_Num_Threads_Local")
ROW_MAJOR, NO_TRANS, TRANS, PACKED, B_MATRIX = 101, 111, 112, 151, 162  # of cblas.h
ROWS, WEIGHT = 4, 128 << 10  # the fewest rows, and the fewest numbers of a weight, for which packing pays
ALIGNED = 64  # bytes


@cache
def functions() -> Mapping[str, int] | None:
    """The addresses of MKL's functions; None where libtorch has none (Arm, builds with another BLAS)."""
    found = {name: symbol(libtorch(), name) for name in SYMBOLS}
    return found if all(found.values()) else None


def pays(m: int, n: int, k: int) -> bool:
    """Where it was measured: with AVX-512."""
    return functions() is not None and vector_lanes() == 16 and m >= ROWS and n * k >= WEIGHT


class PackedWeight:
    """A weight in MKL's layout: blocks of `block` columns, `apart` bytes from each other."""

    def __init__(self, m: int, n: int, k: int, block: int) -> None:
        self.m, self.n, self.k, self.block = m, n, k, block
        size = ctypes.CFUNCTYPE(ctypes.c_size_t, *[ctypes.c_int] * 4)(self.function("cblas_sgemm_pack_get_size"))
        self.apart = -(-size(B_MATRIX, m, min(block, n), k) // ALIGNED) * ALIGNED
        self.bytes = 4 * n * k  # MKL asks for several MiB more and leaves them alone: pages that never become resident
        self.memory = mmap.mmap(-1, self.apart * -(-n // block))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @staticmethod
    def function(name: str) -> int:
        found = functions()
        assert found is not None
        return found[name]

    def fill(self, weight: int, transposed: bool, ldb: int) -> None:
        """From the matrix at an address: [n, k] where `transposed` (as nn.Linear has it), else [k, n]."""
        i32, f32, ptr = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        pack = ctypes.CFUNCTYPE(None, *[i32] * 6, f32, ptr, i32, ptr)(self.function("cblas_sgemm_pack"))
        threads = ctypes.CFUNCTYPE(i32, i32)(self.function("MKL_Set_Num_Threads_Local"))
        before = threads(1)  # a forked child must not wake up OpenMP
        for i, start in enumerate(range(0, self.n, self.block)):
            size = (self.m, min(self.block, self.n - start), self.k)
            place = weight + 4 * start * (ldb if transposed else 1)
            how = TRANS if transposed else NO_TRANS
            pack(ROW_MAJOR, B_MATRIX, how, *size, 1.0, place, ldb, self.address + i * self.apart)
        threads(before)


def step_packed() -> str:
    """args: a, the packed weight, out, bias. The jobs are columns, in multiples of BLOCK."""
    f = Function("step_packed", "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch", exported=True)
    a, b, c, bias = (f.word(f.word("%args", i, "ptr"), 0, "ptr") for i in range(4))
    m, k, lda, ldc, block, apart = (
        f.word("%sizes", i) for i in (Gemm.M, Gemm.K, Gemm.LDA, Gemm.LDC, Gemm.BLOCK, Gemm.APART)
    )
    a, bias = (f.at(p, f.word("%sizes", i), "float") for p, i in ((a, Gemm.A_AT), (bias, Gemm.BIAS_AT)))
    biased = f.test("ne", f.word(f.word("%args", 3, "ptr"), 0, "ptr"), "null", "ptr")
    beta = f.choose(biased, "float", "1.0", "0.0")
    rows, deep, across, pitch = (f.op(f"trunc i64 {x} to i32") for x in (m, k, lda, ldc))
    before = f.op("call i32 @MKL_Set_Num_Threads_Local(i32 1)")

    def columns(j: str) -> None:
        count, place = f.min(f.sub("%end", j), block), f.at(c, j)
        size = f.mul(count, 4)

        def line(i: str) -> None:
            to = f.at(place, f.mul(i, ldc))
            f.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {f.at(bias, j)}, i64 {size}, i1 false)")

        f.when(biased, lambda: f.loop("0", m, 1, line) and None)
        packed, wide = f.at(b, f.mul(f.div(j, block), apart), "i8"), f.op(f"trunc i64 {count} to i32")
        f.do(
            f"call void @cblas_sgemm_compute(i32 {ROW_MAJOR}, i32 {NO_TRANS}, i32 {PACKED}, i32 {rows}, i32 {wide}, "
            f"i32 {deep}, ptr {a}, i32 {across}, ptr {packed}, i32 {wide}, float {beta}, ptr {place}, i32 {pitch})"
        )

    f.loop("%begin", "%end", block, columns)
    f.op(f"call i32 @MKL_Set_Num_Threads_Local(i32 {before})")
    return f.text()


DECLARES = """
declare i32 @MKL_Set_Num_Threads_Local(i32)
declare void @cblas_sgemm_compute(i32, i32, i32, i32, i32, i32, ptr, i32, ptr, i32, float, ptr, i32)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.smin.i64(i64, i64)
"""


@cache
def code() -> Code:
    found = functions()
    assert found is not None
    names = ("cblas_sgemm_compute", "MKL_Set_Num_Threads_Local")
    return build([Unit(DECLARES + step_packed(), ("step_packed",), {name: found[name] for name in names})])


def step() -> int:
    """The address of step_packed."""
    return code()["step_packed"]
