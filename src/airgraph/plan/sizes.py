"""The symbolic expressions of a plan, as a list of operations on whole numbers.

    4·s0·s1 + s0   →   v2 = v0·v1, v3 = 4·v2, v4 = v3 + v0

A part that several expressions share is computed once. Whole-number arithmetic takes microseconds where replacing symbols
in sympy's expressions takes milliseconds, and a new set of sizes has to be cheap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy

from airgraph.ir.symbols import evaluate

# By the name of the function: PyTorch has its own classes of Max, Min and Mod beside sympy's.
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
}
Operation = Callable[[Sequence[int]], Any]


class Sizes:
    """Expressions of a plan, and what they come to for one set of symbols after another."""

    def __init__(self, symbols: Sequence[Any]) -> None:
        self.symbols = list(symbols)
        self.index: dict[Any, int] = {s: i for i, s in enumerate(self.symbols)}  # expression → which of the values
        self.operations: list[Operation] = []  # each makes the next value from those before

    def add(self, x: Any) -> None:
        """An expression whose value will be asked for; it may also be a number."""
        if isinstance(x, sympy.Basic) and x not in self.index and x.free_symbols <= set(self.symbols):
            if whole(x):
                self.place(x)
            else:
                self.append(x, lambda v: evaluate(x, dict(zip(self.symbols, v))))

    def place(self, x: Any) -> int:
        if x not in self.index:
            self.append(x, self.operation(x))
        return self.index[x]

    def operation(self, x: Any) -> Operation:
        if x.is_Integer:
            number = int(x)
            return lambda _: number
        do = OPERATIONS[x.func.__name__]
        if (x.is_Mul or x.is_Add) and x.args[0].is_Integer:  # sympy has the number in front
            number, rest = int(x.args[0]), self.place(x.func(*x.args[1:]))
            return lambda v: do(number, v[rest])
        first, *others = (self.place(a) for a in x.args)
        if len(others) == 1:
            (second,) = others
            return lambda v: do(v[first], v[second])
        return lambda v: reduce(do, [v[i] for i in others], v[first])

    def append(self, x: Any, operation: Operation) -> None:
        self.index[x] = len(self.index)
        self.operations.append(operation)

    def values(self, symbols: Mapping[Any, Any]) -> Callable[[Any], int]:
        """For these symbols: a function from expressions (and numbers) to whole numbers."""
        numbers: list[Any] = []
        if all(s in symbols for s in self.symbols):
            numbers = [symbols[s] for s in self.symbols]
            for operation in self.operations:
                numbers.append(operation(numbers))

        def value(x: Any) -> int:
            if not isinstance(x, sympy.Basic):
                return int(x)
            at = self.index.get(x)
            return int(numbers[at] if at is not None and numbers else evaluate(x, symbols))

        return value


def whole(x: Any) -> bool:
    """Nothing but whole numbers on the way, so that `OPERATIONS` are exact."""
    if x.is_Symbol or x.is_Integer:
        return True
    if x.func.__name__ not in OPERATIONS or (x.is_Pow and not (x.exp.is_Integer and x.exp >= 0)):
        return False
    return all(whole(a) for a in x.args)
