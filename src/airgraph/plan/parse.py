"""Plans from text, as text.py writes it.

    parse_plan(text, graph, boundary, target)  →  the plan; `text(parse(text)) == text`

The text may come from a file: it is data, and nothing in it is evaluated. Each line is read once, token by token, those of
loops on demand when `lazy` (`UnreadLoop`). What is wrong with it is a VerifyError that shows the line.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airgraph.errors import VerifyError
from airgraph.ir.boundary import Boundary
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.types import DataType, Dim, dim
from airgraph.plan.copies import copied
from airgraph.plan.functions import FUNCTIONS, REDUCTIONS
from airgraph.plan.index import Affine, Var, same, strides_of
from airgraph.plan.kernels import Domain, Kernel, Part, Store
from airgraph.plan.nest import Nest, schedule
from airgraph.plan.steps import (
    Allocation,
    AttentionSizes,
    AttentionStep,
    CallStep,
    ConvSizes,
    ConvStep,
    GemmSizes,
    GemmStep,
    LoopStep,
    Matrix,
    Plan,
    Step,
)
from airgraph.plan.target import Target
from airgraph.plan.tensors import Expr, ExprPool, Pick, Tensor, buffer
from airgraph.plan.text import DEFAULT_TYPES, type_name
from airgraph.plan.tokens import Line, SizeReader, is_whole, kind_of

TYPES = {type_name(d): d for d in DataType}
INDENT = "    "  # of what a loop computes
TENSOR = re.compile(r"(?<![\w.'])([A-Za-z_][\w.]*'*)(?=\[)", re.ASCII)  # in the lines of a loop
LITERALS = ("inf", "nan", "True", "False")


def parse_plan(
    text: str,
    graph: Graph,
    boundary: Boundary,
    target: Target,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    lazy: bool = False,
) -> Plan:
    """`graph`: the one that the plan was made of. `functions`: as given to `plan_text`. `lazy`: loops are read when
    something of them is asked for."""
    return PlanReader(graph, boundary, target, functions, lazy).plan(text)


class PlanReader:
    """Reads the text of a plan line by line (the grammar is in text.py); whatever is wrong with one is a VerifyError.

    The text names nodes of `graph` and tensors by the names its memory lines give them. `functions` are those that sizes
    may use besides sympy's.
    """

    def __init__(
        self,
        graph: Graph,
        boundary: Boundary,
        target: Target,
        functions: Mapping[str, Callable[..., Any]] | None,
        lazy: bool,
    ) -> None:
        self.size, self.lazy = SizeReader(functions), lazy
        self.nodes: dict[str, Node] = {n.name: n for n in graph.nodes}
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[int, str] = {}
        self.lines: list[str] = []
        self.at = 0  # the line that is read
        self.lock = threading.Lock()  # of reading a loop later, from whichever thread
        self.blocks: dict[tuple[Any, ...], tuple[list[Tensor], Part, Nest]] = {}  # loops that were read, by their text
        self.prologue: LoopStep | None = None  # of the product that follows
        outputs = list(graph.net_output.values())
        self.found = Plan(graph, boundary, [], {}, [], outputs, set(), [], target)

    def plan(self, text: str) -> Plan:
        self.lines = text.splitlines()
        while self.at < len(self.lines):
            try:
                self.line(self.lines[self.at])
            except (VerifyError, json.JSONDecodeError) as error:
                raise self.unreadable(error) from error
            self.at += 1
        return self.finished()

    def unreadable(self, error: VerifyError | json.JSONDecodeError) -> VerifyError:
        """What is wrong with the line that is read."""
        reason, line = error.what if isinstance(error, VerifyError) else str(error), self.lines[self.at]
        shown = line if len(line) <= 200 else f"{line[:197]}..."
        return VerifyError(f"line {self.at + 1} of a plan cannot be read: {reason}", where={"line": shown})

    def finished(self) -> Plan:
        plan = self.found
        for id_, name in self.aliases.items():
            plan.allocations[id_].alias = plan.allocations[self.tensor(name).id]
        if len(plan.outputs) != len(plan.output_values):
            raise VerifyError(f"a plan has {len(plan.outputs)} outputs, its graph {len(plan.output_values)}")
        if self.prologue is not None:
            raise VerifyError("a plan ends with a prologue, and no product follows it")
        return plan

    def line(self, text: str) -> None:
        line = Line(text)
        if self.at == 0:
            self.head(line)
        elif text.startswith(INDENT):
            raise VerifyError("this belongs to no loop")
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
            raise VerifyError(f"{name} is not a tensor of the plan")
        return self.tensors[name]

    def type(self, line: Line) -> tuple[DataType, tuple[Dim, ...]]:
        return self.dtype(line), self.size.many(line)

    def dtype(self, line: Line) -> DataType:
        name = line.next("name")
        if name not in TYPES:
            raise VerifyError(f"{name} is not an element type")
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
                raise VerifyError(f"{kind} is not a kind of memory")
        t = self.tensors[name] = buffer(shape, dtype, source)
        strides = self.size.many(line) if line.take("strides") else strides_of(shape)
        offset = self.size(line) if line.take("offset") else 0
        self.found.allocations[t.id] = Allocation(t, kind, strides, offset, source)
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
        if line.take("channels_last"):
            self.found.last.add(len(self.found.outputs) - 1)

    def matrix(self, line: Line) -> Matrix:
        tensor = self.tensor(line.next("name"))
        offset = self.size.atom(line) if line.take("+") else 0
        return Matrix(tensor, dim(offset), self.size.many(line))

    # -- steps --------------------------------------------------------------------------------------------------------
    def step(self, line: Line) -> None:
        number, steps = line.whole(), self.found.steps
        kind = line.next("name")
        if kind == "loop" and number == len(steps) - 1 and isinstance(last := steps[-1], LoopStep):
            self.unread(line, last) if isinstance(last, UnreadLoop) else self.loop(line, last)
            return
        if kind == "then" and number == len(steps) - 1 and isinstance(product := steps[-1], GemmStep | ConvStep):
            product.epilogue = self.loop(line, new_loop(), merge=False)
            return
        if self.prologue is not None and (kind != "gemm" or number != len(steps)):
            raise VerifyError("the product of a prologue is expected")
        if number != len(steps):
            raise VerifyError(f"step {len(steps)} expected")
        if kind == "first":
            self.prologue = self.loop(line, new_loop(), merge=False)
            return
        steps.append(self.new_step(kind, line))

    def new_step(self, kind: str, line: Line) -> Step:
        match kind:
            case "loop":
                return self.unread(line, UnreadLoop(self)) if self.lazy else self.loop(line, new_loop())
            case "gemm":
                out = self.result(line)
                a = self.matrix(line)
                line.expect("@")
                b = self.matrix(line)
                bias = self.matrix(line) if line.take("+") else None
                ends = self.matrix(line) if line.take("rows") else None
                prologue, self.prologue = self.prologue, None
                return self.checked(GemmStep(out, a, b, bias, self.sizes(line, GemmSizes), ends, prologue=prologue))
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
        raise VerifyError(f"{kind} is not a kind of step")

    def checked(self, step: GemmStep) -> GemmStep:
        loop = step.prologue
        if loop is not None and (loop.roots != [step.a.tensor] or not same(loop.domain.shape[0], step.sizes.m)):
            raise VerifyError("its prologue does not make the rows of its first operand")
        return step

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
        scale = float(line.number())
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
    def unread(self, line: Line, step: UnreadLoop) -> UnreadLoop:
        """One more part of a step, to be read later."""
        step.lines.append(self.at)
        step.sequential = line.take("sequential")
        self.at = self.end_of_loop() - 1
        line.at = len(line.words) - 2
        return step

    def read_loop(self, lines: Sequence[int]) -> LoopStep:
        """The loop whose parts begin in these lines."""
        step = new_loop()
        with self.lock:
            try:
                for self.at in lines:
                    line = Line(self.lines[self.at])
                    line.at = 2  # behind its number and its kind
                    self.loop(line, step)
            except VerifyError as error:
                raise self.unreadable(error) from error
        return step

    def end_of_loop(self) -> int:
        """The number of the line behind the loop that is read."""
        end = self.at + 1
        while end < len(self.lines) and self.lines[end].startswith(INDENT):
            end += 1
        return end

    def loop(self, line: Line, step: LoopStep, merge: bool = True) -> LoopStep:
        """One more part of a step, with the lines below it. Those of a prologue or an epilogue keep a loop over the rows of
        their product, of which each thread has its share: no `merge`."""
        step.sequential = line.take("sequential")
        end = self.end_of_loop()
        text, *rest = TENSOR.split("\n".join(self.lines[self.at + 1 : end]))
        tensors = [self.tensors[name] for name in rest[::2] if name in self.tensors]  # others are refused by `part`
        order = {t: i for i, t in enumerate(dict.fromkeys(tensors))}
        types = tuple([(t.dtype, t.shape) for t in order])
        key = (merge, *line.words[line.at :], text, *rest[1::2], *[order[t] for t in tensors], types)
        found = self.blocks.get(key)
        if found is None:
            part = self.part(line, end)
            nest = schedule(part, self.found.target, merge)
            self.blocks[key] = ([*order], part, nest)
        else:
            known, part, nest = found
            part, nest = copied(part, nest, {old.id: new for old, new in zip(known, order)})
            line.at, self.at = len(line.words) - 2, end - 1
        step.kernel.parts.append(part)
        step.nests.append(nest)
        if len(step.kernel.parts) == 1:
            shape = tuple([v.size for v in (*part.outer, *part.inner)])
            step.domain = Domain(shape, tuple(range(len(part.outer), len(shape))))
            step.roots = [s.target for s in part.stores]
        return step

    def part(self, line: Line, end: int) -> Part:
        """The loops of this line, and what the lines before number `end` compute in them."""
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
        line.end()
        kernel = KernelReader(self, outer, inner)
        while self.at + 1 < end:
            self.at += 1
            kernel.line(Line(self.lines[self.at]))
        return kernel.part


def new_loop() -> LoopStep:
    return LoopStep([], Kernel([]), Domain(()))


class UnreadLoop(LoopStep):
    """A loop whose lines are read when its roots, its kernel or its nests are asked for."""

    def __init__(self, reader: PlanReader) -> None:
        self.reader = reader
        self.lines: list[int] = []  # where its parts begin

    def __getattr__(self, name: str) -> Any:
        if name not in UNREAD:
            raise AttributeError(name)
        vars(self).update(vars(self.reader.read_loop(self.lines)))
        return vars(self)[name]


UNREAD = ("roots", "kernel", "domain", "nests")


class KernelReader:
    """Reads the expressions and stores of one part of a kernel."""

    def __init__(self, plan: PlanReader, outer: Mapping[str, Var], inner: Mapping[str, Var]) -> None:
        self.plan, self.size = plan, plan.size
        self.loops = {**outer, **inner}
        ordered = [[loops[k] for k in sorted(loops, key=lambda k: (len(k), k))] for loops in (outer, inner)]
        self.pool = ExprPool(ordered[1])
        self.part = Part(ordered[0], ordered[1], [], self.pool)
        self.named: dict[str, Expr] = {}

    def line(self, line: Line) -> None:
        name = line.next("name")
        if line.take("="):
            self.named[name] = self.expr(line)
        else:
            target = self.plan.tensor(name)
            line.expect("[")
            at, numbers, picks = self.index(line, "]")
            line.expect("=")
            self.part.stores.append(Store(target, at, self.expr(line), tuple(numbers), tuple(picks)))
        line.end()

    def index(self, line: Line, close: str) -> tuple[Affine, list[Expr], list[Pick]]:
        """constant + Σ coefficient·loop + Σ stride·at(number, limit)"""
        const: list[Any] = []
        terms: list[tuple[Var, Dim]] = []
        numbers: list[Expr] = []
        picks: list[Pick] = []
        while True:
            if self.plain_term(line, terms):
                if not line.take("+"):
                    break
                continue
            factors: list[Any] = []
            while True:
                name = line.peek()
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

    def plain_term(self, line: Line, terms: list[tuple[Var, Dim]]) -> bool:
        """Reads `8*o0` or `o0`, which nearly all terms are, if it comes next."""
        at, words = line.at, line.words
        if words[at] in self.loops:
            terms.append((self.loops[words[at]], 1))
            line.at += 1
        elif words[at + 1] == "*" and words[at + 2] in self.loops and is_whole(words[at]):
            terms.append((self.loops[words[at + 2]], int(words[at])))
            line.at += 3
        else:
            return False
        return True

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
        name, after = line.words[line.at], line.words[line.at + 1]
        if kind_of(name) != "name" or name in LITERALS:
            return self.const(line)
        line.at += 1
        if after == "[":
            return self.load(name, line)
        if after != "(":
            if name not in self.named:
                raise VerifyError(f"{name} is not computed before")
            return self.named[name]
        line.at += 1
        line.nest()
        found = self.function(name, line)
        line.depth -= 1
        return found

    def const(self, line: Line) -> Expr:
        value = line.number()
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
        args = []
        if not line.take(")"):
            args.append(self.expr(line))
            while line.take(","):
                args.append(self.expr(line))
            line.expect(")")
        types = [a.dtype for a in args]
        reduction = name.removesuffix("_i")
        if name in TYPES and len(args) == 1:
            return self.pool.make("cast", args, TYPES[name])
        if name != reduction and reduction in REDUCTIONS and len(args) == 1:
            return self.pool.make("reduce", args, self.suffix(line, types[0]), reduction)
        function = FUNCTIONS.get(name)
        if function is None or function.arity != len(args):
            raise VerifyError(f"{name} is not a function of {len(args)} numbers")
        return self.pool.make(name, args, self.suffix(line, function.result(types)))
