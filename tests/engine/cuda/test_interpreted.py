"""The CUDA engine without a GPU: plans, kernels, capture and replay on CPU tensors, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, check
from interpreted import InterpretedKernels, needs_interpreter

import airgraph
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.cuda import GPU
from airgraph.engine.cuda.executable import CudaExecutable
from airgraph.engine.fold import fold
from airgraph.plan.groups import make_plan

needs_interpreter()
SLOW = ("long rows", "symbolic sizes")


class Interpreted:
    """The CUDA engine with other hands."""

    name = "interpreted"

    def serves(self, device, mode):
        return "it is for tests"

    def warm_up(self):
        pass

    def plan(self, request):
        fold(request)
        return make_plan(request.graph, request.boundary, GPU)

    def load(self, request):
        return CudaExecutable(request, InterpretedKernels())

    def program(self, executable, programs):
        return programs.replayed(executable)


@pytest.fixture(autouse=True)
def engine():
    register_engine(Interpreted())
    yield
    del ENGINES["interpreted"]


@pytest.mark.parametrize("name", [n if n not in SLOW else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_results_are_eagers(name):
    case = CASES[name]
    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # sums are in another order
    check(
        lambda f: torch.compile(f, backend=airgraph.backend(engine="interpreted"), dynamic=case.dynamic),
        case,
        "cpu",
        tolerance,
    )


def test_triton_is_here():
    """This module is not skipped: the kernels above were run."""
    assert importlib.util.find_spec("triton") is not None
