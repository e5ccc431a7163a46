"""Padding: functions of single elements, and indices that are values.

Here the numbers in added parts are followed: what -inf, 0 and False become on their way to a softmax or a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import sympy

from airgraph.analysis.padding.facts import INFINITY, Fact, Facts, Number, PaddingView, aligned, numel_of, rule
from airgraph.ir.ops import elementwise as ops
from airgraph.ir.types import Dim


def combined(view: PaddingView, facts: Sequence[Fact], compute: Callable[[list[Number | None]], Number | None]) -> Fact:
    """The result of an elementwise op: what it makes of the added parts, if that is known."""
    axes = aligned(view, facts)
    pad = {}
    for axis, factors in enumerate(axes):
        if view.carries(factors):
            at = [(f, axis - len(axes) + f.rank) for f in facts]
            number = compute([f.padded(a) if a >= 0 and f.axes[a] else f.fill for f, a in at])
            if number is not None:
                pad[axis] = number
    return Fact(axes, pad, fill=compute([f.fill for f in facts]))


def unknown(numbers: list[Number | None]) -> Number | None:
    return None


def both(function: Callable[..., Number]) -> Callable[[list[Number | None]], Number | None]:
    def compute(numbers: list[Number | None]) -> Number | None:
        return None if any(n is None for n in numbers) else function(*numbers)

    return compute


def added(numbers: list[Number | None]) -> Number | None:
    """-inf + anything is -inf: scores are finite."""
    return -INFINITY if -INFINITY in numbers else both(lambda a, b: a + b)(numbers)


def multiplied(numbers: list[Number | None]) -> Number | None:
    return 0 if any(n is not None and n == 0 for n in numbers) else both(lambda a, b: a * b)(numbers)


def all_of(numbers: list[Number | None]) -> Number | None:
    return False if any(n is not None and not n for n in numbers) else both(lambda a, b: bool(a and b))(numbers)


def any_of(numbers: list[Number | None]) -> Number | None:
    return True if any(n is not None and n for n in numbers) else both(lambda a, b: bool(a or b))(numbers)


def selected(numbers: list[Number | None]) -> Number | None:
    condition, then, other = numbers
    return None if condition is None else (then if condition else other)


def mask_filled(numbers: list[Number | None]) -> Number | None:
    x, mask, value = numbers
    return None if mask is None else (value if mask else x)


# What an op makes of known numbers; `None` is an unknown one.
NUMBERS: dict[str, Callable[[list[Number | None]], Number | None]] = {
    "Add": added,
    "Mul": multiplied,
    "Sub": both(lambda a, b: a - b),
    "Neg": both(lambda a: -a),
    "Exp": both(lambda a: math.exp(a) if a < 700 else INFINITY),
    "LogicalNot": both(lambda a: not a),
    "LogicalAnd": all_of,
    "LogicalOr": any_of,
    "Equal": both(lambda a, b: a == b),
    "NotEqual": both(lambda a, b: a != b),
    "Less": both(lambda a, b: a < b),
    "LessEqual": both(lambda a, b: a <= b),
    "Greater": both(lambda a, b: a > b),
    "GreaterEqual": both(lambda a, b: a >= b),
    "SelectV2": selected,
    "MaskedFill": mask_filled,
}
OTHERS = """Axpy AxpyV2 Sxpy Log Round LogicalXor IsInf IsNan Addcmul Addcdiv ClipByValueV2 Muls Zeta LeftShift RightShift
    Logit NanToNum Lerp"""
NAMES = (ops.UNARY, ops.BINARY, ops.COMPARE, ops.SPECIAL_UNARY, ops.SPECIAL_BINARY, OTHERS)


@rule(*" ".join(NAMES).split(), *NUMBERS)
def each_element(view: PaddingView) -> Facts:
    facts = [view.walk.of(v) for v in view.node.values()]
    fact = combined(view, facts, NUMBERS.get(view.node.op, unknown))
    if view.node.op in COMPARED:
        fact = replace(fact, pad={**compared_places(view, facts, fact), **fact.pad})
    if view.node.op in ("Add", "Sub"):
        fact = replace(fact, place=moved_place(view, facts))
    return [fact]


# -- indices as values: how causal masks are made -------------------------------------------------------------------
COMPARED = {"Less": True, "LessEqual": True, "Greater": False, "GreaterEqual": False, "Equal": False}


def moved_place(view: PaddingView, facts: Sequence[Fact]) -> tuple[int, Dim] | None:
    """Index + number, where the number is the same for all."""
    first, second = facts
    numbers = [f.fill if v.known is None else v.known for f, v in zip(facts, view.node.values())]
    rank = max(f.rank for f in facts)
    sign = 1 if view.node.op == "Add" else -1
    if first.place and numbers[1] is not None and not isinstance(numbers[1], tuple) and second.rank <= first.rank:
        return first.place[0] + rank - first.rank, first.place[1] + sign * numbers[1]
    if second.place and sign > 0 and numbers[0] is not None and not isinstance(numbers[0], tuple):
        return second.place[0] + rank - second.rank, second.place[1] + numbers[0]
    return None


def compared_places(view: PaddingView, facts: Sequence[Fact], result: Fact) -> dict[int, Number]:
    """`j <= i` is False in the added part of j as long as i is a true row: i < size_i and size_j <= j."""
    first, second = facts
    if first.place is None or second.place is None:
        return {}
    (a, b), (m, n) = ((f.place[0] + result.rank - f.rank, f.place[1]) for f in facts if f.place)
    if a == m:
        return {}
    ends = numel_of(result.axes[a]) + b, numel_of(result.axes[m]) + n
    grows = COMPARED[view.node.op]
    found: dict[int, Number] = {}
    if view.carries(result.axes[m]) and sympy.sympify(ends[1] - ends[0]).is_nonnegative:
        found[m] = grows  # there the second is larger
    if view.carries(result.axes[a]) and sympy.sympify(ends[0] - ends[1]).is_nonnegative:
        found[a] = not grows if view.node.op != "Equal" else False
    return found
