"""Sizes: what expressions come to, as sympy says."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod

from airgraph.errors import VerifyError
from airgraph.ir.symbols import evaluate
from airgraph.plan.sizes import Sizes, ceil, choose, less, maximum, minimum, whole

A, B = (sympy.Symbol(n, integer=True, positive=True) for n in "ab")
WHOLE = [
    A,
    3 * A,
    A * B,
    4 * A * B + B,
    A**3 + 7,
    (A + 2) * (B - 1),
    -A + 5,
    FloorDiv(A, 2),
    FloorDiv(1 - A, B),
    CeilDiv(A, B),
    Mod(A * B, 3),
    Max(A, B, 4),
    Min(A - B, 2 * B),
    sympy.Max(A, B),
    64 * FloorDiv(A + 63, 64) * B,
    sympy.Integer(7),
]
OTHER = [A / 2, A * (A + 1) / 2, A**-1 * A**3 / B]


@pytest.mark.parametrize("a, b", [(1, 1), (2, 5), (7, 3), (64, 4), (129, 1)])
def test_values_are_those_of_sympy(a, b):
    sizes = Sizes([A, B])
    terms = [sizes.term(x) for x in (*WHOLE, *OTHER)]
    values = sizes.run({A: a, B: b})
    wanted = [int(evaluate(x, {A: a, B: b})) for x in (*WHOLE, *OTHER)]
    assert [sizes.value(t, values) for t in terms] == wanted
    assert sizes.find(12) == 12 and sizes.find(A * 11) is None


def test_which_expressions_are_done_in_whole_numbers():
    assert all(map(whole, WHOLE)) and not any(map(whole, OTHER))


def test_shared_parts_are_computed_once():
    sizes = Sizes([A, B])
    for x in (3 * A * B, 5 * A * B, A * B, 3 * B * A + 1):
        sizes.term(x)
    assert (
        sizes.text()
        == """\
symbols v0 = a, v1 = b
v2 = v0 * v1
v3 = 3
v4 = v2 * v3
v5 = 5
v6 = v2 * v5
v7 = 1
v8 = v4 + v7"""
    )


def test_a_symbol_without_a_value_is_named():
    with pytest.raises(VerifyError, match=r"no argument tells \{b\}"):
        Sizes([A]).term(A * B)


def test_formulas_take_numbers_and_terms():
    """One definition serves sizes that are known when compiling and those that are not."""

    def rows(m, limit):
        return choose(less(m, 4), 1, maximum(minimum(ceil(m, 8), limit), 2))

    sizes = Sizes([A])
    term = rows(sizes.term(A), 5)
    for a in (1, 3, 4, 17, 33, 400):
        assert sizes.value(term, sizes.run({A: a})) == rows(a, 5)


def test_what_does_not_depend_on_sizes_is_a_number():
    a = Sizes([A]).term(A)
    assert minimum(3, 4) == 3 and choose(less(2, 1), a, 7) == 7
    assert a * 1 is a and a + 0 is a and a * 0 == 0 and maximum(a, a) is a


def test_a_native_function_is_asked():
    sizes, asked = Sizes([A]), []
    term = sizes.ask(lambda dims: asked.append(dims) or sum(dims), 4096, [sizes.term(A), 5, sizes.term(2 * A)])
    assert sizes.value(term, sizes.run({A: 3})) == 14 and asked == [[3, 5, 6]]
    assert sizes.ask(sum, 4096, [1, 2]) == 3
