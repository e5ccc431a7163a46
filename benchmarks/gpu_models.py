"""The models of `gpu.py`: one row each, random weights from a fixed seed, nothing is downloaded.

A row makes a module and its inputs on the GPU, in the type it is measured in. `train` rows time forward, loss and backward.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import vision_models
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Model:
    name: str
    size: str
    make: Callable[[], Made]
    dtype: torch.dtype
    train: bool = False

    def build(self, dtype: torch.dtype | None = None) -> Made:
        """The same weights and inputs every time, rounded to the row's own type and held in `dtype`."""
        torch.manual_seed(0)
        with torch.device("cuda"):
            module, args = self.make()
        module = (module.train() if self.train else module.eval()).to(self.dtype)
        args = tuple(a.to(self.dtype) if a.is_floating_point() else a for a in args)
        if dtype is not None:
            module, args = module.to(dtype), tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
        for part in module.modules():
            if isinstance(part, Llama):
                part.frequency = part.frequency.to(dtype or torch.float32)
        return module, args


# -- Llama --------------------------------------------------------------------------------------------------------------
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, inner: int, batch: int, slots: int) -> None:
        super().__init__()
        self.heads, self.shared, self.depth = heads, shared, width // heads
        self.before, self.after = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, shared * self.depth, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(batch, shared, slots, self.depth))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.depth).transpose(1, 2)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Each shared head of the cache for the query heads that use it."""
        return x.repeat_interleave(self.heads // self.shared, dim=1)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        position: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        y = self.before(x)
        q, k, v = rotate(self.split(self.q(y)), *turn), rotate(self.split(self.k(y)), *turn), self.split(self.v(y))
        slot = position.view(1, 1, -1, 1).expand_as(k)
        self.keys.scatter_(2, slot, k)
        self.values.scatter_(2, slot, v)
        if mask is not None:
            k, v = self.keys, self.values
        seen = F.scaled_dot_product_attention(q, self.spread(k), self.spread(v), attn_mask=mask, is_causal=mask is None)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Logits of the last token. The cache is written in place; a single token sees it up to its position."""

    def __init__(self, batch: int, slots: int = 1024, count: int = 16) -> None:
        super().__init__()
        width, heads, shared, inner, words = 2048, 32, 8, 8192, 128256
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, shared, inner, batch, slots) for _ in range(count))
        self.norm, self.head = nn.RMSNorm(width, 1e-6), nn.Linear(width, words, bias=False)
        depth = width // heads
        self.register_buffer("frequency", 10000.0 ** (-torch.arange(0, depth, 2) / depth))
        self.register_buffer("slots", torch.arange(slots))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        angle = (position[:, None] * self.frequency).repeat(1, 2)
        turn = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        mask = (self.slots <= position)[None, None, None] if token.shape[1] == 1 else None
        for layer in self.layers:
            x = layer(x, turn, position, mask)
        return self.head(self.norm(x[:, -1:]))


def llama_decode(batch: int) -> Made:
    return Llama(batch), (torch.randint(0, 128256, (batch, 1)), torch.tensor([900]))


def llama_prefill() -> Made:
    return Llama(1), (torch.randint(0, 128256, (1, 512)), torch.arange(512))


# -- transformers -------------------------------------------------------------------------------------------------------
class Field(nn.Module):
    """One field of what a transformers model returns."""

    def __init__(self, model: nn.Module, field: str) -> None:
        super().__init__()
        self.model, self.field = model, field

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[self.field]


def bert() -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Field(BertModel(config), "last_hidden_state"), (torch.randint(0, 30000, (8, 128)),)


def vit() -> Made:
    from transformers import ViTConfig, ViTModel

    return Field(ViTModel(ViTConfig(attn_implementation="sdpa")), "last_hidden_state"), (torch.randn(8, 3, 224, 224),)


# -- convolutions -------------------------------------------------------------------------------------------------------
def resnet(batch: int = 16) -> Made:
    widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    return vision_models.resnet((*widths, (512, 512, 1)), 1000), (torch.randn(batch, 3, 224, 224),)


def unet() -> Made:
    return vision_models.UNetBlock(320, 8), (torch.randn(4, 320, 32, 32), torch.randn(4, 512))


# -- norms and elementwise ----------------------------------------------------------------------------------------------
class NormChain(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = torch.softmax(torch.sigmoid(F.gelu(norm(x))), -1) + x
        return x


class Pointwise(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.tanh(x * y + 1.0) * torch.sigmoid(x - y)
        return z.sum(0), z.amax(1)


def norms() -> Made:
    return NormChain(2048, 8), (torch.randn(4096, 2048),)


def pointwise() -> Made:
    return Pointwise(), (torch.randn(4096, 4096), torch.randn(4096, 4096))


def mlp() -> Made:
    widths = (512, 2048, 2048, 512)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(64, 512),)


half, bf16 = torch.float16, torch.bfloat16
MODELS = {
    m.name: m
    for m in (
        Model("llama decode 1", "1.2 B, 1 token, cache of 1,024", lambda: llama_decode(1), bf16),
        Model("llama decode 8", "1.2 B, 8 × 1 token, cache of 1,024", lambda: llama_decode(8), bf16),
        Model("llama prefill", "1.2 B, 512 tokens", llama_prefill, bf16),
        Model("bert", "BERT-base, 8 × 128 tokens", bert, bf16),
        Model("vit", "ViT-base, 8 × 224²", vit, bf16),
        Model("resnet", "ResNet-18-like, 16 × 224²", resnet, half),
        Model("unet", "block of 320 channels, 4 × 32²", unet, half),
        Model("norms", "8 × LayerNorm-GELU-sigmoid-softmax, 4,096 × 2,048", norms, bf16),
        Model("pointwise", "elementwise with two reductions, 4,096²", pointwise, torch.float32),
        Model("mlp", "512-2048-2048-512, 64 rows", mlp, bf16),
        Model("bert train", "BERT-base, 8 × 128 tokens", bert, bf16, train=True),
        Model("resnet train", "ResNet-18-like, 16 × 224²", resnet, half, train=True),
    )
}
