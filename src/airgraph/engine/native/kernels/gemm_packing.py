"""How gemm.py brings operands into the order that its kernels read: transposed, in panels, or row after row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from airgraph.engine.native.llvm.builder import Function, vector, width

if TYPE_CHECKING:
    from airgraph.engine.native.kernels.gemm import Machine

V4 = vector(4)


def by_blocks(kind: str, pattern: Sequence[int]) -> list[int]:
    """A shuffle of two times 4 lanes, done in each block of 4 lanes of two vectors."""
    lanes = width(kind)
    return [block + (p if p < 4 else lanes + p - 4) for block in range(0, lanes, 4) for p in pattern]


def transpose_four(f: Function, kind: str, rows: Sequence[str]) -> list[str]:
    """Four rows → the four columns of each block of 4 lanes."""
    a, b, c, d = rows
    low = [f.shuffle(kind, p, q, by_blocks(kind, (0, 4, 2, 6))) for p, q in ((a, b), (c, d))]
    high = [f.shuffle(kind, p, q, by_blocks(kind, (1, 5, 3, 7))) for p, q in ((a, b), (c, d))]
    firsts = [f.shuffle(kind, p, q, by_blocks(kind, (0, 1, 4, 5))) for p, q in (low, high)]
    return firsts + [f.shuffle(kind, p, q, by_blocks(kind, (2, 3, 6, 7))) for p, q in (low, high)]


def transpose_two(f: Function, kind: str, rows: Sequence[str]) -> list[str]:
    return [f.shuffle(kind, rows[0], rows[1], by_blocks(kind, (lane, lane + 4))) for lane in range(4)]


def transpose() -> str:
    """to[j·ldt + i] = from[i·ldf + j] for i < rows, j < columns, by 4×4 blocks."""
    f = Function("transpose", "ptr %from, i64 %ldf, ptr %to, i64 %ldt, i64 %rows, i64 %columns")

    def block(i: str, j: str) -> None:
        source = f.at(f.at("%from", f.mul(i, "%ldf")), j)
        rows = [f.load(V4, f.at(source, f.mul("%ldf", r))) for r in range(4)]
        place = f.at(f.at("%to", f.mul(j, "%ldt")), i)
        for c, column in enumerate(transpose_four(f, V4, rows)):
            f.store(V4, column, f.at(place, f.mul("%ldt", c)))

    def cell(i: str, j: str) -> None:
        value = f.load("float", f.at(f.at("%from", f.mul(i, "%ldf")), j))
        f.store("float", value, f.at(f.at("%to", f.mul(j, "%ldt")), i))

    rows, columns = f.down("%rows", 4), f.down("%columns", 4)
    f.loop("0", rows, 4, lambda i: f.loop("0", columns, 4, lambda j: block(i, j)))
    f.loop("0", rows, 1, lambda i: f.loop(columns, "%columns", 1, lambda j: cell(i, j)))
    f.loop(rows, "%rows", 1, lambda i: f.loop("0", "%columns", 1, lambda j: cell(i, j)))
    return f.text()


def clear(host: Machine) -> str:
    """to[i][j] = 0 for i < rows, count ≤ j < panel: the lanes of a panel for which there is no row."""
    f = Function("clear", "ptr %to, i64 %rows, i64 %count")

    def line(i: str) -> None:
        place = f.at("%to", f.mul(i, host.panel))
        f.loop("%count", str(host.panel), 1, lambda j: f.store("float", "0.0", f.at(place, j)))

    f.loop("0", "%rows", 1, line)
    return f.text()


def copy(host: Machine) -> str:
    """to[j / panel][i][j % panel] = from[i·ldf + j] for i < rows, j < columns, then zeros; panels lie `apart` floats apart.

    Row by row, as B lies in memory: panel by panel would touch a page for each 32 bytes.
    """
    f = Function("copy", "ptr %from, i64 %ldf, ptr %to, i64 %apart, i64 %rows, i64 %columns")
    whole, end = f.down("%columns", host.panel), f.down(f.add("%columns", host.panel - 1), host.panel)

    def line(i: str) -> None:
        source, to = f.at("%from", f.mul(i, "%ldf")), f.at("%to", f.mul(i, host.panel))

        ahead = f.mul("%ldf", 2)

        def part(j: str, place: str) -> list[str]:
            f.prefetch(source, f.add(ahead, j))
            for v in range(0, host.panel, host.lanes):
                f.store(host.kind, f.load(host.kind, f.at(f.at(source, j), v)), f.at(place, v))
            return [f.at(place, "%apart")]

        def cell(j: str) -> None:
            f.store("float", f.load("float", f.at(source, j)), f.at(rest, f.sub(j, whole)))

        (rest,) = f.loop("0", whole, host.panel, part, ("ptr", to))
        f.loop(whole, "%columns", 1, cell)
        f.loop("%columns", end, 1, lambda j: f.store("float", "0.0", f.at(rest, f.sub(j, whole))))

    f.loop("0", "%rows", 1, line)
    return f.text()


def gather(host: Machine) -> str:
    """Rows one after the other, where their own distance is a multiple of 16 KiB: eight of them share places in level 1."""
    f = Function("gather", "ptr %from, i64 %ldf, ptr %to, i64 %rows, i64 %columns")

    def line(i: str) -> None:
        source, to = f.at("%from", f.mul(i, "%ldf")), f.at("%to", f.mul(i, "%columns"))

        def part(j: str, kind: str) -> None:
            f.store(kind, f.load(kind, f.at(source, j)), f.at(to, j))

        whole = f.down("%columns", host.lanes)
        f.loop("0", whole, host.lanes, lambda j: part(j, host.kind))
        f.loop(whole, "%columns", 1, lambda j: part(j, "float"))

    f.loop("0", "%rows", 1, line)
    return f.text()
