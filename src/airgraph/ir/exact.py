"""Values as plain data and back: what JSON holds, and what it does not (tuples, NaN, complex numbers, expressions).

    writer = DataWriter()
    data = writer.data((2, sympy.Symbol("s0", integer=True) + 1))     {"tuple": [2, {"expr": ["Add", 1, "s0"]}]}
    DataReader(writer.symbol_table()).value(data)                         the same tuple again

Reading makes values of the kinds listed here and nothing else. Sympy's own reader is not used: it evaluates text as
Python. Numbers stay small while expressions are put together, so that a few bytes cannot ask for a number of gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airgraph.errors import VerifyError
from airgraph.ir.attr import KINDS, Attr
from airgraph.ir.symbols import is_expression
from airgraph.ir.types import dim

if TYPE_CHECKING:
    import sympy


class LazyTable(Mapping[str, Any]):
    """A table that is made when it is first looked at: sympy takes long to import, and sizes that are fixed need none."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self.make = make

    @cached_property
    def table(self) -> Mapping[str, Any]:
        return self.make()

    def __getitem__(self, name: str) -> Any:
        return self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def sympy_functions() -> dict[str, Any]:
    """The functions of sympy that sizes are made of. PyTorch's own (FloorDiv, …) are given by whoever knows PyTorch."""
    import sympy

    names = "Add Mul Pow Max Min Mod floor ceiling Abs Eq Ne Lt Le Gt Ge And Or Not"
    functions = [getattr(sympy, name) for name in names.split()]
    return {f.__name__: f for f in functions}  # (Eq is Equality)


FUNCTIONS = LazyTable(sympy_functions)
POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")  # the second argument makes the number large
PLAIN = (int, str, bool, float, type(None))  # stand for themselves
LARGEST = 2**128
HIGHEST_POWER = 16
DEEPEST = 60  # of an expression; sizes of real models stay below ten
LONGEST = 200  # parts of one
# Tried in this order; most symbols are sizes.
ASSUMPTIONS: tuple[dict[str, bool], ...] = (
    {"integer": True, "positive": True},
    {"integer": True, "nonnegative": True},
    {"integer": True},
    {"real": True},
    {},
)


def function_name(kind: type, more: Mapping[str, Any]) -> str:
    """The name an expression's head is written with; "" for one that is not known. `more` is looked at first: PyTorch has
    a Max of its own."""
    for name, function in more.items():
        if kind is function:
            return name
    return kind.__name__ if FUNCTIONS.get(kind.__name__) is kind else ""


class DataWriter:
    """Values as data. The symbols it meets go into one table, so that equal names are one symbol again."""

    def __init__(self, functions: Mapping[str, Any] | None = None) -> None:
        self.functions = {} if functions is None else functions
        self.symbols: dict[str, sympy.Symbol] = {}

    def data(self, value: Any) -> Any:
        match value:
            case None | bool() | str():
                return value
            case int():
                return int(value)
            case float():
                return float(value) if math.isfinite(value) else {"float": repr(float(value))}
            case complex():
                return {"complex": [self.data(value.real), self.data(value.imag)]}
            case list():
                return [self.data(v) for v in value]
            case tuple():
                return {"tuple": [self.data(v) for v in value]}
            case dict():
                return {"dict": [[self.data(k), self.data(v)] for k, v in value.items()]}
            case Attr():
                return {"attr": [type(value).__name__, self.data(value.value)]}
            case _ if is_expression(value):
                return {"expr": self.tree(value)}
        raise VerifyError(f"{value!r} ({type(value).__name__}) cannot be written down")

    def tree(self, expr: Any) -> Any:
        """ints and bools are themselves, a string is a symbol, a list is a function and its arguments."""
        import sympy

        if expr is sympy.true or expr is sympy.false:
            return bool(expr)
        if expr.is_Symbol:
            if self.symbols.setdefault(expr.name, expr) != expr:
                raise VerifyError(f"two different symbols are called {expr.name}")
            return expr.name
        if expr.is_Integer:
            return int(expr)
        if expr.is_Rational:
            return {"rational": [int(expr.p), int(expr.q)]}
        if expr.is_Float:
            return {"float": repr(float(expr))}
        name = function_name(expr.func, self.functions)
        if not name:
            raise VerifyError(f"the expression {expr} cannot be written down: {expr.func.__name__} is not known")
        return [name, *(self.tree(arg) for arg in expr.args)]

    def symbol_table(self) -> dict[str, dict[str, bool]]:
        """Each symbol with what is assumed of it: only then is it equal to itself when read."""
        return {name: assumptions(symbol) for name, symbol in self.symbols.items()}


def assumptions(symbol: sympy.Symbol) -> dict[str, bool]:
    import sympy

    for few in ASSUMPTIONS:
        if sympy.Symbol(symbol.name, **few) == symbol:
            return few
    return {key: bool(value) for key, value in symbol.assumptions0.items()}


