"""What no program uses any more is freed: machine code, its memory maps, frames."""

from __future__ import annotations

import gc
import linecache
import platform
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from torch._dynamo.utils import get_metrics_context
from torch.fx.graph_module import _loader

from airgraph.capture import dead_compilations
from airgraph.engine.native import code, runner
from airgraph.engine.native.llvm import jit

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
    before, known, frames = maps(), set(code._known), set(runner._frames)
    alive = [program(number) for number in range(64, 72)]
    for run in alive:
        run(x)
    assert len(set(code._known) - known) >= 8
    # By our own loader, graphs share maps; by LLVM's linker a graph has those of one module.
    assert maps() - before < (8 if platform.machine() == "x86_64" else 3 * 8)
    del run
    alive.clear()
    settled()
    assert set(code._known) <= known and set(runner._frames) <= frames
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


LEFT = """
import collections, gc, torch
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(3, 8)
def ours(rounds):
    for _ in range(rounds):
        torch.compile(model, backend="airgraph")(x)
        torch._dynamo.reset()
        gc.collect()
    kinds = [type(o) for o in gc.get_objects() if str(type(o).__module__).startswith("airgraph.")]
    counts = collections.Counter(kind.__qualname__ for kind in kinds)
    return {kind: n for kind, n in counts.items() if kind not in ("Journal", "StageRecord", "OpUse", "Fallback")}
first = ours(2)
after = ours(4)
assert after == first, {kind: (n, first.get(kind)) for kind, n in after.items() if n != first.get(kind)}
"""


def test_nothing_of_ours_stays_behind_a_reset():
    """Journals are kept up to a limit. In a process of its own: what PyTorch keeps of graphs of other tests is released
    now and then, so the counts would change."""
    done = forked.run("-c", LEFT)
    assert done.returncode == 0, done.stderr


def kept_by_pytorch():
    return {
        "guards": len({id(guards) for _, guards in dead_compilations.guard_finalizers()}),
        "sources": len(_loader.eval_cache),
        "lines": len(linecache.cache),
        "tracebacks": len(get_metrics_context()._edits),
    }


def reset_often(times, backend="airgraph"):
    for _ in range(times):
        torch.compile(small, backend=backend)(torch.ones(8))
        torch._dynamo.reset()


def small(x):
    return torch.relu(x + 1) * 2


def test_what_pytorch_keeps_of_dead_graphs_is_released(monkeypatch):
    monkeypatch.setattr(dead_compilations, "EVERY", 4)
    reset_often(6)
    before = kept_by_pytorch()
    reset_often(8)
    after = kept_by_pytorch()
    assert {name: after[name] - before[name] for name in after if after[name] > before[name] + 4} == {}
    reset_often(8, "aot_eager")  # nobody releases: the tables are the ones that grow
    grown = kept_by_pytorch()
    assert all(grown[name] >= after[name] + 8 for name in grown)


def test_what_live_graphs_need_stays(monkeypatch):
    """The guard on an object's identity still ends its entry, and the source of a live graph can be read."""
    monkeypatch.setattr(dead_compilations, "EVERY", 1)
    live = torch.compile(lambda x: torch.sigmoid(x) + 1, backend="airgraph", dynamic=False)
    live(torch.ones(3))
    graph = torch.fx.symbolic_trace(small)
    for size in range(4, 8):
        live(torch.ones(size))
    entries = [guards.guard_manager.cache_entry for _, guards in dead_compilations.guard_finalizers()]
    assert len({id(entry) for entry in entries if entry is not None}) == 5
    assert "relu" in "".join(linecache.getlines(graph.forward.__code__.co_filename))


@pytest.mark.night
def test_resident_memory_is_flat_over_resets():
    code = """
import gc, torch, airgraph
def small(x):
    return torch.relu(x + 1) * 2
def resets(times):
    for _ in range(times):
        torch.compile(small, backend="airgraph")(torch.ones(8))
        torch._dynamo.reset()
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096
first = resets(400)  # journals and Dynamo's metrics are kept up to a limit
print((resets(600) - first) / 600)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3000, "bytes per reset"
