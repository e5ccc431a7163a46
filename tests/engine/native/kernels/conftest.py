"""What tests of products with a prologue or an epilogue share: the same model compiled for several targets."""

import pytest
import torch

import airgraph
from airgraph.engine.native import target as native


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
