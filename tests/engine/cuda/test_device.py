"""The CUDA engine on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import BF16, CASES, F16, F32, F64, check

import airgraph
from airgraph.engine.cuda.executable import CudaExecutable

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
HALF = {"rtol": 3e-2, "atol": 3e-2}
FLOATS = [F32, F64, BF16, F16]
TYPED = ("elementwise", "softmax", "layer norm", "gelu", "functions", "reductions", "swiglu", "perceptron", "images")
TYPED += ("normed products", "one row", "long sums")


def compiled(programs, **options):
    def run(function):
        fast = torch.compile(function, backend=airgraph.backend(verify=True), **options)

        def call(*args):
            with airgraph.pipeline.wrapping(lambda gm, program, config: programs.append(program) or program):
                return fast(*args)

        return call

    return run


@pytest.mark.parametrize("name", CASES)
def test_results_are_eagers(name):
    case, programs = CASES[name], []
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if case.rough else {"rtol": 1e-5, "atol": 1e-5}
    check(compiled(programs, dynamic=case.dynamic), case, "cuda", tolerance)
    assert all(isinstance(p.executable, CudaExecutable) for p in programs)
    assert all(p.journal.counters["captured"] for p in programs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", TYPED)
def test_every_floating_point_type(name, dtype):
    from copy import copy

    case = copy(CASES[name])
    case.dtype = dtype
    if isinstance(case.function, type):
        make = case.function
        case.function = make().to("cuda", dtype)
    tolerance = HALF if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-3}
    check(compiled([]), case, "cuda", tolerance)
