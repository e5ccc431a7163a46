"""Where an element lies, as a sum over loop variables.

    Affine(const, {v: coefficient})          const + Σ coefficient·v,  0 ≤ v < v.size

Shapes are ints or sympy expressions, and so are constants and coefficients. Everything that only moves elements (a
transpose, a slice, a broadcast, a reshape) is arithmetic on these sums, so it costs nothing when it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from airgraph.errors import Unsupported
from airgraph.ir.types import Dim, dim, numel

KEPT = 4096  # expressions of which is remembered what they are: a plan asks again and again
_ids = itertools.count()


class UnsupportedPlan(Unsupported):
    """This cannot be one kernel; the text says why."""


@dataclass(frozen=True, eq=False)
class Var:
    """One loop. Compared by identity."""

    size: Dim
    id: int = field(default_factory=lambda: next(_ids))

    def __repr__(self) -> str:
        return f"v{self.id}<{self.size}>"


class SplitVar(Exception):
    """A reshape cuts through this loop: it has to be two, of these sizes."""

    def __init__(self, var: Var, sizes: tuple[Dim, ...]) -> None:
        super().__init__(var, sizes)
        self.var, self.sizes = var, sizes


class CutVar(Exception):
    """Elements come from different places below and above `at`: this loop has to run in parts."""

    def __init__(self, var: Var, at: Dim) -> None:
        super().__init__(var, at)
        self.var, self.at = var, at


@dataclass(frozen=True)
class Affine:
    """An index: const + Σ coefficient · loop variable."""

    const: Dim = 0
    terms: tuple[tuple[Var, Dim], ...] = ()

    @classmethod
    def make(cls, const: Dim, terms: Mapping[Var, Dim]) -> Affine:
        kept = [(v, c) for v, c in terms.items() if not same(c, 0) and not same(v.size, 1)]
        return cls(dim(const), tuple(sorted(kept, key=lambda t: t[0].id)))

    @classmethod
    def of(cls, var: Var) -> Affine:
        return cls.make(0, {var: 1})

    def __add__(self, other: Affine | Dim) -> Affine:
        if not isinstance(other, Affine):
            return Affine(dim(self.const + other), self.terms)
        if not other.terms:
            return Affine(dim(self.const + other.const), self.terms)
        terms = dict(self.terms)
        for v, c in other.terms:
            terms[v] = terms.get(v, 0) + c
        return Affine.make(self.const + other.const, {v: expand(c) for v, c in terms.items()})

    def __mul__(self, factor: Dim) -> Affine:
        if same(factor, 1):
            return self
        return Affine.make(expand(self.const * factor), {v: expand(c * factor) for v, c in self.terms})

    def coefficient(self, var: Var) -> Dim:
        return next((c for v, c in self.terms if v is var), 0)

    def vars(self) -> set[Var]:
        return {v for v, _ in self.terms}

    def substitute(self, table: Mapping[Var, Affine]) -> Affine:
        result = Affine(self.const, tuple((v, c) for v, c in self.terms if v not in table))
        for v, c in self.terms:
            if v in table:
                result = result + table[v] * c
        return result


ZERO = Affine()


def expand(x: Dim) -> Dim:
    return x if isinstance(x, int) else expanded(x)


@lru_cache(KEPT, typed=True)
def expanded(x: Dim) -> Dim:
    import sympy  # takes long, and a plan of fixed sizes needs none

    return dim(sympy.expand(x))


def same(a: Any, b: Any) -> bool:
    """Equal for every value of the symbols, as far as expanding shows."""
    return a == b if isinstance(a, int) and isinstance(b, int) else equal(a, b)


@lru_cache(KEPT, typed=True)
def equal(a: Any, b: Any) -> bool:
    return bool(a == b or expand(a - b) == 0)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))


def backwards(step: Dim) -> bool:
    """Whether elements are read in the opposite order. Sizes are not negative, so for one number times some of them the
    number tells; a sum of which nothing is known might be so."""
    if isinstance(step, int):
        return step < 0
    return not step.is_nonnegative and (step.is_Add or step.could_extract_minus_sign())


def volume(sizes: Sequence[Dim]) -> Dim:
    """Their product, expanded."""
    return known_volume(tuple(sizes))


@lru_cache(KEPT)
def known_volume(sizes: tuple[Dim, ...]) -> Dim:
    return expand(numel(sizes))


def strides_of(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Of a contiguous tensor, in elements."""
    return known_strides(tuple(shape))


@lru_cache(KEPT)
def known_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    strides: list[Dim] = []
    step: Dim = 1
    for size in reversed(shape):
        strides.append(step)
        step = expand(step * size)
    return tuple(reversed(strides))


def linear(index: Sequence[Affine], strides: Sequence[Dim], offset: Dim = 0) -> Affine:
    total = Affine(dim(offset))
    for e, stride in zip(index, strides):
        total = total + e * stride
    return total