class DataReader:
    """Data as values. Whatever is wrong with it is a VerifyError."""

    def __init__(self, symbols: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.more = {} if functions is None else functions
        self.symbols = {name: self.symbol(name, assumed) for name, assumed in symbols.items()}
        self.made: dict[str, Any] = {}  # expressions, by their data

    @cached_property
    def functions(self) -> dict[str, Callable[..., Any]]:
        return {**FUNCTIONS, **self.more}

    def symbol(self, name: Any, assumed: Any) -> sympy.Symbol:
        import sympy

        if (
            not isinstance(name, str)
            or not name.isidentifier()
            or not isinstance(assumed, dict)
            or not set(assumed.values()) <= {True, False}
        ):
            raise VerifyError(f"the symbol {name!r} is described by {assumed!r}")
        try:
            return sympy.Symbol(name, **assumed)
        except (TypeError, ValueError) as error:
            raise VerifyError(f"the symbol {name!r} is described by {assumed!r}") from error

    def value(self, data: Any, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise VerifyError("a value is nested too deeply")
        if type(data) in PLAIN:
            return data
        match data:
            case list():
                return [d if type(d) in PLAIN else self.value(d, depth + 1) for d in data]
            case {"tuple": list(items)}:
                return tuple(self.value(d, depth + 1) for d in items)
            case {"dict": list(pairs)} if all(isinstance(p, list) and len(p) == 2 for p in pairs):
                return {self.key(k): self.value(v, depth + 1) for k, v in pairs}
            case {"float": "nan" | "inf" | "-inf" as text}:
                return float(text)
            case {"complex": [real, imag]}:
                return complex(self.number(real), self.number(imag))
            case {"attr": [str(kind), content]} if kind in KINDS:
                return self.attr(kind, self.value(content, depth + 1))
            case {"expr": tree}:
                return self.whole_expression(tree)
        raise VerifyError(f"{shown(data)} is not a value")

    def size(self, data: Any) -> Any:
        """A whole number or an expression for one."""
        if type(data) is int and -LARGEST <= data <= LARGEST:
            return data
        value = self.value(data)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or is_size_expression(value)) or abs(value if whole else 0) > LARGEST:
            raise VerifyError(f"{shown(data)} is no size")
        return value

    def known(self, data: Any) -> Any:
        """What is known of a value: a number, an expression, or nested tuples of them. Never text, which sympy reads as
        Python where it expects an expression."""
        return checked_numbers(self.value(data), tuple)

    def key(self, data: Any) -> Any:
        if not isinstance(data, str | int | float | bool | None):
            raise VerifyError(f"{shown(data)} is not a key")
        return data

    def number(self, data: Any) -> float:
        value = self.value(data)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise VerifyError(f"{shown(data)} is not a number")
        return float(value)

    def attr(self, kind: str, content: Any) -> Attr:
        try:
            return KINDS[kind](content)
        except AssertionError as error:
            raise VerifyError(str(error)) from error

    def expression(self, tree: Any, depth: int = 0) -> Any:
        import sympy

        if depth > DEEPEST:
            raise VerifyError("an expression is nested too deeply")
        match tree:
            case bool():
                return sympy.true if tree else sympy.false
            case int():
                return self.small(sympy.Integer(tree))
            case str() if tree in self.symbols:
                return self.symbols[tree]
            case {"rational": [int(p), int(q)]} if q:
                return sympy.Rational(p, q)
            case {"float": str(text)}:
                return self.float_of(text)
            case [str(name), *rest] if name in self.functions and rest:
                return self.applied(name, [self.expression(a, depth + 1) for a in rest])
        raise VerifyError(f"{shown(tree)} is not an expression")

    def whole_expression(self, tree: Any) -> Any:
        """Most are met again and again, and sympy takes long to make one."""
        key = repr(tree)
        if key not in self.made:
            if parts(tree) > LONGEST:
                raise VerifyError("an expression is too long for a size")
            self.made[key] = dim(self.expression(tree))
        return self.made[key]

    def float_of(self, text: str) -> Any:
        import sympy

        try:
            return sympy.Float(float(text))
        except ValueError as error:
            raise VerifyError(f"{shown(text)} is not a number") from error

    def applied(self, name: str, args: list[Any]) -> Any:
        last = args[-1]
        if name.rpartition(".")[2] in POWERS and last.is_number and not abs(last) <= HIGHEST_POWER:
            raise VerifyError(f"{name} by {last} is too large a number for a size")
        try:
            return self.small(self.functions[name](*args))
        except (TypeError, ValueError, ArithmeticError, AttributeError, AssertionError) as error:
            raise VerifyError(f"{name} of {len(args)} arguments cannot be read: {error}") from error

    def small(self, expr: Any) -> Any:
        if getattr(expr, "is_Integer", False) and abs(int(expr)) > LARGEST:
            raise VerifyError("a number is too large for a size")
        return expr


def is_size_expression(value: Any) -> bool:
    """An expression that is a number: not a condition."""
    import sympy

    return isinstance(value, sympy.Expr)


def checked_numbers(value: Any, container: type | tuple[type, ...]) -> Any:
    """`value` if it is numbers and expressions in nested containers of these types, and nothing else."""
    nested: Any = value
    if isinstance(nested, container):
        for part in value:
            checked_numbers(part, container)
    elif value is not None and not (isinstance(value, int | float | complex) or is_expression(value)):
        raise VerifyError(f"{shown(value)} stands where numbers are expected")
    return value


def parts(tree: Any) -> int:
    return 1 + sum(map(parts, tree)) if isinstance(tree, list) else 1


def shown(data: Any) -> str:
    """The beginning of it: a file may hold anything, of any length."""
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
