"""torch_npu's fused ops with a GPU as the host: Triton kernels, as docs/ascend.md says. A process has one host, so on a GPU
this file runs itself in another process.

pytest tests/compat/test_fused_ops_cuda.py
AIRGRAPH_NPU_HOST=cuda pytest tests/compat/test_fused_ops_cuda.py -k swiglu        one op
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch_npu
from torch.utils._pytree import tree_leaves, tree_map

import airgraph
from airgraph.compat.npu import state
from airgraph.compilation import reading_plans
from airgraph.journal import JOURNALS
from airgraph.plan.steps import CallStep, LoopStep
from tests.compat.graph_cases import leaves
from tests.compat.test_formulas import AROUND, KERNELS, NATIVE, calls, rows

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_journals")]
ON_CUDA = state.host_device().type == "cuda"
on_cuda = pytest.mark.skipif(not ON_CUDA, reason="needs host=cuda")
CALLS = 3  # op by op, captured, replayed
CASTS = {"Cast"}  # from and to eight-bit floats, which loops do not have


@pytest.mark.skipif(ON_CUDA or not torch.cuda.is_available(), reason="needs a GPU, and a host that is none")
def test_all_of_this_on_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    done = subprocess.run(command, env={**os.environ, "AIRGRAPH_NPU_HOST": "cuda"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def run(call: Any, *given: Any) -> list[Any]:
    """Its results, and then its arguments, some of which it may have written to."""
    args, named = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, given)
    results = call(*args, **named)
    return [*leaves(results), *leaves(tree_leaves((args, named)))]


def steps_of(op: str) -> list[Any]:
    """The steps of the plan that the op is compiled to; its results are eager's when it is run, captured and replayed."""
    call, args, named = calls()[op]
    found: list[Any] = []

    def read(graph: str, device: torch.device, plan: Any) -> None:
        assert device.type == "cuda"
        found.extend(plan.steps)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=airgraph.backend(), fullgraph=True, dynamic=False)
    with reading_plans(read), torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(run(compiled, args, named), run(call, args, named), rtol=1e-5, atol=1e-5)
    (journal,) = JOURNALS
    assert not journal.fallbacks and journal.counters["captured"] == 1
    assert found, f"no plan: {journal.text()}"
    return found


@on_cuda
@pytest.mark.parametrize("op", sorted(rows()[NATIVE]))
def test_kernels(op: str) -> None:
    steps = steps_of(op)
    left = {step.node.op for step in steps if isinstance(step, CallStep)} - KERNELS - CASTS
    assert not left, f"by PyTorch: {sorted(left)}"
    assert any(isinstance(step, LoopStep) for step in steps) or {"MatMul", "BatchMatMul"} & {
        step.node.op for step in steps if isinstance(step, CallStep)
    }


@on_cuda
@pytest.mark.parametrize("op", sorted(rows()[AROUND] & calls().keys()))
def test_kernels_around_calls_of_pytorch(op: str) -> None:
    steps = steps_of(op)
    assert any(isinstance(step, LoopStep) for step in steps)
    assert not any(isinstance(step, CallStep) and step.node.op == "AtenCall" for step in steps)


@on_cuda
def test_fused_with_what_is_around_it() -> None:
    def f(x: torch.Tensor, gamma: torch.Tensor) -> Any:
        y = torch_npu.npu_geglu(torch_npu.npu_rms_norm(x + 1, gamma)[0])[0] * 2
        return torch_npu.npu_dynamic_quant(y)

    found: list[Any] = []
    x, gamma = torch.randn(64, 512, device="npu").half(), torch.rand(512, device="npu").half()
    compiled = torch.compile(f, backend=airgraph.backend(), fullgraph=True)
    with reading_plans(lambda graph, device, plan: found.extend(plan.steps)):
        for _ in range(CALLS):
            quantised, scale = compiled(x, gamma)
            expected, its_scale = f(x, gamma)
            torch.testing.assert_close(scale, its_scale)
            assert (quantised.int() - expected.int()).abs().max() <= 1  # a scale may be off by its last bit
    assert found and all(isinstance(step, LoopStep) for step in found)
