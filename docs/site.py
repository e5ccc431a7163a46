"""The pages of the documentation site: `python docs/site.py build/docs`, then `mkdocs build`.

Copies README, docs/ and what stands beside them into one folder, with links that are right there, and makes the reference
of the public names from their docstrings.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Where each file of the repository is on the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/cpu.png": "cpu.png",
    "examples/README.md": "examples.md",
    "examples/ascend/README.md": "examples_ascend.md",
    "examples/serve/README.md": "examples_serve.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def stage(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages = {source: page for source, page in PAGES.items() if (ROOT / source).is_file()}
    pages |= {f"docs/{file.name}": file.name for file in (ROOT / "docs").glob("*.md")}
    for source, page in pages.items():
        if page.endswith(".md"):
            (folder / page).write_text(relinked((ROOT / source).read_text("utf-8"), source, pages), "utf-8")
        else:
            shutil.copy(ROOT / source, folder / page)
    (folder / "api.md").write_text(reference(), "utf-8")


def relinked(text: str, source: str, pages: dict[str, str]) -> str:
    """Links to pages of the site lead there; of a link to another file of the repository only the text stays."""

    def link(found: re.Match[str]) -> str:
        image, title, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = (ROOT / source).parent / target
        name = path.resolve().relative_to(ROOT).as_posix()
        name = f"{name}/README.md" if path.is_dir() else name
        return f"{image}[{title}]({pages[name]}{anchor})" if name in pages else title

    return LINK.sub(link, text)


def reference() -> str:
    """Every public name with its signature and docstring."""
    import airgraph

    parts = ["# API reference", "Made from docstrings. The fields of `airgraph.Config` are the [options](options.md)."]
    for name in sorted(airgraph.__all__, key=str.lower):
        item = getattr(airgraph, name)
        shown = "" if inspect.isclass(item) else re.sub(r"'([^']*)'", r"\1", str(inspect.signature(item)))
        parts.append(f"## `airgraph.{name}`\n\n```\nairgraph.{name}{shown}\n```\n\n{inspect.getdoc(item) or ''}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
