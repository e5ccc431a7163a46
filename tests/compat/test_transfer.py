"""`torch_npu.contrib.transfer_to_npu`: a script written for CUDA, on the emulated npu."""

from __future__ import annotations

import io
from collections.abc import Iterator

import forked
import pytest
import torch
from torch import nn

from airgraph.compat.npu import state, transfer
from airgraph.errors import CompatError


@pytest.fixture
def transferred() -> Iterator[None]:
    transfer.install()
    yield
    transfer.uninstall()


def test_devices() -> None:
    assert transfer.npu_for("cuda:0") == "npu:0" and transfer.npu_for("cuda") == "npu"
    assert transfer.npu_for(torch.device("cuda")) == torch.device("npu")
    assert transfer.npu_for(torch.device("cuda", 0)) == torch.device("npu", 0)
    for other in ("cpu", "cudagraph", torch.device("cpu"), 0, None, torch.float32):
        assert transfer.npu_for(other) is other


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_making_and_moving(transferred: None, device: str | torch.device) -> None:
    made = [
        torch.ones(2, device=device),
        torch.tensor([1.0, 2.0], device=device),
        torch.randn(2, device=device),
        torch.zeros_like(torch.ones(2), device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device, dtype=torch.float64),
        torch.ones(2).cuda(),
        torch.ones(2).cuda(0),
        torch.ones(2).new_zeros(3, device=device),
        nn.Linear(2, 2).to(device).weight,
        nn.Linear(2, 2).cuda().weight,
        torch.randn(3, device=device, generator=torch.Generator(device=device).manual_seed(0)),
    ]
    assert {str(x.device) for x in made} == {"npu:0"}
    assert all(x.is_cuda for x in made) and not torch.ones(2).is_cuda
    assert made[5].dtype == torch.float64


def test_names_of_torch_cuda(transferred: None) -> None:
    cuda = torch.cuda
    assert cuda.is_available() and cuda.device_count() == 1 and cuda.current_device() == 0
    assert cuda.get_device_name() == "airgraph emulated NPU"
    assert cuda.get_device_capability() < (9, 0)  # PyTorch compares it, where it finds Triton
    cuda.set_device(0)
    cuda.manual_seed(3)
    with cuda.stream(cuda.Stream()):
        x = torch.ones(1024, device="cuda")
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    end.record()
    cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert cuda.memory_allocated() == torch.npu.memory_allocated() >= x.nbytes
    assert cuda.CUDAGraph is torch.npu.NPUGraph
    with cuda.device(0):
        assert x.sum().item() == 1024


def test_training_with_amp(transferred: None) -> None:
    model = nn.Linear(4, 4).cuda()
    before = model.weight.detach().cpu()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for autocast, scaler in (
        (torch.cuda.amp.autocast(), torch.cuda.amp.GradScaler(init_scale=1024.0)),
        (torch.autocast("cuda", dtype=torch.float16), torch.amp.GradScaler("cuda", init_scale=1024.0)),
    ):
        with autocast:
            out = model(torch.ones(2, 4, device="cuda"))
        assert out.dtype == torch.float16
        scaler.scale(out.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.allclose(model.weight.detach().cpu(), before - 2 * 0.1 * 2)


def test_a_graph(transferred: None) -> None:
    x = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [6.0, 6.0]


def test_loading(transferred: None) -> None:
    for location in ("cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda"}):
        file = io.BytesIO()
        torch.save(torch.ones(2), file)
        file.seek(0)
        assert str(torch.load(file, map_location=location).device) == "npu:0"
    file.seek(0)
    assert torch.load(file).device.type == "cpu"


def test_a_default_device_is_still_seen(transferred: None) -> None:
    with torch.device("npu"):
        assert torch.ones(2).device.type == "npu"
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).device.type == "npu"
    finally:
        torch.set_default_device(None)


def test_everything_is_taken_back() -> None:
    def names() -> list[object]:
        classes = [vars(c).get(n) for c in (torch.Tensor, nn.Module) for n in ("to", "cuda", "is_cuda", "to_empty")]
        functions = [getattr(torch, n) for n in (*transfer.FACTORIES, "load", "Generator")]
        return [*classes, *functions, *(dict(vars(m)) for m in (torch.cuda, torch.cuda.amp, torch.cuda.memory))]

    before = names()
    transfer.install()
    transfer.install()
    assert names() != before
    transfer.uninstall()
    assert names() == before
    assert not torch.cuda.is_available() or torch.version.cuda


def test_on_a_gpu_there_is_nothing_to_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "host_device", lambda: torch.device("cuda", 0))
    with pytest.raises(CompatError, match="transfer_to_npu is for scripts on a machine without CUDA"):
        transfer.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is nothing to transfer on a GPU")
def test_importing_it_is_what_does_it() -> None:
    code = """
import sys, torch
from airgraph import compat
compat.install()
import torch_npu
assert "torch_npu.contrib.transfer_to_npu" not in sys.modules and not torch.cuda.is_available()
from torch_npu.contrib import transfer_to_npu
assert torch.cuda.is_available()

@torch.compile(backend="airgraph")
def f(x):
    return torch.relu(x) * 2

assert f(torch.ones(3).cuda()).tolist() == [2.0] * 3
compat.uninstall()
assert not torch.cuda.is_available()
compat.install()
assert not torch.cuda.is_available()
import torch_npu.contrib.transfer_to_npu
assert torch.ones(2, device="cuda").device.type == "npu"
"""
    result = forked.run("-c", code)
    assert result.returncode == 0, result.stderr
