"""`import torch_npu`, and the examples of its page on torch.compile."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import forked
import pytest
import torch

from airgraph import compat
from airgraph.runtime.recording import step_now


def test_names() -> None:
    import torch_npu
    import torch_npu.npu
    from torch_npu.npu import NPUGraph, graph, make_graphed_callables

    assert torch_npu.npu is torch.npu
    assert (NPUGraph, graph) == (torch.npu.NPUGraph, torch.npu.graph)
    assert make_graphed_callables is torch.npu.make_graphed_callables
    assert torch_npu.__version__.endswith("+airgraph")
    assert not compat.is_real("torch_npu")
    assert {"NPUGraph", "graph", "graph_pool_handle", "ExternalEvent", "register_npu_graph_handler"} <= set(
        torch.npu.__all__
    )
    with pytest.raises(AttributeError, match="module 'torch_npu' has no attribute 'nonsense'"):
        torch_npu.nonsense  # noqa: B018


def test_mark_step_begin_counts_steps() -> None:
    before = step_now()
    torch.compiler.npugraph_mark_step_begin()
    assert step_now() == before + 1


def test_uninstall_takes_everything_away() -> None:
    code = """
        import sys, torch, airgraph.compat as compat
        call = torch._TorchCompileInductorWrapper.__call__
        names = set(dir(torch.compiler))
        compat.install()
        import torch_npu.npu.graphs
        assert torch._TorchCompileInductorWrapper.__call__ is not call
        compat.uninstall()
        assert torch._TorchCompileInductorWrapper.__call__ is call
        assert set(dir(torch.compiler)) == names
        assert not [name for name in sys.modules if name.split(".")[0] in ("torch_npu", "torchair")]
        compat.install()
        import torch_npu
        assert torch_npu.npu.is_available() and torch.ones(2).npu().sum().item() == 2
        assert "torch._inductor.compile_fx" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_tensors_shown_from_inside_a_graph(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch_npu

    x, g = torch.zeros(2, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = x + 1
        torch_npu.print_npugraph_tensor(y, tensor_name="y")
        torch_npu.save_npugraph_tensor(y, save_path=str(tmp_path / "y.pt"))
        torch_npu.save_npugraph_tensor([x, y], save_path=str(tmp_path / "last.pt"), overwrite=True)
    assert capsys.readouterr().out == ""
    for value in (1, 2):
        x.fill_(value)
        g.replay()
    assert capsys.readouterr().out.splitlines() == [
        "y=tensor([2., 2.]), shape=[2], dtype=torch.float32",
        "y=tensor([3., 3.]), shape=[2], dtype=torch.float32",
    ]
    saved = {f.name: torch.load(f) for f in tmp_path.iterdir()}
    assert sorted(saved) == ["last_device_0.pt", "y_device_0_0.pt", "y_device_0_1.pt"]
    assert saved["y_device_0_0.pt"].tolist() == [2, 2]
    assert [t.tolist() for t in saved["last_device_0.pt"]] == [[2, 2], [3, 3]]
    torch_npu.print_npugraph_tensor(torch.ones(1))
    assert capsys.readouterr().out == "tensor=tensor([1.]), shape=[1], dtype=torch.float32\n"


@pytest.mark.parametrize("compiled", [False, True])
def test_several_tensors_and_their_names(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu's examples of saving lists; without a name it is the time."""
    import torch_npu

    monkeypatch.chdir(tmp_path)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch_npu.save_npugraph_tensor((x, y), save_name="inputs", save_dir="made/for_it", suffix=".pt")
        z = x + y
        torch_npu.save_npugraph_tensor(z, save_name="outputs", save_dir=".", suffix=".bin")
        torch_npu.save_npugraph_tensor(z)
        return z

    run = torch.compile(f, backend="npugraph_ex", fullgraph=True) if compiled else f
    run(torch.ones(2).npu(), torch.ones(2).npu())
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*_device_*"))
    assert names[:3] == [*(f"made/for_it/inputs_{i}_device_0_0.pt" for i in range(2)), "outputs_device_0_0.bin"]
    assert re.fullmatch(r"tensor_\d+_device_0_0\.pt", names[3]) and len(names) == 4
    assert torch.load(names[3]).tolist() == [2, 2]
    torch_npu.save_npugraph_tensor.tensorlist([torch.zeros(1)], save_name="more")
    assert (tmp_path / "more_0_device_0_0.pt").exists()
    with pytest.raises(ValueError, match=r"must be .pt or .bin: .txt"):
        torch_npu.save_npugraph_tensor([torch.zeros(1)], suffix=".txt")


# The two examples of torch_npu's page on torch.compile, in our words.

SCRIPT = """
    import torch
    import torch_npu
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(128, 256)
            self.fc2 = nn.Linear(256, 10)

        def forward(self, x):
            return self.fc2(torch.relu(self.fc1(x)))

    def losses(**compiled):
        torch.manual_seed(0)
        model = Model().npu()
        model = torch.compile(model, **compiled) if compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        criterion = nn.CrossEntropyLoss()
        x, y = torch.randn(32, 128).npu(), torch.randint(0, 10, (32,)).npu()
        curve = []
        for _ in range(20):
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        return curve

    eager, compiled = losses(), losses(OPTIONS)
    assert eager[-1] < eager[0] / 2
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    print("equal")
"""


def run_script(folder: Path, options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT).replace("OPTIONS", options))
    return forked.run("-m", "airgraph", "run", "train.py", cwd=folder)


@pytest.mark.slow
@pytest.mark.night  # test_seed_blocks.py has its twin
def test_the_inductor_example(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'backend="inductor", mode="reduce-overhead"')
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
def test_the_npugraphs_example(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'backend="npugraphs"')
    assert done.stdout == "equal\n", done.stderr
