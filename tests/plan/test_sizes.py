"""Sizes: what expressions come to, as sympy says."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod

from airgraph.errors import VerifyError
from airgraph.ir.symbols import evaluate
from airgraph.plan.sizes import Sizes, whole

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
    for x in (*WHOLE, *OTHER):
        sizes.add(x)
    value = sizes.values({A: a, B: b})
    assert [value(x) for x in (*WHOLE, *OTHER)] == [int(evaluate(x, {A: a, B: b})) for x in (*WHOLE, *OTHER)]
    assert (value(12), value(A * 11)) == (12, a * 11)  # a number, and an expression nobody announced


def test_which_expressions_are_done_in_whole_numbers():
    assert all(map(whole, WHOLE)) and not any(map(whole, OTHER))


def test_shared_parts_are_computed_once():
    sizes = Sizes([A, B])
    for x in (3 * A * B, 5 * A * B, A * B):
        sizes.add(x)
    assert len(sizes.operations) == 3


def test_a_symbol_without_a_value_is_named():
    sizes = Sizes([A, B])
    sizes.add(A * B)
    with pytest.raises(VerifyError, match="b is not known"):
        sizes.values({A: 2})(A * B)