# -- reshapes -------------------------------------------------------------------------------------------------------
def reshape_index(index: Sequence[Affine], old: Sequence[Dim], new: Sequence[Dim]) -> list[Affine]:
    """The same element of the same memory, seen as another shape: an index of `old` becomes one of `new`."""
    if any(same(s, 0) for s in (*old, *new)):
        return [ZERO] * len(new)
    result: list[Affine] = []
    for olds, news in matching(old, new):
        e = linear([index[i] for i in olds], strides_of([old[i] for i in olds]))
        result += unravel(e, [new[i] for i in news])
    return result


def matching(old: Sequence[Dim], new: Sequence[Dim]) -> list[tuple[list[int], list[int]]]:
    """The dimensions of both shapes in groups of equal products, as small as can be."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = old[i] if left else 1, new[j] if right else 1
        i, j = i + len(left), j + len(right)
        while not same(a, b):
            grow_left = divides(a, b) if i < len(old) and j < len(new) else i < len(old)
            if grow_left and i < len(old):
                left.append(i)
                a = expand(a * old[i])
                i += 1
            elif j < len(new):
                right.append(j)
                b = expand(b * new[j])
                j += 1
            else:
                raise UnsupportedPlan(f"cannot match shapes {list(old)} and {list(new)}")
        groups.append((left, right))
    return groups


def divides(a: Dim, b: Dim) -> bool:
    """a is the smaller product of the two: it is the one that must take in more."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    q = quotient(b, a)
    return q is not None


def quotient(a: Dim, b: Dim) -> Dim | None:
    """a / b where that is a whole number for all sizes, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if same(b, 1):
        return a
    import sympy

    q = sympy.cancel(sympy.sympify(a) / b)
    return dim(q) if sympy.denom(q) == 1 else None


def unravel(e: Affine, sizes: Sequence[Dim]) -> list[Affine]:
    """One number as an index of `sizes`; the leading index takes whatever is left."""
    if len(sizes) == 1:
        return [e]
    result: list[Affine] = []
    if not sizes:
        return result
    for stride in strides_of(sizes)[:-1]:
        high, low = divide(e, stride, sizes)
        result.append(high)
        e = low
    return [*result, e]


def divide(e: Affine, by: Dim, sizes: Sequence[Dim]) -> tuple[Affine, Affine]:
    """(e // by, e % by). Refused where it is no sum over loops; a loop that straddles is to be split."""
    if same(by, 1):
        return e, ZERO
    high: dict[Var, Dim] = {}
    low: dict[Var, Dim] = {}
    for v, c in e.terms:
        q = quotient(c, by)
        if q is not None:
            high[v] = q
        else:
            low[v] = c
    const_high = quotient(e.const, by)
    const_low: Dim = 0
    if const_high is None:
        if not isinstance(e.const, int) or not isinstance(by, int):
            raise UnsupportedPlan(f"{e.const} does not divide by {by}")
        const_high, const_low = divmod(e.const, by)
    rest = Affine.make(const_low, low)
    if not fits(rest, by):
        for v, c in low.items():
            inner = quotient(by, -c if backwards(c) else c)  # v·c crosses a multiple of `by`: v = v1·inner + v2
            outer = quotient(v.size, inner) if inner is not None else None
            if inner is not None and outer is not None and not same(outer, 1):
                raise SplitVar(v, (outer, inner))
        raise UnsupportedPlan(f"an index over {list(sizes)} is no sum over loops")
    return Affine.make(const_high, high), rest


def fits(e: Affine, below: Dim) -> bool:
    """0 ≤ e < below for all values of the loops."""
    if not e.terms:
        return isinstance(e.const, int) and (not isinstance(below, int) or e.const < below) and e.const >= 0
    if all(isinstance(x, int) for x in (below, e.const, *(y for v, c in e.terms for y in (c, v.size)))):
        ends = [c * max(v.size - 1, 0) for v, c in e.terms]
        return e.const + sum(x for x in ends if x < 0) >= 0 and e.const + sum(x for x in ends if x > 0) < below
    if e.const != 0 or any(backwards(c) for _, c in e.terms):
        return False
    # Symbolic: a chain, each coefficient a multiple of what the inner ones span.
    terms = list(e.terms)
    span: Dim = 1
    while terms:
        found = next(
            (
                t
                for t in terms
                if quotient(t[1], span) is not None and all(quotient(other[1], t[1]) is not None for other in terms)
            ),
            None,
        )
        if found is None:
            return False
        terms.remove(found)
        span = expand(found[1] * found[0].size)
    return quotient(below, span) is not None


def vars_for(shape: Sequence[Dim]) -> list[Var]:
    return [Var(size) for size in shape]


def count(shape: Sequence[Dim]) -> Dim:
    return expand(numel(shape))
