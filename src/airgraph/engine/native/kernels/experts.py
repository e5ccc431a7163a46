"""Products of rows in groups, each with a matrix of its own: experts. Where a group ends is known only when it runs."""

from __future__ import annotations

from functools import partial

from airgraph.engine.native.kernels.gemm import ROWS
from airgraph.engine.native.llvm.builder import Function

DECLARED = "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n"  # beside what gemm.py declares


def step_grouped(ends_at: int) -> str:
    """args: a, b, out, nothing, the ends of the groups (int32). Threads divide columns (SPLIT 0) or rows (1). The sizes are
    those of a single product and, at `ends_at`, where the ends begin.

    Ends are taken to lie in 0..m: what else is there never leads out of memory. Rows behind the last group are zero.
    """
    f = Function("step_grouped", "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch", exported=True)
    a, b, c, _, ends = (f.word(f.word("%args", i, "ptr"), 0, "ptr") for i in range(5))
    form, groups, m, n, k, lda, ldb, ldc, _, sb, _, split, a_at, b_at = (f.word("%sizes", i) for i in range(1, 15))
    a, b, ends = f.at(a, a_at), f.at(b, b_at), f.at(ends, f.word("%sizes", ends_at), "i32")
    by_row = f.test("eq", split, ROWS)
    m0, m1 = f.choose(by_row, "i64", "%begin", "0"), f.choose(by_row, "i64", "%end", m)
    n0, n1 = f.choose(by_row, "i64", "0", "%begin"), f.choose(by_row, "i64", n, "%end")

    def group(i: str, start: str, reach: str) -> list[str]:
        end = f.op(f"sext i32 {f.load('i32', f.at(ends, i, 'i32'))} to i64")
        end = f.min(f.max(end, 0), m)
        first, last = f.max(start, m0), f.min(end, m1)
        f.when(f.test("slt", first, last), lambda: product(i, first, last))
        return [end, f.max(reach, end)]

    def product(i: str, first: str, last: str) -> None:
        matrix = f.at(b, f.mul(i, sb))
        operands = f"ptr {a}, i64 {lda}, ptr {matrix}, i64 {ldb}, ptr {c}, i64 {ldc}"
        given = f"{operands}, i64 {first}, i64 {last}, i64 {n0}, i64 {n1}, i64 {k}, ptr null, i64 0, ptr %scratch"
        for number, name in enumerate(("nt", "nn", "tn")):
            f.when(f.test("eq", form, number), partial(f.do, f"call void @ag_gemm_{name}({given})"))

    def clear(row: str) -> None:
        place, size = f.at(f.at(c, f.mul(row, ldc)), n0), f.mul(f.sub(n1, n0), 4)
        f.do(f"call void @llvm.memset.p0.i64(ptr {place}, i8 0, i64 {size}, i1 false)")

    _, reach = f.loop("0", groups, 1, group, ("i64", "0"), ("i64", "0"))
    f.loop(f.max(reach, m0), m1, 1, clear)
    return DECLARED + f.text()
