"""Sizes that are no multiple of a vector, with garbage in all scratch memory: time of a call, poisoned / clean.

    python benchmarks/poison.py                    all models
    python benchmarks/poison.py --models heads_40

Subnormal numbers in lanes that nothing needs once made such models seven times as slow on x86-64, which takes a microcode
assist for every operation on one. Before each call all memory for intermediates and scratch is filled: with zeros, then
with the garbage, in turn. Only the ratios count; about 1 is right. tests/engine/native/test_poison.py compares the results.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import airgraph
from airgraph.engine.native.runner import POOL

GARBAGE = {"subnormal": 1e-40, "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


# -- models ---------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """A transformer layer: LayerNorm and GELU like BERT's, or RMSNorm, SwiGLU and a causal mask like Llama's."""

    def __init__(self, heads: int, width: int, llama: bool) -> None:
        super().__init__()
        hidden = heads * width
        self.heads, self.width, self.llama = heads, width, llama
        self.norms = nn.ModuleList((nn.RMSNorm if llama else nn.LayerNorm)(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.gate, self.down = nn.Linear(hidden, 300), nn.Linear(hidden, 300), nn.Linear(300, hidden)

    def forward(self, x):
        b, n, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.llama)
        x = x + self.out(seen.transpose(1, 2).reshape(b, n, hidden))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y) if self.llama else F.gelu(self.up(y)))


def transformer(heads: int, width: int, tokens: int, llama: bool = False):
    return nn.Sequential(*(Block(heads, width, llama) for _ in range(2))), torch.randn(1, tokens, heads * width)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y))) + self.depthwise(x)


def images():
    """7×7, the last size of every ResNet at 224×224."""
    layers = [nn.Conv2d(3, 20, 3, stride=2, padding=1), Residual(20), Residual(20), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 10)), torch.randn(1, 3, 14, 14)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.cells, self.out = kind(30, 45, num_layers=2, batch_first=True), nn.Linear(45, 7)

    def forward(self, x):
        return self.out(self.cells(x)[0])


def recurrent(kind: type[nn.GRU] | type[nn.LSTM]):
    return Recurrent(kind), torch.randn(3, 9, 30)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "heads_40": lambda: transformer(6, 40, 37),
    "heads_60_causal": lambda: transformer(4, 60, 33, llama=True),
    "one_token": lambda: transformer(5, 24, 1, llama=True),
    "images_7x7": images,
    "gru": lambda: recurrent(nn.GRU),
    "lstm": lambda: recurrent(nn.LSTM),
}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    return model.eval(), x


# -- timing ---------------------------------------------------------------------------------------------------------------
def ratios(name: str, rounds: int) -> dict[str, float]:
    model, x = build(name)
    run = airgraph.compile(model, (x,))
    seconds: dict[str, list[float]] = {"zero": [], **{kind: [] for kind in GARBAGE}}
    for _ in range(rounds):
        for kind, value in {"zero": 0.0, **GARBAGE}.items():
            POOL.fill(value)
            start = time.perf_counter()
            run(x)
            seconds[kind].append(time.perf_counter() - start)
    clean = statistics.median(seconds.pop("zero"))
    return {kind: statistics.median(times) / clean for kind, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    for name in options.models.split(","):
        print(
            f"{name:16}", *(f"{kind} {ratio:.2f}" for kind, ratio in ratios(name, options.rounds).items()), flush=True
        )


if __name__ == "__main__":
    main()
