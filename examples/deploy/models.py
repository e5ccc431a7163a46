"""Builds the two models of this folder: an MLP and a small Llama with its cache. `python models.py FOLDER`"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import airgraph


class Layer(nn.Module):
    """A Llama layer for one token; the new key and value are written to the cache."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, width // heads
        self.before, self.after = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, angle, position, keys, values, mask):
        y = self.before(x)
        q, k, v = (p(y).view(1, 1, self.heads, self.depth).transpose(1, 2) for p in (self.q, self.k, self.v))
        slot = position.view(1, 1, 1, 1).expand_as(k)
        keys.scatter_(2, slot, rotate(k, angle))
        values.scatter_(2, slot, v)
        seen = F.scaled_dot_product_attention(rotate(q, angle), keys, values, attn_mask=mask)
        x = x + self.o(seen.transpose(1, 2).reshape(1, 1, -1))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-right, left), dim=-1) * angle.sin()


class Llama(nn.Module):
    """Logits of the next token. The cache of `slots` tokens is in buffers, which a built program keeps per instance."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4, words: int = 100, slots: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, 3 * width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, 1e-6), nn.Linear(width, words, bias=False)
        depth = width // heads
        self.register_buffer("frequency", 10000.0 ** (-torch.arange(0, depth, 2) / depth))
        self.register_buffer("slots", torch.arange(slots))
        for i in range(layers):
            self.register_buffer(f"keys_{i}", torch.zeros(1, heads, slots, depth))
            self.register_buffer(f"values_{i}", torch.zeros(1, heads, slots, depth))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        angle = (position[:, None] * self.frequency).repeat(1, 2)
        mask = (self.slots <= position)[None, None, None]
        for i, layer in enumerate(self.layers):
            x = layer(x, angle, position, getattr(self, f"keys_{i}"), getattr(self, f"values_{i}"), mask)
        return self.head(self.norm(x))


def llama() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Llama().eval(), (torch.tensor([[1]]), torch.tensor([0]))


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 10)).eval(), (torch.randn(32, 128),)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for make in (mlp, llama):
        model, args = make()
        airgraph.build(airgraph.compile(model, args), folder / make.__name__)
    args = mlp()[1]
    (folder / "x.bin").write_bytes(args[0].numpy().tobytes())
