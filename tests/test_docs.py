"""README and docs: every block of code runs, verbatim; links lead somewhere; generated pages are up to date."""

import json
import re
from pathlib import Path

import forked
import pytest

from airgraph.tools import cli

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]
ALL = [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"]


def blocks(page, *languages):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.S | re.M)
    return [text for language, text in found if language in (languages or ("python", "c"))]


@pytest.fixture(scope="module")
def results():
    """All pages in one process, with the emulation installed, as some of them are about it."""
    done = forked.run(str(ROOT / "tests" / "scripts" / "doc_blocks.py"), *filter(blocks, PAGES), timeout=600)
    lines = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    assert lines, done.stderr
    return {(line["page"], line["number"]): line["problem"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("page, number", [(page, i) for page in PAGES for i in range(len(blocks(page)))])
def test_every_block_runs(results, page, number):
    if results[page, number] == "no C compiler here":
        pytest.skip(results[page, number])
    assert results[page, number] == ""


COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )?(?:python -m )?airgraph (\S.*?)(?:  .*| > .*|)$", re.M)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page):
    for block in blocks(page, ""):
        for command in COMMAND.findall(block):
            assert cli.parser().parse_args(command.split()).run


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_json_is_json(page):
    assert all(json.loads(block) for block in blocks(page, "json"))


@pytest.mark.parametrize("page", ALL)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.S)
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in t]
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


def test_options_are_up_to_date():
    from airgraph.tools.options import render

    assert (ROOT / "docs" / "options.md").read_text("utf-8") == render(), "make options"


def test_the_site_has_every_page(tmp_path):
    done = forked.run(str(ROOT / "docs" / "site.py"), str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    made = {file.name for file in (tmp_path / "site").iterdir()}
    assert {"index.md", "api.md", "changelog.md", *(Path(page).name for page in PAGES[1:])} <= made
    api = (tmp_path / "site" / "api.md").read_text()
    assert "airgraph.compile(model" in api and "`airgraph.release`" in api


def test_the_readme_is_at_most_two_pages():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
