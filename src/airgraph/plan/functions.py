"""The scalar functions that expressions consist of, one row each. A renderer has a table with exactly these names.

    FUNCTIONS["exp"]  →  ScalarFunction(name="exp", arity=1, cost=12, rounding=Rounding.CLOSE, nan=NaN.PROPAGATES)

Reductions are in a table of their own: the function that combines two values, and the value it starts with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from airgraph.ir.types import DataType

BOOL = DataType.DT_BOOL


class Rounding(Enum):
    """How near a result is to the true value."""

    EXACT = "always representable in the type of the operands"
    CORRECT = "rounded once, as IEEE 754 demands"
    CLOSE = "within a few units in the last place"


class NaN(Enum):
    """What happens to NaN among floating-point operands."""

    PROPAGATES = "the result is NaN"
    MOSTLY = "the result is NaN, but pow(1, NaN) and pow(NaN, 0) are 1"
    FALSE = "the result is false"
    TRUE = "the result is true"
    ZERO = "the result is 0"
    CHOSEN = "the result is NaN if the chosen operand is"
    NONE = "operands are integers or bools"


@dataclass(frozen=True)
class ScalarFunction:
    """A function of numbers. `cost` is relative to an addition."""

    name: str
    arity: int
    cost: int
    rounding: Rounding
    nan: NaN
    truth: bool = False  # the result is a bool, whatever the operands are

    def result(self, operands: Sequence[DataType]) -> DataType:
        """The type of the result where none is given: that of the operands (of `select`, the second)."""
        return BOOL if self.truth else operands[1 if self.name == "select" else 0]


def functions(
    names: str, arity: int, cost: int, rounding: Rounding, nan: NaN, truth: bool = False
) -> Iterable[tuple[str, ScalarFunction]]:
    return ((name, ScalarFunction(name, arity, cost, rounding, nan, truth)) for name in names.split())


EXACT, CORRECT, CLOSE = Rounding
FUNCTIONS: dict[str, ScalarFunction] = {
    **dict(functions("copy cast neg abs relu floor ceil trunc round", 1, 1, EXACT, NaN.PROPAGATES)),
    **dict(functions("sign", 1, 1, EXACT, NaN.ZERO)),
    **dict(functions("invert", 1, 1, EXACT, NaN.NONE)),
    **dict(functions("not is_inf", 1, 1, EXACT, NaN.FALSE, truth=True)),
    **dict(functions("is_nan", 1, 1, EXACT, NaN.TRUE, truth=True)),
    **dict(functions("max min", 2, 1, EXACT, NaN.PROPAGATES)),
    **dict(functions("and or xor", 2, 1, EXACT, NaN.NONE)),
    **dict(functions("eq lt le gt ge", 2, 1, EXACT, NaN.FALSE, truth=True)),
    **dict(functions("ne", 2, 1, EXACT, NaN.TRUE, truth=True)),
    **dict(functions("select", 3, 1, EXACT, NaN.CHOSEN)),
    **dict(functions("floor_div remainder", 2, 20, EXACT, NaN.NONE)),
    **dict(functions("add sub mul", 2, 1, CORRECT, NaN.PROPAGATES)),
    **dict(functions("div", 2, 3, CORRECT, NaN.PROPAGATES)),
    **dict(functions("reciprocal", 1, 1, CORRECT, NaN.PROPAGATES)),
    **dict(functions("sqrt", 1, 4, CORRECT, NaN.PROPAGATES)),
    **dict(functions("rsqrt", 1, 5, CLOSE, NaN.PROPAGATES)),
    **dict(functions("exp exp2 expm1 log log1p log2 log10", 1, 12, CLOSE, NaN.PROPAGATES)),
    **dict(functions("tanh sigmoid erf erfc sinh cosh asinh acosh atanh", 1, 12, CLOSE, NaN.PROPAGATES)),
    **dict(functions("sin cos tan asin acos atan", 1, 12, CLOSE, NaN.PROPAGATES)),
    **dict(functions("atan2", 2, 30, CLOSE, NaN.PROPAGATES)),
    **dict(functions("pow", 2, 30, CLOSE, NaN.MOSTLY)),
}


def cost(op: str) -> int:
    """Of one expression, its operands not counted; a load, a constant or an index costs as much as an addition."""
    found = FUNCTIONS.get(op)
    return found.cost if found is not None else 1


# -- reductions -----------------------------------------------------------------------------------------------------
REDUCTIONS = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "and": "and", "or": "or"}  # → what combines two


def identity(reduction: str, dtype: DataType) -> Any:
    """The value a reduction starts with."""
    match reduction:
        case "sum" | "or":
            return 0
        case "prod":
            return 1
        case "and":
            return -1
    least, most = limits(dtype)
    return least if reduction == "max" else most


def limits(dtype: DataType) -> tuple[Any, Any]:
    """The least and the greatest value of a type."""
    if dtype.is_float:
        return float("-inf"), float("inf")
    if dtype == BOOL:
        return False, True
    bits = BITS[dtype]
    return (0, (1 << bits) - 1) if dtype == DataType.DT_UINT8 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


BITS = {DataType.DT_INT8: 8, DataType.DT_UINT8: 8, DataType.DT_INT16: 16, DataType.DT_INT32: 32, DataType.DT_INT64: 64}
