"""Loop nests as LLVM text.

    define void @NAME(ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch)

`args` holds the addresses of the memory it reads and writes, in the order of `Compiled.tensors`; `sizes` the values of
the symbolic expressions in it, and where in a tensor it begins: the steps of an unrolled recurrence, each with another
part of one tensor, are one kernel. [begin, end) is this thread's share of the parallel loop.

The body of the vectorised loop is written for several lanes at a time, and once more for single elements, which do the
rest. Every value is a vector, of one lane where it does not depend on the vectorised loop, and is computed in the outermost
loop it can be computed in.

What runs in which order is decided by plan/nest.py. No loop is left to LLVM to vectorise: its vectoriser would need O2,
three times the time to compile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airgraph.engine.native.kernels.gemm import BANDS, COLUMNS, ROWS
from airgraph.engine.native.llvm import mathlib
from airgraph.engine.native.llvm.builder import Builder
from airgraph.engine.native.llvm.numbers import (
    BAD_NUMBER,
    BYTES,
    COMPUTED,
    HALVES,
    STORED,
    VectorMath,
    literal,
    spread_literal,
)
from airgraph.engine.rendering import CodeBlock, KernelOperands, find
from airgraph.ir.types import DataType, Dim
from airgraph.plan.functions import identity
from airgraph.plan.index import Affine, Var, expand, same
from airgraph.plan.kernels import Store
from airgraph.plan.nest import SPILLED_BYTES, Nest, Stage
from airgraph.plan.tensors import Expr, Pick, Tensor

T = DataType
SHARE = ("split", "band", "across")  # words behind the sizes of an epilogue
MOST = 1 << 62  # more jobs than there are


@dataclass
class Compiled:
    """The text of a kernel, what has to stand beside it in a module, and what it is to be called with."""

    body: str  # its function, called NAME
    declares: frozenset[str]
    math: frozenset[mathlib.Use]  # the functions of mathlib that it calls
    tensors: list[Tensor]
    sizes: list[Dim]
    jobs: Dim  # iterations of the parallel loop
    unit: int  # threads get multiples of this
    cost: Dim  # of all, in additions
    checks: bool  # it may find an index out of range, or a divisor that is 0
    scratch: int  # bytes that each thread needs


def render(nest: Nest) -> Compiled:
    return LoopWriter(nest).write()


def render_epilogue(nest: Nest) -> Compiled:
    """Of a product: [begin, end) is the thread's share of its columns or rows. Which of them the threads divide
    (products.SPLITS), and BAND and ACROSS of the product (shared_kernels.Gemm), are behind the sizes."""
    return LoopWriter(nest, share="product").write()


def render_block(nest: Nest) -> Compiled:
    """Of a convolution: [begin, end) are pixels; at `scratch` are two numbers, the first channel and the one behind the
    last."""
    return LoopWriter(nest, share="block").write()


def module_text(kernels: Mapping[str, Compiled]) -> str:
    """Several kernels, by the names they get, with the functions and declarations they need, each once."""
    functions, declares = mathlib.module_text({use for c in kernels.values() for use in c.math})
    needed = declares.union(*(c.declares for c in kernels.values()))
    bodies = [c.body.replace("@NAME", f"@{name}", 1) for name, c in kernels.items()]
    return "\n".join([*sorted(needed), functions, *bodies])


class LoopWriter(Builder, KernelOperands):
    """Writes the text of one nest. Lines belong to the loop that is open, or to an outer one: `levels` are the bodies of
    the open loops, each up to where the next loop begins."""

    def __init__(self, nest: Nest, share: str = "") -> None:
        """`share`: of a "product" or a "block", where the loop is an epilogue."""
        Builder.__init__(self)
        KernelOperands.__init__(self, "%")
        self.nest = nest
        self.share = share
        self.vector = nest.vector
        self.wide = nest.target.lanes
        self.allocas: list[str] = []
        self.math: set[mathlib.Use] = set()
        self.starts: dict[Tensor, int] = {}  # the element that its address in this kernel is that of
        self.errors = ""  # the place of this thread's error word, if it checks anything
        self.depth: dict[Var, int] = {}  # open loops
        self.indices: dict[Var, str] = {}  # their counters
        self.levels: list[CodeBlock] = [CodeBlock()]
        self.lanes = 1
        self.now = 0  # number of the stage

    # -- text -------------------------------------------------------------------------------------------------------
    def emit(self, text: str, level: int = -1) -> str:
        return self.op(text, self.levels[level].lines)

    def line(self, text: str) -> None:
        self.levels[-1].lines.append(text)

    def alloca(self, type: str) -> str:
        return self.op(f"alloca {type}", self.allocas)

    def write(self) -> Compiled:
        nest = self.nest
        outer = [v for v in nest.outer if v is not self.vector]
        if self.share == "product":
            self.share_of_product()
        elif self.share == "block":
            self.block_of_pixels()
        elif outer:
            self.loops(outer, self.rows, parallel=True)
        else:
            self.rows(parallel=True)
        return self.finish()

    def finish(self) -> Compiled:
        head = ["define void @NAME(ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch) nounwind {", "entry:"]
        for i, t in enumerate(self.tensors):
            head += [f"  %a{i} = getelementptr ptr, ptr %args, i64 {i}", f"  %b{i} = load ptr, ptr %a{i}"]
            head += [f"  %{'q' if self.starts[t] else 'p'}{i} = load ptr, ptr %b{i}"]
        moved = [(i, t) for i, t in enumerate(self.tensors) if self.starts[t]]
        sizes = [*self.sizes, *(self.starts[t] for _, t in moved)]
        for i in range(len(sizes)):
            head += [f"  %z{i} = getelementptr i64, ptr %sizes, i64 {i + 1}", f"  %s{i} = load i64, ptr %z{i}"]
        for at, (i, t) in enumerate(moved, len(self.sizes)):
            head.append(f"  %p{i} = getelementptr {STORED[t.dtype]}, ptr %q{i}, i64 %s{at}")
        if self.share == "product":
            for i, name in enumerate(SHARE, len(sizes) + 1):
                head += [f"  %z{name} = getelementptr i64, ptr %sizes, i64 {i}", f"  %{name} = load i64, ptr %z{name}"]
        start = [f"  store i64 0, ptr {self.errors}"] if self.errors else []
        end = self.reports() if self.errors else []
        body = "\n".join([*head, *self.allocas, *start, *self.levels[0].lines, *end, "  ret void", "}"])
        nest = self.nest
        return Compiled(
            body,
            frozenset(self.declares),
            frozenset(self.math),
            self.tensors,
            sizes,
            nest.jobs,
            nest.grain,
            nest.cost,
            bool(self.errors),
            nest.scratch,
        )

    # -- loops ------------------------------------------------------------------------------------------------------
    def loop(self, var: Var, start: str, end: str, step: int, body: Any) -> None:
        counter, label = self.alloca("i64"), self.name("L")
        guard = self.emit(f"icmp slt i64 {start}, {end}")
        limit = end if step == 1 else self.emit(f"sub i64 {end}, {step - 1}")
        self.levels.append(CodeBlock())
        self.depth[var] = len(self.levels) - 1
        self.indices[var] = self.emit(f"load i64, ptr {counter}")
        body()
        after = self.emit(f"add i64 {self.indices[var]}, {step}")
        self.line(f"  store i64 {after}, ptr {counter}")
        again = self.emit(f"icmp slt i64 {after}, {limit}")
        self.line(f"  br i1 {again}, label %{label}.body, label %{label}.exit")
        self.line(f"{label}.exit:")
        del self.depth[var]
        closed = self.levels.pop()
        # What the body wanted to have computed outside of it stands there by now: only then does the loop begin.
        self.line(f"  store i64 {start}, ptr {counter}")
        self.line(f"  br i1 {guard}, label %{label}.body, label %{label}.exit")
        self.line(f"{label}.body:")
        self.levels[-1].lines += closed.lines

    def loops(self, loops: Sequence[Var], body: Any, parallel: bool = False) -> None:
        if not loops:
            body()
            return
        first, *rest = loops
        start, end = ("%begin", "%end") if parallel else ("0", self.size(first.size))
        self.loop(first, start, end, 1, lambda: self.loops(rest, body))

    def blocks(self, var: Var, start: str, end: str, step: int, body: Any, fold: Any) -> None:
        """The loop, with `fold` after every block of iterations: a sum of sums rounds less than one long sum."""
        if fold is None:
            self.loop(var, start, end, step, body)
            return
        assert self.nest.block is not None
        block, length = Var(var.size), self.nest.block.iterations * step

        def one() -> None:
            first = self.indices[block]
            last = self.emit(f"add i64 {first}, {length}")
            less = self.emit(f"icmp slt i64 {last}, {end}")
            stop = self.emit(f"select i1 {less}, i64 {last}, i64 {end}")
            self.loop(var, first, stop, step, body)
            fold()

        self.loop(block, start, self.emit(f"add i64 {end}, {length - 1}"), length, one)

    def vectorised(self, start: str, end: str, body: Any, fold: Any = None) -> None:
        """The vectorised loop, several lanes at a time, then the rest one by one."""
        assert self.vector is not None
        size = self.vector.size
        at = start
        for lanes in self.widths(size):
            length = self.emit(f"sub i64 {end}, {at}")
            whole = self.emit(f"and i64 {length}, -{lanes}")
            first, at = at, self.emit(f"add i64 {at}, {whole}")
            self.lanes = lanes
            self.blocks(self.vector, first, at, lanes, body, fold)
        self.lanes = 1
        no_rest = isinstance(size, int) and size % self.wide == 0 and start == "0"
        if not no_rest:
            self.loop(self.vector, at, end, 1, body)

    def widths(self, size: Dim) -> list[int]:
        """Lanes, at first as many as there are. The channels of a convolution are few, and often a multiple of 8: half as
        many do the rest of those, or most of it."""
        half = self.wide // 2
        pays = self.share == "block" and isinstance(size, int) and size % self.wide >= half
        return [n for n in (self.wide, *([half] if pays else [])) if not isinstance(size, int) or size >= n]

    def rows(self, parallel: bool = False) -> None:
        """One iteration of the outer loops but the vectorised one: all stages, then the single elements."""
        if self.nest.vector_outside:
            assert self.vector is not None
            start, end = ("%begin", "%end") if parallel else ("0", self.size(self.vector.size))
            self.vectorised(start, end, self.stages)
        else:
            self.lanes = 1
            self.stages()

    def share_of_product(self) -> None:
        """The rows and columns of the result that this thread has computed."""
        (row, column), bands = self.nest.outer, Var(1)
        by_bands = self.emit(f"icmp eq i64 %split, {BANDS}")
        across = self.emit(f"select i1 {by_bands}, i64 %across, i64 {MOST}")
        first, last = self.emit(f"udiv i64 %begin, {across}"), self.emit("sub i64 %end, 1")
        behind = self.emit(f"add i64 {self.emit(f'udiv i64 {last}, {across}')}, 1")

        def limit(a: str, kind: str, b: str) -> str:
            return self.emit(f"select i1 {self.emit(f'icmp {kind} i64 {a}, {b}')}, i64 {a}, i64 {b}")

        def share(loop: Var, split: int, begin: str, end: str) -> tuple[str, str]:
            """These of a band; else all, or the jobs themselves."""
            size = self.size(loop.size)
            mine = self.emit(f"icmp eq i64 %split, {split}")
            whole = [self.emit(f"select i1 {mine}, i64 {a}, i64 {b}") for a, b in (("%begin", "0"), ("%end", size))]
            part = limit(begin, "sgt", "0"), limit(end, "slt", size)
            return tuple(self.emit(f"select i1 {by_bands}, i64 {a}, i64 {b}") for a, b in zip(part, whole))  # type: ignore[return-value]

        def one() -> None:
            start = self.emit(f"mul i64 {self.indices[bands]}, {across}")
            columns = [self.emit(f"sub i64 {end}, {start}") for end in ("%begin", "%end")]
            top = self.emit(f"mul i64 {self.indices[bands]}, %band")
            rows = share(row, ROWS, top, self.emit(f"add i64 {top}, %band"))
            mine = share(column, COLUMNS, *columns)
            self.loop(row, *rows, 1, lambda: self.vectorised(*mine, self.stages))

        self.loop(bands, first, behind, 1, one)

    def block_of_pixels(self) -> None:
        row, _ = self.nest.outer
        behind = self.emit("getelementptr i64, ptr %scratch, i64 1")
        first, last = (self.emit(f"load i64, ptr {place}") for place in ("%scratch", behind))
        self.loop(row, "%begin", "%end", 1, lambda: self.vectorised(first, last, self.stages))

    def stages(self) -> None:
        lanes = self.lanes
        for stage in self.nest.stages:
            self.stage(stage)
            self.lanes = lanes
        for s in self.nest.single:
            self.store(s)

    def stage(self, stage: Stage) -> None:
        outside = self.lanes
        inside = not self.nest.vector_outside and self.vector is not None
        reduces, blocked, wide = stage.reductions, stage.blocked, self.wide
        self.now = stage.number
        sums: dict[int, dict[int, str]] = {e.id: {} for e in reduces}
        for e in reduces:
            for lanes in (1, wide) if inside else (self.width(e),):
                sums[e.id][lanes] = self.accumulator(e, lanes)

        def body() -> None:
            for s in stage.stores:
                self.store(s)
            for e in reduces:
                lanes = self.lanes if inside else self.width(e)
                self.accumulate(e, sums[e.id][lanes], lanes)
            for e in stage.spills:
                self.spill(e)

        totals = {e.id: {lanes: self.accumulator(e, lanes) for lanes in sums[e.id]} for e in blocked}

        def fold() -> None:
            for e in blocked:
                for lanes, total in totals[e.id].items():
                    self.move(e, sums[e.id][lanes], total, lanes)

        self.inner(body, fold if blocked else None, inside)
        if inside:  # what is behind the last whole vector of a row
            fold()
        sums |= totals
        self.lanes = outside
        for e in reduces:
            self.levels[-1].values[("expr", e.id, self.width(e))] = self.reduced(e, sums[e.id], inside)

    def inner(self, body: Any, fold: Any, inside: bool) -> None:
        """The inner loops, the last of which may be vectorised, and one of which may be done in blocks."""
        block = self.nest.block.loop if fold is not None and self.nest.block is not None else None

        def around(loops: Sequence[Var]) -> None:
            if not loops:
                body()
                return
            first, *rest = loops
            end, folded = self.size(first.size), fold if first is block else None
            if inside and not rest:
                self.vectorised("0", end, body, folded)
            else:
                self.blocks(first, "0", end, 1, lambda: around(rest), folded)

        around(self.nest.inner)

    # -- kept for a later stage -------------------------------------------------------------------------------------
    def spill_address(self, e: Expr) -> str:
        length, at = 1, Affine()
        for v in reversed(self.nest.inner):
            at = at + Affine.of(v) * length
            length *= v.size
        type = COMPUTED[e.dtype]
        index = self.offset(at)
        start = self.nest.spills[e.id] * length * SPILLED_BYTES
        base = self.emit(f"getelementptr i8, ptr %scratch, i64 {start}")
        return self.emit(f"getelementptr {type}, ptr {base}, i64 {index}")

    def spill(self, e: Expr) -> None:
        value = self.lanes_of(self.value(e), e, self.lanes)
        type = COMPUTED[e.dtype]
        self.line(f"  store <{self.lanes} x {type}> {value}, ptr {self.spill_address(e)}, align {BYTES[type]}")

    # -- numbers ----------------------------------------------------------------------------------------------------
    def width(self, e: Expr) -> int:
        return self.lanes if self.vector is not None and self.vector in e.vars and self.vector in self.depth else 1

    def level_of(self, variables: Any) -> int:
        return max((self.depth.get(v, 0) for v in variables), default=0)

    def find(self, key: Any) -> str | None:
        return find(self.levels, key)

    def value(self, e: Expr) -> str:
        lanes = self.width(e)
        key = ("expr", e.id, lanes)
        found = self.find(key)
        assert found is not None or e.op != "reduce", "a reduction is read before it is done"
        if found is None:
            level = self.level_of(e.vars)
            level = max([level, *(self.level_of_value(a) for a in e.args)])
            stage = min([self.stage_level(e), len(self.levels) - 1])
            level = max(level, stage)
            found = self.compute(e, lanes, level)
            self.levels[level].values[key] = found
        return found

    def stage_level(self, e: Expr) -> int:
        """What depends on a reduction is computed behind it: not further out than the row."""
        return self.level_of(self.nest.outer) if e.level else 0

    def level_of_value(self, e: Expr) -> int:
        key = ("expr", e.id, self.width(e))
        for i in reversed(range(len(self.levels))):
            if key in self.levels[i].values:
                return i
        return max(self.level_of(e.vars), self.stage_level(e))

    def lanes_of(self, value: str, e: Expr, lanes: int, level: int | None = None) -> str:
        """The value spread over `lanes`."""
        own = self.width(e)
        if own == lanes:
            return value
        if e.op == "const":
            return spread_literal(e.source, e.dtype, lanes)
        type = COMPUTED[e.dtype]
        at = self.level_of_value(e)
        key = ("splat", value, lanes)
        found = self.find(key)
        if found is None:
            found = self.emit(
                f"shufflevector <1 x {type}> {value}, <1 x {type}> poison, <{lanes} x i32> zeroinitializer", at
            )
            self.levels[at].values[key] = found
        return found

    def offset(self, at: Affine, level_limit: int | None = None) -> str:
        """const + Σ coefficient·loop, each partial sum in the outermost loop where it is known."""
        terms = sorted(at.terms, key=lambda t: self.depth.get(t[0], 0))
        total = self.size(at.const)
        key: tuple[Any, ...] = ("at", at.const)
        for v, c in terms:
            key = (*key, v.id, c)
            level = self.depth[v]
            found = self.find(key)
            if found is None:
                index = self.indices[v]
                scaled = index if same(c, 1) else self.emit(f"mul i64 {index}, {self.size(c)}", level)
                found = scaled if total == "0" else self.emit(f"add i64 {total}, {scaled}", level)
                self.levels[level].values[key] = found
            total = found
        return total

    def compute(self, e: Expr, lanes: int, level: int) -> str:
        if e.id in self.nest.spills and self.now > e.level:
            return self.emit(
                f"load <{lanes} x {COMPUTED[e.dtype]}>, ptr {self.spill_address(e)}, align {BYTES[COMPUTED[e.dtype]]}",
                level,
            )
        match e.op:
            case "load":
                return self.load(e, lanes, level)
            case "const":
                return literal(e.source, e.dtype)
            case "iota":
                return self.iota(e, lanes, level)
        args = [self.lanes_of(self.value(a), a, lanes) for a in e.args]
        return VectorMath(self, lanes, level).apply(e, args)

    # -- memory -----------------------------------------------------------------------------------------------------
    def place(self, t: Tensor, at: Affine) -> tuple[str, str]:
        """The tensor's address and an index into it. The address is that of the first element a loop reads, as far as that
        is a known number."""
        start = self.starts.setdefault(t, at.const if isinstance(at.const, int) else 0)
        return self.pointer(t), self.offset(at + -start)

    def load(self, e: Expr, lanes: int, level: int) -> str:
        assert e.at is not None
        type, (base, index) = STORED[e.dtype], self.place(e.source, e.at)
        index, vectors = self.picked(index, e.args, e.picks, level)
        step = e.at.coefficient(self.vector) if self.vector is not None else 0
        if lanes > 1 and (vectors or not same(step, 1)):
            raw = "poison"
            for lane in range(lanes):
                address = self.lane_address(type, base, index, step, vectors, lane, level)
                one = self.emit(f"load {type}, ptr {address}, align {BYTES[type]}", level)
                raw = self.emit(f"insertelement <{lanes} x {type}> {raw}, {type} {one}, i64 {lane}", level)
        else:
            address = self.emit(f"getelementptr {type}, ptr {base}, i64 {index}", level)
            raw = self.emit(f"load <{lanes} x {type}>, ptr {address}, align {BYTES[type]}", level)
        return self.loaded(raw, e.dtype, lanes, level)

    def lane_address(
        self, type: str, base: str, index: str, step: Dim, vectors: Sequence[str], lane: int, level: int
    ) -> str:
        """base + index + step·lane + what the numbers of this lane pick"""
        at = index if lane == 0 else self.emit(f"add i64 {index}, {self.size(expand(step * lane))}", level)
        for vector in vectors:
            number = self.emit(f"extractelement <{self.lanes} x i64> {vector}, i64 {lane}", level)
            at = self.emit(f"add i64 {at}, {number}", level)
        return self.emit(f"getelementptr {type}, ptr {base}, i64 {at}", level)

    def picked(self, index: str, numbers: Sequence[Expr], picks: Sequence[Pick], level: int) -> tuple[str, list[str]]:
        """The index with what numbers add to it that are the same in all lanes, and the vectors of the others."""
        vectors = []
        for number, pick in zip(numbers, picks):
            added = self.checked(number, pick)
            if self.width(number) > 1:
                vectors.append(added)
            else:
                index = self.emit(f"add i64 {index}, {added}", level)
        return index, vectors

    def checked(self, e: Expr, pick: Pick) -> str:
        """number·stride, an i64 or a vector of them, in the loop where the number is known. A number out of range sets the
        error word, and element 0 is read instead."""
        value = self.value(e)
        level, lanes, key = self.level_of_value(e), self.width(e), ("picked", e.id, self.width(e), pick)
        found = self.find(key)
        if found is not None:
            return found
        type, vector, bits = COMPUTED[e.dtype], f"<{lanes} x i64>", f"<{lanes} x i1>"
        if type != "i64":
            word = "zext" if e.dtype == T.DT_UINT8 else "sext"
            value = self.emit(f"{word} <{lanes} x {type}> {value} to {vector}", level)
        limit = self.spread_size(pick.size, lanes, level)
        if pick.wraps:
            negative = self.emit(f"icmp slt {vector} {value}, zeroinitializer", level)
            wrapped = self.emit(f"add {vector} {value}, {limit}", level)
            value = self.emit(f"select {bits} {negative}, {vector} {wrapped}, {vector} {value}", level)
        bad = self.emit(f"icmp uge {vector} {value}, {limit}", level)
        flags = self.emit(f"bitcast {bits} {bad} to i{lanes}", level)
        self.flag(self.emit(f"icmp ne i{lanes} {flags}, {'false' if lanes == 1 else '0'}", level), BAD_NUMBER, level)
        value = self.emit(f"select {bits} {bad}, {vector} zeroinitializer, {vector} {value}", level)
        if not same(pick.stride, 1):
            value = self.emit(f"mul {vector} {value}, {self.spread_size(pick.stride, lanes, level)}", level)
        if lanes == 1:
            value = self.emit(f"extractelement {vector} {value}, i64 0", level)
        self.levels[level].values[key] = value
        return value

    def spread_size(self, d: Dim, lanes: int, level: int) -> str:
        size = self.size(d)
        if not size.startswith("%"):
            return f"<{', '.join([f'i64 {size}'] * lanes)}>"
        first = self.emit(f"insertelement <{lanes} x i64> poison, i64 {size}, i64 0", level)
        if lanes == 1:
            return first
        lane0 = f"<{lanes} x i32> zeroinitializer"
        return self.emit(f"shufflevector <{lanes} x i64> {first}, <{lanes} x i64> poison, {lane0}", level)

    def flag(self, condition: str, error: int, level: int) -> None:
        """Errors come together in a register; the kernel reports them at its end."""
        if not self.errors:
            self.errors = self.alloca("i64")
        bits = self.emit(f"select i1 {condition}, i64 {error}, i64 0", level)
        old = self.emit(f"load i64, ptr {self.errors}", level)
        both = self.emit(f"or i64 {old}, {bits}", level)
        self.levels[level].lines.append(f"  store i64 {both}, ptr {self.errors}")

    def reports(self) -> list[str]:
        """The last lines of a kernel that may find errors. Other threads may report at the same time."""
        return [
            f"  %errors = load i64, ptr {self.errors}",
            "  %some = icmp ne i64 %errors, 0",
            "  br i1 %some, label %report, label %out",
            "report:",
            "  %before = atomicrmw or ptr %sizes, i64 %errors monotonic",
            "  br label %out",
            "out:",
        ]

    def loaded(self, raw: str, dtype: DataType, lanes: int, level: int) -> str:
        if dtype == T.DT_BOOL:
            return self.emit(f"icmp ne <{lanes} x i8> {raw}, zeroinitializer", level)
        if dtype in HALVES:
            return VectorMath(self, lanes, level).widened(raw, dtype)
        return raw

    def store(self, s: Store) -> None:
        dtype = s.target.dtype
        type, (base, index) = STORED[dtype], self.place(s.target, s.at)
        step = s.at.coefficient(self.vector) if self.vector is not None and self.vector in self.depth else 0
        lanes = self.lanes if self.vector is not None and self.vector in self.depth else 1
        value = self.lanes_of(self.value(s.value), s.value, lanes)
        if dtype == T.DT_BOOL:
            value = self.emit(f"zext <{lanes} x i1> {value} to <{lanes} x i8>")
        elif dtype in HALVES:
            value = VectorMath(self, lanes, len(self.levels) - 1).narrowed(value, dtype)
        level = len(self.levels) - 1
        index, vectors = self.picked(index, s.numbers, s.picks, level)
        if not vectors and (lanes == 1 or same(step, 1)):
            address = self.emit(f"getelementptr {type}, ptr {base}, i64 {index}")
            self.line(f"  store <{lanes} x {type}> {value}, ptr {address}, align {BYTES[type]}")
            return
        for lane in range(lanes):
            address = self.lane_address(type, base, index, step, vectors, lane, level)
            one = self.emit(f"extractelement <{lanes} x {type}> {value}, i64 {lane}")
            self.line(f"  store {type} {one}, ptr {address}, align {BYTES[type]}")

    def iota(self, e: Expr, lanes: int, level: int) -> str:
        assert e.at is not None
        start = self.offset(e.at)
        first = self.emit(f"insertelement <1 x i64> poison, i64 {start}, i64 0", level)
        if lanes > 1:
            step = e.at.coefficient(self.vector)  # type: ignore[arg-type]
            spread = self.emit(
                f"shufflevector <1 x i64> {first}, <1 x i64> poison, <{lanes} x i32> zeroinitializer", level
            )
            ramp = ", ".join(f"i64 {i}" for i in range(lanes))
            if same(step, 1):
                first = self.emit(f"add <{lanes} x i64> {spread}, <{ramp}>", level)
            else:
                factor = self.emit(f"insertelement <1 x i64> poison, i64 {self.size(step)}, i64 0", level)
                factors = self.emit(
                    f"shufflevector <1 x i64> {factor}, <1 x i64> poison, <{lanes} x i32> zeroinitializer", level
                )
                steps = self.emit(f"mul <{lanes} x i64> {factors}, <{ramp}>", level)
                first = self.emit(f"add <{lanes} x i64> {spread}, {steps}", level)
        if e.dtype == T.DT_INT64:
            return first
        return VectorMath(self, lanes, level).cast(first, T.DT_INT64, e.dtype)

    # -- reductions -------------------------------------------------------------------------------------------------
    def accumulator(self, e: Expr, lanes: int) -> str:
        type = COMPUTED[e.dtype]
        place = self.alloca(f"<{lanes} x {type}>")
        self.line(
            f"  store <{lanes} x {type}> {spread_literal(identity(e.source, e.dtype), e.dtype, lanes)}, ptr {place}"
        )
        return place

    def accumulate(self, e: Expr, place: str, lanes: int) -> None:
        (body,) = e.args
        type = COMPUTED[e.dtype]
        value = self.lanes_of(self.value(body), body, lanes)
        old = self.emit(f"load <{lanes} x {type}>, ptr {place}")
        new = VectorMath(self, lanes, len(self.levels) - 1).combine(e.source, e.dtype, old, value)
        self.line(f"  store <{lanes} x {type}> {new}, ptr {place}")

    def move(self, e: Expr, place: str, into: str, lanes: int) -> None:
        """Add what has come together in one place to another, and start over."""
        type = f"<{lanes} x {COMPUTED[e.dtype]}>"
        a, b = self.emit(f"load {type}, ptr {place}"), self.emit(f"load {type}, ptr {into}")
        both = VectorMath(self, lanes, len(self.levels) - 1).combine(e.source, e.dtype, a, b)
        self.line(f"  store {type} {both}, ptr {into}")
        self.line(f"  store {type} {spread_literal(identity(e.source, e.dtype), e.dtype, lanes)}, ptr {place}")

    def reduced(self, e: Expr, places: dict[int, str], inside: bool) -> str:
        type = COMPUTED[e.dtype]
        if not inside:
            ((lanes, place),) = places.items()
            return self.emit(f"load <{lanes} x {type}>, ptr {place}")
        one = self.emit(f"load <1 x {type}>, ptr {places[1]}")
        many = self.emit(f"load <{self.wide} x {type}>, ptr {places[self.wide]}")
        f = VectorMath(self, 1, len(self.levels) - 1)
        return f.combine(e.source, e.dtype, one, f.across(e.source, e.dtype, many, self.wide))
