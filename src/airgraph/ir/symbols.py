"""Values of symbolic expressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from airgraph.errors import VerifyError


def evaluate(expr: Any, symbols: Mapping[Any, Any]) -> Any:
    """An expression, or nested tuples of them, with the symbols replaced by their values."""
    if isinstance(expr, tuple | list):
        return tuple(evaluate(e, symbols) for e in expr)
    if not isinstance(expr, sympy.Basic):
        return expr
    if expr in symbols:
        return symbols[expr]
    result = expr.xreplace({s: sympy.sympify(symbols[s]) for s in expr.free_symbols if s in symbols})
    if result.is_Integer:
        return int(result)
    if result.is_Boolean and result in (sympy.true, sympy.false):
        return bool(result)
    if result.is_Number:
        return float(result)
    missing = ", ".join(sorted(map(str, result.free_symbols)))
    raise VerifyError(f"{expr} has no value: {missing} is not known")
