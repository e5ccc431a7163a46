"""Imports go one way, and the graph layers need no torch.

compat, tools → building, named_models, torch_backend → artifacts → api → deploy → pipeline → compilation → store → capture, runtime → engine → plan → analysis, passes, convert → aten_call, torch_types → ir → config, errors, journal
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import airgraph

ROOT = Path(airgraph.__file__).parent
# What stands further down is imported by what stands above, never the other way round; one row's layers do not know
# each other. The last three are small enough to have an order of their own.
ORDER = [
    {"__main__"},
    {"__init__"},
    {"compat", "tools"},
    {"building", "named_models", "torch_backend"},
    {"artifacts"},
    {"api"},
    {"deploy"},
    {"pipeline"},
    {"compilation"},
    {"store"},
    {"capture", "runtime"},
    {"engine"},
    {"plan"},
    {"analysis", "passes", "convert"},
    {"aten_call", "torch_types"},
    {"ir"},
    {"journal"},
    {"disk_cache", "source_hash"},
    {"gears"},
    {"collector", "config", "locks"},
    {"errors"},
    {"torch_internals"},
]
LEVEL = {layer: level for level, layers in enumerate(ORDER) for layer in layers}
# Seen and agreed to, with the reason.
AGREED = {
    ("tools/run.py", "compat"): "`airgraph run script.py` is the command that installs the emulation",
    ("tools/children/sitecustomize.py", "compat"): "processes that such a script starts have it, too",
    ("tools/doctor.py", "compat"): "`airgraph doctor` says what the emulation has",
}
FILES = sorted(ROOT.rglob("*.py"))
TORCH_FREE = ("ir", "gears", "analysis", "passes", "plan", "config", "errors", "journal", "disk_cache", "source_hash")


def layer_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, wherever it stands."""
    return list(found_imports(file))


def found_imports(file: Path) -> Iterator[tuple[int, str]]:
    package = ["airgraph", *file.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}" if module == "airgraph" else module


def wrong_way(file: Path) -> Iterator[str]:
    here = layer_of(file)
    for line, module in imports(file):
        first, *rest = module.split(".")
        there = (rest or ["a public name"])[0]
        if first == "airgraph" and there != here:
            there = there if there in LEVEL else "api"
            name = file.relative_to(ROOT).as_posix()
            if LEVEL[there] <= LEVEL[here] and (name, there) not in AGREED:
                yield f"{name}:{line} ({here}) imports {module} ({there})"


def test_every_layer_has_its_place():
    assert {layer_of(file) for file in FILES} == LEVEL.keys()


@pytest.mark.parametrize("layer", sorted(LEVEL))
def test_imports_go_one_way(layer):
    assert [text for file in FILES if layer_of(file) == layer for text in wrong_way(file)] == []


def test_what_was_agreed_to_is_still_needed():
    found = {(f.relative_to(ROOT).as_posix(), m.split(".")[1]) for f in FILES for _, m in imports(f) if "." in m}
    assert AGREED.keys() <= found


# -- cycles -----------------------------------------------------------------------------------------------------------
# An import inside a function, seen and agreed to, with the reason.
LATER = {("airgraph.plan.steps", "airgraph.plan.text"): "`plan.text()` is the function of plan/text.py"}


def module_of(file: Path) -> str:
    return ".".join(["airgraph", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def needed(module: str) -> set[str]:
    """The modules of ours that one imports, wherever the import stands, but not those for annotations alone."""
    found = set()
    waiting: list[ast.AST] = [ast.parse(MODULES[module].read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f if f in MODULES else str(node.module) for f in full.values()}
        waiting += ast.iter_child_nodes(node)
    return {other for other in found if other in MODULES and other != module and (module, other) not in LATER}


def test_no_import_cycles():
    graph = {module: needed(module) for module in MODULES}
    while True:  # what imports nothing that is left goes, until only cycles are left
        leaves = {module for module, others in graph.items() if not others}
        if not leaves:
            break
        graph = {module: others - leaves for module, others in graph.items() if module not in leaves}
    on_cycles = {m for m in graph if any(m in graph[other] for other in graph)}
    assert on_cycles == set()


def test_graph_layers_do_not_import_torch():
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in FILES
        if layer_of(file) in TORCH_FREE
        for line, module in imports(file)
        if module.split(".")[0] in ("torch", "torch_npu", "torchair")
    ]
    assert found == []


def test_graph_layers_run_without_torch():
    """With an empty package in place of airgraph/__init__.py, which is what brings torch in."""
    code = f"""
import sys, types
package = types.ModuleType("airgraph")
package.__path__ = [{str(ROOT)!r}]
sys.modules["airgraph"] = package
sys.modules["torch"] = None
import airgraph.ir.proto, airgraph.ir.text, airgraph.ir.verify, airgraph.passes, airgraph.plan
from airgraph.journal import Journal
graph = airgraph.ir.text.from_py('''
x_0 = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
y = ge.Mul(x_0, 1.0)
_ = ge.NetOutput([y])
''')
airgraph.passes.run_passes(graph, Journal(), check=True)
print(airgraph.ir.text.to_py(graph).splitlines()[-1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "_ = ge.NetOutput([x_0], dependencies=[])\n")


def test_the_rule_finds_what_it_forbids(tmp_path, monkeypatch):
    (tmp_path / "ir").mkdir()
    file = tmp_path / "ir" / "bad.py"
    file.write_text("import torch\nfrom airgraph import tools\ndef f():\n    from ..passes import PASSES\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(wrong_way(file)) == [
        "ir/bad.py:2 (ir) imports airgraph.tools (tools)",
        "ir/bad.py:4 (ir) imports airgraph.passes (passes)",
    ]
