"""The models of `cpu.py`: one row each, random weights from a fixed seed, nothing is downloaded.

Rows belong to groups: `small` (0.05 to 100 ms a call), `real` (sizes in use), `odd` (sizes that are no multiples of a
vector's) and `bf16`.

A row makes a module and its example inputs. Every forward takes tensors by position and returns a tensor, so that one
and the same module goes to torch.compile and to the ONNX exporter. Most are made from `transformers` configurations, with
`sdpa` attention; where a contender could not take the original (data-dependent loops over experts, cache objects), the
same arithmetic is written in plain torch, and the row says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import vision_models
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
VOCAB = 2000


@dataclass(frozen=True)
class Model:
    """One row. `make` returns the module and its inputs; `train` rows time forward, loss and backward.

    `state` is how the names of those buffers begin that a call writes to. `heavy`: weights of gigabytes, so contenders that
    copy them twice are left out. `autocast`: computed in bfloat16 where PyTorch's autocast does, with weights in `dtype`.
    """

    name: str
    size: str
    make: Callable[[], Made]
    train: bool = False
    state: tuple[str, ...] = ()
    group: str = "small"
    dtype: torch.dtype = torch.float32
    heavy: bool = False
    autocast: bool = False

    def build(self) -> Made:
        """The same weights and inputs in every process."""
        torch.manual_seed(0)
        module, args = self.make()
        args = tuple(a.to(self.dtype) if a.is_floating_point() else a for a in args)
        module = (module.train() if self.train else module.eval()).to(self.dtype)
        return Autocast(module) if self.autocast else module, args

    def exportable(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> Made:
        """For ONNX, which has no buffers that change: what a call writes to goes in and comes out."""
        if not self.state:
            return module, args
        state = {name: value.clone() for name, value in module.named_buffers() if name.startswith(self.state)}
        return Stateless(module, list(state)), (*args, *state.values())


class Autocast(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*args)


class Stateless(nn.Module):
    """A module whose named buffers are inputs, and outputs after its own result."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, state = args[: -len(self.names)], args[-len(self.names) :]
        result = torch.func.functional_call(self.module, dict(zip(self.names, state)), own)
        return result, *state


