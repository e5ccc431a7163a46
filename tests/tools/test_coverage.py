"""docs/coverage.md says what the registry says."""

from pathlib import Path

import forked
import pytest

from airgraph.tools import coverage

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


@pytest.mark.slow
def test_the_page_is_current():
    """In a process of its own: other tests register converters."""
    made = forked.run("-m", "airgraph.tools.coverage")
    assert made.stdout == PAGE.read_text(), "make coverage"


def test_ge_ops_are_found():
    from airgraph.convert.families.matrices import addmm

    assert {"MatMulV2", "Mul", "Add"} <= coverage.emitted(addmm)
