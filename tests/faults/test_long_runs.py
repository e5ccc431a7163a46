"""What no program uses any more is freed: machine code, its memory maps, frames."""

from __future__ import annotations

import gc
import platform
from collections import Counter
from pathlib import Path

import pytest
import torch

from airgraph.engine.native import code, runner
from airgraph.engine.native.llvm import jit

JOURNAL = ("Journal", "StageRecord", "OpUse", "Fallback")
OPS = ("tanh", "sigmoid", "exp", "sin", "cos", "abs", "relu", "erf")


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


def program(number):
    """Another graph for every number."""
    names = [OPS[(number >> 3 * i) & 7] for i in range(3)]
    lines = "\n".join(f"    x = (x * 0.5).{name}() + x" for name in names)
    space = {}
    exec(f"def graph_{number}(x):\n{lines}\n    return x.softmax(-1), x.sum()", space)
    return torch.compile(space[f"graph_{number}"], backend="airgraph", dynamic=False)


def settled():
    torch._dynamo.reset()
    gc.collect()


def maps():
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_machine_code_goes_with_the_last_program_that_uses_it():
    x = torch.randn(4, 8)
    program(0)(x)
    settled()
    before, known, frames = maps(), len(code._known), len(runner._frames)
    alive = [program(number) for number in range(64, 72)]
    for run in alive:
        run(x)
    assert len(code._known) >= known + 8
    # By our own loader, graphs share maps; by LLVM's linker a graph has those of one module.
    assert maps() - before < (8 if platform.machine() == "x86_64" else 3 * 8)
    del run
    alive.clear()
    settled()
    assert len(code._known) == known and len(runner._frames) == frames
    assert maps() <= before + 2  # an arena of malloc's is not ours


def test_object_files_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(jit, "OBJECT_BYTES", 100)
    cache = jit.ObjectCache()
    for i in range(10):
        cache.put(bytes([i]), bytes(30))
        assert cache.get(bytes([0])) is not None or i > 2
        cache.get(bytes([0]))
    assert cache.bytes == sum(map(len, cache.files.values())) <= 100
    assert cache.get(bytes([0])) is not None, "what is used stays"
    assert cache.get(bytes([1])) is None


def test_nothing_of_ours_stays_behind_a_reset():
    """(Dynamo itself keeps about 110 KB a compilation: docs/reliability.md. Journals are kept up to a limit.)"""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(3, 8)

    def ours(rounds):
        for _ in range(rounds):
            torch.compile(model, backend="airgraph")(x)
            settled()
        kinds = Counter(type(o).__qualname__ for o in gc.get_objects() if is_ours(type(o)))
        return {kind: count for kind, count in kinds.items() if kind not in JOURNAL}

    first = ours(3)
    assert ours(8) == first


def is_ours(kind):
    return str(kind.__module__).startswith("airgraph.")
