"""Every row of docs/torchair.md's table names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parents[1] / "docs" / "torchair.md"


def rows() -> list[list[str]]:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Section by section")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| subject")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].split(":")[0])
def test_a_row_names_tests_that_exist(row: list[str]) -> None:
    subject, here, tests = row
    assert re.search(r"as there|different|other|no effect|ours", here), here
    named = re.findall(r"`([\w./]+)::(\w+)`", tests)
    assert named, subject
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_the_table_is_read() -> None:
    assert len(rows()) > 30
