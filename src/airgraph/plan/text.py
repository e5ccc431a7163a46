"""Plans as text, which parse.py reads back: golden, fixture and cache entry in one.

    plan for cpu
    symbol s0: integer positive
    x: float[s0, 8] input
    b: float[8] input
    t0: float[s0, 8] output 0
    0 loop o0<s0, o1<8
        t0[8*o0 + o1] = relu(add(x[8*o0 + o1], b[o1]))
    output 0: t0

First the memory: each tensor with its type and what kind of memory it has, then the steps in order, then the outputs and
the notes. Outer loops are o0, o1, …, inner ones i0, i1, …; `sum_i(…)` reduces over the inner loops. Expressions with
several uses have names: x0, x1, …. An element type is written behind an expression where it does not follow. A product may
have a prologue before it and an epilogue behind it, with its number: `3 first …`, `3 gemm …`, `3 then …`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airgraph.errors import VerifyError
from airgraph.ir.exact import assumptions, function_name
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType, Dim
from airgraph.plan.functions import FUNCTIONS
from airgraph.plan.index import Affine, Var, strides_of
from airgraph.plan.kernels import Part
from airgraph.plan.steps import Allocation, AttentionStep, CallStep, ConvStep, GemmStep, LoopStep, Matrix, Plan, Step
from airgraph.plan.tensors import Expr, Picks, Tensor

if TYPE_CHECKING:
    import sympy

LEAVES = ("load", "const", "iota")  # written where they are used, however often
DEEPEST = 16  # expressions nested deeper get names
NAME = re.compile(r"[A-Za-z_][\w.]*'*", re.ASCII)
GENERATED = re.compile(r"[aotix]\d+", re.ASCII)  # names the text makes up
DEFAULT_TYPES = {float: DataType.DT_FLOAT, bool: DataType.DT_BOOL, int: DataType.DT_INT64}  # of constants


def plan_text(plan: Plan, functions: Mapping[str, Any] | None = None) -> str:
    """`functions`: PyTorch's own functions of sizes, by the names they are written with."""
    return "\n".join(PlanText(plan, functions).lines())


def type_name(dtype: DataType) -> str:
    return dtype.name[3:].lower()


def quoted(text: str) -> str:
    """A name as it is, if it is one; otherwise as a JSON string."""
    return text if NAME.fullmatch(text) else json.dumps(text)


def rest_of_line(text: str) -> str:
    return text if text.isprintable() and not text.startswith('"') and text == text.strip() else json.dumps(text)


def value_name(value: Value) -> str:
    return f"{quoted(value.node.name)}:{value.index}"


class SizeText:
    """Sizes as text: integers, or expressions with +, *, ** and functions. Notes the symbols that it meets."""

    def __init__(self, functions: Mapping[str, Any] | None = None) -> None:
        self.functions = functions or {}
        self.symbols: dict[str, sympy.Symbol] = {}
        self.known: dict[Any, str] = {}

    def __call__(self, d: Dim, tight: int = 0) -> str:
        """`tight`: 0 anywhere, 1 as a term of a sum, 2 as a factor, 3 as a base."""
        if isinstance(d, int):
            return str(d)
        key = (d, tight)
        if key not in self.known:
            self.known[key] = self.expression(d, tight)
        return self.known[key]

    def many(self, sizes: Sequence[Dim]) -> str:
        return f"[{', '.join(map(self, sizes))}]"

    def expression(self, e: Any, tight: int) -> str:
        if e.is_Symbol:
            return self.symbol(e)
        if e.is_Integer:
            return str(e)
        if e.is_Add:
            text, level = " + ".join(self.expression(a, 1) for a in e.args), 0
        elif e.is_Mul:
            text, level = "*".join(self.expression(a, 2) for a in e.args), 1
        elif e.is_Pow and e.exp.is_Integer and e.exp >= 0:
            text, level = f"{self.expression(e.base, 3)}**{e.exp}", 2
        elif e.is_Rational:
            return f"Rational({e.p}, {e.q})"
        elif e.is_Float:
            return f"Float({float(e)!r})"
        else:
            name = function_name(e.func, self.functions) or e.func.__name__
            return f"{name}({', '.join(self.expression(a, 0) for a in e.args)})"
        return text if tight <= level else f"({text})"

    def symbol(self, s: sympy.Symbol) -> str:
        if self.symbols.setdefault(s.name, s) != s or not NAME.fullmatch(s.name) or GENERATED.fullmatch(s.name):
            raise VerifyError(f"the symbol {s.name} cannot be written down: its name means something else")
        return str(s.name)


