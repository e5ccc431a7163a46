"""The kernel of products of one row, with the loops around them (products.py).

A program takes some rows of the matrices whole: it loads them before it waits for the kernel in front (programmatic
dependent launch), so reading weights goes on while that one finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from airgraph.engine.cuda.functions import COMPUTED, STORED
from airgraph.engine.cuda.kernel_source import ONCE
from airgraph.engine.cuda.product_source import ProductsSource, ProductsWriter, times
from airgraph.engine.cuda.products import RowProducts
from airgraph.engine.cuda.render import Renderer, divides
from airgraph.engine.cuda.tiles import Tile, other_warps, power_of_two
from airgraph.plan.index import same
from airgraph.plan.kernels import Store
from airgraph.plan.steps import GemmStep, LoopStep
from airgraph.plan.tensors import Expr, Tensor

HELD = 8192  # elements of the matrices that a program holds
WIDE_ROW = 8192  # from here on a row is read by eight warps


class RowRenderer(Renderer):
    """A loop that makes a row: the function returns it in place of storing it."""

    def store(self, s: Store) -> None:
        value = f"({self.spread(s.value)}).to(tl.{STORED[s.target.dtype]})"
        exact = divides(self.row, self.tile.r)
        self.line(f"return {value if exact else f'tl.where(rmask, {value}, 0)'}")


class ProductsRenderer(Renderer):
    """A loop that reads products. `sums` are the lines that define them, as acc0, acc1, …: what the loop loads besides
    comes before them, so that it is on its way meanwhile."""

    def __init__(self, nest: Any, tile: Tile, products: Sequence[Tensor], sums: Sequence[str]) -> None:
        super().__init__(nest, tile)
        self.products, self.sums = list(products), sums

    def whole_rows(self) -> None:
        for e in self.nest.exprs:
            if e.op == "load" and not e.picks and e.source not in self.products:
                self.value(e)
        for line in self.sums:
            self.line(line)
        super().whole_rows()

    def load(self, e: Expr) -> str:
        if e.source not in self.products:
            return super().load(e)
        return f"acc{self.products.index(e.source)}.to(tl.{STORED[e.dtype]}).to(tl.{COMPUTED[e.dtype]})"


@dataclass(frozen=True, eq=False)
class VectorSource(ProductsSource):
    """The kernel of one unit. `ahead`: weights are loaded before the kernel in front is done, which is right only where no
    kernel of the program writes them."""

    unit: RowProducts
    ahead: bool = True
    held: int = HELD
    given_warps: int = 0  # 0: by rule

    @property
    def row(self) -> int:
        return int(self.unit.products[0].sizes.k)

    @property
    def tile(self) -> int:
        return power_of_two(self.row)

    @property
    def rows(self) -> int:
        together = len(self.unit.products) if self.unit.epilogue is not None else 1
        return max(1, power_of_two(self.held // self.tile // together + 1) // 2)

    @property
    def warps(self) -> int:
        if self.given_warps:
            return self.given_warps
        beside = len(self.unit.products) > 1 and self.unit.epilogue is None  # few programs of each product
        return 8 if self.tile >= WIDE_ROW or beside else 4

    @cached_property
    def written(self) -> VectorWriter:
        return VectorWriter(self)

    @property
    def constants(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "TILE": self.tile, "AHEAD": self.ahead}

    def alternatives(self) -> list[VectorSource]:
        """With more or fewer rows in a program, and other warps."""
        held = [replace(self, held=count) for count in (self.held // 2, self.held * 2)]
        warps = [replace(source, given_warps=n) for source in (self, *held) for n in other_warps(self.warps)]
        same_rows = [source for source in held if source.rows == self.rows]
        found = {(s.rows, s.warps): s for s in (*held, *warps) if s not in same_rows and s.tensors == self.tensors}
        return [s for at, s in found.items() if at != (self.rows, self.warps)]


class VectorWriter(ProductsWriter):
    """A function for the prologue, one for the epilogue, and the kernel."""

    source: VectorSource

    def body(self) -> list[str]:
        prologue, epilogue = self.unit.prologue, self.unit.epilogue
        self.row = self.prologue(prologue) if prologue is not None else None
        return self.side_by_side() if epilogue is None else self.together(epilogue)

    def prologue(self, loop: LoopStep) -> str:
        (nest,) = loop.nests
        given = self.function("row", ["pid"], RowRenderer(nest, Tile(1, self.source.tile, warps=self.source.warps)))
        return f"row(pid * 0, {given})"

    def epilogue(self, loop: LoopStep) -> str:
        (nest,) = loop.nests
        products = self.unit.products
        sums = [self.product(i, p) for i, p in enumerate(products)]
        renderer = ProductsRenderer(nest, Tile(self.source.rows), [p.out for p in products], sums)
        first = ["pid", "y", *(f"w{i}" for i in range(len(products)))]
        first += [f"b{i}" for i, p in enumerate(products) if p.bias is not None]
        return f"end({', '.join(first)}, {self.function('end', first, renderer)})"

    def together(self, epilogue: LoopStep) -> list[str]:
        """Every program does its rows of all products."""
        end, products = self.epilogue(epilogue), self.unit.products
        lines = [line for i, p in enumerate(products) for line in self.weights(i, p, "pid")]
        lines += self.vector(products[0])
        return [*lines, *(line for i, p in enumerate(products) for line in self.bias(i, p, f"n{i}")), end]

    def one(self, p: GemmStep, program: str) -> list[str]:
        mask = "" if divides(p.sizes.n, self.source.rows) else f", n0 < {self.size(p.sizes.n)}"
        return [
            *self.weights(0, p, program),
            *self.vector(p),
            *self.bias(0, p, "n0"),
            self.product(0, p),
            f"tl.store({self.pointer(p.out)} + n0, acc0.to(tl.{STORED[p.out.dtype]}){mask})",
        ]

    def weights(self, i: int, p: GemmStep, program: str) -> list[str]:
        """The rows of one matrix as a tile, zero where there is nothing."""
        _, along, across = p.b.strides
        masks = [] if divides(p.sizes.n, self.source.rows) else [f"(n{i} < {self.size(p.sizes.n)})[:, None]"]
        masks += [] if divides(p.sizes.k, self.source.tile) else [f"(k < {self.size(p.sizes.k)})[None, :]"]
        mask = f", {' & '.join(masks)}, other=0" if masks else ""
        terms = [f"n{i}[:, None] * {self.size(across)}", "k[None, :]" + times(self, along)]
        terms += [] if same(p.b.offset, 0) else [self.size(p.b.offset)]
        return [
            f"n{i} = {program}.to(INDEX) * ROWS + tl.arange(0, ROWS)",
            "k = tl.arange(0, TILE).to(INDEX)",
            *(["wait_before(EARLY, AHEAD)"] if not i else []),
            f"w{i} = tl.load({self.pointer(p.b.tensor)} + ({' + '.join(terms)}){mask}, {ONCE})",
        ]

    def vector(self, p: GemmStep) -> list[str]:
        if self.row is not None:
            return ["wait_behind(EARLY, AHEAD)", f"y = ({self.row}).to(tl.float32)"]
        at = "k[None, :]" + times(self, p.a.strides[2])
        at += "" if same(p.a.offset, 0) else f" + {self.size(p.a.offset)}"
        mask = "" if divides(p.sizes.k, self.source.tile) else f", (k < {self.size(p.sizes.k)})[None, :], other=0"
        loaded = f"tl.load({self.pointer(p.a.tensor)} + ({at}){mask})"
        return ["wait_behind(EARLY, AHEAD)", f"y = {loaded}.to(tl.float32)"]

    def product(self, i: int, p: GemmStep) -> str:
        return f"acc{i} = tl.sum(w{i}.to(tl.float32) * y, 1)" + (f" + b{i}" if p.bias is not None else "")
