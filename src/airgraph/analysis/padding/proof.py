"""May a size be padded? Which rows of a graph's results depend on rows that were added at the end of its inputs.

A graph with the symbolic size s is to run at a larger size B: every input that has s is made longer at the end, and of
the results only the first part is kept. That is right if every op commutes with cutting:

    cut(op(x_B)) = op(cut(x_B))        whatever stands in the added part of x_B

Elementwise ops do, a softmax over another axis does, the rows of a matrix product do; a mean over s does not. So one rule
for each op (one module a family) says along which axes it commutes, and the rule for a
whole graph is: all its ops do, or the op that does not is the refusal. Nothing else has to be known of a value than which
of its axes are s, and that is in its type, but for one thing: `view(b · s, d)` hides s in a product. A `Fact` therefore
has the factors of each axis.

Some ops that mix rows leave the true ones alone for what stands in the added part: a softmax over keys that a mask sets
to -inf, a sum over rows that a mask sets to 0. A fact has the number in the added part of an axis where it is known
(`pad`), and where an element is its own index (`place`), which is how causal masks are made. A mask that comes from the
user is padded with what makes the graph come out right, if there is such a number; every other input with its last row,
which is a legal row wherever the true ones are. (0 · padded is taken for 0: rows like the true ones are as finite.)

    padding_of(graph, s0)   →   Padding(s0, inputs={"x": (0,), "mask": (0,)}, masks={"mask": False}, …)
                            →   PaddingRefusal("ReduceMean", "reduces over s0", …)

Cutting keeps the first rows. An op may allow that and still not allow any choice of rows (a running sum, a causal
attention): `Padding.ordered` names the first such, and a batch with one is not split in two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airgraph.analysis.padding import (  # noqa: F401  (importing a family fills the table of rules)
    activations,
    attention,
    complex_numbers,
    convolutions,
    core,
    creation,
    elementwise,
    indexing,
    matrices,
    norms,
    pooling,
    reductions,
    resampling,
    shapes,
    sorting,
)
from airgraph.analysis.padding.facts import (
    INFINITY,
    RULES,
    Fact,
    Number,
    PaddingView,
    Rule,
    UnsupportedPadding,
    has,
    numel_of,
    plain,
    uniform,
)
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import row
from airgraph.ir.types import DataType, Dim

TRIALS = 64  # choices of numbers for masks that are looked at
# Ops that are followed even where the size does not come near: a mask may be made with what they give.
CONSTANTS = (
    "Cast",
    "Identity",
    "Fill",
    "Range",
    "Unsqueeze",
    "ExpandDims",
    "Squeeze",
    "Reshape",
    "BroadcastTo",
    "Expand",
    "Neg",
    "Add",
    "Sub",
)


@dataclass(frozen=True)
class PaddingRefusal:
    """The op that stands in the way, why, and the user's line it comes from."""

    op: str
    why: str
    code: str = ""
    source: str | None = None

    def text(self) -> str:
        origin = f", from {self.source.strip()}" if self.source else ""
        return f"{self.op} {self.why}{origin}"


@dataclass(frozen=True)
class Padding:
    """How to pad a size: the axes it is at, the number a mask is padded with, and the axes of results to cut."""

    symbol: Any
    inputs: Mapping[str, tuple[int, ...]]  # Data → its axes of this size
    masks: Mapping[str, Number]  # Data → what it is padded with; the others with their last row
    outputs: tuple[Mapping[int, Dim], ...]  # of each output: axis → its size
    ordered: str | None = None  # the first op that allows the first rows to be kept, not any rows

    @property
    def splits(self) -> bool:
        """The rows may as well be computed some here, some there."""
        return self.ordered is None and all(len(axes) <= 1 for axes in self.outputs)


def padding_of(graph: Graph, symbol: Any) -> Padding | PaddingRefusal:
    """Whether `symbol` may be padded in `graph`, and how."""
    first: PaddingRefusal | None = None
    for masks in itertools.islice(choices(graph, symbol), TRIALS):
        found = Walk(graph, symbol, masks).run()
        if isinstance(found, Padding):
            return found
        first = first or found
    assert first is not None
    return first


def choices(graph: Graph, symbol: Any) -> Iterator[dict[str, Number]]:
    """No mask at all, then every single input that could be one with every number it could be padded with, then pairs."""
    options = [
        (node.name, number)
        for node in graph.inputs
        if has(node.output.type.shape, symbol)
        for number in mask_numbers(node.output)
    ]
    yield {}
    yield from ({name: number} for name, number in options)
    for one, other in itertools.combinations(options, 2):
        if one[0] != other[0]:
            yield dict((one, other))


def mask_numbers(value: Value) -> list[Number]:
    """Masks are of bool or whole numbers, or they are numbers that are added to the scores of an attention."""
    if value.dtype == DataType.DT_BOOL:
        return [False, True]
    if value.dtype.is_int:
        return [0, 1]
    return [-INFINITY] if value.dtype.is_float and is_attention_mask(value) else []


VIEWS = ("Identity", "Cast", "Reshape", "Unsqueeze", "ExpandDims", "Squeeze", "BroadcastTo", "Expand", "StridedSliceV2")


def is_attention_mask(value: Value) -> bool:
    for node in value.users:
        op = row(node)
        if op and any(s.name == "atten_mask" and e is value for s, e in zip(op.slots, node.inputs)):
            return True
        if node.op in VIEWS and node.inputs[0] is value and is_attention_mask(node.output):
            return True
    return False


