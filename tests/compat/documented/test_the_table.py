"""Every row of the tables by subject and by page names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parents[1] / "docs"


def rows(document: str, section: str, head: str) -> list[list[str]]:
    text = (DOCS / document).read_text(encoding="utf-8").partition(section)[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(f"| {head}")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


SUBJECTS = rows("torchair.md", "## Section by section", "subject")
PAGES = rows("torchair_pages.md", "# TorchAir's documentation", "page")


@pytest.mark.parametrize("row", SUBJECTS + PAGES, ids=lambda row: row[0].split(":")[0].split(",")[0])
def test_a_row_names_tests_that_exist(row: list[str]) -> None:
    subject, here, tests = row
    assert re.search(r"as there|different|other|no effect|ours|the chip's", here), here
    named = re.findall(r"`([\w./]+)::(\w+)`", tests)
    assert named, subject
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_the_tables_are_read() -> None:
    assert len(SUBJECTS) > 30 and len(PAGES) > 60
