"""A planned graph as one LLVM module with a C interface: the frame's image and the kernels of the native engine."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from airgraph.deploy.interface import Interface, Port
from airgraph.deploy.runtime import RuntimeWriter
from airgraph.deploy.text import Constants
from airgraph.deploy.weights import PlacedWeight, WeightsFile
from airgraph.engine.native.binding import ROW
from airgraph.engine.native.code import CompiledKernel, NativeStep
from airgraph.engine.native.engine import NativeExecutable
from airgraph.engine.native.frames import DTYPE_NUMBER, Tuned
from airgraph.engine.native.image import KernelName, Outside
from airgraph.engine.native.kernels import conv_last, gemm, panels, shared_kernels, winograd
from airgraph.engine.native.kernels.loops import Compiled, module_text
from airgraph.engine.native.kernels.products import rule
from airgraph.engine.native.kernels.shared_kernels import ConvLast, Gemm
from airgraph.engine.native.packing import PackingBudget
from airgraph.engine.native.tables import MOST, DefinitionWords
from airgraph.engine.protocol import Request, Symbols
from airgraph.errors import BuildError
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import Amount, SizeOp, Sizes, Term, both, either, equal, less
from airgraph.plan.steps import CallStep, ConvStep
from airgraph.runtime.loaded import Contract

ANY_ROWS = 240  # whole tiles of every kind: entry points with other numbers of rows share a packed weight


def refuse_calls(request: Request) -> None:
    """All nodes that PyTorch would compute, at once."""
    assert request.plan is not None
    calls = [step.node for step in request.plan.steps if isinstance(step, CallStep)]
    if calls:
        named = {str(n.attrs.get("target", n.op)): n.name for n in calls}
        raise BuildError(
            f"{len(calls)} nodes have no kernel of their own, and C has no PyTorch: {', '.join(named)}",
            where=dict(list(named.items())[:8]),
            hint="write them with other ops, or as a converter to ops that have kernels (docs/converters.md)",
        )


class BuildExecutable(NativeExecutable):
    """The program whose frame is built into an object. Its loops are not compiled for this process. Weights are packed in
    panels (panels.py), since C has no MKL; each is in the file once, so one that any step reads as it is stays so."""

    def __init__(self, request: Request, contract: Contract, weights: Mapping[str, torch.Tensor]) -> None:
        refuse_calls(request)
        self.loops: dict[str, Compiled] = {}
        super().__init__(request, compile=self.named_kernels)
        known = set(self.sizes.symbols)
        guards = [g for g in contract.guards if getattr(g, "free_symbols", set()) <= known]
        self.guards = [(truth(g, self.sizes), str(g)) for g in guards]
        self.contract = contract
        slots = [self.table.argument(spec.name) for spec in self.boundary.arguments]
        self.weights = {slot: pair for slot, pair in zip(slots, weights.items()) if slot is not None}
        self.packed_slots: set[int] = set()

    def state(self) -> frozenset[int]:
        """The addresses of the weights that it writes to."""
        slots = {self.table.argument(name) for name in self.written}
        return frozenset(tensor.data_ptr() for slot, (_, tensor) in self.weights.items() if slot in slots)

    def plain(self) -> frozenset[int]:
        """The addresses of the weights and constants that some step reads as they are, or writes to."""
        products = self.products({}, symbolic=False)
        packs = {step for step, product in products.items() if panels.serve(product)}
        packs |= {step for step in self.kernels if isinstance(step.origin, ConvStep)}
        read = {
            self.table.slot(tensor)
            for step in self.kernels
            for i, tensor in enumerate(step.args)
            if tensor is not None and not (i == 1 and step in packs)
        }
        return self.state() | {self.tensor(slot)[1].data_ptr() for slot in read & {*self.weights, *self.constants}}

    def lay_out(self, plain: Collection[int]) -> None:
        """The frame. `plain`: see there, of all programs that share the weights."""
        every = {*self.weights, *self.constants}
        self.packed_slots = {slot for slot in every if self.tensor(slot)[1].data_ptr() not in plain}
        contract = self.contract
        self.get_ready({s.symbol: typical(contract.ranges.get(s.symbol, (None, None))) for s in self.sources})
        assert self.shared is not None
        self.sized = self.shared.sizes_image()
        if any(operation.op == SizeOp.SYMPY for operation in self.sizes.code):
            raise BuildError(
                "one of its sizes is no whole-number formula",
                where={"sizes": ", ".join(map(str, self.sizes.expressions))},
                hint="fixed sizes: leave dynamic_shapes out",
            )
        if any(row[DefinitionWords.KIND] == DefinitionWords.STRIDE for row in self.definitions()):
            raise BuildError("a symbol is only known from the strides of an argument", hint="contiguous arguments")

    def named_kernels(self, wanted: Iterable[Compiled]) -> dict[str, CompiledKernel]:
        every = {c.body: c for c in wanted}
        names = {body: f"loop_{i}" for i, body in enumerate(every)}
        self.loops = {names[body]: c for body, c in every.items()}
        return {body: CompiledKernel(None, KernelName("", name)) for body, name in names.items()}

    def may_be_packed(self, step: NativeStep) -> bool:
        return self.weight_slot(step) in self.packed_slots

    def packed_products(self, symbols: Symbols, budget: PackingBudget) -> dict[NativeStep, Tuned]:
        found = dict[NativeStep, Tuned]()
        for step, product in self.products(symbols, symbolic=False).items():
            if self.may_be_packed(step) and panels.serve(product):
                tile = panels.tile_of(product._replace(m=ANY_ROWS)).number
                found[step] = Tuned(product, rule(product)._replace(panels=True, tile=tile))
        return found

    def tensor(self, slot: int) -> tuple[str, torch.Tensor]:
        """A weight or a constant, with its name."""
        return self.weights[slot] if slot in self.weights else (f"constant {slot}", self.constants[slot])

    def definitions(self) -> list[list[int]]:
        numbers = self.sized.definitions
        return [numbers[i : i + DefinitionWords.WORDS] for i in range(0, len(numbers), DefinitionWords.WORDS)]


def part_of(weight: torch.Tensor, start: int, shape: tuple[int, int], stride: int) -> torch.Tensor:
    """A matrix in a tensor's memory."""
    return weight.detach().as_strided(shape, (stride, 1), weight.storage_offset() + start)


