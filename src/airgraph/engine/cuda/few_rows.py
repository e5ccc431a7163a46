"""The kernel of products of two to eight rows in half precision, with the loop behind them (products.py).

    for start in tl.range(0, 2048, 128, num_stages=6):
        y = tl.load(…)                                   a part of all rows
        w0 = tl.load(…)                                  the same part of sixteen rows of the matrix
        acc0 = tl.dot(w0, y, acc0)

Tensor cores take the rows as columns, eight at a time, so what counts is reading the matrix. A program is one warp for
sixteen rows of it, with several parts on their way. Time in µs on an H200, bfloat16, 8 rows, one CUDA graph, by cuBLAS
and by this kernel without a loop behind it: 2048→2048 6.1 / 5.1, 2048→3072 6.1 / 5.3, 2048→16384 19.0 / 18.5,
8192→2048 12.7 / 13.3, 2048→128256 129 / 123; with 4 rows 6.1 / 5.0, 6.4 / 5.6, 18.7 / 18.0, 13.2 / 12.8, 127 / 122.

Products of more rows are cuBLAS's, with a kernel for the loop behind them. Against the best of ten tilings of a Triton
kernel with the loop in it: 1024 rows 768→3072 with a GELU 14.8 / 17.6, 1576 rows 21.2 / 28.0; 512 rows 2048→8192 twice
with SwiGLU 55.6 / 61.8; 64 rows 2048→2048 with a GELU 8.2 / 8.0, 512→2048 5.0 / 3.5.

The loop in front (a norm) stays a kernel of its own: every program would repeat it, and so few threads take longer for
that than a kernel in between. A Llama of 1.2 billion parameters decoded eight tokens in 1.25 ms, with norms in the
kernels in 1.38, by cuBLAS in 1.36; two tokens in 1.19, 1.23 and 1.23.
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
from airgraph.engine.cuda.tiles import PROGRAMS, Tile, power_of_two
from airgraph.ir.types import Dim
from airgraph.plan.index import same
from airgraph.plan.steps import GemmStep, LoopStep
from airgraph.plan.tensors import Expr

WARP_ROWS = 16  # of the matrix, in one instruction of tensor cores
SHARED = 64 << 10  # bytes of a multiprocessor's memory that a program may take on every GPU
LONG_ROW = 4096


@dataclass(frozen=True)
class Parts:
    """How much of the matrices a program reads at a time."""

    rows: int  # of all matrices
    tile: int  # elements of each
    stages: int  # parts on their way at most


@dataclass(frozen=True, eq=False)
class FewRowsSource(ProductsSource):
    unit: RowProducts
    given: Parts | None = None  # None: by rule

    @property
    def together(self) -> int:
        """Products that a program does."""
        return len(self.unit.products) if self.unit.epilogue is not None else 1

    @property
    def count(self) -> int:
        """Rows in a tile."""
        return power_of_two(self.unit.count)

    @property
    def parts(self) -> Parts:
        if self.given is not None:
            return self.given
        columns = sum(int(p.sizes.n) for p in self.unit.products)
        if columns // (2 * WARP_ROWS) >= PROGRAMS:
            return Parts(2 * WARP_ROWS, 128, 4)
        return Parts(WARP_ROWS, 256, 5) if int(self.unit.products[0].sizes.k) >= LONG_ROW else Parts(WARP_ROWS, 128, 6)

    @property
    def rows(self) -> int:
        return max(WARP_ROWS, self.parts.rows // self.together)

    @property
    def warps(self) -> int:
        return self.rows // WARP_ROWS

    @property
    def stages(self) -> int:
        part = (self.rows * self.together + self.count) * self.parts.tile * 2  # bytes
        return max(1, min(self.parts.stages, SHARED // part))

    @cached_property
    def written(self) -> FewRowsWriter:
        return FewRowsWriter(self)

    @property
    def constants(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "TILE": self.parts.tile, "COUNT": self.count}

    def alternatives(self) -> list[FewRowsSource]:
        choices = [Parts(*p) for p in ((16, 128, 6), (16, 256, 5), (32, 128, 4), (32, 256, 3), (64, 128, 4))]
        found = [replace(self, given=parts) for parts in choices if parts != self.parts]
        return [s for s in found if s.tensors == self.tensors]


class FewRowsWriter(ProductsWriter):
    """A function for the epilogue, and the kernel."""

    source: FewRowsSource

    def body(self) -> list[str]:
        lines = ["wait_before(EARLY, False)", "m = tl.arange(0, COUNT).to(INDEX)"]
        epilogue = self.unit.epilogue
        return [*lines, *(self.side_by_side() if epilogue is None else self.with_epilogue(epilogue))]

    def with_epilogue(self, loop: LoopStep) -> list[str]:
        (nest,) = loop.nests
        products = self.unit.products
        renderer = ResultsRenderer(nest, products, self.mask(products[0]) == "")
        first = ["x", *([] if renderer.exact_rows else ["xmask"]), *(f"acc{i}" for i in range(len(products)))]
        given = self.function("end", first, renderer)
        mask = [] if renderer.exact_rows else [f"xmask = {self.mask(products[0])}"]
        at = f"x = m[None, :] * {self.size(products[0].sizes.n)} + n[:, None]"
        return [*self.sums(products, "pid"), at, *mask, f"end({', '.join(first)}, {given})"]

    def one(self, p: GemmStep, program: str) -> list[str]:
        mask = self.mask(p)
        at = f"m[None, :] * {self.size(p.sizes.n)} + n[:, None]"
        stored = f"acc0.to(tl.{STORED[p.out.dtype]})" + (f", {mask}" if mask else "")
        return [*self.sums([p], program), f"tl.store({self.pointer(p.out)} + ({at}), {stored})"]

    def mask(self, p: GemmStep) -> str:
        """Of a tile of the results."""
        masks = [] if divides(p.sizes.n, self.source.rows) else [f"(n < {self.size(p.sizes.n)})[:, None]"]
        masks += [] if self.source.count == self.unit.count else [f"(m < {self.unit.count})[None, :]"]
        return " & ".join(masks)

    def sums(self, products: Sequence[GemmStep], program: str) -> list[str]:
        """acc0, acc1, … for the rows `n` of the matrices."""
        a, k = products[0].a, products[0].sizes.k
        masks = [] if self.source.count == self.unit.count else [f"(m < {self.unit.count})[None, :]"]
        masks += [] if divides(k, self.source.parts.tile) else [f"(k < {self.size(k)})[:, None]"]
        terms = [f"m[None, :]{times(self, a.strides[1])}", f"k[:, None]{times(self, a.strides[2])}"]
        terms += [] if same(a.offset, 0) else [self.size(a.offset)]
        inside = [
            "k = (start + tl.arange(0, TILE)).to(INDEX)",
            f"y = tl.load({self.pointer(a.tensor)} + ({' + '.join(terms)}){other(masks)})",
            *(line for i, p in enumerate(products) for line in self.product(i, p)),
        ]
        lines = [f"n = {program}.to(INDEX) * ROWS + tl.arange(0, ROWS)"]
        lines += [f"acc{i} = tl.zeros([ROWS, COUNT], tl.float32)" for i in range(len(products))]
        lines.append(f"for start in tl.range(0, {self.size(k)}, TILE, num_stages={self.source.stages}):")
        lines += [f"    {line}" for line in inside]
        for i, p in enumerate(products):
            lines += self.bias(i, p, "n")
            lines += [] if p.bias is None else [f"acc{i} += b{i}[:, None]"]
        return lines

    def product(self, i: int, p: GemmStep) -> list[str]:
        """What `y` adds to it, which is elements `k` of all rows."""
        _, along, across = p.b.strides
        masks = [] if divides(p.sizes.n, self.source.rows) else [f"(n < {self.size(p.sizes.n)})[:, None]"]
        masks += [] if divides(p.sizes.k, self.source.parts.tile) else [f"(k < {self.size(p.sizes.k)})[None, :]"]
        terms = [f"n[:, None] * {self.size(across)}", "k[None, :]" + times(self, along)]
        terms += [] if same(p.b.offset, 0) else [self.size(p.b.offset)]
        return [
            f"w{i} = tl.load({self.pointer(p.b.tensor)} + ({' + '.join(terms)}){other(masks)}, {ONCE})",
            f"acc{i} = tl.dot(w{i}, y, acc{i})",
        ]


def other(masks: Sequence[str]) -> str:
    """Arguments of a load: zero where one of the masks is not set."""
    return f", {' & '.join(masks)}, other=0" if masks else ""


class ResultsRenderer(Renderer):
    """A loop that reads products, in registers as acc0, acc1, …; `x` is a tile of places in the results."""

    def __init__(self, nest: Any, products: Sequence[GemmStep], exact: bool) -> None:
        super().__init__(nest, Tile(1))
        self.results, self.exact = [p.out for p in products], exact

    @cached_property
    def exact_rows(self) -> bool:
        return self.exact

    def start(self, outer: Dim) -> list[str]:
        return []

    def load(self, e: Expr) -> str:
        if e.source not in self.results:
            return super().load(e)
        return f"acc{self.results.index(e.source)}.to(tl.{STORED[e.dtype]}).to(tl.{COMPUTED[e.dtype]})"
