"""Plans from text, as text.py writes it.

    parse_plan(text, graph, boundary, target)  →  the plan; `text(parse(text)) == text`

The text may come from a file: it is data, and nothing in it is evaluated. Each line is read once, token by token. What is
wrong with it is a VerifyError that shows the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy

from airgraph.errors import VerifyError
from airgraph.ir.boundary import Boundary
from airgraph.ir.exact import LARGEST, DataReader
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.types import DataType, Dim, dim
from airgraph.plan.functions import FUNCTIONS, REDUCTIONS
from airgraph.plan.index import Affine, Var, strides_of
from airgraph.plan.kernels import Domain, Kernel, Part, Store
from airgraph.plan.nest import schedule
from airgraph.plan.steps import (
    AttentionSizes,
    AttentionStep,
    CallStep,
    ConvSizes,
    ConvStep,
    GemmSizes,
    GemmStep,
    LoopStep,
    Matrix,
    Place,
    Plan,
    Step,
)
from airgraph.plan.target import Target
from airgraph.plan.tensors import Expr, ExprPool, Pick, Tensor, buffer
from airgraph.plan.text import DEFAULT_TYPES, type_name

TOKEN = re.compile(
    r"""\s*(?:([A-Za-z_][\w.]*'*)|(\d+(?:\.\d+)?(?:e[+-]?\d+)?)|("(?:[^"\\]|\\.)*")|(\*\*|[-+*()\[\],:=<@])|(\S))""",
    re.ASCII,
)
NESTED = 100  # parentheses within each other
DIGITS = 40  # of a number
TYPES = {type_name(d): d for d in DataType}
KINDS_OF_TOKENS = ("", "name", "number", "string", "sign", "other")


def parse_plan(
    text: str,
    graph: Graph,
    boundary: Boundary,
    target: Target,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Plan:
    """`graph`: the one that the plan was made of. `functions`: as given to `plan_text`."""
    return PlanReader(graph, boundary, target, functions).plan(text)


class Line:
    """The tokens of one line, taken from left to right. The line may end in plain text, of which tokens mean nothing."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = [(KINDS_OF_TOKENS[m.lastindex or 0], m[m.lastindex or 0], m.end()) for m in TOKEN.finditer(text)]
        ends = [("end", "", len(text))] * 2
        self.kinds, self.words, self.ends = (list(x) for x in zip(*found, *ends))
        self.at = self.depth = 0

    def peek(self, ahead: int = 0) -> str:
        return self.words[self.at + ahead]

    def kind(self, ahead: int = 0) -> str:
        return self.kinds[self.at + ahead]

    def next(self, kind: str | None = None) -> str:
        found, text = self.kinds[self.at], self.words[self.at]
        if found in ("end", "other") or (kind is not None and kind != found):
            raise VerifyError(f"a {kind or 'word'} expected, not {text or 'the end'}")
        self.at += 1
        return text

    def take(self, token: str) -> bool:
        """Whether this comes next; then it is taken."""
        if self.words[self.at] != token or self.kinds[self.at] == "string":
            return False
        self.at += 1
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise VerifyError(f"{token!r} expected, not {self.peek() or 'the end'}")

    def end(self) -> None:
        if self.kind() != "end":
            raise VerifyError(f"{self.peek()!r} is not expected")

    def rest(self) -> str:
        """The text behind the last token."""
        text = self.text[self.ends[self.at - 1] :].strip()
        self.at = len(self.words) - 2
        return str(json.loads(text)) if text.startswith('"') else text

    def separated(self, close: str) -> Iterator[None]:
        """Items with commas between them, up to and with `close`."""
        if self.take(close):
            return
        while True:
            yield
            if self.take(close):
                return
            self.expect(",")

    def name(self) -> str:
        """A name, or a string that stands for one."""
        return str(json.loads(self.next())) if self.kind() == "string" else self.next("name")

    def whole(self) -> int:
        text = self.next("number")
        if not text.isdigit() or len(text) > DIGITS:
            raise VerifyError(f"{text[:DIGITS]} is not a whole number")
        return int(text)

    def nest(self) -> None:
        self.depth += 1
        if self.depth > NESTED:
            raise VerifyError("too many parentheses within each other")


class SizeReader:
    """Reads sizes: sums of products of integers, symbols, powers and functions."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]] | None) -> None:
        self.reader = DataReader({}, functions)

    def symbol(self, line: Line) -> tuple[str, bool]:
        """(the name of a symbol that is declared, whether the arguments tell its value)"""
        name = line.next("name")
        line.expect(":")
        words: list[str] = []
        while line.kind() == "name":
            words.append(line.next())
        bound = "unbound" not in words
        assumed = {w.removeprefix("not_"): not w.startswith("not_") for w in words if w != "unbound"}
        self.reader.symbols[name] = self.reader.symbol(name, assumed)
        return name, bound

    def __call__(self, line: Line) -> Dim:
        return self.sum([self.term(line), *self.more(line)])

    def more(self, line: Line) -> Iterator[Any]:
        while line.take("+"):
            yield self.term(line)

    def sum(self, terms: list[Any]) -> Dim:
        return dim(terms[0] if len(terms) == 1 else self.applied("Add", terms))

    def term(self, line: Line) -> Any:
        factors = [self.factor(line)]
        while line.take("*"):
            factors.append(self.factor(line))
        return self.product(factors)

    def product(self, factors: list[Any]) -> Any:
        return factors[0] if len(factors) == 1 else self.applied("Mul", factors)

    def factor(self, line: Line) -> Any:
        base = self.atom(line)
        return self.applied("Pow", [base, line.whole()]) if line.take("**") else base

    def atom(self, line: Line) -> Any:
        if line.take("-"):
            return -line.whole()
        if line.kind() == "number":
            return line.whole()
        if line.take("("):
            line.nest()
            inside = self(line)
            line.expect(")")
            line.depth -= 1
            return inside
        name = line.next("name")
        if not line.take("("):
            if name not in self.reader.symbols:
                raise VerifyError(f"{name} is no symbol that the plan declares")
            return self.reader.symbols[name]
        return self.function(name, line)

    def function(self, name: str, line: Line) -> Any:
        line.nest()
        if name == "Float":
            found = self.reader.float_of(line.next("number"))
            line.expect(")")
        else:
            args = [self(line) for _ in line.separated(")")]
            found = sympy.Rational(*args) if name == "Rational" and is_ratio(args) else self.applied(name, args)
        line.depth -= 1
        return found

    def applied(self, name: str, args: list[Any]) -> Any:
        if name not in self.reader.functions or not args:
            raise VerifyError(f"{name} is no function of sizes")
        if all(isinstance(a, int) for a in args) and name in ("Add", "Mul"):
            total = args[0]
            for a in args[1:]:
                total = total + a if name == "Add" else total * a
                if abs(total) > LARGEST:
                    raise VerifyError("a number is too large for a size")
            return total
        return self.reader.applied(name, [sympy.Integer(a) if isinstance(a, int) else a for a in args])

    def many(self, line: Line) -> tuple[Dim, ...]:
        line.expect("[")
        return tuple(self(line) for _ in line.separated("]"))


def is_ratio(args: list[Any]) -> bool:
    return len(args) == 2 and all(isinstance(a, int) for a in args) and args[1] != 0


class PlanReader:
    def __init__(
        self, graph: Graph, boundary: Boundary, target: Target, functions: Mapping[str, Callable[..., Any]] | None
    ) -> None:
        self.size = SizeReader(functions)
        self.nodes: dict[str, Node] = {n.name: n for n in graph.nodes}
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[int, str] = {}
        self.kernel: KernelReader | None = None  # of the loop whose lines follow
        outputs = list(graph.net_output.values())
        self.found = Plan(graph, boundary, [], {}, [], outputs, set(), [], target)

    def plan(self, text: str) -> Plan:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                self.line(number, Line(line))
            except (VerifyError, json.JSONDecodeError) as error:
                reason = error.what if isinstance(error, VerifyError) else str(error)
                shown = line if len(line) <= 200 else f"{line[:197]}..."
                raise VerifyError(f"line {number} of a plan cannot be read: {reason}", where={"line": shown}) from error
        return self.finished()

    def finished(self) -> Plan:
        plan = self.found
        for id_, name in self.aliases.items():
            plan.places[id_].alias = plan.places[self.tensor(name).id]
        if len(plan.outputs) != len(plan.output_values):
            raise VerifyError(f"a plan has {len(plan.outputs)} outputs, its graph {len(plan.output_values)}")
        for step in plan.steps:
            if isinstance(step, LoopStep):
                step.nests = [schedule(p, plan.target) for p in step.kernel.parts]
        return plan

    def line(self, number: int, line: Line) -> None:
        if number == 1:
            self.head(line)
        elif line.text.startswith("    "):
            self.body(line)
        elif line.kind() == "number":
            self.step(line)
        else:
            self.fact(line)
        line.end()

    def head(self, line: Line) -> None:
        line.expect("plan")
        line.expect("for")
        name = line.name()
        if name != self.found.target.name:
            raise VerifyError(f"it is a plan for {name}, not for {self.found.target.name}")

    def fact(self, line: Line) -> None:
        first = line.next("name")
        if line.take(":"):
            self.place(first, line)
        elif first == "symbol":
            name, bound = self.size.symbol(line)
            if bound:
                self.found.symbols.add(self.size.reader.symbols[name])
        elif first == "output":
            self.output(line)
        elif first == "note":
            self.found.notes.append(line.rest())
        else:
            raise VerifyError(f"{first!r} is not expected")

    # -- memory -------------------------------------------------------------------------------------------------------
    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise VerifyError(f"{name} is no tensor of the plan")
        return self.tensors[name]

    def type(self, line: Line) -> tuple[DataType, tuple[Dim, ...]]:
        return self.dtype(line), self.size.many(line)

    def dtype(self, line: Line) -> DataType:
        name = line.next("name")
        if name not in TYPES:
            raise VerifyError(f"{name} is no element type")
        return TYPES[name]

    def place(self, name: str, line: Line) -> None:
        if name in self.tensors:
            raise VerifyError(f"{name} stands there twice")
        dtype, shape = self.type(line)
        kind = line.next("name")
        source: Any = None
        match kind:
            case "input":
                source = line.name() if line.kind() == "string" else name
            case "const" | "call":
                source = self.value(line)
            case "output":
                source = line.whole()
            case "arena":
                pass
            case _:
                raise VerifyError(f"{kind} is no kind of memory")
        t = self.tensors[name] = buffer(shape, dtype, source)
        strides = self.size.many(line) if line.take("strides") else strides_of(shape)
        offset = self.size(line) if line.take("offset") else 0
        self.found.places[t.id] = Place(t, kind, strides, offset, source)
        if line.take("alias"):
            self.aliases[t.id] = line.next("name")

    def value(self, line: Line) -> Value:
        name = line.name()
        line.expect(":")
        index = line.whole()
        node = self.node(name)
        if index >= len(node.outputs):
            raise VerifyError(f"{name} has no output {index}")
        return node.outputs[index]

    def node(self, name: str) -> Node:
        if name not in self.nodes:
            raise VerifyError(f"{name} is no node of the graph")
        return self.nodes[name]

    def output(self, line: Line) -> None:
        if line.whole() != len(self.found.outputs):
            raise VerifyError(f"output {len(self.found.outputs)} expected")
        line.expect(":")
        if line.take("as"):
            line.expect("PyTorch")
            line.expect("made")
            line.expect("it")
            self.found.outputs.append(None)
        else:
            self.found.outputs.append(self.tensor(line.next("name")))
        if line.take("restrided"):
            self.found.loose.add(len(self.found.outputs) - 1)

    def matrix(self, line: Line) -> Matrix:
        tensor = self.tensor(line.next("name"))
        offset = self.size.atom(line) if line.take("+") else 0
        return Matrix(tensor, dim(offset), self.size.many(line))

    # -- steps --------------------------------------------------------------------------------------------------------
    def step(self, line: Line) -> None:
        number, steps = line.whole(), self.found.steps
        kind = line.next("name")
        if kind == "loop" and number == len(steps) - 1 and isinstance(steps[-1], LoopStep):
            self.loop(line, steps[-1])
            return
        if number != len(steps):
            raise VerifyError(f"step {len(steps)} expected")
        steps.append(self.new_step(kind, line))

    def new_step(self, kind: str, line: Line) -> Step:
        match kind:
            case "loop":
                return self.loop(line, LoopStep([], Kernel([]), Domain(())))
            case "gemm":
                out = self.result(line)
                a = self.matrix(line)
                line.expect("@")
                b = self.matrix(line)
                bias = self.matrix(line) if line.take("+") else None
                return GemmStep(out, a, b, bias, self.sizes(line, GemmSizes))
            case "attention":
                return self.attention(line)
            case "conv":
                out = self.result(line)
                x = self.matrix(line)
                line.expect(",")
                w = self.matrix(line)
                bias = self.matrix(line) if line.take("+") else None
                return ConvStep(out, x, w, bias, self.sizes(line, ConvSizes), line.take("channels_last"))
            case "call":
                return self.call(line)
        raise VerifyError(f"{kind} is no kind of step")

    def result(self, line: Line) -> Tensor:
        found = self.tensor(line.next("name"))
        line.expect("=")
        return found

    def sizes(self, line: Line, kind: Callable[..., Any]) -> Any:
        line.expect("for")
        found: list[Dim] = []
        for name in kind._fields:  # type: ignore[attr-defined]
            if found:
                line.expect(",")
            line.expect(name)
            found.append(self.size(line))
        return kind(*found)

    def attention(self, line: Line) -> AttentionStep:
        out = self.tensor(line.next("name"))
        lse = self.tensor(line.next("name")) if line.take(",") else None
        line.expect("=")
        q = self.matrix(line)
        line.expect(",")
        k = self.matrix(line)
        line.expect(",")
        v = self.matrix(line)
        mask = None
        if line.take(","):
            line.expect("mask")
            mask = self.matrix(line)
        sizes = self.sizes(line, AttentionSizes)
        line.expect("scale")
        scale = float(number(line))
        return AttentionStep(out, lse, q, k, v, mask, sizes, line.take("causal"), scale)

    def call(self, line: Line) -> CallStep:
        writes: list[Tensor] = []
        if not line.take("-"):
            writes.append(self.tensor(line.next("name")))
            while line.take(","):
                writes.append(self.tensor(line.next("name")))
        line.expect("=")
        op = line.name()
        line.expect("(")
        reads = [self.read(line) for _ in line.separated(")")]
        line.expect("node")
        node = self.node(line.name())
        by = line.rest() if line.take("by") else ""
        if node.op != op or len(node.outputs) != len(writes):
            raise VerifyError(f"{node.name} is a {node.op} with {len(node.outputs)} outputs")
        return CallStep(node, reads, list(zip(node.outputs, writes)), by)

    def read(self, line: Line) -> tuple[Value, Matrix, Tensor]:
        value = self.value(line)
        line.expect("=")
        matrix = self.matrix(line)
        if not line.take("as"):
            return value, matrix, matrix.tensor
        dtype, shape = self.type(line)
        return value, matrix, buffer(shape, dtype, value)

    # -- loops --------------------------------------------------------------------------------------------------------
    def loop(self, line: Line, step: LoopStep) -> LoopStep:
        step.alone = line.take("sequential")
        outer: dict[str, Var] = {}
        inner: dict[str, Var] = {}
        while line.kind() == "name":
            name = line.next()
            line.expect("<")
            loops = outer if name[0] == "o" else inner
            if name in loops or name[0] not in "oi":
                raise VerifyError(f"{name} is no name of another loop")
            loops[name] = Var(self.size(line))
            if not line.take(","):
                break
        self.kernel = KernelReader(self, outer, inner)
        part = self.kernel.part
        step.kernel.parts.append(part)
        if len(step.kernel.parts) == 1:
            shape = tuple(v.size for v in (*part.outer, *part.inner))
            step.domain = Domain(shape, tuple(range(len(part.outer), len(shape))))
            self.kernel.roots = step.roots
        return step

    def body(self, line: Line) -> None:
        if self.kernel is None or not isinstance(self.found.steps[-1], LoopStep):
            raise VerifyError("this belongs to no loop")
        self.kernel.line(line)


class KernelReader:
    """Reads the expressions and stores of one part of a kernel."""

    def __init__(self, plan: PlanReader, outer: Mapping[str, Var], inner: Mapping[str, Var]) -> None:
        self.plan, self.size = plan, plan.size
        self.loops = {**outer, **inner}
        ordered = [[loops[k] for k in sorted(loops, key=lambda k: (len(k), k))] for loops in (outer, inner)]
        self.pool = ExprPool(ordered[1])
        self.part = Part(ordered[0], ordered[1], [], self.pool)
        self.named: dict[str, Expr] = {}
        self.roots: list[Tensor] | None = None  # gets the tensors that are stored, of the first part

    def line(self, line: Line) -> None:
        name = line.next("name")
        if line.take("="):
            self.named[name] = self.expr(line)
            return
        target = self.plan.tensor(name)
        line.expect("[")
        at, numbers, picks = self.index(line, "]")
        line.expect("=")
        self.part.stores.append(Store(target, at, self.expr(line), tuple(numbers), tuple(picks)))
        if self.roots is not None:
            self.roots.append(target)

    def index(self, line: Line, close: str) -> tuple[Affine, list[Expr], list[Pick]]:
        """constant + Σ coefficient·loop + Σ stride·at(number, limit)"""
        const: list[Any] = []
        terms: list[tuple[Var, Dim]] = []
        numbers: list[Expr] = []
        picks: list[Pick] = []
        while True:
            factors: list[Any] = []
            while True:
                name = line.peek() if line.kind() == "name" else ""
                if name in self.loops:
                    line.next()
                    terms.append((self.loops[name], self.coefficient(factors)))
                    break
                if name in ("at", "wrap") and line.peek(1) == "(":
                    line.next()
                    number, limit = self.picked(line)
                    numbers.append(number)
                    picks.append(Pick(self.coefficient(factors), limit, name == "wrap"))
                    break
                factors.append(self.size.factor(line))
                if not line.take("*"):
                    const.append(self.size.product(factors))
                    break
            if not line.take("+"):
                break
        line.expect(close)
        return Affine(self.size.sum(const) if const else 0, tuple(terms)), numbers, picks

    def coefficient(self, factors: list[Any]) -> Dim:
        return dim(self.size.product(factors)) if factors else 1

    def picked(self, line: Line) -> tuple[Expr, Dim]:
        line.expect("(")
        line.nest()
        number = self.expr(line)
        line.expect(",")
        limit = self.size(line)
        line.expect(")")
        line.depth -= 1
        return number, limit

    # -- expressions --------------------------------------------------------------------------------------------------
    def expr(self, line: Line) -> Expr:
        name = line.peek() if line.kind() == "name" else ""
        after = line.peek(1)
        if not name or name in ("inf", "nan", "True", "False"):
            return self.const(line)
        line.next()
        if after == "[":
            return self.load(name, line)
        if after != "(":
            if name not in self.named:
                raise VerifyError(f"{name} is not computed before")
            return self.named[name]
        line.expect("(")
        line.nest()
        found = self.function(name, line)
        line.depth -= 1
        return found

    def const(self, line: Line) -> Expr:
        value = number(line)
        return self.pool.make("const", (), self.suffix(line, DEFAULT_TYPES[type(value)]), value)

    def suffix(self, line: Line, expected: DataType) -> DataType:
        return self.plan.dtype(line) if line.take(":") else expected

    def load(self, name: str, line: Line) -> Expr:
        source = self.plan.tensor(name)
        line.expect("[")
        line.nest()
        at, numbers, picks = self.index(line, "]")
        line.depth -= 1
        return self.pool.make("load", numbers, self.suffix(line, source.dtype), source, at, tuple(picks))

    def function(self, name: str, line: Line) -> Expr:
        if name == "index":
            at, numbers, _ = self.index(line, ")")
            if numbers:
                raise VerifyError("an index does not depend on numbers")
            return self.pool.make("iota", (), self.suffix(line, DataType.DT_INT64), None, at)
        args = [self.expr(line) for _ in line.separated(")")]
        types = [a.dtype for a in args]
        reduction = name.removesuffix("_i")
        if name in TYPES and len(args) == 1:
            return self.pool.make("cast", args, TYPES[name])
        if name != reduction and reduction in REDUCTIONS and len(args) == 1:
            return self.pool.make("reduce", args, self.suffix(line, types[0]), reduction)
        function = FUNCTIONS.get(name)
        if function is None or function.arity != len(args):
            raise VerifyError(f"{name} is no function of {len(args)} numbers")
        return self.pool.make(name, args, self.suffix(line, function.result(types)))


def number(line: Line) -> float | int | bool:
    minus = line.take("-")
    text = line.next()
    if text in ("True", "False"):
        return text == "True"
    if text in ("inf", "nan"):
        return -float(text) if minus else float(text)
    if not text[0].isdigit() or len(text) > DIGITS:
        raise VerifyError(f"{text[:DIGITS]} is no number")
    value: float | int = int(text) if text.isdigit() else float(text)
    return -value if minus else value
