"""What kernels of products of few rows (vectors.py, few_rows.py) have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from airgraph.engine.cuda.functions import SIGNATURE
from airgraph.engine.cuda.kernel_source import KernelWriter, Value, WrittenSource
from airgraph.engine.cuda.products import RowProducts
from airgraph.engine.cuda.render import HEAD, Renderer, divides
from airgraph.engine.rendering import KernelOperands
from airgraph.ir.types import Dim
from airgraph.plan.index import same
from airgraph.plan.steps import GemmStep


class ProductsSource(WrittenSource):
    """The kernel of one unit. A program takes `rows` rows of the matrices, which are columns of the results."""

    unit: RowProducts
    fuses = True

    @property
    @abstractmethod
    def rows(self) -> int: ...

    @property
    @abstractmethod
    def constants(self) -> dict[str, Any]: ...

    @property
    def sizes(self) -> tuple[Dim, ...]:
        return tuple(self.written.sizes)

    @property
    def signature(self) -> dict[str, str]:
        pointers = {f"p{i}": f"*{SIGNATURE[t.dtype]}" for i, t in enumerate(self.tensors)}
        return pointers | {f"s{i}": "i64" for i in range(len(self.sizes))}

    def numbers(self, value: Value) -> list[int]:
        return [value(s) for s in self.sizes]

    def programs(self, product: GemmStep) -> int:
        return -(-int(product.sizes.n) // self.rows)

    def grid(self, value: Value) -> int:
        products = self.unit.products
        return self.programs(products[0]) if self.unit.epilogue is not None else sum(map(self.programs, products))


class ProductsWriter(KernelWriter, ABC):
    """Writes the text of a kernel: functions for the loops around the products, and the kernel."""

    def __init__(self, source: ProductsSource) -> None:
        super().__init__()
        self.source, self.unit = source, source.unit
        self.functions: list[str] = []
        self.checks = False
        lines = ["launch_next(EARLY)", "pid = tl.program_id(0)", *self.body()]
        parameters = [f"p{i}" for i in range(len(self.tensors))] + [f"s{i}" for i in range(len(self.sizes))]
        constants = [f"{name}: tl.constexpr" for name in ("INDEX", *source.constants, "EARLY")]
        body = "".join(f"    {line}\n" for line in lines)
        main = f"\n\n@triton.jit\ndef kernel({', '.join([*parameters, *constants])}):\n{body}"
        self.text = HEAD + "".join(self.functions) + main

    @abstractmethod
    def body(self) -> list[str]:
        """The lines behind those that every kernel begins with."""

    @abstractmethod
    def one(self, p: GemmStep, program: str) -> list[str]:
        """A product and nothing behind it, by programs of its own."""

    def side_by_side(self) -> list[str]:
        """Each product has programs of its own."""
        lines: list[str] = []
        end, products = 0, self.unit.products
        if len(products) == 1:
            return self.one(products[0], "pid")
        for p in products:
            first, end = end, end + self.source.programs(p)
            inside = self.one(p, f"(pid - {first})" if first else "pid")
            lines += [f"{'elif' if first else 'if'} pid < {end}:", *(f"    {line}" for line in inside)]
        return lines

    def function(self, name: str, first: Sequence[str], renderer: Renderer) -> str:
        """Adds the function that a renderer wrote; gives the arguments to call it with, behind the first."""
        made = renderer.source()
        self.checks |= made.checks
        parameters = ", ".join([*first, *made.parameters])
        self.functions.append(f"\n\n@triton.jit\ndef {name}({parameters}):\n{made.body}")
        given = [*map(self.pointer, made.tensors), *map(self.size, made.sizes), "INDEX"]
        return ", ".join([*given, *map(str, made.constants.values())])

    def bias(self, i: int, p: GemmStep, n: str) -> list[str]:
        """b0, b1, … for the columns `n`."""
        if p.bias is None:
            return []
        at = f"{n}{times(self, p.bias.strides[0])} + {self.size(p.bias.offset)}"
        mask = "" if divides(p.sizes.n, self.source.rows) else f", {n} < {self.size(p.sizes.n)}, other=0"
        return [f"b{i} = tl.load({self.pointer(p.bias.tensor)} + ({at}){mask}).to(tl.float32)"]


def times(operands: KernelOperands, stride: Dim) -> str:
    return "" if same(stride, 1) else f" * {operands.size(stride)}"
