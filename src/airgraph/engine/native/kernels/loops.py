"""A kernel as LLVM text.

    define void @NAME(ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch)

`args` say where the addresses of the memory it reads and writes are, in the order of `Compiled.tensors`; `sizes` the
values of the symbolic expressions in it; [begin, end) the share of the outermost loop this thread does. One loop is the
vector loop: its body is written for LANES elements at a time, and once more for single ones, which do the rest. Every
value is a vector, of one lane where it does not depend on the vector loop, and is computed in the outermost loop it can be
computed in.

Reductions run over the inner loops, one stage for each level: what is needed again in a later stage is kept in `scratch` if
it was dear. No loop is left to LLVM to vectorise: its vectoriser would need O2, three times the time to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from airgraph.engine.native.llvm import mathlib
from airgraph.engine.native.llvm.numbers import (
    BAD_NUMBER,
    BYTES,
    COMPUTED,
    HALVES,
    LANES,
    STORED,
    Function,
    identity,
    literal,
    spread_literal,
)
from airgraph.ir.types import DataType, Dim
from airgraph.plan.collapse import collapsed
from airgraph.plan.index import Affine, Var, expand, same
from airgraph.plan.kernels import Part, Store
from airgraph.plan.tensors import COST, Expr, Tensor

T = DataType
MOST_KEPT = 1 << 20  # bytes that a thread keeps between stages
BLOCK = 512  # turns of a loop that are summed up by themselves
KEPT = 10  # a formula that costs this much is kept for the next stage


@dataclass
class Compiled:
    """A kernel's text (with NAME for its name, behind the functions it calls) and what it wants to be given."""

    text: str
    tensors: list[Tensor]
    sizes: list[Dim]
    jobs: Dim  # turns of the outermost loop
    unit: int  # threads get multiples of this
    cost: Dim  # of all, in additions
    checks: bool  # it may find an index out of range, or a divisor that is 0
    scratch: int  # bytes that each thread needs


def compile_part(part: Part) -> Compiled:
    return Writer(collapsed(part)).write()


@dataclass
class Level:
    """Lines of one loop's body, up to where the next loop begins."""

    lines: list[str] = field(default_factory=list)
    values: dict[Any, str] = field(default_factory=dict)