class PlanText:
    """Writes a plan line by line and gives tensors their names, in the order in which they are met."""

    def __init__(self, plan: Plan, functions: Mapping[str, Any] | None = None) -> None:
        self.plan = plan
        self.size = SizeText(functions)
        self.names: dict[int, str] = {}
        self.taken: set[str] = set()
        self.count = 0

    def lines(self) -> list[str]:
        plan = self.plan
        steps = [line for number, step in enumerate(plan.steps) for line in self.step(number, step)]
        outputs = [self.output(i, t) for i, t in enumerate(plan.outputs)]
        memory = [self.place(p) for p in plan.allocations.values()]
        for s in sorted(plan.symbols, key=str):
            self.size.symbol(s)
        symbols = [self.symbol(name, s) for name, s in sorted(self.size.symbols.items())]
        notes = [f"note {rest_of_line(note)}" for note in plan.notes]
        return [f"plan for {quoted(plan.target.name)}", *symbols, *memory, *steps, *outputs, *notes]

    def symbol(self, name: str, s: sympy.Symbol) -> str:
        assumed = [key if holds else f"not_{key}" for key, holds in assumptions(s).items()]
        unbound = [] if s in self.plan.symbols else ["unbound"]
        return f"symbol {name}: {' '.join([*assumed, *unbound])}".rstrip()

    # -- memory -------------------------------------------------------------------------------------------------------
    def name(self, t: Tensor) -> str:
        """Arguments by their own names where those are names, the rest in the order they appear."""
        if t.id not in self.names:
            place = self.plan.allocations[t.id]
            name = str(place.source) if place.kind == "input" else ""
            if not NAME.fullmatch(name) or GENERATED.fullmatch(name) or name in WORDS:
                letter = "a" if place.kind == "input" else "t"
                name, self.count = f"{letter}{self.count}", self.count + 1
            while name in self.taken:
                name += "'"
            self.taken.add(name)
            self.names[t.id] = name
        return self.names[t.id]

    def type(self, t: Tensor) -> str:
        return f"{type_name(t.dtype)}{self.size.many(t.shape)}"

    def place(self, p: Allocation) -> str:
        name = self.name(p.tensor)
        words = [f"{name}: {self.type(p.tensor)} {p.kind}"]
        match p.kind:
            case "input" if p.source != name:
                words.append(json.dumps(p.source))
            case "const" | "call":
                words.append(value_name(p.source))
            case "output":
                words.append(str(p.source))
        if p.strides != strides_of(p.tensor.shape):
            words.append(f"strides {self.size.many(p.strides)}")
        if p.offset != 0:
            words.append(f"offset {self.size(p.offset)}")
        if p.alias is not None:
            words.append(f"alias {self.name(p.alias.tensor)}")
        return " ".join(words)

    def matrix(self, m: Matrix) -> str:
        start = f"+{self.size(m.offset, 3)}" if m.offset != 0 else ""
        return f"{self.name(m.tensor)}{start}{self.size.many(m.strides)}"

    def output(self, number: int, t: Tensor | None) -> str:
        restrided = " restrided" if number in self.plan.loose else ""
        last = " channels_last" if number in self.plan.last else ""
        return f"output {number}: {self.name(t) if t is not None else 'as PyTorch made it'}{restrided}{last}"

    # -- steps --------------------------------------------------------------------------------------------------------
    def step(self, number: int, step: Step) -> list[str]:
        match step:
            case LoopStep():
                return [line for part in step.kernel.parts for line in self.part(number, step, part)]
            case GemmStep():
                bias = f" + {self.matrix(step.bias)}" if step.bias else ""
                rows = f" rows {self.matrix(step.ends)}" if step.ends else ""
                product = f"{self.matrix(step.a)} @ {self.matrix(step.b)}{bias}{rows}"
                line = f"{number} gemm {self.name(step.out)} = {product} {self.sizes(step.sizes)}"
                return [*self.fused(number, step.prologue, "first"), line, *self.fused(number, step.epilogue, "then")]
            case AttentionStep():
                out = ", ".join(map(self.name, (step.out, *([step.lse] if step.lse is not None else []))))
                operands = ", ".join(self.matrix(m) for m in (step.q, step.k, step.v))
                mask = f", mask {self.matrix(step.mask)}" if step.mask else ""
                causal = " causal" if step.causal else ""
                tail = f"{self.sizes(step.sizes)} scale {step.scale!r}{causal}"
                return [f"{number} attention {out} = {operands}{mask} {tail}"]
            case ConvStep():
                bias = f" + {self.matrix(step.bias)}" if step.bias else ""
                operands = f"{self.matrix(step.x)}, {self.matrix(step.w)}{bias}"
                last = " channels_last" if step.last else ""
                line = f"{number} conv {self.name(step.out)} = {operands} {self.sizes(step.sizes)}{last}"
                return [line, *self.fused(number, step.epilogue, "then")]
            case CallStep():
                return [self.call(number, step)]
        raise AssertionError(step)

    def fused(self, number: int, loop: LoopStep | None, kind: str) -> list[str]:
        """A loop that is part of a product."""
        return [line for part in loop.kernel.parts for line in self.part(number, loop, part, kind)] if loop else []

    def sizes(self, sizes: Any) -> str:
        return "for " + ", ".join(f"{name} {self.size(d)}" for name, d in zip(sizes._fields, sizes))

    def call(self, number: int, step: CallStep) -> str:
        reads = ", ".join(self.read(*read) for read in step.reads)
        writes = ", ".join(self.name(t) for _, t in step.writes)
        by = f"  by {rest_of_line(step.by)}" if step.by else ""
        node = step.node
        return f"{number} call {writes or '-'} = {quoted(node.op)}({reads}) node {quoted(node.name)}{by}"

    def read(self, value: Value, matrix: Matrix, t: Tensor) -> str:
        view = f" as {self.type(t)}" if t is not matrix.tensor else ""
        return f"{value_name(value)} = {self.matrix(matrix)}{view}"

    # -- loops --------------------------------------------------------------------------------------------------------
    def part(self, number: int, step: LoopStep, part: Part, kind: str = "loop") -> list[str]:
        """Loops are listed in the order they were made: sums over them are written in that order."""
        loops = {v: f"o{i}" for i, v in enumerate(part.outer)} | {v: f"i{i}" for i, v in enumerate(part.inner)}
        over = ", ".join(f"{loops[v]}<{self.size(v.size)}" for v in sorted(loops, key=lambda v: v.id))
        sequential = " sequential" if step.sequential else ""
        lines = [f"{number} {kind}{sequential} {over}".rstrip()]
        exprs = part.exprs()
        uses: dict[int, int] = {}
        for e in exprs:
            for a in e.args:
                uses[id(a)] = uses.get(id(a), 0) + 1
        texts: dict[int, str] = {}
        depth: dict[int, int] = {}
        for e in exprs:
            text = expr_text(e, [texts[id(a)] for a in e.args], loops, self.name, self.size)
            depth[id(e)] = 1 + max((depth[id(a)] for a in e.args), default=0)
            if e.op not in LEAVES and (uses.get(id(e), 0) > 1 or depth[id(e)] >= DEEPEST):
                name, depth[id(e)] = f"x{len(lines) - 1}", 0
                lines.append(f"    {name} = {text}")
                text = name
            texts[id(e)] = text
        for s in part.stores:
            at = index_text(s.at, s.picks, [texts[id(n)] for n in s.numbers], loops, self.size)
            lines.append(f"    {self.name(s.target)}[{at}] = {texts[id(s.value)]}")
        return lines


