"""Rewrite rules: a pattern, what replaces it, and a reason when it does not apply.

    # Transpose(Transpose(x, p), q) → Transpose(x, p∘q)
    Rule("compose_transposes", P("Transpose", P("Transpose", "x", "p"), "q"), compose)

A pattern names an op and its inputs. An input is
    "x"            whatever value stands there, bound to that name; the same name twice is the same value twice
    P(…)           an op again
    0.5            a constant number of that value
    Either(…)      the first of several that fits
    (P(…), "y")    a list of values, for an op that takes one
    None           nothing: an optional input that was not given
`bind="name"` binds the value of the op itself, `index=1` means another of its outputs, further keywords are attributes it
must have. Add and Mul fit either way round.

The replacement gets what was bound and the matched node; it returns the new value, None where there is nothing to do,
or `no("reason")` where something stands in the way that a reader of the journal would want to know. A `private` rule is
for patterns that pay only if the values in between are gone afterwards: it is refused where somebody else reads one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from airgraph.errors import Unsupported
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Input, Node, Value
from airgraph.ir.ops import Op, row
from airgraph.passes.liveness import Liveness
from airgraph.passes.result import PassResult

COMMUTATIVE = frozenset({"Add", "Mul"})
Bound = dict[str, Value]


@dataclass(frozen=True)
class P:
    """An op with these inputs and attributes; further inputs of the node may be anything."""

    ops: tuple[str, ...]
    inputs: tuple[Any, ...]
    bind: str | None
    index: int
    attrs: Mapping[str, Any]

    def __init__(
        self, op: str | tuple[str, ...], *inputs: Any, bind: str | None = None, index: int = 0, **attrs: Any
    ) -> None:
        object.__setattr__(self, "ops", (op,) if isinstance(op, str) else op)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "bind", bind)
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "attrs", attrs)


@dataclass(frozen=True)
class Either:
    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)


class UnsupportedRewrite(Unsupported):
    """What a rule returns where its pattern matched and it still does not apply."""


def no(reason: str, *about: Any) -> UnsupportedRewrite:
    return UnsupportedRewrite(f"{reason}: {', '.join(map(str, about))}" if about else reason)


@dataclass(frozen=True, eq=False)
class Rule:
    name: str
    pattern: P | Either
    replace: Callable[..., Value | UnsupportedRewrite | None]
    private: bool = False


# -- matching -------------------------------------------------------------------------------------------------------
Found = tuple[Bound, tuple[Node, ...]]  # what was bound, and the nodes the pattern names


def match(pattern: P | Either, node: Node) -> Bound | None:
    """The first bindings that fit, or None."""
    return next((bound for bound, _ in matches(pattern, node)), None)


def matches(pattern: P | Either, node: Node) -> Iterator[Found]:
    """Every way the pattern fits, with `node` at its root; the root is not among the nodes."""
    for choice in pattern.choices if isinstance(pattern, Either) else (pattern,):
        yield from _op(choice, node, ({}, ()))


def _op(pattern: P, node: Node, found: Found) -> Iterator[Found]:
    """A node that waits for another is never part of a match: the waiting would be lost."""
    op = row(node) if node.op in pattern.ops else None
    if op is None or node.control or len(node.inputs) < len(pattern.inputs) or not _attrs(pattern, node, op):
        return
    yield from _inputs(pattern.inputs, node.inputs, found)
    if node.op in COMMUTATIVE and len(pattern.inputs) == 2:
        yield from _inputs(pattern.inputs, node.inputs[::-1], found)


def _attrs(pattern: P, node: Node, op: Op) -> bool:
    return all(node.attrs.get(name, op.attrs.get(name)) == value for name, value in pattern.attrs.items())


def _inputs(wanted: Sequence[Any], given: Sequence[Input], found: Found) -> Iterator[Found]:
    if not wanted:
        yield found
        return
    for more in _input(wanted[0], given[0], found):
        yield from _inputs(wanted[1:], given[1:], more)


def _input(wanted: Any, entry: Input, found: Found) -> Iterator[Found]:
    bound, nodes = found
    match wanted:
        case Either():
            for choice in wanted.choices:
                yield from _input(choice, entry, found)
        case tuple():
            if isinstance(entry, tuple) and len(entry) == len(wanted):
                yield from _inputs(wanted, entry, found)
        case None:
            if entry is None:
                yield found
        case _ if not isinstance(entry, Value):
            return
        case str():
            if wanted not in bound:
                yield {**bound, wanted: entry}, nodes
            elif same(bound[wanted], entry):
                yield found
        case P():
            if entry.index == wanted.index:
                for here, _ in [found] if wanted.bind is None else _input(wanted.bind, entry, found):
                    yield from _op(wanted, entry.node, (here, (*nodes, entry.node)))
        case _:
            number = constant_number(entry)
            if number is not None and math.isclose(number, wanted, rel_tol=1e-7):
                yield found


def same(a: Value, b: Value) -> bool:
    """One value, or two constants that are equal."""
    if a is b:
        return True
    both = a.node.op == b.node.op == "Const" and a.type == b.type
    return both and attr_key(a.node.attrs["value"]) == attr_key(b.node.attrs["value"])


def attr_key(value: Any) -> str | bytes:
    """Equal for equal attributes; 0.0 and -0.0 are two."""
    return repr((value.dtype, value.shape)).encode() + value.tobytes() if isinstance(value, np.ndarray) else repr(value)


def constant_number(value: Value) -> float | None:
    number = value.node.attrs.get("value") if value.node.op == "Const" else None
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


# -- rewriting ------------------------------------------------------------------------------------------------------
Screen = tuple[frozenset[str] | None, ...]  # for each input of a root: the ops that may stand there; None: any


def screens(rule: Rule) -> list[tuple[str, Screen]]:
    """What a look at the inputs of a node is enough to tell, for each op a match can begin with."""
    choices = rule.pattern.choices if isinstance(rule.pattern, Either) else (rule.pattern,)
    found = []
    for choice in choices:
        screen = tuple(map(_ops, choice.inputs))
        for op in choice.ops:
            found.append((op, screen))
            if op in COMMUTATIVE and len(screen) == 2:
                found.append((op, screen[::-1]))
    return found


def _ops(wanted: Any) -> frozenset[str] | None:
    match wanted:
        case P():
            return frozenset(wanted.ops)
        case Either():
            each = [_ops(choice) for choice in wanted.choices]
            return None if None in each else frozenset[str]().union(*each)  # type: ignore[arg-type]
        case str() | tuple() | None:
            return None
    return frozenset({"Const"})


def passes_screen(screen: Screen, node: Node) -> bool:
    for ops, entry in zip(screen, node.inputs):
        if ops is not None and not (isinstance(entry, Value) and entry.node.op in ops):
            return False
    return True


def apply(
    graph: Graph, rules: Sequence[Rule], helpers: Sequence[Rule] = (), live: Liveness | None = None
) -> PassResult:
    """Every rule wherever it fits, until none does; `helpers` only where a rewrite brought something new."""
    with ge.building(graph), graph.editing():
        return _Rewriting(graph, rules, helpers, live).run()


class _Rewriting:
    """One run of a set of rules over a graph, until none applies; `queue` has the nodes that are still to be tried."""

    def __init__(self, graph: Graph, rules: Sequence[Rule], helpers: Sequence[Rule], live: Liveness | None) -> None:
        self.graph = graph
        roots = {op for rule in rules for op, _ in screens(rule)}
        self.queue = deque(node for node in graph.nodes if node.op in roots)
        self.live = live or Liveness(graph)
        self.rules: dict[str, dict[Rule, list[Screen]]] = {}
        for rule in (*rules, *helpers):
            for op, screen in screens(rule):
                self.rules.setdefault(op, {}).setdefault(rule, []).append(screen)
        self.notes: dict[Any, str] = {}
        self.fired: Counter[str] = Counter()
        self.refused: dict[tuple[str, Node], None] = {}

    def run(self) -> PassResult:
        done = -1
        while self.queue and done != self.fired.total():
            done = self.fired.total()
            while self.queue:
                self.visit(self.queue.popleft())
            self.queue.extend(node for _, node in self.refused)  # its other readers may be gone by now
        notes = list(dict.fromkeys(self.notes.values()))
        return PassResult(bool(self.fired), notes, self.fired, Counter(rule for rule, _ in self.refused))

    def visit(self, node: Node) -> None:
        if node in self.live.dead or not node.outputs or not self.live.readers(node.output):
            return
        for rule, looks in self.rules.get(node.op, {}).items():
            if any(passes_screen(look, node) for look in looks):
                new = self.attempt(rule, node)
                if new is not None:
                    self.queue += [n for n in (new.node, *new.users) if n.op in self.rules]
                    return

    def attempt(self, rule: Rule, node: Node) -> Value | None:
        """The new value, once everything reads it."""
        refusal: UnsupportedRewrite | None = None
        for bound, nodes in matches(rule.pattern, node):
            new: Value | UnsupportedRewrite | None = self.elsewhere(node, nodes) if rule.private else None
            if new is None:
                outer = self.graph.stand_before(node)
                new = rule.replace(node=node, **bound)
                self.graph.stand_before(outer)
            if isinstance(new, Value):
                self.settle(rule, (node, *nodes), new, bound)
                return new
            refusal = refusal or new
        if refusal is not None:
            self.refused[rule.name, node] = None
            self.notes[rule.name, node] = f"{rule.name} refused {node.name}: {refusal.reason}"
        return None

    def elsewhere(self, root: Node, nodes: Sequence[Node]) -> UnsupportedRewrite | None:
        inside = {root, *nodes}
        for node in nodes:
            for value in node.outputs:
                others = [user.name for user in self.live.readers(value) if user not in inside]
                if others:
                    return no(f"{node.name} is read elsewhere", *others[:3])
        return None

    def settle(self, rule: Rule, nodes: Sequence[Node], new: Value, bound: Bound) -> None:
        node = nodes[0]
        self.fired[rule.name] += 1
        self.refused.pop((rule.name, node), None)
        self.notes.pop((rule.name, node), None)
        self.graph.replace(node.output, new)
        self.live.drop(node)
        if new.node in {value.node for value in bound.values()}:
            self.notes[self.fired.total(), node] = f"{rule.name}: {node.name} → {new.node.name}"
            return
        new.type, new.known = node.output.type, node.output.known  # FX's symbols, not those a type rule would choose
        old = next((n for n in nodes if n.op == new.node.op and (n is node or rule.private)), None)
        if old is not None:
            old.name, new.node.name = new.node.name, old.name  # what was `MatMul` stays `MatMul`
        self.notes[self.fired.total(), node] = f"{rule.name}: {new.node.name}"


@dataclass(frozen=True)
class RulePass:
    """A pass made of rules. `helpers` are passes whose rules run along, unless switched off: what one of these rules
    brings together is theirs to simplify, and no pass should leave work for one before it."""

    rules: Sequence[Rule]
    helpers: tuple[str, ...] = ()

    def __call__(self, graph: Graph, helpers: Sequence[Rule] = (), live: Liveness | None = None) -> PassResult:
        return apply(graph, self.rules, helpers, live)
