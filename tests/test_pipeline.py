"""The pipeline as a whole: what happens how often, and in which order."""

import re
from pathlib import Path

import pytest
import torch

import airgraph
from airgraph import compilation, pipeline
from airgraph.journal import JOURNALS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def conversions(monkeypatch):
    """The registries of the conversions that take place."""
    found = []

    def convert(gm, name, registry, *rest, **options):
        found.append("GE" if registry is pipeline.REGISTRY else "ATen")
        return pipeline_convert(gm, name, registry, *rest, **options)

    pipeline_convert = pipeline.convert
    monkeypatch.setattr(pipeline, "convert", convert)
    return found


def compiled(tmp_path, function, **options):
    x = torch.randn(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(function, backend=airgraph.backend(**options))(x)


@pytest.mark.parametrize("mode, wanted", [("max-autotune", "GE"), ("reduce-overhead", "ATen")])
def test_a_graph_is_converted_once(conversions, tmp_path, mode, wanted):
    compiled(tmp_path, lambda x: x.relu().sum(-1), mode=mode)
    assert conversions == [wanted]


def test_a_graph_with_fallbacks_is_converted_once_for_all_its_dumps(conversions, tmp_path):
    compiled(tmp_path, lambda x: torch.linalg.qr(x)[0], dump="py", dump_path=str(tmp_path))
    assert JOURNALS[-1].fallbacks and conversions == ["GE"]
    assert len(list(tmp_path.glob("*.py"))) == 2


@pytest.mark.parametrize("mode, wanted", [("max-autotune", ["GE"]), ("reduce-overhead", ["ATen", "GE"])])
def test_the_padding_analysis_reads_the_graph_there_is(conversions, tmp_path, mode, wanted):
    """In mode reduce-overhead there is none of GE ops, which its rules are about, so one is made."""
    compiled(tmp_path, lambda x: x.relu() * 2, mode=mode, buckets={"batch": [8]})
    assert conversions == wanted


def test_stages_in_order():
    torch.compile(lambda x: x.exp() * 2, backend="airgraph")(torch.randn(3))
    stages = [stage.name for stage in JOURNALS[-1].stages]
    assert stages[:3] == ["fx_passes", "cache", "convert"] and stages[-2:] == ["plan", "load"]


SECTION = (
    (ROOT / "docs" / "architecture.md")
    .read_text(encoding="utf-8")
    .partition("## From `linear` + GELU to machine code")[2]
    .partition("\n## ")[0]
)


def test_the_files_that_docs_architecture_names_are_there():
    files = re.findall(r"^\d+\. \*\*`([\w/]+\.py)`\*\*", SECTION, re.MULTILINE)
    assert 10 <= len(files) <= 15
    assert [f for f in files if not (ROOT / "src" / "airgraph" / f).exists()] == []


def test_what_docs_architecture_shows_is_what_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    linear, programs = torch.nn.Linear(16, 32).eval(), []
    backend = airgraph.backend(dump="py", dump_path=str(tmp_path))
    with torch.no_grad(), compilation.wrapping(lambda gm, program, config: programs.append(program) or program):
        torch.compile(lambda x: torch.nn.functional.gelu(linear(x)), backend=backend)(torch.randn(5, 16))
    shown = {line.strip() for line in SECTION.splitlines()}
    plan = programs[-1].native.plan.text().splitlines()
    assert {line.strip() for line in plan[plan.index("t0: float[5, 32] arena") :]} <= shown
    graphs = [line for file in tmp_path.glob("*.py") for line in file.read_text(encoding="utf-8").splitlines()]
    nodes = [re.sub(r', node_name="\w+"', "", line) for line in graphs if re.match(r"[A-Z]\w+ = ge\.", line)]
    assert len(nodes) == 8 and set(nodes) <= shown
