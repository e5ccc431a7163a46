"""`airgraph profile`, and the names of kernels under torch.profiler."""

import json
import sys

import pytest
import torch

import airgraph
from airgraph.compilation import wrapping
from airgraph.tools import cli
from airgraph.tools.profile import profiling
from airgraph.tools.roofline import short


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)])

    def forward(self, x):
        x = torch.relu(self.layers[0](x))
        return torch.linalg.matrix_exp(self.layers[1](x)[:4])


def test_kernels_have_names_under_torch_profiler():
    x, programs = torch.randn(8, 16), []
    with wrapping(lambda gm, program, config: programs.append(program) or program):
        fast = airgraph.compile(Two(), x, engine="native")
    expected = fast(x)
    (frame,) = programs[0].executable.frames
    before = list(frame.step_table)
    with torch.profiler.profile() as profile:
        for _ in range(3):
            assert torch.equal(fast(x), expected)
    assert list(frame.step_table) == before, "what stood in for the kernels is gone"
    counts = {event.key: event.count for event in profile.key_averages()}
    name = programs[0].name
    assert counts[f"airgraph {name} inference"] == 3
    assert counts["airgraph::MatMulV2 layers.0"] == counts["airgraph::MatMulV2 layers.1"] == 3
    assert counts["airgraph::Relu"] == counts["aten::linalg_matrix_exp"] == 3


def test_what_is_known_of_a_kernel():
    x = torch.randn(8, 16)
    with profiling() as found:
        fast = airgraph.compile(Two(), x, engine="native")
        fast(x), fast(x)
    (profile,) = found
    kernels = {kernel.name: kernel for kernel in profile.kernels}
    first = kernels["MatMulV2 layers.0"]
    assert (first.calls, first.module, first.flops) == (2, "layers.0", 2 * 8 * 16 * 32)
    assert first.bytes == 4 * (8 * 16 + 16 * 32 + 32 + 8 * 32) and first.seconds > 0
    assert kernels["Relu"].source.endswith("x = torch.relu(self.layers[0](x))") and kernels["Relu"].flops is None
    assert kernels["aten::linalg_matrix_exp"].calls >= 1
    assert profile.machine.bandwidth > 1e8 and profile.machine.peak > 1e8
    assert profile.json()["kernels"][0]["seconds"] == profile.kernels[0].seconds
    assert profile.table().row_count == len(profile.kernels)


def test_a_kernel_of_two_graphs_has_the_amounts_of_both():
    """Of equal names and other sizes: the average of the calls, not the last graph's for all of them."""
    small, large = torch.randn(4, 16), torch.randn(8, 16)
    with profiling() as found:
        programs = [airgraph.compile(Two(), x, engine="native") for x in (small, large)]
        programs[0](small), programs[1](large), programs[1](large)
    (first,) = [kernel for kernel in found[0].kernels if kernel.name == "MatMulV2 layers.0"]
    assert (first.calls, first.flops) == (3, round(2 * (4 + 8 + 8) / 3 * 16 * 32))


SCRIPT = """
import torch
model = torch.compile(torch.nn.Linear(4, 4), backend="airgraph", options={"engine": "native"})
for _ in range(3):
    with torch.no_grad():
        model(torch.ones(2, 4))
raise SystemExit(7)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "script.py"


def test_the_command(script, tmp_path, capsys):
    script.write_text(SCRIPT)
    trace, data = tmp_path / "trace.json", tmp_path / "profile.json"
    assert cli.main(["profile", "--trace", str(trace), "--json", str(data), str(script)]) == 7
    out = capsys.readouterr().out
    assert "MatMulV2" in out and "of 1 graph," in out
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(str(name).startswith("airgraph::MatMulV2") for name in names)
    assert json.loads(data.read_text())["kernels"]


def test_a_script_without_kernels(script, capsys):
    script.write_text("print('hello')\n")
    assert cli.main(["profile", str(script)]) == 2
    assert "no kernel ran" in capsys.readouterr().err
    script.write_text("raise SystemExit(5)\n")
    assert cli.main(["profile", str(script)]) == 5
    assert not capsys.readouterr().err


def test_lines_are_short():
    line = '"/home/me/model.py", line 24, in forward    x = self.linear1(x)'
    assert short(line) == short(f"File {line}") == "model.py:24  x = self.linear1(x)"
