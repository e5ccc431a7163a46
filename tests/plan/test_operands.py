"""Strided views of memory: which reshapes need no copy."""

from __future__ import annotations

import pytest
import sympy

from airgraph.plan.operands import reshaped_strides

N = sympy.Symbol("n", integer=True, positive=True)


@pytest.mark.parametrize(
    ("shape", "strides", "new", "wanted"),
    [
        ((2, 3, 4), (12, 4, 1), (6, 4), (4, 1)),
        ((2, 3, 4), (12, 4, 1), (24,), (1,)),
        ((24,), (2,), (2, 3, 4), (24, 8, 2)),
        ((2, 16, 4, 8), (512, 32, 8, 1), (32, 32), (32, 1)),  # attention's result: heads beside each other
        ((2, 4, 16, 8), (512, 8, 32, 1), (32, 32), None),  # the same before its axes are exchanged
        ((2, 3, 4), (12, 1, 3), (6, 4), None),
        ((2, 6), (6, 1), (4, 3), (3, 1)),
        ((2, 6), (12, 1), (4, 3), None),  # would begin in a gap
        ((2, 1, 6), (6, 99, 1), (2, 6, 1), (6, 1, 1)),
        ((N, 16, 4, 8), (512, 32, 8, 1), (16 * N, 32), (32, 1)),
        ((2, N, 8), (8 * N, 8, 1), (2 * N, 8), (8, 1)),
    ],
)
def test_reshaped_strides(shape, strides, new, wanted) -> None:
    assert reshaped_strides(shape, strides, new) == wanted
