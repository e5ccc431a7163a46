"""The short version of `make soak`: mixed calls for some seconds, and memory stays flat."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak import ACTIONS, ALLOWED, soak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory from /proc")
def test_mixed_calls_leave_memory_flat():
    counts, growth = soak(8, say=lambda line: None)
    assert set(counts) == set(ACTIONS), "every action ran"
    assert growth < ALLOWED, f"{growth / 1e6:.1f} MB more after {sum(counts.values())} actions: {dict(counts)}"
