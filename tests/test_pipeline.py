"""The pipeline as a whole: what happens how often, and in which order."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import airgraph
from airgraph import compilation
from airgraph.convert import REGISTRY, walk
from airgraph.ir import ge
from airgraph.journal import JOURNALS

ROOT = Path(__file__).parents[1]


OP = torch.library.custom_op(
    "test_pipeline::scale", lambda x, by: x * by, mutates_args=(), schema="(Tensor x, float by) -> Tensor"
)
OP.register_fake(lambda x, by: torch.empty_like(x))


@pytest.fixture
def conversions(monkeypatch):
    """How often each graph's FX nodes were gone through by whoever converts them, by the graph's name."""
    found = Counter()

    class Counting(walk.Walker):
        def finish(self, node):
            found[self.graph.name] += 1
            super().finish(node)

    monkeypatch.setattr(walk, "Walker", Counting)
    return found


@pytest.fixture
def scale_without_a_kernel():
    @airgraph.register_converter(torch.ops.test_pipeline.scale.default)
    def scale(x, by, *, meta_outputs):
        return ge.custom_op("PipelineScale", inputs={"x": x}, outputs=["y"], attrs={"by": ge.attr.Float(by)})

    yield torch.ops.test_pipeline.scale
    del REGISTRY.converters[torch.ops.test_pipeline.scale.default]


def run(function, **options):
    x = torch.randn(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    result = torch.compile(function, backend=airgraph.backend(**options))(x)
    torch.testing.assert_close(result, function(x))


OPTIONS = {
    "plain": {},
    "dump": {"dump": "py"},
    "buckets": {"buckets": {"batch": [8]}},
    "both": {"dump": "py", "buckets": {"batch": [8]}},
    "unfolded views": {"dump": "py", "fold_views": False},
    "summary": {"summary": "csv"},
}


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kernel", ["all ops have a kernel", "a user's has none", "a fallback"])
def test_a_graph_is_converted_once(conversions, scale_without_a_kernel, tmp_path, mode, options, kernel):
    def function(x):
        y = x.relu().t().contiguous() * 2
        if kernel == "a user's has none":
            return scale_without_a_kernel(y, 0.5) + 1
        return y + torch.linalg.qr(x)[0].t() if kernel == "a fallback" else y

    run(function, mode=mode, dump_path=str(tmp_path), **OPTIONS[options])
    assert list(conversions.values()) == [1]
    assert len(list(tmp_path.glob("dynamo_*.py"))) == (2 if "dump" in OPTIONS[options] else 0)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_the_graphs_of_a_training_step_are_converted_once_each(conversions, tmp_path, mode):
    layer, x = torch.nn.Linear(3, 3), torch.randn(5, 3)
    backend = airgraph.backend(mode=mode, dump="py", dump_path=str(tmp_path), buckets={"batch": [8]})
    torch.compile(layer, backend=backend)(x).sum().backward()
    assert list(conversions.values()) == [1, 1]


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
