"""Everything in a plan that depends on sizes, as one list of operations on whole numbers.

    4·s0·s1 + s0   →   v3 = v0 * v1, v4 = 4, v5 = v4 * v3, v6 = v5 + v0

Symbols come first among the values; each operation appends one. Equal operations are one, so what several expressions
share is computed once. The list is data: the native engine interprets it (engine/native/binding.py) in a microsecond or
two for each new set of sizes, where replacing symbols in sympy's expressions takes milliseconds. `Sizes.run` is the same
in Python.

Formulas that are no sympy expressions (how many threads share a step, where an intermediate lies) are written as Python
over `Term`s, with `minimum`, `maximum`, `choose` and comparisons as functions that take numbers as well:

    rows = maximum(ceil(m, 8), 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from typing import Any, NamedTuple

from airgraph.errors import VerifyError
from airgraph.ir.symbols import evaluate, is_expression


class SizeOp(IntEnum):
    CONST, ADD, MUL, FLOOR, MOD, MIN, MAX, LESS, EQUAL, CHOOSE, COPY, ASK, SYMPY = range(13)


SIGNS = {SizeOp.ADD: "+", SizeOp.MUL: "*", SizeOp.FLOOR: "//", SizeOp.MOD: "%", SizeOp.LESS: "<", SizeOp.EQUAL: "=="}
COMPUTE: dict[SizeOp, Callable[[int, int], int]] = {
    SizeOp.ADD: lambda a, b: a + b,
    SizeOp.MUL: lambda a, b: a * b,
    SizeOp.FLOOR: lambda a, b: a // b,
    SizeOp.MOD: lambda a, b: a % b,
    SizeOp.MIN: min,
    SizeOp.MAX: max,
    SizeOp.LESS: lambda a, b: int(a < b),
    SizeOp.EQUAL: lambda a, b: int(a == b),
}
# By the name of the function: PyTorch has its own classes of Max, Min and Mod beside sympy's.
WHOLE_FUNCTIONS = {
    "Add": SizeOp.ADD,
    "Mul": SizeOp.MUL,
    "Max": SizeOp.MAX,
    "Min": SizeOp.MIN,
    "Mod": SizeOp.MOD,
    "PythonMod": SizeOp.MOD,
    "FloorDiv": SizeOp.FLOOR,
    "CleanDiv": SizeOp.FLOOR,
}
COMMUTE = frozenset({SizeOp.ADD, SizeOp.MUL, SizeOp.MIN, SizeOp.MAX, SizeOp.EQUAL})


class Operation(NamedTuple):
    """`a`, `b` and `c` are values by number; CONST: a is the number itself; ASK: (question, first value, how many)."""

    op: SizeOp
    a: int = 0
    b: int = 0
    c: int = 0


@dataclass(frozen=True, eq=False)
class Term:
    """A whole number that depends on the sizes: one of the values of `sizes`."""

    sizes: Sizes
    index: int

    def __add__(self, other: Amount) -> Amount:
        return self.sizes.make(SizeOp.ADD, self, other)

    def __sub__(self, other: Amount) -> Amount:
        return self + -1 * other

    def __mul__(self, other: Amount) -> Amount:
        return self.sizes.make(SizeOp.MUL, self, other)

    def __floordiv__(self, other: Amount) -> Amount:
        return self.sizes.make(SizeOp.FLOOR, self, other)

    def __rfloordiv__(self, other: int) -> Amount:
        return self.sizes.make(SizeOp.FLOOR, other, self)

    def __rsub__(self, other: int) -> Amount:
        return -1 * self + other

    __radd__, __rmul__ = __add__, __mul__


Amount = int | Term


def _combine(op: SizeOp, a: Amount, b: Amount) -> Amount:
    if isinstance(a, int) and isinstance(b, int):
        return COMPUTE[op](a, b)
    sizes = a.sizes if isinstance(a, Term) else b.sizes  # type: ignore[union-attr]
    return sizes.make(op, a, b)


def minimum(a: Amount, b: Amount) -> Amount:
    return _combine(SizeOp.MIN, a, b)


def maximum(a: Amount, b: Amount) -> Amount:
    return _combine(SizeOp.MAX, a, b)


def modulo(a: Amount, b: Amount) -> Amount:
    return _combine(SizeOp.MOD, a, b)


def as_int(x: Amount) -> int:
    """Of a term that is known to be a number."""
    assert isinstance(x, int)
    return x


def less(a: Amount, b: Amount) -> Amount:
    """1 if a < b, else 0."""
    return _combine(SizeOp.LESS, a, b)


def equal(a: Amount, b: Amount) -> Amount:
    return _combine(SizeOp.EQUAL, a, b)


def both(a: Amount, b: Amount) -> Amount:
    return _combine(SizeOp.MIN, a, b)


def either(a: Amount, b: Amount) -> Amount:
    return _combine(SizeOp.MAX, a, b)


def choose(condition: Amount, yes: Amount, no: Amount) -> Amount:
    if isinstance(condition, int):
        return yes if condition else no
    return condition.sizes.make(SizeOp.CHOOSE, condition, yes, no)


def ceil(a: Amount, b: Amount) -> Amount:
    """a / b rounded up."""
    return (a + b - 1) // b


class Sizes:
    """The values of a plan: what they are computed from, and how."""

    def __init__(self, symbols: Sequence[Any]) -> None:
        self.symbols = list(symbols)
        self.used: set[Any] = set()  # symbols that something depends on
        self.code: list[Operation] = []
        self.questions: list[tuple[Callable[[Sequence[int]], int], int]] = []  # (in Python, address of the function)
        self.expressions: list[Any] = []  # that only sympy can evaluate
        self._known: dict[Any, Amount] = {s: Term(self, i) for i, s in enumerate(self.symbols)}
        self._made: dict[Operation, Term] = {}
        self._asked: dict[tuple[int, ...], Term] = {}

    @property
    def count(self) -> int:
        return len(self.symbols) + len(self.code)

    # -- from expressions to terms --------------------------------------------------------------------------------------
    def term(self, x: Any) -> Amount:
        """An expression over the symbols; a number is itself."""
        if isinstance(x, int | Term):
            return x
        if not is_expression(x):
            return int(x)
        found = self._known.get(x)
        self.used |= x.free_symbols
        if found is None:
            found = self._known[x] = self._convert(x)
        return found

    def find(self, x: Any) -> Amount | None:
        """As `term`, but None for an expression that is not among the values."""
        return self._known.get(x) if is_expression(x) and not x.is_Integer else int(x)

    def _convert(self, x: Any) -> Amount:
        if x.is_Integer:
            return int(x)
        if not x.free_symbols <= set(self.symbols):
            raise VerifyError(f"{x} has no value: no argument tells {x.free_symbols - set(self.symbols)}")
        if not whole(x):
            self.expressions.append(x)
            return self._append(Operation(SizeOp.SYMPY, len(self.expressions) - 1))
        if x.is_Pow:
            return reduce(lambda a, b: a * b, [self.term(x.base)] * int(x.exp))
        op = WHOLE_FUNCTIONS[x.func.__name__]
        operands = [self.term(a) for a in x.args]
        if op in COMMUTE:  # numbers last: 3·a·b and 5·a·b share a·b
            operands.sort(key=lambda t: isinstance(t, int))
        return reduce(lambda a, b: _combine(op, a, b), operands)

    def make(self, op: SizeOp, *operands: Amount) -> Amount:
        folded = simplified(op, operands)
        if folded is not None:
            return folded
        numbers = [self._number(x) for x in operands]
        if op in COMMUTE:
            numbers.sort()
        return self._append(Operation(op, *numbers))

    def ask(self, function: Callable[[Sequence[int]], int], address: int, operands: Sequence[Amount]) -> Amount:
        """What a native function says about these numbers; `function` asks it from Python."""
        if all(isinstance(x, int) for x in operands):
            return function([x for x in operands if isinstance(x, int)])
        numbers = [self._number(x) for x in operands]
        known = next((i for i, (_, where) in enumerate(self.questions) if where == address), None)
        if known is None:
            known = len(self.questions)
            self.questions.append((function, address))
        key = (known, *numbers)
        if key not in self._asked:
            first = self.count
            for number in numbers:  # side by side, as the function reads them
                self.code.append(Operation(SizeOp.COPY, number))
            self._asked[key] = self._append(Operation(SizeOp.ASK, known, first, len(numbers)))
        return self._asked[key]

    def _number(self, x: Amount) -> int:
        return self._append(Operation(SizeOp.CONST, x)).index if isinstance(x, int) else x.index

    def _append(self, operation: Operation) -> Term:
        found = self._made.get(operation)
        if found is None:
            found = self._made[operation] = Term(self, self.count)
            self.code.append(operation)
        return found

    # -- values -----------------------------------------------------------------------------------------------------------
    def run(self, symbols: Mapping[Any, Any]) -> list[int]:
        """All values for these symbols. (The native engine does the same; what SizeOp.SYMPY says only Python can tell.)"""
        given = [symbols.get(s) for s in self.symbols]
        values = [x if isinstance(x, int) else 0 for x in given]  # (none: nothing here depends on it)
        for op, a, b, c in self.code:
            match op:
                case SizeOp.CONST:
                    values.append(a)
                case SizeOp.CHOOSE:
                    values.append(values[b] if values[a] else values[c])
                case SizeOp.COPY:
                    values.append(values[a])
                case SizeOp.ASK:
                    values.append(self.questions[a][0](values[b : b + c]))
                case SizeOp.SYMPY:
                    values.append(int(evaluate(self.expressions[a], symbols)))
                case _:
                    values.append(COMPUTE[op](values[a], values[b]))
        return values

    def add(self, x: Any) -> None:
        """An expression whose value will be asked for; left to sympy where it has other symbols."""
        if not is_expression(x) or x.free_symbols <= set(self.symbols):
            self.term(x)

    def values(self, symbols: Mapping[Any, Any]) -> Callable[[Any], int]:
        """For engines that compute in Python: a function from expressions (and numbers) to whole numbers."""
        values = self.run(symbols) if all(s in symbols for s in self.symbols) else []

        def value(x: Any) -> int:
            term = self.find(x)
            known = isinstance(term, Term) and term.index < len(values)
            return self.value(term, values) if known or isinstance(term, int) else int(evaluate(x, symbols))

        return value

    def value(self, x: Any, values: Sequence[int]) -> int:
        term = self.term(x)
        return term if isinstance(term, int) else int(values[term.index])

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "symbols " + ", ".join(f"v{i} = {s}" for i, s in enumerate(self.symbols))
        for i, (op, a, b, c) in enumerate(self.code, len(self.symbols)):
            match op:
                case SizeOp.CONST:
                    shown = str(a)
                case SizeOp.CHOOSE:
                    shown = f"v{b} if v{a} else v{c}"
                case SizeOp.COPY:
                    shown = f"v{a}"
                case SizeOp.ASK:
                    shown = f"ask {a} (v{b}...v{b + c - 1})"
                case SizeOp.SYMPY:
                    shown = str(self.expressions[a])
                case SizeOp.MIN | SizeOp.MAX:
                    shown = f"{op.name.lower()}(v{a}, v{b})"
                case _:
                    shown = f"v{a} {SIGNS[op]} v{b}"
            yield f"v{i} = {shown}"


def simplified(op: SizeOp, operands: Sequence[Amount]) -> Amount | None:
    """The result, where it is one of the operands or a number."""
    if op == SizeOp.CHOOSE:
        condition, yes, no = operands
        return choose(condition, yes, no) if isinstance(condition, int) else yes if yes is no else None
    a, b = operands
    if isinstance(a, int) and isinstance(b, int):
        return COMPUTE[op](a, b)
    if isinstance(a, int) and op in COMMUTE:
        a, b = b, a
    if op in (SizeOp.MIN, SizeOp.MAX) and a is b:
        return a
    match op, b:
        case (SizeOp.ADD, 0) | (SizeOp.MUL, 1) | (SizeOp.FLOOR, 1):
            return a
        case SizeOp.MUL, 0:
            return 0
    return None


def whole(x: Any) -> bool:
    """Nothing but whole numbers on the way, so that the operations are exact."""
    if x.is_Symbol or x.is_Integer:
        return True
    if x.is_Pow:
        return bool(x.exp.is_Integer and x.exp > 0) and whole(x.base)
    return x.func.__name__ in WHOLE_FUNCTIONS and all(whole(a) for a in x.args)
