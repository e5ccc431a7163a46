"""Statements about TorchAir's and torch_npu's public behaviour that no other test holds: docs/torchair.md names them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchair
from torch._dynamo.utils import counters

from airgraph.convert.fx_text import source_line


def dumped(f: Callable[..., Any], folder: Path, *args: Any, kind: str = "py", dynamic: bool = False) -> dict[str, str]:
    """The dumps of a compiled function, by what they are called: original and optimized."""
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type, config.debug.graph_dump.path = kind, str(folder)
    torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), dynamic=dynamic)(*args)
    return {name: next(folder.glob(f"dynamo_{name}_*")).read_text() for name in ("original", "optimized")}


def npu(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="npu")


def test_inputs_that_nobody_reads_are_left_out_and_the_others_numbered(tmp_path: Path) -> None:
    def f(a: torch.Tensor, b: torch.Tensor, n: int) -> torch.Tensor:
        return b.reshape(-1, n) + 1

    text = dumped(f, tmp_path, npu(3), npu(4, 6), 6, dynamic=True)
    inputs = {name: re.findall(r"ge\.Data\(index=(\d+)", dump) for name, dump in text.items()}
    assert inputs["original"] == ["0", "1", "2", "3"] and inputs["optimized"] == ["0"]


def test_fusions_are_counted_by_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = torchair.CompilerConfig()
    config.ge_config.export_compile_stat = "2"
    torch._dynamo.reset()
    run = torch.compile(lambda x: x * torch.sigmoid(x), backend=torchair.get_npu_backend(compiler_config=config))
    run(npu(3))
    result = json.loads(Path("fusion_result.json").read_text())
    assert [re.sub(r"\d+", "N", key) for key in result] == ["session_and_graph_id_N_N"]
    (of_graph,) = result.values()
    assert list(of_graph) == ["graph_fusion", "ub_fusion"]
    assert all(set(times) == {"match_times", "effect_times"} for times in of_graph["graph_fusion"].values())


@pytest.mark.parametrize("start", ["", "  "])
def test_a_trace_of_one_frame(start: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = None
    node.stack_trace = f'{start}File "model.py", line 3, in forward\n    return x + 1\n           ~~^~~\n'
    assert source_line(node) == '"model.py", line 3, in forward    return x + 1'


@pytest.mark.parametrize("options", [{"backend": "npugraphs"}, {"mode": "reduce-overhead"}])
def test_results_of_a_graph_tree_stay(options: dict[str, str]) -> None:
    """torch_npu overwrites them in the next generation, and reading them is an error."""
    torch._dynamo.reset()
    run = torch.compile(lambda x: x * 2 + 1, dynamic=False, **options)
    held = []
    for i in range(5):
        torch.compiler.npugraph_mark_step_begin()
        held.append(run(npu(3) * i))
    assert [y.tolist() for y in held] == [[2.0 * i + 1] * 3 for i in range(5)]


@pytest.mark.parametrize("options", [{"backend": "npugraphs"}, {"mode": "reduce-overhead"}])
def test_what_a_graph_tree_leaves_to_eager_is_captured_too(options: dict[str, str]) -> None:
    """torch_npu runs a graph with tensors of the CPU, or one that writes to an argument, without capturing it."""
    torch._dynamo.reset()
    state, steps = npu(2), torch.zeros(2)
    run = torch.compile(lambda x, c: x.add_(c.npu()) * 2, **options)
    for _ in range(4):
        steps += 1
        result = run(state, steps)
    assert state.tolist() == [11, 11] and result.tolist() == [22, 22]


def test_a_graph_for_each_shape() -> None:
    torch._dynamo.reset()
    counters["npugraph_ex"].clear()
    run = torch.compile(lambda x: x * 2, backend="npugraph_ex", dynamic=True)
    for n in (2, 3, 4, 2, 3, 4, 2, 3, 4):
        run(npu(n))
    assert sum(count for name, count in counters["npugraph_ex"].items() if name.startswith("captured_")) == 3
