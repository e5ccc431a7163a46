"""A loop nest as the source of a Triton kernel.

    @triton.jit
    def kernel(p0, p1, s0, INDEX: tl.constexpr, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr, EARLY: tl.constexpr): ...

Pointers come in the order of `Source.tensors`; `s0, s1, …` are the values of the symbolic sizes; INDEX is the type of
indices, EARLY says whether the GPU has programmatic dependent launch. The outer loops are one
index `x`, decomposed by division where memory does not follow it, the inner loops are `r`. All values are tiles that
broadcast: [XBLOCK, 1] for what depends on outer loops, [1, RBLOCK] on inner ones, [1, 1] on none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from airgraph.engine.cuda import functions
from airgraph.engine.cuda.functions import COMPUTED, SIGNATURE, STORED, literal
from airgraph.engine.cuda.kernel_source import Value
from airgraph.engine.cuda.tiles import Tile, choose, other_warps, others, total
from airgraph.engine.rendering import CodeBlock, KernelOperands, find
from airgraph.ir.types import DataType, Dim
from airgraph.plan.index import Affine, Var, expand, same, volume
from airgraph.plan.kernels import Store
from airgraph.plan.nest import Nest, Stage
from airgraph.plan.tensors import Expr, Tensor

HEAD = "from airgraph.engine.cuda.helpers import *\n"
CROSSED = Tile(64, 64, warps=8, blocks=True)


@dataclass(frozen=True, eq=False)
class Source:
    """A kernel's body and what it is to be given. Its text is asked for when it is prepared and when it is launched."""

    body: str
    tensors: tuple[Tensor, ...]
    sizes: tuple[Dim, ...]
    programs: Dim  # iterations of the outer loops; a program does `tile.x` of them
    row: Dim  # iterations of the inner loops
    tile: Tile
    checks: bool  # it asserts that indices are in range
    elements: tuple[Dim, ...] = ()  # of the memory it touches: decides whether indices need 64 bits
    nest: Nest | None = None  # that it was rendered from
    fuses = False  # eager rounds twice
    digest = None

    @cached_property
    def text(self) -> str:
        start = "    begin(EARLY)\n    pid = tl.program_id(0)\n"
        parameters = ", ".join([*self.parameters, "EARLY: tl.constexpr"])
        return f"{HEAD}\n\n@triton.jit\ndef kernel({parameters}):\n{start}{self.body}"

    @property
    def parameters(self) -> list[str]:
        return [*self.signature, *(f"{name}: tl.constexpr" for name in ("INDEX", *self.constants))]

    @cached_property
    def signature(self) -> dict[str, str]:
        pointers = {f"p{i}": f"*{SIGNATURE[t.dtype]}" for i, t in enumerate(self.tensors)}
        return pointers | {f"s{i}": "i64" for i in range(len(self.sizes))}

    @property
    def constants(self) -> dict[str, int]:
        return self.tile.constants

    @property
    def warps(self) -> int:
        return self.tile.warps

    def numbers(self, value: Value) -> list[int]:
        return [value(s) for s in self.sizes]

    def grid(self, value: Value) -> int:
        across = -(-value(self.programs) // self.tile.x)
        return across * -(-value(self.row) // self.tile.r) if self.tile.blocks else across

    def alternatives(self) -> list[Source]:
        if self.nest is None:
            return []
        found = [Renderer(self.nest, tile).source() for tile in others(self.tile)]
        return [s for s in found if s.tensors == self.tensors]


@dataclass(frozen=True, eq=False)
class Merged:
    """Kernels that do not depend on each other as one: each program does a part of one of them."""

    sources: tuple[Source, ...]
    fuses = False
    digest = None

    @cached_property
    def text(self) -> str:
        bodies = list(dict.fromkeys((", ".join(["pid", *s.parameters]), s.body) for s in self.sources))
        functions = "".join(f"\n\n@triton.jit\ndef part{i}({given}):\n{body}" for i, (given, body) in enumerate(bodies))
        names = iter(self.signature)
        pointers = [[next(names) for _ in s.tensors] for s in self.sources]
        ends = [next(names) for _ in self.sources]
        sizes = [[next(names) for _ in s.sizes] for s in self.sources]
        lines = ["begin(EARLY)", "pid = tl.program_id(0)"]
        for i, s in enumerate(self.sources):
            function = bodies.index((", ".join(["pid", *s.parameters]), s.body))
            first = f"pid - {ends[i - 1]}" if i else "pid"
            given = [f"({first}).to(tl.int32)", *pointers[i], *sizes[i], "INDEX", *map(str, s.constants.values())]
            lines += [f"{'elif' if i else 'if'} pid < {ends[i]}:", f"    part{function}({', '.join(given)})"]
        parameters = ", ".join([*self.signature, "INDEX: tl.constexpr", "EARLY: tl.constexpr"])
        main = "".join(f"    {line}\n" for line in lines)
        return f"{HEAD}{functions}\n\n@triton.jit\ndef kernel({parameters}):\n{main}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for s in self.sources for t in s.tensors)

    @property
    def sizes(self) -> tuple[Dim, ...]:
        return tuple(d for s in self.sources for d in (s.programs, *s.sizes))

    @property
    def elements(self) -> tuple[Dim, ...]:
        return tuple(d for s in self.sources for d in s.elements)

    @cached_property
    def signature(self) -> dict[str, str]:
        """The pointers of each, where each ends among the programs, the sizes of each."""
        pointers = [SIGNATURE[t.dtype] for t in self.tensors]
        numbers = len(self.sources) + sum(len(s.sizes) for s in self.sources)
        return {f"p{i}": f"*{t}" for i, t in enumerate(pointers)} | {f"s{i}": "i64" for i in range(numbers)}

    @property
    def constants(self) -> dict[str, int]:
        return {}

    @property
    def warps(self) -> int:
        return max(s.warps for s in self.sources)

    @property
    def checks(self) -> bool:
        return any(s.checks for s in self.sources)

    def numbers(self, value: Value) -> list[int]:
        ends = itertools.accumulate(s.grid(value) for s in self.sources)
        return [*ends, *(n for s in self.sources for n in s.numbers(value))]

    def grid(self, value: Value) -> int:
        return sum(s.grid(value) for s in self.sources)

    def alternatives(self) -> list[Merged]:
        """With other numbers of warps: all parts have the same."""
        return [Merged(tuple(with_warps(s, count) for s in self.sources)) for count in other_warps(self.warps)]


def with_warps(source: Source, count: int) -> Source:
    return replace(source, tile=replace(source.tile, warps=count))


def render(nest: Nest, known: dict[Nest, Source] | None = None) -> Source:
    """`known`: the kernels so far; a nest that differs from one of theirs in nothing but its tensors gets the same one."""
    known = {} if known is None else known
    first = nest.like or nest
    source = known.get(first)
    if source is None:
        crossing = crossed(first)
        renderer = Renderer(crossing, CROSSED) if crossing else Renderer(first, choose(first, total(first.outer)))
        source = known[first] = renderer.source()
    return source if first is nest else on_tensors_of(nest, source)


def on_tensors_of(nest: Nest, source: Source) -> Source:
    """A kernel of the nest that this one is a copy of, on the tensors of this one."""
    assert nest.like is not None
    table = {a.source: b.source for a, b in zip(nest.like.exprs, nest.exprs) if a.op == "load"}
    table |= {a.target: b.target for a, b in zip(nest.like.stores, nest.stores)}
    own = nest if source.nest is nest.like else crossed(nest)
    return replace(source, tensors=tuple([table[t] for t in source.tensors]), nest=own)


def crossed(nest: Nest) -> Nest | None:
    """A nest without inner loops that reads memory across the order in which it stores: the loop along which it reads is
    the second axis of a square tile, and Triton exchanges the axes in shared memory."""
    stored = {contiguous_loop(s.at) for s in nest.single}
    if nest.inner or len(stored) != 1 or any(s.picks for s in nest.single):
        return None
    (kept,) = stored
    loads = [e.at for e in nest.exprs if e.op == "load" and e.at is not None and not e.picks]
    read = {contiguous_loop(at) for at in loads if kept in at.vars()} - {kept, None}
    (along,) = read if len(read) == 1 else (None,)
    if kept is None or along is None or not (long_enough(kept) and long_enough(along)):
        return None
    others = [v for v in nest.outer if v not in (along, kept)]
    return replace(nest, outer=(*others, kept), inner=(along,), vector=None)


def contiguous_loop(at: Affine) -> Var | None:
    """The loop whose neighbours are neighbours in memory."""
    return next((v for v, step in at.terms if same(step, 1)), None)


def long_enough(v: Var) -> bool:
    size = expand(v.size)
    return not isinstance(size, int) or size >= CROSSED.x


class Renderer(KernelOperands):
    """Renders one nest as the body of a Triton kernel; `source()` is the result.

    A block of the kernel computes a tile: XBLOCK iterations of the outer loops at once and, where there are inner ones,
    RBLOCK of those, in one go (`whole_rows`) or in a loop for each stage (`long_rows`). What does not depend
    on the inner loops is defined outside of them.
    """

    def __init__(self, nest: Nest, tile: Tile) -> None:
        super().__init__()
        self.nest, self.tile = nest, tile
        self.inner = frozenset(nest.inner)
        self.checks = False
        self.count = 0
        self.scopes = [CodeBlock("    ")]
        self.axes: dict[Var, str] = {}
        self.loops: dict[str, list[Var]] = {}
        self.row = total(nest.inner)
        self.shape = "[XBLOCK, RBLOCK]" if tile.r else "[XBLOCK]"

    # -- the whole --------------------------------------------------------------------------------------------------
    def source(self) -> Source:
        outer = total(self.nest.outer)
        self.index("x", self.nest.outer)
        self.index("r", self.nest.inner)
        body = self.whole_rows if self.tile.whole else self.long_rows
        body()
        unit = "[1, 1]" if self.tile.r else "[1]"
        start = [f"zero = tl.zeros({unit}, INDEX)", *self.start(outer)]
        lines = [*(f"    {line}" for line in start), *self.scopes[0].lines]
        elements = tuple(volume(t.shape) for t in self.tensors)
        return Source(
            "\n".join(lines) + "\n",
            tuple(self.tensors),
            tuple(self.sizes),
            outer,
            self.row,
            self.tile,
            self.checks,
            (outer, self.row, *elements),
            self.nest,
        )

    def start(self, outer: Dim) -> list[str]:
        """Where this program stands: x, and r where a row is one tile or divided among programs."""
        spread = "[:, None]" if self.tile.r else ""
        lines, first = [], "tl.arange(0, RBLOCK)[None, :].to(INDEX)"
        if self.tile.blocks:
            lines.append(f"across = tl.cdiv({self.size(outer)}, XBLOCK)")
            lines.append(f"r = (pid // across).to(INDEX) * RBLOCK + {first}")
            lines.append("pid = pid % across")
        lines.append(f"x = pid.to(INDEX) * XBLOCK + tl.arange(0, XBLOCK){spread}")
        if not self.exact_rows:
            lines.append(f"xmask = x < {self.size(outer)}")
        if self.tile.r and self.tile.whole:
            lines += [] if self.tile.blocks else [f"r = {first}"]
            if not divides(self.row, self.tile.r):
                lines.append(f"rmask = r < {self.size(self.row)}")
        return lines

    def ordered(self, loops: Sequence[Var]) -> list[Var]:
        """The loop along which memory is contiguous innermost: neighbouring threads get neighbouring elements. That of a
        store before that of loads, which are cached."""
        stores = [*(s for stage in self.nest.stages for s in stage.stores), *self.nest.single]
        stored = [v for v in (contiguous_loop(s.at) for s in stores) if v in loops]
        plain = stored and self.nest.inner and not self.nest.vector_outside
        vector = stored[0] if plain else self.nest.vector
        return [*(v for v in loops if v is not vector), *(v for v in loops if v is vector)]

    def index(self, axis: str, loops: Sequence[Var]) -> None:
        """The loops that an axis of the tile runs over, outermost first."""
        self.loops[axis] = self.ordered(loops)
        for v in loops:
            self.axes[v] = axis

    def whole_rows(self) -> None:
        """Every stage on the same tile: a value is computed once and stays in registers."""
        for stage in self.nest.stages:
            for s in stage.stores:
                self.store(s)
            for e in stage.reductions:
                self.define(e, self.reduced(e))
        for s in self.nest.single:
            self.store(s)

    def reduced(self, e: Expr) -> str:
        # Inner loops of one iteration each: there is nothing to combine (in a square tile, r is an outer loop).
        if not self.tile.r or self.tile.blocks:
            return f"({self.value(e.args[0])}).to(tl.{COMPUTED[e.dtype]})"
        return functions.reduced(e.source, e.dtype, self.masked(self.spread(e.args[0]), e))

    def long_rows(self) -> None:
        """A loop over tiles for each stage."""
        for stage in self.nest.stages:
            self.stage(stage)
        for s in self.nest.single:
            self.store(s)

    def stage(self, stage: Stage) -> None:
        outside = self.scopes[0]
        sums = {e.id: f"a{e.id}" for e in stage.reductions}
        inside = CodeBlock("        ")
        self.scopes.append(inside)
        for s in stage.stores:
            self.store(s)
        for e in stage.reductions:
            tile = self.masked(self.spread(e.args[0]), e)
            new = functions.combined(e.source, e.dtype, sums[e.id], tile)
            self.line(f"{sums[e.id]} = {new}")
        self.scopes.pop()
        for e in stage.reductions:
            start = f"tl.full({self.shape}, {functions.identity(e.source, e.dtype)}, tl.{COMPUTED[e.dtype]})"
            outside.lines.append(f"    {sums[e.id]} = {start}")
        row = self.size(self.row)
        outside.lines += [
            f"    for start in range(0, {row}, RBLOCK):",
            "        r = (start + tl.arange(0, RBLOCK))[None, :].to(INDEX)",
            *([] if divides(self.row, self.tile.r) else [f"        rmask = r < {row}"]),
            *inside.lines,
        ]
        for e in stage.reductions:
            self.define(e, functions.reduced(e.source, e.dtype, sums[e.id]))

    @cached_property
    def exact_rows(self) -> bool:
        return self.tile.x == 1 or divides(total(self.nest.outer), self.tile.x)

    # -- values -----------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        scope = self.scopes[-1]
        scope.lines.append(scope.indent + text)

    def scope_of(self, variables: Iterable[object]) -> CodeBlock:
        """What does not depend on the inner loops is computed outside of them."""
        return self.scopes[-1] if self.inner.intersection(variables) else self.scopes[0]

    def define(self, e: Expr, text: str) -> str:
        scope = self.scope_of(e.vars)
        self.count += 1
        name = f"v{self.count}"
        scope.lines.append(f"{scope.indent}{name} = {text}")
        scope.values[e.id] = name
        return name

    def value(self, e: Expr) -> str:
        found = find(self.scopes, e.id)
        if found is not None:
            return found
        assert e.op != "reduce", "a reduction is read before it is done"
        match e.op:
            case "load":
                return self.define(e, self.load(e))
            case "const":
                unit = "[1, 1]" if self.tile.r else "[1]"
                return self.define(e, f"tl.full({unit}, {literal(e.source, e.dtype)}, tl.{COMPUTED[e.dtype]})")
            case "iota":
                assert e.at is not None
                return self.define(e, f"({self.offset(e.at)}).to(tl.{COMPUTED[e.dtype]})")
        return self.define(e, functions.applied(e, [self.value(a) for a in e.args]))

    def spread(self, e: Expr) -> str:
        value = self.value(e)
        return f"tl.broadcast_to({value}, {self.shape})"

    def masked(self, tile: str, e: Expr) -> str:
        """A tile with the neutral element outside of the row."""
        text = f"({tile}).to(tl.{COMPUTED[e.dtype]})"
        if divides(self.row, self.tile.r):
            return text
        return f"tl.where(rmask, {text}, {functions.identity(e.source, e.dtype)}).to(tl.{COMPUTED[e.dtype]})"

    # -- places -----------------------------------------------------------------------------------------------------
    def offset(self, at: Affine) -> str:
        terms = [term for axis in self.loops for term in self.terms(axis, dict(at.terms))]
        if not terms:
            terms = ["zero"]
        if not same(at.const, 0):
            terms.append(self.size(at.const))
        return " + ".join(terms)

    def terms(self, axis: str, coefficients: dict[Var, Dim]) -> list[str]:
        """Σ coefficient · loop over the loops of an axis. Neighbours that run through memory as one are one term: all loops
        of a contiguous tensor are just `x`, whose neighbours the compiler knows to be neighbours in memory."""
        loops, found = self.loops[axis], []
        last = len(loops) - 1
        while last >= 0:
            step, first = coefficients.get(loops[last]), last
            if step is None:
                last -= 1
                continue
            span = loops[last].size
            while first and same(coefficients.get(loops[first - 1], 0), step * span):
                first -= 1
                span = expand(span * loops[first].size)
            text, behind = axis, total(tuple(loops[last + 1 :]))
            text = text if same(behind, 1) else f"({text} // {self.size(behind)})"
            text = f"({text} % {self.size(span)})" if first else text
            found.append(text if same(step, 1) else f"{text} * {self.size(step)}")
            last = first - 1
        return found[::-1]

    def mask(self, variables: Iterable[object]) -> list[str]:
        axes = {self.axes[v] for v in variables if isinstance(v, Var)}
        exact = {"x": self.exact_rows, "r": divides(self.row, max(self.tile.r, 1))}
        return [f"{axis}mask" for axis in ("x", "r") if axis in axes and not exact[axis]]

    def picked(self, args: Sequence[Expr], picks: Sequence[tuple[Dim, Dim, bool]]) -> list[str]:
        """What numbers that pick elements add to an offset; out of range is asserted, and element 0 is read instead."""
        terms = []
        for a, (stride, size, wraps) in zip(args, picks):
            number, limit = f"{self.value(a)}.to(tl.int64)", self.size(size)
            scope = self.scope_of(a.vars)
            self.count += 1
            name = f"n{self.count}"
            wrapped = f"tl.where({number} < 0, {number} + {limit}, {number})" if wraps else number
            masks = " & ".join(self.mask(a.vars))
            good = f"({name} >= 0) & ({name} < {limit})"
            tested = f"({good}) | (({masks}) == 0)" if masks else good
            scope.lines += [
                f"{scope.indent}{name} = {wrapped}",
                f'{scope.indent}tl.device_assert({tested}, "index out of range")',
                f"{scope.indent}{name} = tl.where({good}, {name}, 0)",
            ]
            self.checks = True
            terms.append(name if same(stride, 1) else f"{name} * {self.size(stride)}")
        return terms

    def load(self, e: Expr) -> str:
        assert e.at is not None
        place = " + ".join([self.offset(e.at), *self.picked(e.args, e.picks)])
        mask = " & ".join(self.mask(e.vars))
        text = f"tl.load({self.pointer(e.source)} + ({place})" + (f", {mask}, other=0)" if mask else ")")
        return text + (".to(tl.float32)" if e.dtype in functions.HALVES else "")

    def store(self, s: Store) -> None:
        value = self.value(s.value)
        variables = {*s.at.vars(), *s.value.vars, *(v for n in s.numbers for v in n.vars)}
        place = " + ".join([self.offset(s.at), *self.picked(s.numbers, s.picks)])
        full = bool(self.inner & variables)
        # Loops of one iteration are in no index: the tile of the place is made complete, so that it fits the value.
        place += " + x * 0" if "x" not in {self.axes[v] for v in s.at.vars()} else ""
        mask = " & ".join(dict.fromkeys(self.mask([*self.nest.outer, *(self.nest.inner if full else ())])))
        dtype = s.target.dtype
        stored = f"({value}).to(tl.{STORED[dtype]})" if dtype != DataType.DT_BOOL else f"({value}).to(tl.int1)"
        line = f"tl.store({self.pointer(s.target)} + ({place}), {stored}" + (f", {mask})" if mask else ")")
        scope = self.scopes[-1] if full else self.scopes[0]
        scope.lines.append(scope.indent + line)


def divides(size: Dim, block: int) -> bool:
    """Blocks cover it exactly, and it is not empty: nothing has to be masked."""
    size = expand(size)
    return isinstance(size, int) and size > 0 and size % block == 0
