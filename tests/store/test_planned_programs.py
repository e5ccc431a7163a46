"""Programs of the CUDA engine on disk: a second process is given the same plan and launches the same kernels.

No GPU and no Triton are needed: what stands in for them writes down what would be launched, with which numbers.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from torch import nn

import airgraph
from airgraph.disk_cache import open_cache
from airgraph.engine import ENGINES
from airgraph.engine.cuda import compile as cuda_compile
from airgraph.engine.cuda import cubins
from airgraph.engine.cuda.cubins import offer
from airgraph.engine.cuda.kept_kernels import KeptSource
from airgraph.engine.cuda.triton_build import Binary
from airgraph.errors import VerifyError
from airgraph.journal import JOURNALS
from airgraph.named_models import CachedModel
from airgraph.plan.parse import PlanReader
from airgraph.store import planned_program
from airgraph.store.convention import PLANNED
from airgraph.store.planned_program import PlannedProgram
from airgraph.tools import cli

sys.path.insert(0, str(Path(__file__).parent))
from recorded import registered


@pytest.fixture
def engine(monkeypatch, tmp_path):
    JOURNALS.clear()
    yield registered(monkeypatch, tmp_path)
    del ENGINES["recorded"]


class Block(nn.Module):
    """Loops, products of one row, a norm, a call of PyTorch, a buffer that is written to, a constant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.gate, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x):
        h = nn.functional.silu(self.gate(self.norm(x)))
        y = x + self.down(h)
        self.seen.add_(y.sum(0))
        return y.sort(-1)[0], (y * torch.arange(64.0)).softmax(-1)


@pytest.mark.parametrize("kind", ["static", "dynamic", "training"])
def test_a_second_compilation_plans_nothing(engine, kind):
    def run():
        torch._dynamo.reset()
        model, training = Block(), kind == "training"
        compiled = torch.compile(model, backend=airgraph.backend(engine="recorded"), dynamic=kind == "dynamic")
        with torch.set_grad_enabled(training):
            for rows in (1, 3) if kind == "dynamic" else (3,):
                result, _ = compiled(torch.randn(rows, 64))
                if training:
                    result.sum().backward()
        return engine.taken()

    first, planned = run()
    assert planned and first and all(e.kind == "program" for e in open_cache().entries() if e.kind != "object")
    again, none = run()
    assert again == first and none == 0
    assert sum(journal.counters["program hits"] for journal in JOURNALS) == planned
    assert "program" in {entry.kind for entry in open_cache().entries()} and open_cache().verify()[1] == []


@pytest.mark.parametrize("kind", ["static", "dynamic", "training", "one row"])
def test_a_program_that_is_read_renders_no_loop(engine, kind, monkeypatch):
    """Only products of one row, whose kernels are made of several steps. What is rendered later is what was compiled."""

    def run():
        torch._dynamo.reset()
        compiled = torch.compile(Block(), backend=airgraph.backend(engine="recorded"), dynamic=kind == "dynamic")
        with torch.set_grad_enabled(kind == "training"):
            result, _ = compiled(torch.randn(1 if kind == "one row" else 3, 64))
            if kind == "training":
                result.sum().backward()
        return engine.taken()

    first, _ = run()
    engine.executables.clear()
    read, original = [], PlanReader.read_loop
    monkeypatch.setattr(PlanReader, "read_loop", lambda self, lines: read.append(lines) or original(self, lines))
    assert run() == (first, 0)
    assert bool(read) == (kind == "one row")
    kept = [s for e in engine.executables for s in e.kernels.sources if isinstance(s, KeptSource)]
    assert kept
    for source in kept:
        assert hashlib.sha256(source.text.encode()).hexdigest() == source.digest
        rendered = source.rendered
        assert (source.signature, source.constants) == (rendered.signature, rendered.constants)
        assert (source.warps, source.checks, source.fuses) == (rendered.warps, rendered.checks, rendered.fuses)
        assert (source.sizes, source.elements) == (rendered.sizes, rendered.elements)
    assert read


def test_a_program_that_was_read_is_saved(engine, tmp_path):
    rows = {"x": {0: torch.export.Dim.DYNAMIC}}
    model, x = Block().eval(), torch.randn(3, 64)
    for planned in (1, 0):
        fast = airgraph.compile(model, x, engine="recorded", dynamic_shapes=rows)
        fast(x)
        first, made = engine.taken()
        assert made == planned
    path = airgraph.save(fast, tmp_path / "m.airp")
    engine.taken()
    airgraph.load(path, engine="recorded", trust=True)(x)
    assert engine.taken() == (first, 0)


def test_a_model_under_a_name(engine):
    x = torch.randn(3, 64)

    def run():
        model = Block().eval()
        fast = airgraph.compile(model, x, cache="block", engine="recorded")
        assert isinstance(fast, CachedModel)
        fast(x)
        return engine.taken()

    first, planned = run()
    assert planned == 1 and first
    assert run() == (first, 0)


