"""Values of symbolic expressions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from airgraph.errors import VerifyError


def is_expression(value: Any) -> bool:
    """Whether it is one of sympy's. Found out without sympy, which takes long to import and which a program of fixed sizes
    does without; and by its class, since an expression would look for all its symbols."""
    return hasattr(type(value), "free_symbols")


def symbols_in(things: Iterable[Any]) -> set[Any]:
    """The symbols of expressions, which may be in nested lists and tuples; whatever else is there has none."""
    found: set[Any] = set()
    for thing in things:
        found |= symbols_in(thing) if isinstance(thing, list | tuple) else getattr(thing, "free_symbols", set())
    return found


def evaluate(expr: Any, symbols: Mapping[Any, Any]) -> Any:
    """An expression, or nested tuples of them, with the symbols replaced by their values."""
    if isinstance(expr, tuple | list):
        return tuple(evaluate(e, symbols) for e in expr)
    if not is_expression(expr):
        return expr
    if expr in symbols:
        return symbols[expr]
    import sympy

    values = {s: sympy.sympify(symbols[s]) for s in expr.free_symbols if s in symbols}
    try:
        result = expr.xreplace(values)
    except (ArithmeticError, AssertionError) as error:  # PyTorch's functions: a divisor of 0, a negative remainder
        shown = ", ".join(f"{s} = {v}" for s, v in values.items())
        raise VerifyError(f"{expr} has no value with {shown}") from error
    if result.is_Integer:
        return int(result)
    if result.is_Boolean and result in (sympy.true, sympy.false):
        return bool(result)
    if result.is_Number:
        return float(result)
    missing = ", ".join(sorted(map(str, result.free_symbols)))
    raise VerifyError(f"{expr} has no value: {missing} is not known")
