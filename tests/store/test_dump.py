"""Dumps: what is written, where, and what happens when it cannot be."""

import os
import re
import stat
import subprocess
import sys

import pytest
import torch

import airgraph
from airgraph.errors import DumpError
from airgraph.ir.text import from_py, to_py
from airgraph.journal import JOURNALS
from airgraph.store import dump


def compile_and_dump(tmp_path, kind, function=lambda x: torch.relu(x) * 2 + 1, x=None):
    torch.compile(function, backend=airgraph.backend(dump=kind, dump_path=str(tmp_path)))(
        torch.randn(2, 3) if x is None else x
    )
    return {f.name.split("_")[1]: f for f in sorted(tmp_path.glob(f"*.{kind}"))}


@pytest.mark.parametrize("kind", ["py", "txt", "pbtxt"])
def test_every_format(tmp_path, kind):
    files = compile_and_dump(tmp_path, kind)
    assert sorted(files) == ["optimized", "original"]
    for file in files.values():
        assert re.fullmatch(rf"dynamo_\w+_graph_\d+_rank_0_pid_{os.getpid()}_ts_\d{{20}}\.{kind}", file.name)
        assert stat.S_IMODE(file.stat().st_mode) & 0o137 == 0
        assert "Relu" in file.read_text()


@pytest.mark.parametrize("stage", ["original", "optimized"])
def test_a_py_dump_reads_back(tmp_path, stage):
    text = compile_and_dump(tmp_path, "py")[stage].read_text()
    graph = from_py(text)
    code = [line for line in text.splitlines() if " = ge." in line]
    assert [line for line in to_py(graph).splitlines() if " = ge." in line] == code


def test_large_constants_are_files_beside_the_dump(tmp_path):
    table = torch.arange(1001, dtype=torch.float32)

    def function(x):
        return x + torch.tensor(table.tolist())

    x = torch.randn(1001)
    text = compile_and_dump(tmp_path, "py", function, x)["optimized"].read_text()
    (file,) = tmp_path.glob("*optimized*.npy")
    assert f'ge.FileConstant("{file.name}", dtype=0)' in text
    (constant,) = [n for n in from_py(text, tmp_path).of("Const") if n.output.type.shape == (1001,)]
    assert torch.equal(torch.from_numpy(constant.attrs["value"]), table)


def test_rank_is_in_the_name(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert "_rank_3_" in compile_and_dump(tmp_path, "py")["original"].name


def test_a_folder_that_disappears(tmp_path):
    folder = tmp_path / "no" / "graphs"
    folder.mkdir(parents=True)
    backend = airgraph.backend(dump="py", dump_path=str(folder))
    folder.rmdir()
    folder.parent.rmdir()
    with pytest.raises(Exception, match=r"dump_path '.*graphs' is not a folder\n.*try: +mkdir -p"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def test_a_disk_that_refuses(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump, "write", refuse)
    torch.compile(lambda x: x + 1, backend=airgraph.backend())(torch.ones(2))
    from airgraph.ir.graph import Graph

    with pytest.raises(DumpError, match=r"the graph could not be written to .*\n.*No space left") as caught:
        dump.write_dump(Graph("graph_1"), "original", "py", str(tmp_path))
    assert "another dump_path" in str(caught.value)


@pytest.mark.slow
def test_debug_bundle(tmp_path):
    code = """
import torch, airgraph
m = torch.nn.Linear(4, 4)
torch.compile(m, backend="airgraph")(torch.randn(2, 4)).sum().backward()
"""
    env = {**os.environ, "TORCH_COMPILE_DEBUG": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "torch_compile_debug").glob("run_*/airgraph")
    found = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    for phase in ("forward", "backward"):
        assert {f"model__0/{phase}/000_aot_{phase}_graph.txt", f"model__0/{phase}/output_code.py"} <= found
        for part in (
            "graph_after_optimize_noop_ops.txt",
            "original_ge_graph.py",
            "optimized_ge_graph.py",
            "ge_graph_after_dead_code.py",
        ):
            assert any(re.fullmatch(rf"model__0/{phase}/\d{{3}}_aot_{phase}_{part}", name) for name in found), part
    assert {"debug.log", "model__0/dynamo_out_graph.txt"} <= found
    assert "compiler inputs" in (folder / "debug.log").read_text()


def test_the_journal_tells_what_the_passes_did():
    torch.compile(lambda x, y: (x.t() @ y) * 1, backend=airgraph.backend())(torch.randn(3, 2), torch.randn(3, 4))
    text = JOURNALS[-1].text()
    assert "neutral_element: Mul →" in text and "transpose_into_x1" in text
