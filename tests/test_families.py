"""One set of op families: a module of a per-op table is a family, and an op is in the same one in every table."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import airgraph
from airgraph.analysis.padding import facts, proof, shared  # noqa: F401  (the proof imports every family)
from airgraph.convert import REGISTRY
from airgraph.convert.fx_text import target_text
from airgraph.engine.meanings import MEANINGS
from airgraph.ir.families import FAMILIES
from airgraph.ir.ops import BUILT_IN
from airgraph.ir.ops import table as ops
from airgraph.plan.lowerings import table as lowerings
from airgraph.tools.coverage import emitted

ROOT = Path(airgraph.__file__).parent
# Each table's package, and its modules that are no family: what the families are written with.
TABLES = {
    "convert/families": set(),
    "ir/ops": {"table", "rules", "joint"},
    "engine/meanings": {"table", "layouts"},
    "plan/lowerings": {"table", "formulas"},
    "analysis/padding": {"facts", "shared", "proof"},
}
# These converters emit no op of their family: the ATen op is of it, GE has no such op, and others stand for it.
BUILT_FROM_OTHERS = {
    "aten.hardtanh.default": "GE's activations have only its gradient; it is a clip that keeps NaN",
    "aten.addr.default": "an outer product is a broadcast multiplication",
    "aten._fused_rms_norm.default": "written out, so that the pass that fuses RmsNorm decides",
    "aten.t.default": "of a vector it is the vector; of a matrix it is a view, which the walk emits",
}
# ATen's forms of ops of other families: lists of tensors, and Python's arithmetic with symbolic numbers.
FORMS = {"foreach", "symbols"}


def modules(package: str) -> Iterator[Path]:
    other = TABLES[package] | {"__init__"}
    return (p for p in sorted((ROOT / package).glob("*.py")) if p.stem not in other)


def families_of(registers: list[Any], name: str, names: Callable[..., Any], package: str, patch: Any) -> dict[str, str]:
    """Op → family: each module runs once more, while the function `name` of `registers` only notes what it is given."""
    found: dict[str, str] = {}
    for path in modules(package):

        def note(*args: Any, family: str = path.stem, **kwargs: Any) -> Callable[[Any], Any]:
            for op in names(*args):
                assert found.setdefault(op, family) == family, f"{op} is in {family} and {found[op]}"
            return lambda function: function

        with patch.context() as context:
            for module in registers:
                context.setattr(module, name, note)
            runpy.run_path(str(path), run_name=f"airgraph.{package}.{path.stem}".replace("/", "."))
    return found


@pytest.fixture
def by_op(monkeypatch) -> dict[str, dict[str, str]]:
    """Table → op → family."""
    return {
        "ir/ops": families_of([ops], "define", lambda name, *rest: [name], "ir/ops", monkeypatch),
        "plan/lowerings": families_of([lowerings], "lowers", lambda *names: names, "plan/lowerings", monkeypatch),
        "analysis/padding": families_of([facts, shared], "rule", lambda *names: names, "analysis/padding", monkeypatch),
        "engine/meanings": {
            name: path.stem
            for path in modules("engine/meanings")
            for name in getattr(importlib.import_module(f"airgraph.engine.meanings.{path.stem}"), path.stem.upper())
        },
    }


@pytest.mark.parametrize("package", TABLES)
def test_every_module_is_a_family(package):
    assert [p.stem for p in modules(package) if p.stem not in FAMILIES] == []


def test_every_family_has_ops():
    used = {path.stem for package in TABLES for path in modules(package)}
    assert set(FAMILIES) == used


def test_an_op_is_in_one_family(by_op):
    assert by_op["ir/ops"].keys() == BUILT_IN
    assert by_op["engine/meanings"].keys() == MEANINGS.keys() & BUILT_IN
    wrong = {
        (table, op): (family, by_op["ir/ops"][op])
        for table, rows in by_op.items()
        for op, family in rows.items()
        if not op.startswith("aten.") and by_op["ir/ops"][op] != family  # aten.*: calls the padding proof knows
    }
    assert wrong == {}


def test_a_converter_emits_ops_of_its_family(by_op):
    wrong = {}
    for target, converter in REGISTRY.converters.items():
        package, _, family = converter.function.__module__.rpartition(".")
        ops = emitted(converter.function) if package == "airgraph.convert.families" else set()
        if ops and family not in FORMS and family not in {by_op["ir/ops"][op] for op in ops}:
            wrong[target_text(target).removeprefix("torch.ops.")] = (family, sorted(ops))
    assert wrong.keys() == BUILT_FROM_OTHERS.keys(), wrong
