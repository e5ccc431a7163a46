"""A guard that failed, and what would have avoided the recompilation."""

from __future__ import annotations

import pytest

from airgraph.tools.recompile_advice import advice


@pytest.mark.parametrize(
    "guard, wanted",
    [
        ("tensor 'x' size mismatch at index 0. expected 4, actual 5", "torch._dynamo.mark_dynamic(x, 0)"),
        ("tensor 'x' size mismatch at index 1. expected 4, actual 1", "mark_unbacked(x, 1), or pad it to 2"),
        ("tensor 'x' stride mismatch at index 0. expected 4, actual 8", "x.contiguous() before the call"),
        ("2 <= x.size()[1]", "mark_unbacked(x, 1)"),
        ("x.stride()[0] == 6", "x.contiguous()"),
    ],
)
def test_sizes_and_strides(guard, wanted):
    assert wanted in advice(guard)


def test_other_guards_have_none():
    assert advice("___check_obj_id(self, 12345)") is None
    assert advice("n == 3") is None
