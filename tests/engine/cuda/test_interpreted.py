"""The CUDA engine without a GPU: plans, kernels, capture and replay on CPU tensors, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, F16, HALF, TestedEngine, check
from interpreted import InterpretedKernels, needs_interpreter

import airgraph
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.cuda.executable import CudaExecutable
from airgraph.engine.cuda.tune import KernelTuner

needs_interpreter()
SLOW = ("long rows", "symbolic sizes")


class Picking:
    """A clock by which one of the configurations is the fastest."""

    name = "a GPU"

    def __init__(self, number):
        self.number, self.picked = number, 0

    def expect(self, source):
        pass

    def seconds(self, sources, value, tensors):
        self.picked += 1
        fastest = 1 + self.number % (len(sources) - 1)
        return [1e-6 if i == fastest else 1.0 for i in range(len(sources))]


class Interpreted(TestedEngine):
    """The CUDA engine with other hands."""

    name = "interpreted"
    clock = None

    def load(self, request):
        tuner = KernelTuner(request.journal, self.clock) if request.autotune else None
        return CudaExecutable(request, InterpretedKernels(), tuner)

    def program(self, executable, programs):
        return programs.replayed(executable)


@pytest.fixture(autouse=True)
def engine():
    engine = Interpreted()
    register_engine(engine)
    yield engine
    del ENGINES["interpreted"]


@pytest.mark.parametrize("name", [n if n not in SLOW else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_results_are_eagers(name):
    case = CASES[name]
    tolerance = HALF if case.dtype is F16 else {"rtol": 1e-4, "atol": 1e-4}  # sums are in another order
    check(
        lambda f: torch.compile(f, backend=airgraph.backend(engine="interpreted"), dynamic=case.dynamic),
        case,
        "cpu",
        tolerance,
    )


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    "name",
    ["elementwise", "softmax", "layer norm", "one row", "normed products", "swiglu", "normed products of three rows"],
)
def test_every_configuration_gives_the_same(engine, monkeypatch, tmp_path, name, number):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    engine.clock = Picking(number)
    backend = airgraph.backend(engine="interpreted", autotune=True)
    tolerance = HALF if CASES[name].dtype is F16 else {"rtol": 1e-4, "atol": 1e-4}
    check(lambda f: torch.compile(f, backend=backend), CASES[name], "cpu", tolerance)
    assert engine.clock.picked


@pytest.mark.night
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["decode", "long sums", "images", "reductions"])
def test_every_configuration_of_slow_ones_gives_the_same(engine, monkeypatch, tmp_path, name, number):
    test_every_configuration_gives_the_same(engine, monkeypatch, tmp_path, name, number)


def test_triton_is_here():
    """This module is not skipped: the kernels above were run."""
    assert importlib.util.find_spec("triton") is not None
