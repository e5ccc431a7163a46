"""Private parts of PyTorch: every use is listed, every row is used, and what is listed is there."""

import ast
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import airgraph
from airgraph.torch_internals import LAYOUTS, PYTHON, SYMBOLS, TESTED

ROOT = Path(airgraph.__file__).parent
FILES = [file for file in sorted(ROOT.rglob("*.py")) if file.name != "torch_internals.py"]
ON_CUDA_ONLY = {
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._cuda_endAllocateToPool",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._cuda_isCurrentStreamCapturing",
}


def private(parts: list[str]) -> str | None:
    """`torch._C._x.y` → `torch._C._x`, `torch.utils._pytree.tree_map` → `torch.utils._pytree`; ops are public."""
    if parts[:1] != ["torch"] or parts[1:2] == ["ops"]:
        return None
    at = next((i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), None)
    if at is None or parts[at:] == ["_C"]:
        return None
    return ".".join(parts[: at + 1 + (parts[at] == "_C")])


def chain(node: ast.AST) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def names(text: str) -> Iterator[str | None]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (private(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (private([*str(node.module).split("."), alias.name]) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield private(chain(node))


def used(text: str) -> set[str]:
    return {name for name in names(text) if name is not None}


def test_every_use_is_listed_and_every_row_is_used():
    found = set().union(*(used(file.read_text(encoding="utf-8")) for file in FILES))
    listed = {row.name for row in PYTHON}
    assert found - listed == set(), "not in torch_internals.py"
    assert listed - found == set(), "not used any more"


def test_every_symbol_is_listed_and_used():
    text = "".join(file.read_text(encoding="utf-8") for file in FILES)
    assert set(re.findall(r"\b_Z(?:N|TV|\d)\w{8,}", text)) == {row.name for row in SYMBOLS}
    assert [file for file, _, _ in LAYOUTS if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("name", sorted({row.name for row in PYTHON} - ON_CUDA_ONLY))
def test_it_is_there(name):
    try:
        operator.attrgetter(name.partition(".")[2])(torch)
    except AttributeError:
        __import__(name)


def test_this_version_is_named():
    """The one the suite runs with. Another one is read about in torch_internals.py first."""
    assert ".".join(torch.__version__.split(".")[:2]) in TESTED


def test_the_rule_finds_what_it_forbids():
    text = "import torch\nfrom torch._new import x\ny = torch._C._hidden(1)\nz = torch.ops._c10d.f\n"
    assert used(text) == {"torch._new", "torch._C._hidden"}


def test_layouts_of_objects_are_found():
    """Else tests of what is watched would be skipped, and nobody would notice."""
    from airgraph.engine.native import object_watch

    assert object_watch.layout() is not None
    assert object_watch.is_available() == (sys.version_info < (3, 13)), "dictionaries have version tags up to 3.12"
