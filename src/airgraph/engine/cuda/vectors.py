"""Products of one row with matrices, fused with the loops around them.

    y = norm(x)   g = y Gᵀ   u = y Uᵀ   z = silu(g) · u        →    one kernel that reads x, G and U and writes z

A program takes some rows of the matrices whole: it loads them before it waits for the kernel in front (programmatic
dependent launch), so reading weights goes on while that one finishes. `fused` finds what belongs together; `VectorSource`
is the kernel. The loop that makes the row (`prologue`) is repeated by every program, the loop that reads the products
(`epilogue`) continues with them in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from airgraph.engine.cuda.decode import DecodeAttention
from airgraph.engine.cuda.functions import COMPUTED, SIGNATURE, STORED
from airgraph.engine.cuda.kernel_source import ONCE, Value
from airgraph.engine.cuda.render import HEAD, Renderer, divides
from airgraph.engine.cuda.tiles import Tile, other_warps, power_of_two, total
from airgraph.engine.rendering import KernelOperands
from airgraph.ir.types import Dim
from airgraph.plan.index import same, volume
from airgraph.plan.kernels import Store
from airgraph.plan.steps import GemmStep, LoopStep, Step, step_reads, step_writes
from airgraph.plan.tensors import Expr, Tensor

HELD = 8192  # elements of the matrices that a program holds
WIDE_ROW = 8192  # from here on a row is read by eight warps


@dataclass(frozen=True, eq=False)
class VectorProducts:
    """Products of the same row, by one kernel. With an epilogue a program does all of them for its rows, else each has
    programs of its own."""

    products: tuple[GemmStep, ...]
    prologue: LoopStep | None = None
    epilogue: LoopStep | None = None

    @property
    def parts(self) -> list[Step]:
        return [s for s in (self.prologue, *self.products, self.epilogue) if s is not None]

    @property
    def writes(self) -> list[Tensor]:
        return self.epilogue.roots if self.epilogue is not None else [p.out for p in self.products]

    @property
    def reads(self) -> list[Tensor]:
        own = {t.id for part in self.parts for t in step_writes(part)}
        return [t for part in self.parts for t in step_reads(part) if t.id not in own]


Unit = Step | VectorProducts | DecodeAttention


def reads_of(unit: Unit) -> Iterable[Tensor]:
    return unit.reads if isinstance(unit, VectorProducts | DecodeAttention) else step_reads(unit)


def writes_of(unit: Unit) -> list[Tensor]:
    return unit.writes if isinstance(unit, VectorProducts | DecodeAttention) else step_writes(unit)


# -- what belongs together ----------------------------------------------------------------------------------------------
def fused(
    steps: Sequence[Step | DecodeAttention], inner: Callable[[Tensor], bool], home: Callable[[Tensor], int]
) -> list[Unit]:
    """The steps with products and the loops around them as one. `inner`: nothing outside of the graph sees a tensor;
    `home`: a key of the memory it is in."""
    finder = Finder(steps, inner, home)
    found: dict[int, VectorProducts] = {}  # by the number of the step in whose place it is
    gone: set[int] = set()
    for number, step in enumerate(steps):
        if isinstance(step, GemmStep) and number not in gone:
            unit = finder.unit(number, gone)
            numbers = [finder.numbers[id(part)] for part in unit.parts]
            gone.update(numbers)
            found[max(numbers) if unit.epilogue is not None else number] = unit
    return [found.get(i, step) for i, step in enumerate(steps) if i in found or i not in gone]


class Finder:
    """Which loops a product can take in, by who reads and makes what."""

    def __init__(
        self, steps: Sequence[Step | DecodeAttention], inner: Callable[[Tensor], bool], home: Callable[[Tensor], int]
    ) -> None:
        self.steps, self.inner, self.home = steps, inner, home
        self.numbers = {id(step): i for i, step in enumerate(steps)}
        self.readers: dict[int, set[int]] = {}
        self.makers: dict[int, int] = {}
        for i, step in enumerate(steps):
            for t in reads_of(step):
                self.readers.setdefault(home(t), set()).add(i)
            for t in writes_of(step):
                self.makers[home(t)] = i

    def unit(self, number: int, gone: set[int]) -> VectorProducts:
        step = self.steps[number]
        assert isinstance(step, GemmStep)
        siblings = [
            s
            for i in sorted(self.readers[self.home(step.a.tensor)])
            if i >= number and i not in gone and isinstance(s := self.steps[i], GemmStep) and s.a == step.a
        ]
        epilogue = self.epilogue(step, siblings)
        products = [s for s in siblings if epilogue is None or self.reads(epilogue, s)]
        prologue = self.prologue(products, epilogue)
        return VectorProducts(tuple(products), prologue, epilogue)

    def reads(self, loop: LoopStep, product: GemmStep) -> bool:
        return self.numbers[id(loop)] in self.readers.get(self.home(product.out), ())

    def epilogue(self, step: GemmStep, siblings: Sequence[GemmStep]) -> LoopStep | None:
        """The only reader of the product, if it is a loop over the same elements."""
        readers = self.readers.get(self.home(step.out), set())
        loop = self.steps[min(readers)] if len(readers) == 1 else None
        if not isinstance(loop, LoopStep) or loop.sequential or len(loop.nests) != 1 or not self.inner(step.out):
            return None
        (nest,) = loop.nests
        products = [s for s in siblings if self.reads(loop, s)]
        others = [s for s in products if not self.inner(s.out) or self.readers[self.home(s.out)] != readers]
        if nest.inner or others or any(not same(s.sizes.n, total(nest.outer)) for s in products):
            return None
        outs = [s.out for s in products]
        renderer = Renderer(nest, Tile(1))
        renderer.index("x", nest.outer)
        loads = [e for e in nest.exprs if e.op == "load" and e.source in outs]
        plain = all(e.at is not None and not e.picks and renderer.offset(e.at) == "x" for e in loads)
        return loop if plain and not renderer.sizes else None

    def prologue(self, products: Sequence[GemmStep], epilogue: LoopStep | None) -> LoopStep | None:
        """The loop that makes the row and nothing else, if nobody reads it but these products."""
        (a, k), row = (products[0].a, products[0].sizes.k), products[0].a.tensor
        made = self.makers.get(self.home(row))
        loop = self.steps[made] if made is not None else None
        if made is None or not isinstance(loop, LoopStep) or loop.sequential or len(loop.nests) != 1:
            return None
        numbers = {self.numbers[id(p)] for p in products}
        (nest,) = loop.nests
        whole = same(total(nest.outer), 1) and same(total(nest.inner), k) and not nest.vector_outside
        only = loop.roots == [row] and self.inner(row) and self.readers[self.home(row)] == numbers
        if not (whole and only and same(a.offset, 0) and same(a.strides[2], 1)) or nest.single:
            return None
        last = max(numbers) if epilogue is None else self.numbers[id(epilogue)]
        sources = {self.home(t) for t in step_reads(loop)}
        between = {self.home(t) for s in self.steps[made + 1 : last] for t in writes_of(s)}
        return None if sources & between else loop


# -- the kernel ---------------------------------------------------------------------------------------------------------
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
class VectorSource:
    """The kernel of one unit (a KernelSource). `ahead`: weights are loaded before the kernel in front is done, which is
    right only where no kernel of the program writes them."""

    unit: VectorProducts
    ahead: bool = True
    held: int = HELD
    given_warps: int = 0  # 0: by rule
    fuses = True
    digest = None

    @property
    def row(self) -> int:
        return int(self.unit.products[0].sizes.k)

    @property
    def tile(self) -> int:
        return power_of_two(self.row)

    @property
    def rows(self) -> int:
        """Of each matrix that a program holds."""
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
    def text(self) -> str:
        return self.written.text

    @property
    def checks(self) -> bool:
        return self.written.checks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.written.tensors)

    @property
    def sizes(self) -> tuple[Dim, ...]:
        return tuple(self.written.sizes)

    @property
    def elements(self) -> tuple[Dim, ...]:
        return tuple(volume(t.shape) for t in self.tensors)

    @property
    def signature(self) -> dict[str, str]:
        pointers = {f"p{i}": f"*{SIGNATURE[t.dtype]}" for i, t in enumerate(self.tensors)}
        return pointers | {f"s{i}": "i64" for i in range(len(self.sizes))}

    @property
    def constants(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "TILE": self.tile, "AHEAD": self.ahead}

    def numbers(self, value: Value) -> list[int]:
        return [value(s) for s in self.sizes]

    def programs(self, product: GemmStep) -> int:
        return -(-int(product.sizes.n) // self.rows)

    def grid(self, value: Value) -> int:
        products = self.unit.products
        return self.programs(products[0]) if self.unit.epilogue is not None else sum(map(self.programs, products))

    def alternatives(self) -> list[VectorSource]:
        """With more or fewer rows in a program, and other warps."""
        held = [replace(self, held=count) for count in (self.held // 2, self.held * 2)]
        warps = [replace(source, given_warps=n) for source in (self, *held) for n in other_warps(self.warps)]
        same_rows = [source for source in held if source.rows == self.rows]
        found = {(s.rows, s.warps): s for s in (*held, *warps) if s not in same_rows and s.tensors == self.tensors}
        return [s for at, s in found.items() if at != (self.rows, self.warps)]


class VectorWriter(KernelOperands):
    """Writes the text: a function for the prologue, one for the epilogue, one for each set of products, and the kernel."""

    def __init__(self, source: VectorSource) -> None:
        super().__init__()
        self.source, self.unit = source, source.unit
        self.functions: list[str] = []
        self.checks = False
        prologue, epilogue = self.unit.prologue, self.unit.epilogue
        self.row = self.prologue(prologue) if prologue is not None else None
        self.end = self.epilogue(epilogue) if epilogue is not None else None
        lines = ["launch_next(EARLY)", "pid = tl.program_id(0)"]
        lines += self.together() if self.end is not None else self.side_by_side()
        parameters = [f"p{i}" for i in range(len(self.tensors))] + [f"s{i}" for i in range(len(self.sizes))]
        constants = [f"{name}: tl.constexpr" for name in ("INDEX", "ROWS", "TILE", "AHEAD", "EARLY")]
        body = "".join(f"    {line}\n" for line in lines)
        main = f"\n\n@triton.jit\ndef kernel({', '.join([*parameters, *constants])}):\n{body}"
        self.text = HEAD + "".join(self.functions) + main

    def function(self, name: str, first: Sequence[str], renderer: Renderer) -> str:
        """Adds the function that a renderer wrote; gives the arguments to call it with, behind the first."""
        made = renderer.source()
        self.checks |= made.checks
        parameters = ", ".join([*first, *made.parameters])
        self.functions.append(f"\n\n@triton.jit\ndef {name}({parameters}):\n{made.body}")
        given = [*map(self.pointer, made.tensors), *map(self.size, made.sizes), "INDEX"]
        return ", ".join([*given, *map(str, made.constants.values())])

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

    def together(self) -> list[str]:
        """Every program does its rows of all products."""
        products = self.unit.products
        lines = [line for i, p in enumerate(products) for line in self.weights(i, p, "pid")]
        lines += self.vector(products[0])
        return [*lines, *(line for i, p in enumerate(products) for line in self.bias(i, p)), str(self.end)]

    def side_by_side(self) -> list[str]:
        """Each product has programs of its own."""
        lines: list[str] = []
        end = 0
        products = self.unit.products
        for i, p in enumerate(products):
            first, end = end, end + self.source.programs(p)
            inside = [*self.weights(0, p, f"(pid - {first})"), *self.vector(p), *self.bias(0, p), self.product(0, p)]
            mask = "" if divides(p.sizes.n, self.source.rows) else f", n0 < {self.size(p.sizes.n)}"
            inside.append(f"tl.store({self.pointer(p.out)} + n0, acc0.to(tl.{STORED[p.out.dtype]}){mask})")
            if len(products) > 1:
                lines += [f"{'elif' if i else 'if'} pid < {end}:", *(f"    {line}" for line in inside)]
            else:
                lines += inside
        return lines

    def weights(self, i: int, p: GemmStep, program: str) -> list[str]:
        """The rows of one matrix as a tile, zero where there is nothing."""
        _, along, across = p.b.strides
        masks = [] if divides(p.sizes.n, self.source.rows) else [f"(n{i} < {self.size(p.sizes.n)})[:, None]"]
        masks += [] if divides(p.sizes.k, self.source.tile) else [f"(k < {self.size(p.sizes.k)})[None, :]"]
        mask = f", {' & '.join(masks)}, other=0" if masks else ""
        terms = [f"n{i}[:, None] * {self.size(across)}", "k[None, :]" + self.times(along)]
        terms += [] if same(p.b.offset, 0) else [self.size(p.b.offset)]
        return [
            f"n{i} = {program}.to(INDEX) * ROWS + tl.arange(0, ROWS)",
            "k = tl.arange(0, TILE).to(INDEX)",
            *(["wait_before(EARLY, AHEAD)"] if not i else []),
            f"w{i} = tl.load({self.pointer(p.b.tensor)} + ({' + '.join(terms)}){mask}, {ONCE})",
        ]

    def times(self, stride: Dim) -> str:
        return "" if same(stride, 1) else f" * {self.size(stride)}"

    def vector(self, p: GemmStep) -> list[str]:
        if self.row is not None:
            return ["wait_behind(EARLY, AHEAD)", f"y = ({self.row}).to(tl.float32)"]
        at = "k[None, :]" + self.times(p.a.strides[2])
        at += "" if same(p.a.offset, 0) else f" + {self.size(p.a.offset)}"
        mask = "" if divides(p.sizes.k, self.source.tile) else f", (k < {self.size(p.sizes.k)})[None, :], other=0"
        loaded = f"tl.load({self.pointer(p.a.tensor)} + ({at}){mask})"
        return ["wait_behind(EARLY, AHEAD)", f"y = {loaded}.to(tl.float32)"]

    def bias(self, i: int, p: GemmStep) -> list[str]:
        if p.bias is None:
            return []
        at = f"n{i}{self.times(p.bias.strides[0])} + {self.size(p.bias.offset)}"
        mask = "" if divides(p.sizes.n, self.source.rows) else f", n{i} < {self.size(p.sizes.n)}, other=0"
        return [f"b{i} = tl.load({self.pointer(p.bias.tensor)} + ({at}){mask}).to(tl.float32)"]

    def product(self, i: int, p: GemmStep) -> str:
        return f"acc{i} = tl.sum(w{i}.to(tl.float32) * y, 1)" + (f" + b{i}" if p.bias is not None else "")
