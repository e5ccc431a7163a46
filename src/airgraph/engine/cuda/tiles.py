"""Which tile of its index space one program of a kernel computes.

    flat    x                 elementwise: all loops as one
    rows    x × r             reductions: outer loops as x, inner loops as r
    blocks  x × r             layout changes: what is stored side by side as x, what is read side by side as r

A row that fits into one tile is read once, whatever the number of stages (`whole`); a longer one is read once per stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from airgraph.ir.types import DataType, Dim
from airgraph.plan.index import Var, expand, volume
from airgraph.plan.nest import Nest, product

PROGRAMS = 264  # two for each multiprocessor of a large GPU: with fewer, smaller tiles are better
LONGEST = 16384  # elements of a row in one tile
BYTES = 32  # of each tensor per thread: two accesses of 16
LIGHT = 32  # formulas: what computes more has fewer elements per thread
SIZES = {DataType.DT_FLOAT16: 2, DataType.DT_BF16: 2, DataType.DT_DOUBLE: 8, DataType.DT_INT64: 8, DataType.DT_BOOL: 1}
MOST = 1 << 14  # elements of a tile that is tried
UNKNOWN = 1 << 16  # a symbolic size is taken for this


@dataclass(frozen=True)
class Tile:
    x: int
    r: int = 0  # 0: no reduction
    whole: bool = True  # a row is one tile
    warps: int = 4
    blocks: bool = False  # programs divide r as well

    @property
    def constants(self) -> dict[str, int]:
        return {"XBLOCK": self.x, **({"RBLOCK": self.r} if self.r else {})}


def power_of_two(n: int) -> int:
    """The next one that is not smaller."""
    return 1 << max(n - 1, 0).bit_length()


def guess(d: Dim) -> int:
    d = expand(d)
    return d if isinstance(d, int) else UNKNOWN


def choose(nest: Nest, outer: Dim) -> Tile:
    """`outer`: iterations of the outer loops."""
    return rows(nest, guess(outer)) if nest.inner else flat(guess(outer))


def flat(total: int) -> Tile:
    x = min(1024, max(128, power_of_two(total // PROGRAMS)))
    return Tile(min(x, power_of_two(total)) if total < 128 else x, warps=max(1, min(4, x // 128)))


def rows(nest: Nest, outer: int) -> Tile:
    length = product(nest.inner)
    known = length if isinstance(length, int) else None
    if nest.vector_outside:
        return columns(nest, outer, known)
    if known is None or known > LONGEST:
        return Tile(1, 2048, whole=False, warps=8)
    r = power_of_two(known)
    x = max(1, 1024 // r)
    while x > 1 and outer // x < PROGRAMS:
        x //= 2
    return Tile(x, r, warps=warps_for(x * r, nest))


def columns(nest: Nest, outer: int, length: int | None) -> Tile:
    """Neighbours in memory belong to different rows."""
    x = min(64, power_of_two(outer))
    while x > 16 and outer // x < PROGRAMS:
        x //= 2
    r = 64 if length is None else min(64, power_of_two(length))
    return Tile(x, r, whole=length is not None and length <= r, warps=warps_for(x * r, nest))


def warps_for(elements: int, nest: Nest) -> int:
    """Enough threads to read a tile of the widest tensor in two accesses each."""
    widest = max(
        (SIZES.get(e.dtype, 4) for e in nest.exprs if e.op == "load" and e.vars.issuperset(nest.inner)), default=4
    )
    each = BYTES // widest if len(nest.exprs) <= LIGHT else 8
    return max(1, min(16, power_of_two(elements // (32 * each))))


def others(tile: Tile) -> list[Tile]:
    """Tiles to be timed against one that was chosen by rule: half and twice the rows or elements, and the warps."""
    wider = [t for t in (tile.x // 2, tile.x * 2, tile.x * 4) if t and t * max(tile.r, 1) <= MOST]
    shapes = [replace(tile, x=x) for x in wider]
    if tile.r and not tile.whole:
        shapes += [replace(tile, r=r) for r in (tile.r // 2, tile.r * 2) if tile.x * r <= MOST]
    return [*shapes, *(replace(tile, warps=count) for count in other_warps(tile.warps))]


def other_warps(count: int) -> list[int]:
    return [n for n in (count // 2, count * 2) if 1 <= n <= 16]


def total(loops: tuple[Var, ...]) -> Dim:
    return volume([v.size for v in loops])
