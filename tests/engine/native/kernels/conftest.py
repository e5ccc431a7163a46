"""What tests of kernels share: the same model compiled for several targets, and plans for a CPU with AMX."""

from dataclasses import replace

import pytest
import torch

import airgraph
from airgraph.engine.native import target as native
from airgraph.ir.types import DataType
from airgraph.plan import groups


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def compiled_for(monkeypatch):
    """compiled_for(targets, model, x): for each target the executable, and the results of two calls.

    No program is from the cache: its key does not see the patched target."""
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")

    def compile(targets, model, x, dynamic=False):
        found, made = [], []
        for target in targets:
            monkeypatch.setattr(native, "this_cpu", lambda target=target: target)
            with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
                run = airgraph.compile(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},) if dynamic else None)
            with torch.no_grad():
                found.append((made[-1].native, run(x), run(x)))
        return found

    return compile


@pytest.fixture
def plans(monkeypatch):
    """The plans that are made for a CPU with AMX; what runs is made for this one."""
    found, make = [], groups.make_plan
    bf16 = (DataType.DT_BF16,)

    def made(graph, boundary, here):
        amx = replace(here, widens=(), multiplies=bf16, widens_attention=bf16, widened=native.WITH_AMX)
        found.append(make(graph, boundary, amx))
        return found[-1] if here.multiplies else make(graph, boundary, here)

    monkeypatch.setenv("AIRGRAPH_CACHE", "off")
    monkeypatch.setattr(groups, "make_plan", made)
    return found