def typical(ends: tuple[int | None, int | None]) -> int:
    """A size for which the arena is laid out well; any other works."""
    low, high = ends
    return max(low or 0, min(128, 128 if high is None else high))


def truth(condition: Any, sizes: Sizes) -> Amount:
    """1 where a condition on sizes holds."""
    if condition in (True, sympy.true):
        return 1
    if isinstance(condition, sympy.Rel):
        a, b = (sizes.term(side) for side in condition.args)
        match condition.rel_op:
            case "==":
                return equal(a, b)
            case "!=":
                return 1 - equal(a, b)
            case "<":
                return less(a, b)
            case ">=":
                return 1 - less(a, b)
            case ">":
                return less(b, a)
            case "<=":
                return 1 - less(b, a)
    parts = [truth(part, sizes) for part in getattr(condition, "args", ())]
    match condition:
        case sympy.And() | sympy.Or():
            result = parts[0]
            for part in parts[1:]:
                result = (both if isinstance(condition, sympy.And) else either)(result, part)
            return result
        case sympy.Not():
            return 1 - parts[0]
    raise BuildError(f"the condition {condition} on sizes cannot be checked in C", hint="other dynamic_shapes")


@dataclass(frozen=True)
class BuiltProgram:
    """`texts`: LLVM modules, to be linked into one; `exports`: the functions that C calls."""

    texts: list[str]
    exports: list[str]


