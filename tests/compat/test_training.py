"""A model moved to the npu, compiled and trained: the losses are the CPU's, and its file goes there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchair
from torch import Tensor, nn
from torch.nn import functional

STEPS = 20
CLASSES = 5


class Model(nn.Module):
    """Parameters, buffers that each step changes, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1, bias=False)  # before a norm a bias has no gradient but rounding
        self.batch_norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens)).transpose(1, 2)
        x = functional.gelu(self.batch_norm(self.conv(x))).mean(2)
        return self.out(x)[:, :CLASSES]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Three batches again and again, to be learned by heart."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, 20, (8, 6), generator=generator) for _ in range(3)]
    return [(tokens, tokens.sum(1) % CLASSES) for tokens in (made * count)[:count]]


class Run:
    """A model with its optimizer on a device."""

    def __init__(self, device: str, **compiled: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Model().to(device)
        self.step = torch.compile(self.model, fullgraph=True, **compiled) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, data: list[tuple[Tensor, Tensor]]) -> list[float]:
        losses = []
        for tokens, target in data:
            loss = functional.cross_entropy(self.step(tokens.to(self.device)), target.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.fixture(scope="module")
def on_cpu() -> tuple[list[float], Run]:
    """Twenty steps on the CPU, as they are."""
    run = Run("cpu")
    return run.train(batches(STEPS)), run


def torchair_backend() -> Any:
    return torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())


COMPILED: dict[str, Any] = {
    "eager": dict,
    "torchair": lambda: {"backend": torchair_backend()},
    "airgraph": lambda: {"backend": "airgraph"},
    "inductor": lambda: {"backend": "inductor"},
    "npugraphs": lambda: {"backend": "npugraphs"},
    "npugraph_ex": lambda: {"backend": "npugraph_ex"},
}
EXACT = ("eager", "npugraphs", "npugraph_ex")  # there every op is PyTorch's own


@pytest.mark.parametrize("how", COMPILED)
def test_twenty_steps_give_the_losses_of_the_cpu(how: str, on_cpu: tuple[list[float], Run]) -> None:
    expected, reference = on_cpu
    run = Run("npu", **COMPILED[how]())
    losses = run.train(batches(STEPS))
    assert len(losses) == STEPS and expected[-1] < expected[0] / 2
    assert {str(p.device) for p in run.model.state_dict().values()} == {"npu:0"}
    if how in EXACT:
        assert losses == expected
        assert all(torch.equal(v.cpu(), w) for v, w in zip(run.model.state_dict().values(), reference_state(reference)))
    # Each step starts from the rounding of the one before it, and Adam divides by what may be small.
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for (name, mine), theirs in zip(run.model.state_dict().items(), reference_state(reference)):
        torch.testing.assert_close(
            mine.cpu(), theirs, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def reference_state(run: Run) -> list[Tensor]:
    return list(run.model.state_dict().values())


@pytest.mark.parametrize("how", ["eager", "torchair", "npugraphs"])
def test_a_checkpoint_goes_to_the_cpu_and_back(how: str, tmp_path: Path) -> None:
    """Ten steps on the npu, five on the CPU from its file, five on the npu from that one's: as twenty on the CPU."""
    data, file = batches(STEPS), tmp_path / "state.pt"
    losses = []
    for device, part in (("npu", data[:10]), ("cpu", data[10:15]), ("npu", data[15:])):
        torch._dynamo.reset()
        run = Run(device, **(COMPILED[how]() if device == "npu" else {}))
        if file.exists():
            run.load(torch.load(file, map_location=device))
        losses += run.train(part)
        torch.save(run.state(), file)
    held = torch.load(file)
    assert {v.device.type for v in held["model"].values()} == {"npu"}
    assert {v.device.type for v in torch.load(file, map_location="cpu")["model"].values()} == {"cpu"}
    expected = Run("cpu").train(data)
    if how in EXACT:
        assert losses == expected
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    """Bit for bit, with the two names of one weight still one weight."""
    run = Run("npu")
    run.train(batches(2))
    torch.save(run.model.state_dict(), tmp_path / "model.pt")
    there = Model()
    there.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cpu"))
    for name, value in run.model.state_dict().items():
        assert torch.equal(there.state_dict()[name], value.cpu()), name
    torch.save(there.state_dict(), tmp_path / "again.pt")
    back = Model().npu()
    back.load_state_dict(torch.load(tmp_path / "again.pt"))  # of the CPU, into parameters of the npu
    assert back.out.weight is back.embed.weight and back.out.weight.device.type == "npu"
    tokens = batches(1)[0][0].npu()
    assert torch.equal(back.eval()(tokens), run.model.eval()(tokens))


@pytest.mark.parametrize("backend", ["airgraph", "npugraph_ex"])
def test_a_frozen_batch_norm(backend: str) -> None:
    """In inference the host has no statistics for the backward pass, an accelerator has."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval().npu()
    x = torch.randn(2, 3, 6, 6, device="npu", requires_grad=True)
    fast = torch.compile(model, backend=backend)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    for _ in range(3):
        found = torch.autograd.grad(fast(x).square().sum(), [x, *model.parameters()])
        for mine, eager in zip(found, expected):
            torch.testing.assert_close(mine.cpu(), eager.cpu())
