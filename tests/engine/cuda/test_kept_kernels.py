"""Kernels of programs that were kept: found by their digests, and compiled from their source only where that is needed."""

import subprocess
import sys

import pytest
import torch

from airgraph.engine.cuda import compile as cuda_compile
from airgraph.engine.cuda.kept_kernels import KeptSource
from airgraph.engine.cuda.render import Source
from airgraph.engine.cuda.tiles import Tile
from airgraph.engine.cuda.triton_build import Binary
from airgraph.ir.types import DataType
from airgraph.plan.tensors import buffer

TENSORS = (buffer((4,), DataType.DT_FLOAT, None), buffer((4,), DataType.DT_FLOAT, None))
BINARY = Binary(b"code", "kernel", 0, 4, True)


class Rendered(KeptSource):
    """Its text counts how often it is asked for."""

    asked = 0

    @property
    def text(self):
        Rendered.asked += 1
        return "def kernel(): ..."


@pytest.fixture
def kernels(monkeypatch):
    """DriverKernels without a driver: what is loaded is the binary."""
    Rendered.asked = 0
    monkeypatch.setattr(cuda_compile, "LoadedKernel", lambda binary, device: binary)
    monkeypatch.setattr(cuda_compile, "_functions", {})
    monkeypatch.setattr(cuda_compile, "_futures", {})
    monkeypatch.setattr(cuda_compile, "build", lambda variant, capability: Binary(b"built", "kernel", 0, 4, True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")
    return cuda_compile.DriverKernels(torch.device("cuda", 0))


def source(digest):
    return Rendered(digest, Source("", TENSORS, (4,), 4, 0, Tile(4), False, (4,)), (), 0)


def test_what_is_kept_is_not_rendered(kernels, monkeypatch):
    monkeypatch.setattr(cuda_compile, "found", lambda digest: BINARY.to_bytes())
    one = source("a")
    kernels.prepare([one, source("a"), source("b")])
    assert kernels.function(one, (True, True), wide=False) == BINARY
    assert kernels.digest(one) == "a" and kernels.binaries() == dict.fromkeys("ab", BINARY.to_bytes())
    assert Rendered.asked == 0


@pytest.mark.parametrize("alignment, wide", [((True, False), False), ((True, True), True)])
def test_another_variant_is_compiled_from_its_source(kernels, monkeypatch, alignment, wide):
    monkeypatch.setattr(cuda_compile, "found", lambda digest: BINARY.to_bytes())
    one = source("a")
    kernels.prepare([one])
    assert kernels.function(one, alignment, wide).code == b"built"
    assert Rendered.asked == 1


def test_code_that_is_gone_is_compiled_from_its_source(kernels, monkeypatch):
    monkeypatch.setattr(cuda_compile, "found", lambda digest: None)
    one = source("a")
    kernels.prepare([one])
    assert kernels.function(one, (True, True), wide=False).code == b"built"
    assert Rendered.asked == 1 and kernels.binaries() == {}


def test_reading_a_tape_takes_no_plan():
    """A second start imports neither what plans nor what renders."""
    script = "import sys, airgraph.engine.cuda.tape; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for name in ("airgraph.plan.steps", "airgraph.plan.parse", "airgraph.engine.cuda.render", "sympy.core"):
        assert f"'{name}'" not in done.stdout