class Walk:
    """Once through a graph, with one choice of what masks are padded with."""

    def __init__(self, graph: Graph, symbol: Any, masks: Mapping[str, Number]) -> None:
        self.graph, self.symbol, self.masks = graph, symbol, masks
        self.facts: dict[Value, Fact] = {}
        self.ordered: str | None = None

    def run(self) -> Padding | PaddingRefusal:
        for node in self.needed():
            if acts(node):
                self.ordered = self.ordered or op_name(node)
            try:
                self.visit(node)
            except UnsupportedPadding as mixed:
                return self.refusal(node, str(mixed))
        inputs = {n.name: self.axes(n.output) for n in self.graph.inputs if self.axes(n.output)}
        outputs = [self.of(v) for v in self.graph.net_output.values()]
        cuts = tuple({i: numel_of(f) for i, f in enumerate(fact.axes) if self.carries(f)} for fact in outputs)
        return Padding(self.symbol, inputs, dict(self.masks), cuts, self.ordered)

    def refusal(self, node: Node, why: str) -> PaddingRefusal:
        note = self.graph.notes[node.note] if 0 <= node.note < len(self.graph.notes) else None
        return PaddingRefusal(op_name(node), why, note.code if note else "", note.file if note else None)

    def needed(self) -> list[Node]:
        """What leads to a result or has an effect; the conversion leaves nodes behind that nobody reads."""
        wanted = {n for n in self.graph.nodes if n.op in ("NetOutput", "Data", "Assign", "PrintV2", "AtenCall")}
        for node in reversed(self.graph.nodes):
            if node in wanted:
                wanted |= {v.node for v in node.values()} | set(node.control)
        return [n for n in self.graph.nodes if n in wanted]

    # -- one node ---------------------------------------------------------------------------------------------------
    def visit(self, node: Node) -> None:
        rule = RULES.get(op_name(node)) if row(node) else None
        if node.op == "Data":
            self.enter(node.output)
        elif node.op == "NetOutput":
            self.leave(node)
        elif node.outputs and all(v.known is not None for v in node.outputs):
            pass  # sizes, and numbers computed from them: who takes one for a number is asked there
        elif not self.touches(node):
            self.pass_by(node, rule)
        else:
            self.check_numbers(node)
            if rule is None:
                raise UnsupportedPadding(f"is not known to keep the rows of {self.symbol} apart")
            facts = zip(node.outputs, rule(PaddingView(self, node)))
            self.facts |= {value: fact for value, fact in facts if fact is not None}

    def pass_by(self, node: Node, rule: Rule | None) -> None:
        """The size does not come near this node; but it may make a constant that a mask is made with."""
        if node.op == "Const":
            number = uniform(node.attrs["value"], node.output.dtype)
            self.facts[node.output] = Fact(plain(node.output.type.shape), fill=number)
        elif node.op in CONSTANTS and rule:
            try:
                fact = rule(PaddingView(self, node))[0]
            except UnsupportedPadding:
                return
            if fact is not None:
                self.facts[node.output] = fact

    def touches(self, node: Node) -> bool:
        return any(
            has(v.type.shape, self.symbol) or has(v.known, self.symbol) or self.carried(v)
            for v in (*node.values(), *node.outputs)
        )

    def carried(self, value: Value) -> bool:
        return value in self.facts and any(map(self.carries, self.facts[value].axes))

    def check_numbers(self, node: Node) -> None:
        """The size itself among the numbers an op computes with: it would be another one."""
        op = row(node)
        for slot, entry in zip(op.slots if op and op.name != "AtenCall" else (), node.inputs):
            values = entry if isinstance(entry, tuple) else (entry,)
            if not slot.index and any(v is not None and has(v.known, self.symbol) for v in values):
                raise UnsupportedPadding(f"computes with the size {self.symbol} as a number")

    def enter(self, value: Value) -> None:
        shape = value.type.shape
        if value.known is not None or not has(shape, self.symbol):
            return
        if any(d != self.symbol for d in shape or () if has(d, self.symbol)):
            raise UnsupportedPadding(f"{value.node.name} has a size computed from {self.symbol}: {list(shape or ())}")
        number = self.masks.get(value.node.name)
        pad = {} if number is None else dict.fromkeys(self.axes(value), number)
        self.facts[value] = Fact(plain(shape), pad)

    def leave(self, node: Node) -> None:
        for value in node.values():
            if has(value.known, self.symbol):
                raise UnsupportedPadding(f"gives the size {self.symbol} back as a number")
            for factors in self.of(value).axes:
                if self.carries(factors) and (not self.carries(factors[:1]) or self.carries(factors[1:])):
                    raise UnsupportedPadding(f"returns {self.symbol} flattened with another dimension")

    # -- asked by rules ---------------------------------------------------------------------------------------------
    def of(self, value: Value) -> Fact:
        if value not in self.facts:
            if has(value.type.shape, self.symbol):
                raise UnsupportedPadding(f"reads {value.tensor}, of which too little is known")
            number = None if has(value.known, self.symbol) or value.known is None else uniform(value.known, value.dtype)
            known = number if isinstance(number, int | float) else None
            self.facts[value] = Fact(plain(value.type.shape), fill=known)
        return self.facts[value]

    def carries(self, factors: Sequence[Dim]) -> bool:
        return has(tuple(factors), self.symbol)

    def axes(self, value: Value) -> tuple[int, ...]:
        return tuple(i for i, d in enumerate(value.type.shape or ()) if has(d, self.symbol))


def acts(node: Node) -> bool:
    """What must not happen twice, as it would if a batch were split; a call of PyTorch that is not known may be one."""
    op = row(node)
    return (
        op is None or op.effect in ("write", "print", "random") or (op.effect == "call" and op_name(node) not in RULES)
    )


def op_name(node: Node) -> str:
    return str(node.attrs["target"]) if node.op == "AtenCall" else node.op