# -- from transformers ------------------------------------------------------------------------------------------------
class Field(nn.Module):
    """A transformers model with positional inputs and one tensor as its result."""

    def __init__(self, model: nn.Module, field: str, *names: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.field, self.names, self.fixed = model, field, names, fixed

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        given = {name: value for name, value in zip(self.names, (first, second)) if value is not None}
        return getattr(self.model(**given, **self.fixed), self.field)


def pretrained(model: str, config: str, **args: Any) -> nn.Module:
    """`transformers.<model>` of `transformers.<config>(**args)`, by sdpa."""
    import transformers

    made = getattr(transformers, config)(**args)
    made._attn_implementation = "sdpa"
    return getattr(transformers, model)(made)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(10, VOCAB, (batch, length))


def layers(count: int, width: int, heads: int, inner: int) -> dict[str, int]:
    """The arguments that most text and vision configurations share."""
    return {"num_hidden_layers": count, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}


def bert(train: bool = False) -> Made:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kind = "BertForMaskedLM" if train else "BertForSequenceClassification"
    model = pretrained(kind, "BertConfig", vocab_size=VOCAB, **layers(4, 256, 4, 1024), **off)
    ids = tokens(1, 48)
    if train:
        return Field(model, "loss", "input_ids", "labels"), (ids, tokens(1, 48))
    mask = torch.ones(1, 48, dtype=torch.long)
    mask[:, 40:] = 0
    return Field(model, "logits", "input_ids", "attention_mask"), (ids, mask)


def bert_base(length: int, batch: int = 1) -> Made:
    model = pretrained("BertForSequenceClassification", "BertConfig", vocab_size=30522)
    return Field(model, "logits", "input_ids", "attention_mask"), (
        tokens(batch, length),
        torch.ones(batch, length, dtype=torch.long),
    )


def electra() -> Made:
    model = pretrained("ElectraModel", "ElectraConfig", vocab_size=VOCAB, embedding_size=128, **layers(4, 256, 4, 1024))
    return Field(model, "last_hidden_state", "input_ids"), (tokens(1, 48),)


def qwen3_odd() -> Made:
    """Heads of 40."""
    args = {"vocab_size": VOCAB, "num_key_value_heads": 2, "head_dim": 40, **layers(4, 240, 6, 640)}
    model = pretrained("Qwen3ForCausalLM", "Qwen3Config", **args)
    return Field(model, "logits", "input_ids", use_cache=False), (tokens(1, 40),)


def deit_odd() -> Made:
    """Heads of 60."""
    args = {"image_size": 96, "patch_size": 16, **layers(4, 180, 3, 720)}
    model = pretrained("DeiTForImageClassification", "DeiTConfig", **args)
    return Field(model, "logits", "pixel_values"), (torch.randn(1, 3, 96, 96),)


def gpt2() -> Made:
    special = {"bos_token_id": 1, "eos_token_id": 2}
    model = pretrained("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=256, n_layer=4, n_head=4, **special)
    return Field(model, "logits", "input_ids", use_cache=False), (tokens(1, 64),)


def llama_prefill() -> Made:
    args = {"vocab_size": VOCAB, "num_key_value_heads": 2, **layers(4, 256, 4, 688)}
    model = pretrained("LlamaForCausalLM", "LlamaConfig", **args)
    return Field(model, "logits", "input_ids", use_cache=False), (tokens(1, 64),)


def t5() -> Made:
    args = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model = pretrained("T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, **args)
    names = ("input_ids", "decoder_input_ids")
    return Field(model, "logits", *names, use_cache=False), (tokens(1, 48), tokens(1, 16))


def vit() -> Made:
    args = {"image_size": 96, "patch_size": 16, **layers(4, 192, 3, 768)}
    model = pretrained("ViTForImageClassification", "ViTConfig", **args)
    return Field(model, "logits", "pixel_values"), (torch.randn(1, 3, 96, 96),)


def whisper() -> Made:
    import transformers

    args = {"num_mel_bins": 80, "d_model": 192, "encoder_layers": 4, "encoder_attention_heads": 3}
    config = transformers.WhisperConfig(encoder_ffn_dim=768, max_source_positions=200, **args)
    config._attn_implementation = "sdpa"
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
    return Field(encoder, "last_hidden_state", "input_features"), (torch.randn(1, 80, 400),)


class DenseExperts(nn.Module):
    """All experts on all tokens, weighted by the router (zero for those not chosen): no shape depends on the data.

    transformers' own loop over the experts that were hit cannot be exported; this is the same sum.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(experts.gate_up_proj.detach().transpose(1, 2).contiguous())
        self.down = nn.Parameter(experts.down_proj.detach().transpose(1, 2).contiguous())

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(x.shape[0], self.down.shape[0], dtype=x.dtype).scatter(1, index, weights)
        gate, up = torch.matmul(x, self.gate_up).chunk(2, dim=-1)
        return (torch.matmul(F.silu(gate) * up, self.down) * share.t().unsqueeze(-1)).sum(0)


def mixtral() -> Made:
    special = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = pretrained("MixtralForCausalLM", "MixtralConfig", vocab_size=VOCAB, **layers(2, 256, 4, 512), **special)
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.gate.weight, std=0.1)
        layer.mlp.experts = DenseExperts(layer.mlp.experts)
    return Field(model, "logits", "input_ids", use_cache=False), (tokens(1, 32),)


# -- Llama, one token with a static cache -----------------------------------------------------------------------------
class DecodeLayer(nn.Module):
    """A Llama layer for one token; the new key and value are written to the given cache."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.heads, self.shared, self.depth = heads, shared, width // heads
        self.before, self.after = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, shared * self.depth, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        position: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        y = self.before(x)
        q = rotate(self.q(y).view(1, 1, self.heads, self.depth).transpose(1, 2), *turn)
        k = rotate(self.k(y).view(1, 1, self.shared, self.depth).transpose(1, 2), *turn)
        v = self.v(y).view(1, 1, self.shared, self.depth).transpose(1, 2)
        slot = position.view(1, 1, 1, 1).expand_as(k)  # index_copy_ would be exported with two transposes of the cache
        keys.scatter_(2, slot, k)
        values.scatter_(2, slot, v)
        seen = F.scaled_dot_product_attention(q, self.spread(keys), self.spread(values), attn_mask=mask)
        x = x + self.o(seen.transpose(1, 2).reshape(1, 1, -1))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Each shared head of the cache for the query heads that use it."""
        group = self.heads // self.shared
        return x if group == 1 else x.repeat_interleave(group, dim=1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Decode(nn.Module):
    """Logits of the next token. The cache of `slots` tokens lies in buffers and is written in place."""

    def __init__(
        self, count: int, width: int, heads: int, shared: int, inner: int, slots: int, words: int = VOCAB
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(DecodeLayer(width, heads, shared, inner) for _ in range(count))
        self.norm, self.head = nn.RMSNorm(width, 1e-6), nn.Linear(width, words, bias=False)
        depth = width // heads
        self.register_buffer("frequency", 10000.0 ** (-torch.arange(0, depth, 2) / depth))
        self.register_buffer("slots", torch.arange(slots))
        for i in range(count):
            self.register_buffer(f"keys_{i}", torch.randn(1, shared, slots, depth))
            self.register_buffer(f"values_{i}", torch.randn(1, shared, slots, depth))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        angle = (position[:, None] * self.frequency).repeat(1, 2)
        turn = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        mask = (self.slots <= position)[None, None, None]
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, position, getattr(self, f"keys_{i}"), getattr(self, f"values_{i}"), mask)
        return self.head(self.norm(x))


def llama_decode() -> Made:
    return Decode(8, 320, 5, 5, 864, 128), (tokens(1, 1), torch.tensor([100]))


HALF_BILLION = {"count": 24, "width": 896, "heads": 14, "shared": 2, "inner": 4864}


def llama_half_decode() -> Made:
    return Decode(**HALF_BILLION, slots=512, words=32000), (tokens(1, 1), torch.tensor([400]))


def llama_half_prefill() -> Made:
    args = {"vocab_size": 32000, "num_key_value_heads": 2, **layers(24, 896, 14, 4864)}
    model = pretrained("LlamaForCausalLM", "LlamaConfig", **args)
    return Field(model, "logits", "input_ids", use_cache=False), (tokens(1, 128),)


# -- images at 224² -----------------------------------------------------------------------------------------------------
def images(make: Callable[[], nn.Module], batch: int = 1, side: int = 224) -> Callable[[], Made]:
    return lambda: (make(), (torch.randn(batch, 3, side, side),))


def unet_block(batch: int = 1) -> Made:
    return vision_models.UNetBlock(320, 8), (torch.randn(batch, 320, 32, 32), torch.randn(batch, 512))


# -- plain torch ------------------------------------------------------------------------------------------------------
def mlp() -> Made:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)), (torch.randn(32, 128),)


def resnet() -> Made:
    widths = ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2))
    return vision_models.resnet(widths, 100), (torch.randn(1, 3, 56, 56),)


class Loss(nn.Module):
    """What a classifier is trained by."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(x).float(), labels)


def classified(make: Callable[[], Made], batch: int, side: int) -> Callable[[], Made]:
    """A training step of an image classifier."""
    return lambda: (Loss(make()[0]), (torch.randn(batch, 3, side, side), torch.randint(0, 100, (batch,))))


class CellLoop(nn.Module):
    """An LSTM cell over a sequence, step by step, and a head on the last state."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(given, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], self.cell.hidden_size)
        for step in x.unbind(0):
            h, c = self.cell(step, (h, c))
        return self.head(h)


def lstm() -> Made:
    return CellLoop(128, 256), (torch.randn(16, 8, 128),)


class Recurrent(nn.Module):
    """nn.GRU or nn.LSTM over a sequence, and a head on its last output."""

    def __init__(self, kind: type[nn.RNNBase], given: int, width: int, count: int) -> None:
        super().__init__()
        self.inside, self.head = kind(given, width, count), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inside(x)[0][-1])


def recurrent(kind: type[nn.RNNBase]) -> Callable[[], Made]:
    return lambda: (Recurrent(kind, 128, 256, 2), (torch.randn(32, 4, 128),))


class Ranking(nn.Module):
    """DLRM in small: dense features by an MLP, bags of categories by tables, all pairs' dot products, an MLP on top."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
        self.top = nn.Sequential(
            nn.Linear(width + pairs.shape[1], 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, dense: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        sums = [table(bags[:, i]).sum(1) for i, table in enumerate(self.tables)]
        every = torch.stack([x, *sums], dim=1)
        dots = torch.bmm(every, every.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return torch.sigmoid(self.top(torch.cat((x, dots), dim=1)))


def dlrm() -> Made:
    return Ranking(8, 1000, 32), (torch.randn(64, 13), torch.randint(0, 1000, (64, 8, 4)))


class NormChain(nn.Module):
    """LayerNorm, GELU and softmax in turn: no matmul, three passes over the rows each time."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = x + F.softmax(F.gelu(norm(x)), dim=-1)
        return x


def norms() -> Made:
    return NormChain(512, 4), (torch.randn(8, 64, 512),)


class Pointwise(nn.Module):
    """A long chain of elementwise math: what a compiler should turn into one loop."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            a = torch.tanh(x) * torch.sigmoid(y) + 0.5 * x
            b = torch.sqrt(a * a + 1.0) - torch.exp(-a.abs())
            x = torch.where(b > 0.3, b * y, a - b).clamp(-3.0, 3.0)
            y = torch.maximum(y * 0.9 + x * 0.1, torch.sin(b)) / (1.0 + a * a)
        return x + y


def pointwise() -> Made:
    return Pointwise(), (torch.randn(128, 1024), torch.randn(128, 1024))


def of_group(group: str, dtype: torch.dtype, *rows: Model) -> tuple[Model, ...]:
    return tuple(replace(row, group=group, dtype=dtype) for row in rows)


SMALL = (
    Model("mlp", "128→256→10 with ReLU, 32 rows", mlp),
    Model("bert", "4 layers of 256, 48 tokens, a mask", bert),
    Model("gpt2", "4 layers of 256, 64 tokens", gpt2),
    Model("llama_prefill", "4 layers of 256, 2 of 4 heads shared, 64 tokens", llama_prefill),
    Model(
        "llama_decode",
        "8 layers of 320, 1 token, static cache of 128; plain torch",
        llama_decode,
        state=("keys_", "values_"),
    ),
    Model("t5", "encoder and decoder, 2 layers of 256 each, 48 and 16 tokens", t5),
    Model("vit", "4 layers of 192, 96×96", vit),
    Model("whisper_encoder", "4 layers of 192, 80 mels, 400 frames", whisper),
    Model("mixtral", "2 layers of 256, 4 experts, 2 used, 32 tokens; dense experts", mixtral),
    Model("resnet", "7 blocks, 32 to 256 channels, 56×56", resnet),
    Model("lstm", "LSTMCell 128→256, 16 steps, 8 rows", lstm),
    Model("dlrm", "8 tables of 1000×32, bags of 4, 64 rows", dlrm),
    Model("norms", "LayerNorm, GELU, softmax, 4 times, 8×64×512", norms),
    Model("pointwise", "60 elementwise operations, 128×1024", pointwise),
    Model("bert_train", "4 layers of 256, 48 tokens: loss and gradients", lambda: bert(train=True), train=True),
)
REAL = (
    Model("bert_base_64", "BERT-base, 64 tokens", lambda: bert_base(64)),
    Model("bert_base_384", "BERT-base, 384 tokens", lambda: bert_base(384)),
    Model("bert_base_64x16", "BERT-base, 16 × 64 tokens", lambda: bert_base(64, 16)),
    Model("resnet50", "ResNet-50, 224²", images(vision_models.resnet50)),
    Model("resnet50x16", "ResNet-50, 16 × 224²", images(vision_models.resnet50, 16)),
    Model("mobilenet_v3", "MobileNetV3-large, 224²", images(vision_models.mobilenet_v3)),
    Model("mobilenet_v3x16", "MobileNetV3-large, 16 × 224²", images(vision_models.mobilenet_v3, 16)),
    Model("convnext_tiny", "ConvNeXt-tiny, 224²", images(vision_models.convnext_tiny)),
    Model("convnext_tinyx16", "ConvNeXt-tiny, 16 × 224²", images(vision_models.convnext_tiny, 16)),
    Model("unet_block", "320 channels, 32², attention over the pixels", unet_block),
    Model("unet_blockx16", "the same, 16 images", lambda: unet_block(16)),
    Model("gru", "nn.GRU, 2 layers of 256, 32 steps, 4 rows", recurrent(nn.GRU)),
    Model("lstm_module", "nn.LSTM, 2 layers of 256, 32 steps, 4 rows", recurrent(nn.LSTM)),
    Model("llama_0.5b_decode", "24 layers of 896, 1 token", llama_half_decode, state=("keys_", "values_"), heavy=True),
    Model("llama_0.5b_prefill", "24 layers of 896, 128 tokens", llama_half_prefill, heavy=True),
)
ODD = (
    Model("electra", "4 layers of 256, 48 tokens", electra),
    Model("qwen3_heads_40", "4 layers of 240, heads of 40, 40 tokens", qwen3_odd),
    Model("deit_heads_60", "4 layers of 180, heads of 60, 96×96", deit_odd),
)
BF16 = (
    Model("bf16_bert", "4 layers of 256, 48 tokens, a mask", bert),
    Model("bf16_llama_prefill", "4 layers of 256, 64 tokens", llama_prefill),
    Model("bf16_llama_decode", "8 layers of 320, 1 token", llama_decode, state=("keys_", "values_")),
    Model("bf16_norms", "LayerNorm, GELU, softmax, 4 times, 8×64×512", norms),
    Model("bf16_resnet", "7 blocks, 32 to 256 channels, 56×56", resnet),
)
TRAIN = (
    Model("resnet_train", "7 blocks, 16 × 56²: loss and gradients", classified(resnet, 16, 56), train=True),
    Model(
        "mobilenet_v3_train",
        "MobileNetV3-large, 8 × 96²: loss and gradients",
        classified(images(vision_models.mobilenet_v3), 8, 96),
        train=True,
    ),
)
AUTOCAST = (
    Model("autocast_bert", "4 layers of 256, 48 tokens, a mask", bert, autocast=True),
    Model("autocast_resnet50", "ResNet-50, 224²", images(vision_models.resnet50), autocast=True),
    Model(
        "autocast_bert_train",
        "4 layers of 256, 48 tokens: loss and gradients",
        lambda: bert(train=True),
        train=True,
        autocast=True,
    ),
    Model(
        "autocast_resnet_train",
        "7 blocks, 16 × 56²: loss and gradients",
        classified(resnet, 16, 56),
        train=True,
        autocast=True,
    ),
)
ROWS = (
    *of_group("small", torch.float32, *SMALL),
    *of_group("real", torch.float32, *REAL),
    *of_group("odd", torch.float32, *ODD),
    *of_group("bf16", torch.bfloat16, *BF16),
    *of_group("train", torch.float32, *TRAIN),
    *of_group("autocast", torch.float32, *AUTOCAST),
)
MODELS = {row.name: row for row in ROWS}
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))
