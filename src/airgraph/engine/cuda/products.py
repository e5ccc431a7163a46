"""Products of few rows with matrices, and the loops around them: which of them one kernel does.

    y = norm(x)   g = y Gᵀ   u = y Uᵀ   z = silu(g) · u        →    one kernel that reads x, G and U and writes z

`fused` finds what belongs together. The loop that makes the row (`prologue`) is repeated by every program, the loop that
reads the products (`epilogue`) continues with them in registers. Kernels: of one row vectors.py, of several few_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from airgraph.engine.cuda.decode import DecodeAttention
from airgraph.engine.cuda.render import Renderer
from airgraph.engine.cuda.tiles import Tile, total
from airgraph.plan.index import same
from airgraph.plan.steps import GemmStep, LoopStep, Step, step_reads, step_writes
from airgraph.plan.tensors import Tensor


@dataclass(frozen=True, eq=False)
class RowProducts:
    """Products of the same rows, by one kernel. With an epilogue a program does all of them for its part of the columns,
    else each has programs of its own."""

    products: tuple[GemmStep, ...]
    prologue: LoopStep | None = None
    epilogue: LoopStep | None = None

    @property
    def count(self) -> int:
        """Of rows."""
        return int(self.products[0].sizes.m)

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


Unit = Step | RowProducts | DecodeAttention


def reads_of(unit: Unit) -> Iterable[Tensor]:
    return unit.reads if isinstance(unit, RowProducts | DecodeAttention) else step_reads(unit)


def writes_of(unit: Unit) -> list[Tensor]:
    return unit.writes if isinstance(unit, RowProducts | DecodeAttention) else step_writes(unit)


def fused(
    steps: Sequence[Step | DecodeAttention], inner: Callable[[Tensor], bool], home: Callable[[Tensor], int]
) -> list[Unit]:
    """The steps with products and the loops around them as one. `inner`: nothing outside of the graph sees a tensor;
    `home`: a key of the memory it is in."""
    finder = Finder(steps, inner, home)
    found: dict[int, RowProducts] = {}  # by the number of the step in whose place it is
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

    def unit(self, number: int, gone: set[int]) -> RowProducts:
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
        return RowProducts(tuple(products), prologue, epilogue)

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
        elements = total(nest.outer)
        if nest.inner or others or any(not same(s.sizes.m * s.sizes.n, elements) for s in products):
            return None
        outs = [s.out for s in products]
        renderer = Renderer(nest, Tile(1))
        renderer.index("x", nest.outer)
        loads = [e for e in nest.exprs if e.op == "load" and e.source in outs]
        plain = all(e.at is not None and not e.picks and renderer.offset(e.at) == "x" for e in loads)
        return loop if plain and not renderer.sizes else None

    def prologue(self, products: Sequence[GemmStep], epilogue: LoopStep | None) -> LoopStep | None:
        """The loop that makes the row and nothing else, if nobody reads it but these products. (Of several rows it is a
        kernel of its own, see few_rows.py.)"""
        a, (_, m, _, k) = products[0].a, products[0].sizes
        row = a.tensor
        made = self.makers.get(self.home(row))
        loop = self.steps[made] if made is not None else None
        if made is None or not isinstance(loop, LoopStep) or loop.sequential or len(loop.nests) != 1:
            return None
        numbers = {self.numbers[id(p)] for p in products}
        (nest,) = loop.nests
        whole = same(m, 1) and same(total(nest.outer), 1) and same(total(nest.inner), k) and not nest.vector_outside
        only = loop.roots == [row] and self.inner(row) and self.readers[self.home(row)] == numbers
        if not (whole and only and same(a.offset, 0) and same(a.strides[2], 1)) or nest.single:
            return None
        last = max(numbers) if epilogue is None else self.numbers[id(epilogue)]
        sources = {self.home(t) for t in step_reads(loop)}
        between = {self.home(t) for s in self.steps[made + 1 : last] for t in writes_of(s)}
        return None if sources & between else loop
