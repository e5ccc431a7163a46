"""Padding: ops that work element by element, indices that are values, and what is made anew.

Here the numbers in added parts are followed: what -inf, 0 and False become on their way to a softmax or a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import sympy

from airgraph.analysis.padding.facts import (
    INFINITY,
    Fact,
    Facts,
    Number,
    PaddingView,
    UnsupportedPadding,
    aligned,
    has,
    numel_of,
    plain,
    rule,
)
from airgraph.ir.ops import elementwise, special
from airgraph.ir.types import DataType, Dim


# -- elementwise ----------------------------------------------------------------------------------------------------
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
OTHERS = """Axpy AxpyV2 Sxpy Log Round LogicalXor IsInf IsNan Addcmul Addcdiv ClipByValueV2 Muls Swish Gelu LeakyRelu
    Elu CeluV2 HardSwish HardSigmoid Mish SoftplusV2 ThresholdV2 Zeta LeftShift RightShift Logit NanToNum Lerp Complex
    Real Imag Bitcast"""
ELEMENTWISE = (
    frozenset(
        " ".join(
            [elementwise.UNARY, elementwise.BINARY, elementwise.COMPARE, special.UNARY, special.BINARY, OTHERS]
        ).split()
    )
    | NUMBERS.keys()
)


@rule(*ELEMENTWISE)
def each_element(view: PaddingView) -> Facts:
    facts = [view.walk.of(v) for v in view.node.values()]
    fact = combined(view, facts, NUMBERS.get(view.node.op, unknown))
    if view.node.op in COMPARED:
        fact = replace(fact, pad={**compared_places(view, facts, fact), **fact.pad})
    if view.node.op in ("Add", "Sub"):
        fact = replace(fact, place=moved_place(view, facts))
    return [fact]


@rule("Identity", "TensorMove", "Cast")
def same(view: PaddingView) -> Facts:
    fact = view.fact("x")
    if view.node.op != "Cast":
        return [fact]
    convert = number_as(DataType(view.attr("dst_type")))
    pad = {axis: convert(n) for axis, n in fact.pad.items()}
    place = fact.place if view.node.output.dtype in EXACT else None
    return [Fact(fact.axes, pad, place, None if fact.fill is None else convert(fact.fill))]


# Types that hold an index as it is.
EXACT = (DataType.DT_INT32, DataType.DT_INT64, DataType.DT_FLOAT, DataType.DT_DOUBLE)


def number_as(dtype: DataType) -> Callable[[Number], Number]:
    if dtype == DataType.DT_BOOL:
        return bool
    return (lambda n: int(n) if math.isfinite(n) else n) if dtype.is_int else float


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


@rule("Range")
def counted(view: PaddingView) -> Facts:
    start, delta = view.numbers("start"), view.numbers("delta")
    if has((start, delta), view.symbol):
        raise UnsupportedPadding(f"begins or steps by a number computed from {view.symbol}")
    axes = plain(view.node.output.type.shape)
    if any(map(view.carries, axes)):
        view.keep_order()
    return [Fact(axes, place=(0, start) if delta == 1 and start is not None else None)]


@rule("Tril", "Triu")
def triangle(view: PaddingView) -> Facts:
    """Element (i, j) stays if j <= i + diagonal (Tril) or j >= i + diagonal (Triu), else it is 0."""
    fact, diagonal = view.fact("x"), view.attr("diagonal")
    i, j = fact.rank - 2, fact.rank - 1
    if not view.carrying(fact):
        return [replace(fact, fill=None)]
    if {i, j} & set(view.carrying(fact)):
        view.keep_order()
    pad = {axis: n for axis, n in fact.pad.items() if n == 0}  # what is cut away is 0
    # In the added part of j, with i a true row, j - i is 1 + size_j - size_i at least.
    least = 1 + numel_of(fact.axes[j]) - numel_of(fact.axes[i]) - diagonal
    if view.carries(fact.axes[j]):
        cut_away = view.node.op == "Tril" and sympy.sympify(least - 1).is_nonnegative  # j > i + diagonal
        stays = view.node.op == "Triu" and sympy.sympify(least).is_nonnegative  # j >= i + diagonal
        number = 0 if cut_away else fact.padded(j) if stays else None
        if number is not None:
            pad[j] = number
    return [Fact(fact.axes, pad)]


# -- creation -------------------------------------------------------------------------------------------------------
@rule("Fill")
def fill(view: PaddingView) -> Facts:
    return [Fact(plain(view.node.output.type.shape), fill=view.fact("value").fill)]


@rule("Empty")
def empty(view: PaddingView) -> Facts:
    return [Fact(plain(view.node.output.type.shape), fill=0)]


@rule("ZerosLike", "OnesLike")
def filled_like(view: PaddingView) -> Facts:
    return [Fact(view.fact("x").axes, fill=0 if view.node.op == "ZerosLike" else 1)]


@rule("Assign")
def assign(view: PaddingView) -> Facts:
    raise UnsupportedPadding(f"writes to an argument that has {view.symbol}")


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
