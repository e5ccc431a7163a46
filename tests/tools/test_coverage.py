"""docs/coverage.md says what the registry says."""

import subprocess
import sys
from pathlib import Path

import pytest

from airgraph.tools import coverage

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


@pytest.mark.slow
def test_the_page_is_current():
    """In a process of its own: other tests register converters."""
    made = subprocess.run(
        [sys.executable, "-m", "airgraph.tools.coverage"], capture_output=True, text=True, timeout=120
    )
    assert made.stdout == PAGE.read_text(), "make coverage"


def test_ge_ops_are_found():
    from airgraph.convert.families.matrices import addmm

    assert {"MatMulV2", "Mul", "Add"} <= coverage.emitted(addmm)