class ProgramWriter:
    """The tables and functions of a program as LLVM text. `placed`: its weights and constants."""

    def __init__(self, executable: BuildExecutable, interface: Interface, name: str) -> None:
        self.executable, self.interface, self.name = executable, interface, name
        self.image, self.constants = executable.image, Constants()
        self.rows: dict[str, int] = {}
        self.products: list[int] = []  # the words for the function of products with packed weights
        packed = [*self.packed_products(), *self.packed_convolutions()]
        self.placed = [*self.placed_weights(), *packed]

    # -- weights ------------------------------------------------------------------------------------------------------
    def slot_word(self, slot: int) -> int:
        return self.image.tables["slots"][0] + slot

    def placed_weights(self) -> list[PlacedWeight]:
        """Those that some step reads or writes as they are."""
        e, placed = self.executable, []
        for slot in sorted(self.plain_slots() & {*e.weights, *e.constants}):
            name, tensor = e.tensor(slot)
            state = tensor.data_ptr() in e.state()
            placed.append(PlacedWeight(name, tensor, self.slot_word(slot), state, constant=slot in e.constants))
        return placed

    def plain_slots(self) -> set[int]:
        """Whose address some step takes: those that all steps read in panels are not among them."""
        start, count = self.image.tables["slots"]
        return {to - start for to in self.image.links[1::2] if start < to < start + count}

    def packed_products(self) -> Iterator[PlacedWeight]:
        for pack in self.image.packs:
            _, weight = self.executable.tensor(pack.slot)
            sizes = self.image.words[pack.sizes : pack.sizes + Gemm.WORDS]
            form, start, stride = (sizes[i] for i in (Gemm.FORM, Gemm.B_AT, Gemm.LDB))
            m, n, k = (sizes[i] for i in (Gemm.M, Gemm.N, Gemm.K))
            transposed = gemm.FORMS[form] == "nt"
            matrix = part_of(weight, start, (n, k) if transposed else (k, n), stride)
            self.products.append(pack.sizes + Gemm.PACKED)
            dims = self.image.linked(pack.sizes + Gemm.PANELS)
            tile, how = self.image.words[dims + conv_last.TILE], (start, stride, form)
            matrix = matrix if transposed else matrix.t()
            yield self.packed(pack.slot, matrix, panels.one_by_one(m, n, k), pack.args, how, tile=tile)

    def packed_convolutions(self) -> Iterator[PlacedWeight]:
        for pack in self.image.conv_packs:
            _, weight = self.executable.tensor(pack.slot)
            first = pack.sizes + ConvLast.DIMS
            dims, start = ConvSizes(*self.image.words[first : first + len(conv_last.SIZES)]), pack.sizes + ConvLast.W_AT
            matrix = part_of(weight, self.image.words[start] // 4, (dims.o, dims.depth), dims.depth)
            by_squares = self.image.words[first + conv_last.SQUARES] > 0
            yield self.packed(pack.slot, matrix, dims, pack.args, self.image.words[start], by_squares)
            self.image.words[start], self.image.words[first + conv_last.PREPACKED] = 0, 1

    def packed(
        self,
        slot: int,
        matrix: torch.Tensor,
        dims: ConvSizes,
        args: int,
        how: Hashable,
        by_squares: bool = False,
        tile: int = 0,
    ) -> PlacedWeight:
        """The step whose arguments are at `args` reads the matrix in panels of the tile with this number, at an address
        that a new word has."""
        (name, weight), host = self.executable.tensor(slot), conv_last.these_tiles()[tile]
        image, word = self.image, len(self.image.words)
        image.words.append(0)
        at = image.links[::2].index(args + 1)
        image.links[2 * at + 1] = word
        shape = (dims.o, dims.c, dims.groups, dims.kh, dims.kw)
        key = (weight.data_ptr(), weight.nbytes, shape, how, by_squares, tile)
        kernels = matrix.reshape(dims.o, -1, dims.kh, dims.kw)
        copy = winograd.in_panels(kernels, host) if by_squares else panels.in_panels(matrix, dims, host)
        constant = slot in self.executable.constants
        return PlacedWeight(f"{name} in panels", copy, word, constant=constant, packed=key)

    def weight_rows(self, file: WeightsFile) -> list[list[int]]:
        """See words.WeightWords."""
        return [[w.at, file.offset(w), w.memory.nbytes, file.state(w)] for w in self.placed]

    # -- tables -------------------------------------------------------------------------------------------------------
    def table(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self.constants.rows(name, rows)
        self.rows[name] = len(rows)

    def tables(self, file: WeightsFile) -> None:
        executable, image, string = self.executable, self.image, self.constants.string
        self.constants.table("words", image.words)
        self.rows["words"] = len(image.words)
        pairs = zip(image.links[::2], image.links[1::2])
        self.table("links", [[at, to] for at, to in pairs])
        outside = zip(image.outside[::3], image.outside[1::3], image.outside[2::3])
        functions: list[list[int | str]] = [[at, self.function(n)] for at, kind, n in outside if kind == Outside.STEP]
        self.table("functions", functions + [[at, "@step_panels"] for at in self.products])
        self.table("weights", self.weight_rows(file))
        self.rows["state"] = file.state_bytes
        places = {port.index: i for i, port in enumerate(self.interface.inputs)}
        self.table("definitions", [[s, places[a], *rest] for s, a, *rest in executable.definitions()])
        self.table("code", [executable.sized.code[i : i + ROW] for i in range(0, len(executable.sized.code), ROW)])
        self.table("questions", [[f"@{name}"] for name in executable.sized.questions])
        self.rows["symbols"] = executable.sized.symbols
        self.table("ranges", self.ranges())
        open_guards = [(term, text) for term, text in executable.guards if isinstance(term, Term)]
        self.table("guards", [[term.index, string(text)] for term, text in open_guards])
        self.table("inputs", self.ports(self.interface.inputs))
        self.table("outputs", self.ports(self.interface.outputs))

    def function(self, step: int) -> str:
        symbol = self.executable.kernels[step].symbol
        assert symbol is not None
        return f"@{symbol.name}"

    def ranges(self) -> list[list[int | str]]:
        ports, symbols = {port.index: port for port in self.interface.inputs}, self.executable.sizes.symbols
        rows: list[list[int | str]] = []
        for symbol, argument, kind, axis, factor, offset in self.executable.definitions():
            ends = self.executable.contract.ranges.get(symbols[symbol])
            if ends is not None:
                low, high = ends
                size = f"(size {axis} - {offset})" if offset else f"size {axis}"
                of = f" / {factor}" if factor != 1 else ""
                name = f"{size}{of} of " if kind == DefinitionWords.SIZE else ""
                text = self.constants.string(f"{name}{ports[argument].name}")
                rows.append([symbol, low or 0, MOST if high is None else min(high, MOST), text])
        return rows

    def ports(self, ports: list[Port]) -> list[list[int | str]]:
        string = self.constants.string
        return [[port.index, DTYPE_NUMBER[port.dtype], port.dtype.itemsize, string(port.name)] for port in ports]

    # -- modules ------------------------------------------------------------------------------------------------------
    def declared(self) -> str:
        names = {self.function(i) for i in range(len(self.executable.kernels))}
        names |= {"@step_panels"} if self.products else set()
        lines = [f"declare void {name}(ptr, ptr, i64, i64, ptr)" for name in sorted(names)]
        lines += [f"declare i64 @{name}(ptr)" for name in sorted(set(self.executable.sized.questions))]
        return "\n".join(lines)

    def program(self, file: WeightsFile) -> BuiltProgram:
        self.tables(file)
        runtime = RuntimeWriter(self.name, self.constants, self.rows, file.identity)
        functions = runtime.source()  # (first: it adds strings)
        own = "\n".join([self.declared(), self.constants.source(), functions])
        shared = shared_kernels.sources()
        loops = [module_text(self.executable.loops)] if self.executable.loops else []
        return BuiltProgram([own, *loops, *shared], runtime.exports)
