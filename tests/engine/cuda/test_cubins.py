"""Compiled Triton kernels are kept on disk: the next process compiles only what differs. (No GPU and no Triton needed.)"""

import dataclasses

import pytest

from airgraph.disk_cache import open_cache
from airgraph.engine.cuda import compile as cuda_compile
from airgraph.engine.cuda import cubins
from airgraph.engine.cuda.triton_build import Binary, KernelVariant

VARIANT = KernelVariant("def kernel(x): ...", (("x", "*fp32"),), (("BLOCK", 64),), warps=4, aligned=(True,))


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Compiles a variant as a new process would; gives the kernel, and what Triton was asked for."""
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    asked = []

    def build(variant, capability):
        asked.append((variant, capability))
        return Binary(f"cubin of {variant} for {capability}".encode(), "kernel", 128, variant.warps, capability >= 90)

    monkeypatch.setattr(cuda_compile, "build", build)

    def process(variant=VARIANT, capability=90):
        cuda_compile._futures.clear()
        return cuda_compile.request(variant, capability).result(), len(asked)

    yield process
    cuda_compile._futures.clear()


def test_a_second_process_compiles_nothing(processes):
    first, asked = processes()
    assert asked == 1 and first.early
    assert processes() == (first, 1)
    assert open_cache().counts["cubin hits"] == 1


@pytest.mark.parametrize(
    "change", [{"text": "def kernel(x): pass"}, {"warps": 8}, {"aligned": (False,)}, {"wide": True}, {"checks": True}]
)
def test_what_a_kernel_depends_on(processes, change):
    first, _ = processes()
    other, asked = processes(dataclasses.replace(VARIANT, **change))
    assert asked == 2 and other.code != first.code
    assert processes(capability=80)[1] == 3


def test_another_triton_or_a_damaged_file(processes, monkeypatch):
    first, _ = processes()
    (entry,) = [e for e in open_cache().entries() if e.kind == "cubin"]
    data = entry.path.read_bytes()
    entry.path.write_bytes(data[:-1] + b"?")
    assert processes() == (first, 2)
    monkeypatch.setattr(cubins, "triton_version", lambda: "triton 0")
    assert processes()[1] == 3