class Writer:
    def __init__(self, part: Part) -> None:
        self.part = part
        self.count = 0
        self.allocas: list[str] = []
        self.tensors: list[Tensor] = []
        self.sizes: list[Dim] = []
        self.declares: set[str] = set()
        self.math: set[tuple[str, int, str]] = set()
        self.checks = False
        self.scratch = 0
        self.depth: dict[Var, int] = {}  # open loops
        self.names: dict[Var, str] = {}
        self.levels: list[Level] = [Level()]
        self.lanes = 1
        self.now = 0  # stage
        self.vector = self.vector_loop()
        self.spills: dict[int, int] = {}
        self.exprs = part.exprs()

    # -- choices ----------------------------------------------------------------------------------------------------
    def vector_loop(self) -> Var | None:
        """The loop along which most memory lies side by side."""
        part = self.part
        candidates = [*part.inner[-1:], *reversed(part.outer)]
        if not candidates:
            return None
        loads = [(e.at, 1) for e in part.exprs() if e.op == "load" and e.at is not None]
        places = [*loads, *((s.at, 2) for s in part.stores)]

        def score(v: Var) -> float:
            total = sum(
                w if same(at.coefficient(v), 1) else 0 if same(at.coefficient(v), 0) else -2 * w for at, w in places
            )
            small = isinstance(v.size, int) and v.size < LANES
            return total - (1000 if small else 0)

        best = max(score(v) for v in candidates)
        return next(v for v in candidates if score(v) == best)

    def outer_order(self) -> list[Var]:
        """The longest loop outermost, for the threads; the vector loop innermost."""
        rest = [v for v in self.part.outer if v is not self.vector]
        if not rest:
            return []
        longest = max(rest, key=lambda v: v.size if isinstance(v.size, int) else 1 << 40)
        if isinstance(rest[0].size, int) and rest[0].size >= 8:
            longest = rest[0]
        return [longest, *(v for v in rest if v is not longest)]

    # -- text -------------------------------------------------------------------------------------------------------
    def name(self) -> str:
        self.count += 1
        return f"%x{self.count}"

    def emit(self, text: str, level: int | None = None) -> str:
        result = self.name()
        self.levels[len(self.levels) - 1 if level is None else level].lines.append(f"  {result} = {text}")
        return result

    def line(self, text: str) -> None:
        self.levels[-1].lines.append(text)

    def alloca(self, type: str) -> str:
        result = self.name()
        self.allocas.append(f"  {result} = alloca {type}")
        return result

    def size(self, d: Dim) -> str:
        d = expand(d)
        if isinstance(d, int):
            return str(d)
        for i, known in enumerate(self.sizes):
            if same(known, d):
                return f"%s{i}"
        self.sizes.append(d)
        return f"%s{len(self.sizes) - 1}"

    def pointer(self, t: Tensor) -> str:
        if t not in self.tensors:
            self.tensors.append(t)
        return f"%p{self.tensors.index(t)}"

    def write(self) -> Compiled:
        part = self.part
        outer = self.outer_order()
        vector_outside = self.vector is not None and self.vector not in part.inner
        jobs: Dim = 1
        unit = 1
        if outer:
            jobs = outer[0].size
            self.nest(outer, lambda: self.rows(vector_outside), shared=True)
        elif vector_outside:
            assert self.vector is not None
            jobs, unit = self.vector.size, 64
            self.rows(True, shared=True)
        else:
            self.rows(False)
        return self.finish(jobs, unit)

    def finish(self, jobs: Dim, unit: int) -> Compiled:
        head = ["define void @NAME(ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch) nounwind {", "entry:"]
        for i in range(len(self.tensors)):
            head += [
                f"  %a{i} = getelementptr ptr, ptr %args, i64 {i}",
                f"  %b{i} = load ptr, ptr %a{i}",
                f"  %p{i} = load ptr, ptr %b{i}",
            ]
        for i in range(len(self.sizes)):
            head += [f"  %z{i} = getelementptr i64, ptr %sizes, i64 {i + 1}", f"  %s{i} = load i64, ptr %z{i}"]
        functions, declares = mathlib.module_text(self.math)
        text = "\n".join(
            [
                *sorted(declares | self.declares),
                functions,
                *head,
                *self.allocas,
                *self.levels[0].lines,
                "  ret void",
                "}",
            ]
        )
        turns: Dim = 1
        for v in (*self.part.outer, *self.part.inner):
            turns = turns * v.size
        each = sum(COST.get(e.op, 1) for e in self.exprs) + len(self.part.stores)
        return Compiled(text, self.tensors, self.sizes, jobs, unit, expand(turns * each), self.checks, self.scratch)

    # -- loops ------------------------------------------------------------------------------------------------------
    def loop(self, var: Var, start: str, end: str, step: int, body: Any) -> None:
        counter, label = self.alloca("i64"), f"L{self.count}"
        guard = self.emit(f"icmp slt i64 {start}, {end}")
        limit = end if step == 1 else self.emit(f"sub i64 {end}, {step - 1}")
        self.levels.append(Level())
        self.depth[var] = len(self.levels) - 1
        self.names[var] = self.emit(f"load i64, ptr {counter}")
        body()
        after = self.emit(f"add i64 {self.names[var]}, {step}")
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

    def nest(self, loops: Sequence[Var], body: Any, shared: bool = False) -> None:
        if not loops:
            body()
            return
        first, *rest = loops
        start, end = ("%begin", "%end") if shared else ("0", self.size(first.size))
        self.loop(first, start, end, 1, lambda: self.nest(rest, body))

    def blocks(self, var: Var, start: str, end: str, step: int, body: Any, fold: Any) -> None:
        """The loop, with `fold` after every BLOCK turns: sums of sums are exact where one long sum would lose digits."""
        if fold is None:
            self.loop(var, start, end, step, body)
            return
        block = Var(var.size)

        def one() -> None:
            first = self.names[block]
            last = self.emit(f"add i64 {first}, {BLOCK * step}")
            less = self.emit(f"icmp slt i64 {last}, {end}")
            stop = self.emit(f"select i1 {less}, i64 {last}, i64 {end}")
            self.loop(var, first, stop, step, body)
            fold()

        self.loop(block, start, self.emit(f"add i64 {end}, {BLOCK * step - 1}"), BLOCK * step, one)

    def vectorised(self, start: str, end: str, body: Any, fold: Any = None) -> None:
        """The vector loop, LANES at a time, then the rest one by one."""
        assert self.vector is not None
        small = isinstance(self.vector.size, int) and self.vector.size < LANES
        at = start
        if not small:
            length = self.emit(f"sub i64 {end}, {start}")
            whole = self.emit(f"and i64 {length}, -{LANES}")
            at = self.emit(f"add i64 {start}, {whole}")
            self.lanes = LANES
            self.blocks(self.vector, start, at, LANES, body, fold)
        self.lanes = 1
        whole_number = isinstance(self.vector.size, int) and self.vector.size % LANES == 0 and start == "0"
        if not whole_number:
            self.loop(self.vector, at, end, 1, body)

    def rows(self, vector_outside: bool, shared: bool = False) -> None:
        """What is done for one turn of the outer loops: all stages, and the results of the row."""
        if vector_outside:
            assert self.vector is not None
            start, end = ("%begin", "%end") if shared else ("0", self.size(self.vector.size))
            self.vectorised(start, end, self.stages)
        else:
            self.lanes = 1
            self.stages()

    def stages(self) -> None:
        inner = set(self.part.inner)
        reduces = [e for e in self.exprs if e.op == "reduce"]
        full = [s for s in self.part.stores if s.value.vars & inner or s.at.vars() & inner]
        single = [s for s in self.part.stores if s not in full]
        last = max([e.level - 1 for e in reduces] + [s.value.level for s in full], default=-1)
        self.choose_spills(last)
        lanes = self.lanes
        for level in range(last + 1):
            due = [e for e in reduces if e.level - 1 == level]
            stores = [s for s in full if s.value.level == level]
            if due or stores:
                self.stage(level, due, stores)
            self.lanes = lanes
        for s in single:
            self.store(s)

    def stage(self, level: int, reduces: list[Expr], stores: list[Store]) -> None:
        outside = self.lanes
        inside = self.vector in self.part.inner
        self.now = level
        sums: dict[int, dict[int, str]] = {e.id: {} for e in reduces}
        for e in reduces:
            for lanes in (1, LANES) if inside else (self.width(e),):
                sums[e.id][lanes] = self.accumulator(e, lanes)

        def body() -> None:
            for s in stores:
                self.store(s)
            for e in reduces:
                lanes = self.lanes if inside else self.width(e)
                self.accumulate(e, sums[e.id][lanes], lanes)
            for key in [k for k in self.spills if self.by_id(k).level == level]:
                self.spill(self.by_id(key))

        others, final = self.part.inner[:-1], self.part.inner[-1] if self.part.inner else None
        long = [e for e in reduces if final is not None and is_long_sum(e, final)]
        totals = {e.id: self.accumulator(e, LANES if inside else self.width(e)) for e in long}

        def fold() -> None:
            for e in long:
                lanes = LANES if inside else self.width(e)
                self.move(e, sums[e.id][lanes], totals[e.id], lanes)

        if final is None:
            body()
        elif inside:
            self.nest(others, lambda: self.vectorised("0", self.size(final.size), body, fold if long else None))
        else:
            end = self.size(final.size)
            self.nest(others, lambda: self.blocks(final, "0", end, 1, body, fold if long else None))
        for e in long:
            sums[e.id][LANES if inside else self.width(e)] = totals[e.id]
        self.lanes = outside
        for e in reduces:
            self.levels[-1].values[("expr", e.id, self.width(e))] = self.reduced(e, sums[e.id], inside)

    def by_id(self, key: int) -> Expr:
        return next(e for e in self.exprs if e.id == key)

    # -- kept for a later stage -------------------------------------------------------------------------------------
    def choose_spills(self, last: int) -> None:
        self.spills = {}
        inner = set(self.part.inner)
        length: Dim = 1
        for v in self.part.inner:
            length = length * v.size
        if last < 1 or not isinstance(length, int) or self.vector not in inner:
            return
        costs: dict[int, int] = {}  # of computing it again, down to what is at hand
        for e in self.exprs:
            costs[e.id] = 1 + (0 if e.op in ("load", "reduce") else COST.get(e.op, 0))
            costs[e.id] += sum(costs[a.id] for a in e.args if a.vars & inner and e.op != "reduce")
            later = any(e in u.args and u.level - (u.op == "reduce") > e.level for u in self.exprs)
            if e.vars & inner and later and costs[e.id] >= KEPT and e.dtype != T.DT_BOOL:
                need = (len(self.spills) + 1) * length * 8
                if need > MOST_KEPT:
                    return
                self.spills[e.id] = len(self.spills)
                self.scratch = max(self.scratch, need)
                costs[e.id] = 1

    def spill_address(self, e: Expr) -> str:
        length, at = 1, Affine()
        for v in reversed(self.part.inner):
            at = at + Affine.of(v) * length
            length *= v.size
        type = COMPUTED[e.dtype]
        index = self.offset(at)
        start = self.spills[e.id] * length * 8
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
        for level in reversed(self.levels):
            if key in level.values:
                return level.values[key]
        return None

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
        return self.level_of(self.part.outer) if e.level else 0

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
                index = self.names[v]
                scaled = index if same(c, 1) else self.emit(f"mul i64 {index}, {self.size(c)}", level)
                found = scaled if total == "0" else self.emit(f"add i64 {total}, {scaled}", level)
                self.levels[level].values[key] = found
            total = found
        return total

    def compute(self, e: Expr, lanes: int, level: int) -> str:
        if e.id in self.spills and self.now > e.level:
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
        function = Function(self, lanes, level)
        return function.rounded(e, function.apply(e, args))

    # -- memory -----------------------------------------------------------------------------------------------------
    def load(self, e: Expr, lanes: int, level: int) -> str:
        assert e.at is not None
        type, base = STORED[e.dtype], self.pointer(e.source)
        picks = [(self.value(a), a, *pick) for a, pick in zip(e.args, e.picks)]
        index = self.offset(e.at)
        step = e.at.coefficient(self.vector) if self.vector is not None else 0
        scattered = any(self.width(a) > 1 for _, a, *_ in picks) or (lanes > 1 and not same(step, 1))
        if scattered and lanes > 1:
            raw = self.load_lanes(e, lanes, level, index, step, picks)
        else:
            for value, a, stride, size, wraps in picks:
                number = self.emit(f"extractelement <1 x {COMPUTED[a.dtype]}> {value}, i64 0", level)
                index = self.picked(index, number, a.dtype, stride, size, wraps, level)
            address = self.emit(f"getelementptr {type}, ptr {base}, i64 {index}", level)
            raw = self.emit(f"load <{lanes} x {type}>, ptr {address}, align {BYTES[type]}", level)
        return self.loaded(raw, e.dtype, lanes, level)

    def load_lanes(self, e: Expr, lanes: int, level: int, index: str, step: Dim, picks: list[Any]) -> str:
        type, base, raw = STORED[e.dtype], self.pointer(e.source), "poison"
        for lane in range(lanes):
            at = index if lane == 0 else self.emit(f"add i64 {index}, {self.size(expand(step * lane))}", level)
            for value, a, stride, size, wraps in picks:
                own = self.width(a)
                number = self.emit(
                    f"extractelement <{own} x {COMPUTED[a.dtype]}> {value}, i64 {lane if own > 1 else 0}", level
                )
                at = self.picked(at, number, a.dtype, stride, size, wraps, level)
            address = self.emit(f"getelementptr {type}, ptr {base}, i64 {at}", level)
            one = self.emit(f"load {type}, ptr {address}, align {BYTES[type]}", level)
            raw = self.emit(f"insertelement <{lanes} x {type}> {raw}, {type} {one}, i64 {lane}", level)
        return raw

    def picked(self, index: str, number: str, dtype: DataType, stride: Dim, size: Dim, wraps: bool, level: int) -> str:
        """index + number·stride. A number out of range sets the error word, and element 0 is read instead."""
        type = COMPUTED[dtype]
        if type != "i64":
            number = self.emit(f"{'zext' if dtype == T.DT_UINT8 else 'sext'} {type} {number} to i64", level)
        limit = self.size(size)
        if wraps:
            negative = self.emit(f"icmp slt i64 {number}, 0", level)
            turned = self.emit(f"add i64 {number}, {limit}", level)
            number = self.emit(f"select i1 {negative}, i64 {turned}, i64 {number}", level)
        good = self.emit(f"icmp ult i64 {number}, {limit}", level)
        number = self.emit(f"select i1 {good}, i64 {number}, i64 0", level)
        self.flag(self.emit(f"xor i1 {good}, true", level), BAD_NUMBER, level)
        scaled = self.emit(f"mul i64 {number}, {self.size(stride)}", level)
        return self.emit(f"add i64 {index}, {scaled}", level)

    def flag(self, condition: str, error: int, level: int) -> None:
        self.checks = True
        bits = self.emit(f"select i1 {condition}, i64 {error}, i64 0", level)
        old = self.emit("load i64, ptr %sizes", level)
        both = self.emit(f"or i64 {old}, {bits}", level)
        self.levels[level].lines.append(f"  store i64 {both}, ptr %sizes")

    def loaded(self, raw: str, dtype: DataType, lanes: int, level: int) -> str:
        if dtype == T.DT_BOOL:
            return self.emit(f"icmp ne <{lanes} x i8> {raw}, zeroinitializer", level)
        if dtype in HALVES:
            return self.emit(f"fpext <{lanes} x {STORED[dtype]}> {raw} to <{lanes} x float>", level)
        return raw

    def store(self, s: Store) -> None:
        dtype = s.target.dtype
        type, base = STORED[dtype], self.pointer(s.target)
        step = s.at.coefficient(self.vector) if self.vector is not None and self.vector in self.depth else 0
        lanes = self.lanes if self.vector is not None and self.vector in self.depth else 1
        value = self.lanes_of(self.value(s.value), s.value, lanes)
        if dtype == T.DT_BOOL:
            value = self.emit(f"zext <{lanes} x i1> {value} to <{lanes} x i8>")
        elif dtype in HALVES:
            value = self.emit(f"fptrunc <{lanes} x float> {value} to <{lanes} x {type}>")
        index = self.offset(s.at)
        numbers = [(self.value(n), n, *pick) for n, pick in zip(s.numbers, s.picks)]
        if any(self.width(n) > 1 for _, n, *_ in numbers):
            self.scatter(s, value, index, step, numbers)
            return
        for number, n, stride, size, wraps in numbers:
            one = self.emit(f"extractelement <1 x {COMPUTED[n.dtype]}> {number}, i64 0")
            index = self.picked(index, one, n.dtype, stride, size, wraps, len(self.levels) - 1)
        if lanes == 1 or same(step, 1):
            address = self.emit(f"getelementptr {type}, ptr {base}, i64 {index}")
            self.line(f"  store <{lanes} x {type}> {value}, ptr {address}, align {BYTES[type]}")
            return
        for lane in range(lanes):
            at = self.emit(f"add i64 {index}, {self.size(expand(step * lane))}")
            address = self.emit(f"getelementptr {type}, ptr {base}, i64 {at}")
            one = self.emit(f"extractelement <{lanes} x {type}> {value}, i64 {lane}")
            self.line(f"  store {type} {one}, ptr {address}, align {BYTES[type]}")

    def scatter(self, s: Store, value: str, index: str, step: Dim, numbers: list[Any]) -> None:
        """Each lane to a place of its own."""
        type, base, level = STORED[s.target.dtype], self.pointer(s.target), len(self.levels) - 1
        for lane in range(self.lanes):
            at = index if lane == 0 else self.emit(f"add i64 {index}, {self.size(expand(step * lane))}")
            for number, n, stride, size, wraps in numbers:
                own = self.width(n)
                one = self.emit(f"extractelement <{own} x {COMPUTED[n.dtype]}> {number}, i64 {lane if own > 1 else 0}")
                at = self.picked(at, one, n.dtype, stride, size, wraps, level)
            address = self.emit(f"getelementptr {type}, ptr {base}, i64 {at}")
            element = self.emit(f"extractelement <{self.lanes} x {type}> {value}, i64 {lane}")
            self.line(f"  store {type} {element}, ptr {address}, align {BYTES[type]}")

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
        return Function(self, lanes, level).cast(first, T.DT_INT64, e.dtype)

    # -- reductions -------------------------------------------------------------------------------------------------
    def accumulator(self, e: Expr, lanes: int) -> str:
        type = COMPUTED[e.dtype]
        place = self.alloca(f"<{lanes} x {type}>")
        self.line(f"  store <{lanes} x {type}> {spread_literal(identity(e), e.dtype, lanes)}, ptr {place}")
        return place

    def accumulate(self, e: Expr, place: str, lanes: int) -> None:
        (body,) = e.args
        type = COMPUTED[e.dtype]
        value = self.lanes_of(self.value(body), body, lanes)
        old = self.emit(f"load <{lanes} x {type}>, ptr {place}")
        new = Function(self, lanes, len(self.levels) - 1).combine(e.source, e.dtype, old, value)
        self.line(f"  store <{lanes} x {type}> {new}, ptr {place}")

    def move(self, e: Expr, place: str, into: str, lanes: int) -> None:
        """Add what has come together in one place to another, and begin anew."""
        type = f"<{lanes} x {COMPUTED[e.dtype]}>"
        a, b = self.emit(f"load {type}, ptr {place}"), self.emit(f"load {type}, ptr {into}")
        both = Function(self, lanes, len(self.levels) - 1).combine(e.source, e.dtype, a, b)
        self.line(f"  store {type} {both}, ptr {into}")
        self.line(f"  store {type} {spread_literal(identity(e), e.dtype, lanes)}, ptr {place}")

    def reduced(self, e: Expr, places: dict[int, str], inside: bool) -> str:
        type = COMPUTED[e.dtype]
        if not inside:
            ((lanes, place),) = places.items()
            return self.emit(f"load <{lanes} x {type}>, ptr {place}")
        one = self.emit(f"load <1 x {type}>, ptr {places[1]}")
        many = self.emit(f"load <{LANES} x {type}>, ptr {places[LANES]}")
        f = Function(self, 1, len(self.levels) - 1)
        return f.combine(e.source, e.dtype, one, f.across(e.source, e.dtype, many))


def is_long_sum(e: Expr, loop: Var) -> bool:
    return (
        e.source == "sum" and COMPUTED[e.dtype] == "float" and (not isinstance(loop.size, int) or loop.size > 4 * BLOCK)
    )