WORDS = frozenset(
    ["plan", "symbol", "output", "note", "inf", "nan", "True", "False", "lse", "mask"]
)  # no names of tensors


# -- expressions ----------------------------------------------------------------------------------------------------
def expr_text(
    e: Expr, args: Sequence[str], loops: Mapping[Var, str], name: Callable[[Tensor], str], size: SizeText
) -> str:
    """An expression, given the texts of its operands."""
    types = [a.dtype for a in e.args]
    match e.op:
        case "load":
            assert e.at is not None
            text, expected = f"{name(e.source)}[{index_text(e.at, e.picks, args, loops, size)}]", e.source.dtype
        case "const":
            text, expected = number_text(e.source), DEFAULT_TYPES[plain(e.source)]
        case "iota":
            assert e.at is not None
            text, expected = f"index({index_text(e.at, (), (), loops, size)})", DataType.DT_INT64
        case "reduce":
            text, expected = f"{e.source}_i({args[0]})", types[0]
        case "cast":
            return f"{type_name(e.dtype)}({args[0]})"
        case _:
            text, expected = f"{e.op}({', '.join(args)})", FUNCTIONS[e.op].result(types)
    return text if e.dtype == expected else f"{text}:{type_name(e.dtype)}"


def plain(value: Any) -> type:
    return bool if isinstance(value, bool) else float if isinstance(value, float) else int


def number_text(value: Any) -> str:
    return repr(plain(value)(value))


def index_text(at: Affine, picks: Picks, numbers: Sequence[str], loops: Mapping[Var, str], size: SizeText) -> str:
    """A place in memory: constant + Σ coefficient·loop + Σ stride·(a number that is computed, within a range)."""
    parts = [loops[v] if c == 1 else f"{size(c, 1)}*{loops[v]}" for v, c in at.terms]
    for text, (stride, limit, wraps) in zip(numbers, picks):
        parts.append(f"{size(stride, 1)}*{'wrap' if wraps else 'at'}({text}, {size(limit)})")
    if at.const != 0 or not parts:
        parts.append(size(at.const, 1))
    return " + ".join(parts)
