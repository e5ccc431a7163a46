"""`airgraph bench` and `airgraph.bench`."""

import json
import sys

import forked
import pytest
import torch

import airgraph
from airgraph.errors import AirgraphError, ConfigError
from airgraph.tools.bench import worker
from airgraph.tools.bench.contenders import Job
from airgraph.tools.bench.result import BenchResult, Figures

QUICK = {"rounds": 2, "seconds": 0.01, "contenders": ["eager", "airgraph"]}


class Breaking(torch.nn.Module):
    """With a graph break, an op without a converter, and dropout."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, x):
        y = self.dropout(self.linear(x))
        torch._dynamo.graph_break()
        return torch.linalg.matrix_exp(y)


def test_a_model_that_cannot_be_pickled_is_timed_here():
    model = Breaking()
    model.unpicklable = lambda: None
    result = airgraph.bench(model, torch.randn(8, 8), **QUICK)
    assert "timed in one process, as it cannot be pickled" in result.text()
    data = result.json()
    (job,) = data["jobs"]
    eager, ours = job["contenders"]["eager"], job["contenders"]["airgraph"]
    assert 0 < eager["seconds"] < 1 and 0 < ours["seconds"] < 1 and len(ours["rounds"]) == 2
    assert eager["cold_compile_seconds"] is None and ours["cold_compile_seconds"] > 0
    assert ours["distance_from_float64"] < 1e-5 and ours["peak_memory_bytes"] is None
    advice = "\n".join(job["advice"])
    assert "1 graph break (" in advice and "test_bench.py" in advice
    assert "PyTorch runs 1 op without a converter: aten.linalg_matrix_exp.default" in advice
    assert "Breaking is in training mode" in advice and "Breaking.eval()" in advice
    assert result.best in ("eager", "airgraph")
    assert "<td>airgraph</td>" in result.html() and "airgraph bench" in result.html()


def test_a_contender_that_fails_is_a_line_of_the_table():
    def fails(x):
        return airgraph.nonsense(x)

    result = airgraph.bench(fails, torch.ones(2), **QUICK)
    assert "eager cannot run this: AttributeError: module 'airgraph' has no attribute 'nonsense'" in result.text()
    assert result.best is None


def test_training_is_a_forward_and_a_backward_pass():
    model = torch.nn.Linear(3, 2)
    job = Job("linear", model, (torch.ones(4, 3),), {}, training=True)
    job.call(model)()
    assert model.weight.grad is not None
    found = worker.BenchWorker()
    found.jobs, found.contender = [job], "airgraph.compile"
    assert found.answer({"do": "prepare", "job": 0})["failed"] == (
        "ValueError: a model compiled ahead of time is for inference"
    )


def test_unknown_contenders():
    with pytest.raises(ConfigError, match="there is no contender 'inducto'; did you mean 'inductor'"):
        airgraph.bench(torch.relu, torch.ones(2), contenders=["inducto"])


def test_the_table_fits_80_columns():
    names = ["eager", "airgraph reduce-overhead", "inductor"]
    figures = {n: Figures(n, 123.45, 67.89, 2.1e-07, medians=[12.3, 12.9], memory=480_000_000_000) for n in names}
    lines = BenchResult([{"name": "Model", "figures": figures}]).text(width=80).splitlines()
    assert len(lines) == 1 + 2 + len(names) and max(map(len, lines)) <= 80
    assert " ".join(lines[4].split()) == "airgraph reduce-overhead 12600 2% 1.00 123.45 67.89 480000 2.1e-07"


def test_what_a_page_shows_is_escaped():
    result = BenchResult([{"name": "<script>f</script>"}])
    result.jobs[0].figures["eager"] = Figures("eager", failed="<b>", advice=["<i>"])
    assert not any(tag in result.html() for tag in ("<script>", "<b>", "<i>"))


SCRIPT = """
import sys, torch
from torch.nn import functional
assert sys.argv[1:] == ["--flag"]
torch.manual_seed(0)

@torch.compile
def twice(x, scale=2):
    return x * scale

class Layer(torch.nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)  # by a global of the script

model = torch.compile(torch.nn.Sequential(Layer(4, 4), torch.nn.ReLU()).eval(), backend="airgraph")
with torch.no_grad():
    for rows in (2, 3, 5):
        x = model(torch.ones(rows, 4))
    twice(x, scale=3)
    x.zero_()
print("done")
"""


def test_the_functions_of_a_script(tmp_path, monkeypatch):
    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "script.py").write_text(SCRIPT)
    original = torch.compile
    model, twice = worker.jobs_of_script(worker.Script(str(tmp_path / "script.py"), ["--flag"]))
    assert torch.compile is original
    assert (model.name, model.sizes, model.training, model.args[0].shape) == ("Sequential", 3, False, (2, 4))
    assert (twice.name, twice.sizes, twice.kwargs) == ("twice", 1, {"scale": 3})
    assert twice.args[0].any(), "as it was when the function was called"
    assert sys.modules["__main__"].functional is torch.nn.functional


COMPILED = """
import torch, airgraph

model, other = (torch.nn.Linear(4, 4) for _ in range(2))
airgraph.compile(model, torch.ones(2, 4))(torch.ones(2, 4))
other.compile(backend="airgraph")
other(torch.ones(3, 4))
program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
airgraph.compile(program)(torch.ones(2))

@airgraph.compile(cache="twice")
def twice(x):
    return x * 2

twice(torch.ones(5))
"""


def test_whatever_compiles(tmp_path, monkeypatch):
    """`airgraph.compile` is for inference, whatever the mode of its model."""
    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "script.py").write_text(COMPILED)
    originals = torch.nn.Module.compile, airgraph.compile
    jobs = worker.jobs_of_script(worker.Script(str(tmp_path / "script.py")))
    assert [(job.training, job.args[0].shape[0]) for job in jobs] == [(False, 2), (True, 3), (False, 2), (False, 5)]
    assert (torch.nn.Module.compile, airgraph.compile) == originals


def test_a_script_that_fails(tmp_path, monkeypatch):
    """Its process ends with its exit code, and so does the command."""
    from airgraph.tools.bench.run import list_jobs

    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").write_text("import sys\nsys.exit(7)\n")
    with pytest.raises(SystemExit, match="7"):
        worker.jobs_of_script(worker.Script(str(tmp_path / "script.py")))
    ended = {"eager": lambda command: {"failed": "the process ended with 7", "code": 7}}
    with pytest.raises(SystemExit, match="7"):
        list_jobs(ended, {}, type("Bar", (), {"update": lambda *a, **k: None})(), 0)


@pytest.mark.slow
def test_the_command(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--contenders", "eager,airgraph", "--rounds", "1", "--seconds", "0.01", "--json", "f.json"]
    done = forked.run("-m", "airgraph", "bench", *options, "--html", "f.html", "script.py", "--flag", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Sequential, inference") and "done" not in done.stdout
    assert "advice: Sequential is called with 3 sets of sizes" in done.stdout
    first, second = json.loads((tmp_path / "f.json").read_text())["jobs"]
    assert (first["function"], second["function"]) == ("Sequential", "twice")
    assert first["contenders"]["airgraph"]["seconds"] and first["contenders"]["airgraph"]["peak_memory_bytes"] > 1e6
    assert "Sequential" in (tmp_path / "f.html").read_text()


def test_a_script_that_compiles_nothing(monkeypatch):
    from airgraph.tools.bench.run import list_jobs

    with pytest.raises(AirgraphError, match="there is nothing to time"):
        list_jobs({"eager": lambda command: {"jobs": []}}, {}, type("Bar", (), {"update": lambda *a, **k: None})(), 0)
