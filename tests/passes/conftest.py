"""`after(run, BEFORE, AFTER)`: text in, text out, for one pass."""

import pytest

from airgraph.ir.text import HEADER, from_py, to_py
from airgraph.ir.verify import verify


def lines(text: str) -> list[str]:
    return [line for line in text.removeprefix(HEADER).splitlines() if line]


@pytest.fixture
def after():
    """The notes of a pass, once it is sure that it made AFTER of BEFORE (or changed nothing), and does so only once."""

    def check(run, before, expected=None):
        graph = from_py(before)
        result = run(graph)
        verify(graph)
        assert lines(to_py(graph, notes=False)) == lines(before if expected is None else expected)
        assert result.changed == (expected is not None)
        assert not run(graph).changed, "a second run finds nothing"
        return result.notes

    return check