START = """
import json, os, sys
import torch, airgraph
sys.path.insert(0, {folder!r})
from recorded import Recorded
from airgraph.engine import native, register_engine
from airgraph.engine.native.replay_code import native_method
native.problem = lambda: None  # not asked where a GPU runs the model
register_engine(Recorded())
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).eval(), torch.ones(3, 8)
if sys.argv[1] == "named":
    call = airgraph.compile(model, x, cache="block", engine="recorded")
else:
    if not os.path.exists("m.airp"):
        airgraph.save(airgraph.compile(model, x, engine="recorded"), "m.airp")
    call = airgraph.load("m.airp", engine="recorded", trust=True)
call(x)
assert native_method("same") is not None  # as a replay has it
print(json.dumps([*sys.modules]))
"""
UNUSED = ["torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.fx.experimental.symbolic_shapes"]
UNUSED += ["triton", "llvmlite", "sympy", "airgraph.convert", "airgraph.passes", "airgraph.plan.lowerings"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["named", "artifact"])
def test_the_second_start_imports_no_compiler(tmp_path, kind):
    """The artifact starts with an empty cache."""
    script = START.format(folder=str(Path(__file__).parent))
    caches = [tmp_path / "first", tmp_path / ("first" if kind == "named" else "second")]
    first, second = ({**os.environ, "AIRGRAPH_VERIFY": "0", "AIRGRAPH_CACHE_DIR": str(cache)} for cache in caches)
    done = forked.run("-c", script, kind, env=first, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    command = [sys.executable, "-c", script, kind]
    done = subprocess.run(command, env=second, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in UNUSED if name in modules] == []


def test_an_artifact_has_the_plan_and_the_kernels(engine, tmp_path, monkeypatch, capsys):
    model, x = Block().eval(), torch.randn(3, 64)
    fast = airgraph.compile(model, x, engine="recorded")
    fast(x)
    first, _ = engine.taken()
    path = airgraph.save(fast, tmp_path / "m.airp")
    engine.taken()
    offered = {}
    monkeypatch.setattr(cubins, "offer", offered.__setitem__)
    loaded = airgraph.load(path, engine="recorded")
    loaded(x)
    again, planned = engine.taken()
    assert planned == 0 and [launch[:4] for launch in again] == [launch[:4] for launch in first]
    assert {launch[0] for launch in first} <= offered.keys()
    assert all(hashlib.sha256(text).hexdigest() == digest for digest, text in offered.items())
    assert cli.main(["show", str(path)]) == 0 and "bytes of object code" in capsys.readouterr().out
    untrusted = airgraph.load(path, engine="reference")
    torch.testing.assert_close(untrusted(x), model(x))


def test_a_plan_that_cannot_be_used_is_made_again(engine, monkeypatch):
    def run():
        torch._dynamo.reset()
        torch.compile(Block().eval(), backend=airgraph.backend(engine="recorded"))(torch.randn(3, 64))
        return engine.taken()

    with torch.no_grad():
        first, _ = run()
        monkeypatch.setattr(planned_program, "parse_plan", lambda *args: {}["missing"])
        again, planned = run()
    assert planned == 1 and again == first
    assert any("is compiled again: KeyError" in note for stage in JOURNALS[-1].stages for note in stage.notes)


def test_a_plan_that_does_not_read_back_is_not_kept(engine, monkeypatch):
    monkeypatch.setattr(planned_program, "reads_back", lambda data: False)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Block().eval(), backend=airgraph.backend(engine="recorded"))(torch.randn(3, 64))
    notes = [note for stage in JOURNALS[-1].stages for note in stage.notes]
    assert "program not kept: its plan does not read back as it was written" in notes


def test_a_plan_that_is_cut_off(engine):
    def kept():
        (entry,) = [entry for entry in open_cache().entries() if entry.kind == "program"]
        data = entry.path.read_bytes()
        return data[data.index(PLANNED) :]

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Block().eval(), backend=airgraph.backend(engine="recorded"))(torch.randn(3, 64))
    assert PlannedProgram.from_bytes(kept())
    with pytest.raises(VerifyError, match="incomplete or truncated"):
        PlannedProgram.from_bytes(kept()[:-9])


def test_a_plan_of_another_version(engine):
    with pytest.raises(VerifyError, match="not a program of this version"):
        PlannedProgram.from_bytes(b"airgraph plan 0\n" + bytes(64))


def test_offered_kernels_are_not_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cubins, "_offered", {})
    variant = cuda_compile.KernelVariant("def kernel(): ...", (), (), warps=4, aligned=())
    binary = Binary(b"code", "kernel", 0, 4, True)
    offer(cuda_compile.variant_key(variant, 90).digest, binary.to_bytes())
    monkeypatch.setattr(cuda_compile, "build", lambda *args: pytest.fail("compiled"))
    assert cuda_compile.kept_or_compiled(variant, 90) == binary
