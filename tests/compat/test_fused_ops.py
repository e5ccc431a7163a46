"""torch_npu's fused ops against float64 arithmetic in plain PyTorch: eager, compiled, with gradients; and their checks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch_npu
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from airgraph.compat.torch_npu import references
from airgraph.compat.torch_npu.references import REFERENCES, UNKNOWN, reference
from airgraph.convert import REGISTRY, convert
from airgraph.errors import CompatError
from airgraph.journal import Journal

DOCUMENT = Path(__file__).parents[2] / "docs" / "ascend.md"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-6}


@dataclass
class Case:
    """An op, arguments for it and the same in float64; `trains`: the first result has a gradient."""

    op: str
    arguments: Callable[[], tuple[Any, ...]]
    plain: Callable[..., Any]
    named: dict[str, Any] = field(default_factory=dict)
    trains: bool = False
    types: list[torch.dtype] = field(default_factory=lambda: FLOATS)

    @property
    def call(self) -> Callable[..., Any]:
        return getattr(torch_npu, self.op)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def below(*shape: int) -> Tensor:
    """A mask that leaves every row something to see."""
    mask = torch.rand(shape) > 0.6
    mask[..., 0] = False
    return mask


# The same ops, as one would write them down.


def rms_norm(x: Tensor, gamma: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    axes = tuple(range(-gamma.dim(), 0))
    deviation = (x.pow(2).mean(axes, keepdim=True) + eps).sqrt()
    return x / deviation * gamma, 1 / deviation


def add_rms_norm(a: Tensor, b: Tensor, gamma: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    return (*rms_norm(a + b, gamma, eps), a + b)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.tensor_split(2, dim)
    return a / (1 + torch.exp(-a)) * b


def turned(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    """Pairs of numbers as complex ones: a quarter turn is a multiplication by i."""
    if mode == "quarter":
        return torch.cat([turned(*parts) for parts in zip(*(t.tensor_split(2, -1) for t in (x, cos, sin)))], -1)
    if mode == "interleave-half":
        x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    if mode in ("half", "interleave-half"):
        pairs = torch.complex(*x.tensor_split(2, -1)) * 1j
        return x * cos + torch.cat([pairs.real, pairs.imag], -1) * sin
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * 1j
    return x * cos + torch.view_as_real(pairs).flatten(-2) * sin


def masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed: bool = False) -> Tensor:
    if fixed:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return torch.where(mask, -10000.0, x * scale).softmax(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, pse: Tensor | float = 0.0) -> Tensor:
    """On [batch, heads, length, size], with a loop over the heads."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for i in range(q.shape[1]):
        bias = pse if isinstance(pse, float) else pse[:, i]
        s = (torch.einsum("bqd,bkd->bqk", q[:, i], k[:, i // group]) + bias) * scale
        if hidden is not None:
            s = s.masked_fill(hidden[:, 0] if hidden.dim() == 4 else hidden, -math.inf)
        heads.append(s.softmax(-1).nan_to_num(0.0) @ v[:, i // group])
    return torch.stack(heads, 1)


def by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def fusion_bnsd(
    q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, pse: Any, _: Any, mask: Any, scale: float
) -> Tensor:
    return attend(q, k, v, mask, scale, 0.0 if pse is None else pse)


def fusion_bsh(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
    out = attend(*(by_heads(t, n) for t in (q, k, v)), None, 1.0)
    return out.transpose(1, 2).flatten(2)


def fusion_sbh(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
    return fusion_bsh(*(t.transpose(0, 1) for t in (q, k, v)), n, "BSH").transpose(0, 1)


def fusion_bsnd(sparse: Callable[[int, int], Tensor]) -> Callable[..., Tensor]:
    def plain(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
        hidden = sparse(q.shape[1], k.shape[1]).expand(q.shape[0], 1, -1, -1)
        return attend(*(t.transpose(1, 2) for t in (q, k, v)), hidden, named["scale"]).transpose(1, 2)

    return plain


def fusion_tnd(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
    """Sequences of 3 and 4 tokens, and one token that belongs to none."""
    parts, begin, kv = [], 0, 0
    for end, kv_end in ((3, 2), (7, 8)):
        hidden = torch.arange(kv_end - kv)[None, :] > torch.arange(end - begin)[:, None] + (kv_end - kv) - (end - begin)
        one = (q[begin:end], k[kv:kv_end], v[kv:kv_end])
        parts.append(attend(*(t.transpose(0, 1)[None] for t in one), hidden[None, None], 1.0)[0].transpose(0, 1))
        begin, kv = end, kv_end
    return torch.cat([*parts, torch.zeros_like(q[7:])])


def fusion_cut(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
    """Two sequences, one of which was cut: modes 7 and 8; or with prefixes: mode 6."""
    mode, parts = named["sparse_mode"], []
    for number, (begin, end, kv, kv_end) in enumerate(((0, 3, 0, 4), (3, 7, 4, 9))):
        size = end - begin, kv_end - kv
        cut = band(named.get("pre_tockens", 0), named.get("next_tockens", 0), shift=size[1] - size[0])
        rules = {7: (causal_at_the_end, cut), 8: (cut, causal)}
        hidden = rules[mode][number](*size) if mode in rules else prefixed(named["prefix"][number])(*size)[0, 0]
        one = (q[begin:end], k[kv:kv_end], v[kv:kv_end])
        parts.append(attend(*(t.transpose(0, 1)[None] for t in one), hidden[None, None], 1.0)[0].transpose(0, 1))
    return torch.cat(parts)


def prefixed(*prefix: int) -> Callable[[int, int], Tensor]:
    """Causal up to the last query, and the first keys of each sequence for all its queries."""
    return lambda q, k: torch.stack([causal_at_the_end(q, k) & (torch.arange(k) >= n) for n in prefix])[:, None]


def causal(q: int, k: int) -> Tensor:
    return torch.ones(q, k, dtype=torch.bool).triu(1)


def causal_at_the_end(q: int, k: int) -> Tensor:
    return torch.ones(q, k, dtype=torch.bool).triu(k - q + 1)


def band(before: int, after: int, shift: int = 0) -> Callable[[int, int], Tensor]:
    def hidden(q: int, k: int) -> Tensor:
        return ~torch.ones(q, k, dtype=torch.bool).triu(shift - before).tril(shift + after)

    return hidden


def prompt(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
    hidden = named["atten_mask"] | ~torch.ones(5, 6, dtype=torch.bool).tril() if "atten_mask" in named else None
    return attend(q, k, v, None if hidden is None else hidden.expand(2, 1, 5, 6), named["scale_value"])


def next_token(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
    heads = named["num_heads"]
    hidden = torch.arange(6) >= torch.tensor(named["actual_seq_lengths"])[:, None]
    hidden = hidden | named["atten_mask"]
    out = attend(by_heads(q, heads), by_heads(k, 2), by_heads(v, 2), hidden[:, None, None], 1.0)
    return out.transpose(1, 2).flatten(2)


def whole(x: Tensor) -> Tensor:
    """Rounded by hand, half to even."""
    below = x.floor()
    half = (x - below == 0.5) & (below % 2 == 0)
    return torch.where(half, below, (x + 0.5).floor())


def dynamic_quant(
    x: Tensor, smooth_scales: Tensor | None = None, group_index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if smooth_scales is not None and group_index is not None:
        begins = [0, *group_index.tolist()]
        x = torch.cat([x[a:b] * smooth_scales[i] for i, (a, b) in enumerate(itertools.pairwise(begins))])
    elif smooth_scales is not None:
        x = x * smooth_scales
    scale = x.abs().max(-1).values / 127
    return whole((x / scale[..., None]).nan_to_num(0.0)), scale


def quantize(
    x: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype, axis: int = 1, div_mode: bool = True
) -> Tensor:
    x = x.movedim(axis, -1)
    x = x / scales if div_mode else x * scales
    low, high = (0, 255) if dtype == torch.quint8 else (-128, 127)
    return whole(x if zeros is None else x + zeros).clamp(low, high).movedim(-1, axis)


def quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, **named: Any) -> Tensor:
    y = x1.double() @ x2.double()
    bias = named.get("bias")
    if bias is not None and not bias.is_floating_point():
        y = y + bias
    y = y * scale * named.get("pertoken_scale", torch.ones(1)).double()[:, None]
    if bias is not None and bias.is_floating_point():
        y = y + bias
    return y if "output_dtype" in named else whole(y + named["offset"]).clamp(-128, 127)


def weight_quant(x: Tensor, w: Tensor, scale: Tensor, offset: Tensor | None = None, **named: Any) -> Tensor:
    group = named.get("antiquant_group_size", w.shape[0])
    rows = [i // group for i in range(w.shape[0])]
    pick = (lambda t: t[rows]) if "antiquant_group_size" in named else (lambda t: t)
    wide = (w.double() + (0 if offset is None else pick(offset))) * pick(scale)
    return x @ wide + named.get("bias", 0)


def grouped(x: list[Tensor], w: list[Tensor], **named: Any) -> list[Tensor]:
    if "group_list" not in named:
        return [a @ b for a, b in zip(x, w)]
    numbers = [int(n) for n in named["group_list"]]
    ends = [sum(numbers[: i + 1]) for i in range(len(numbers))] if named.get("group_list_type") else numbers
    experts = w[0] if w[0].dim() == 3 else w
    y = torch.zeros(x[0].shape[0], experts[0].shape[1], dtype=torch.float64)
    for begin, end, one, bias in zip([0, *ends], ends, experts, named.get("bias", [0] * 9)):
        y[begin:end] = x[0][begin:end] @ one + bias
    return [y]


def gating(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    order = x.argsort(-1, descending=True)[..., :k]
    weights = (x.exp() / x.exp().sum(-1, keepdim=True)).gather(-1, order)
    if finished is not None:
        order[finished] = x.shape[-1]
    tokens = x[..., 0].numel()
    rows = torch.tensor([[j * tokens + i for j in range(k)] for i in range(tokens)])
    return weights, order, rows.view(order.shape)


def init_routing(x: Tensor, rows: Tensor, experts: Tensor, active: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs = sorted(zip(experts.flatten().tolist(), range(experts.numel()), rows.flatten().tolist()))
    places = [0] * len(pairs)
    for place, (_, _, row) in enumerate(pairs):
        places[row] = place
    kept = pairs[: min(active, x.shape[0]) * experts.shape[1]]
    return (
        torch.stack([x[row % x.shape[0]] for _, _, row in kept]),
        torch.tensor(places),
        torch.tensor([expert for expert, _, _ in pairs]),
    )


def finalize(
    rows: Tensor, s1: Any, s2: Any, bias: Any, scales: Any, places: Tensor, experts: Any, mode: int = 0
) -> Tensor:
    tokens, choices = scales.shape if scales is not None else (rows.shape[0], 1)
    out = torch.zeros(tokens, rows.shape[1], dtype=torch.float64)
    for i in range(tokens):
        for j in range(choices):
            one = rows[places[i * choices + j if mode == 2 else j * tokens + i]]
            one = one if bias is None else one + bias[experts[i, j]]
            out[i] += one if scales is None else scales[i, j] * one
    return out + (0 if s1 is None else s1) + (0 if s2 is None else s2)


def scattered(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    x = x.clone()
    for at, update in zip(indices.flatten(0, -2), updates.flatten(0, indices.dim() - 2)):
        x[tuple(at.tolist())] = update
    return x


def mla_cache(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k: Tensor, c: Tensor, **named: Any
) -> Any:
    k, c = k.clone(), c.clone()
    normed, _ = rms_norm(kv[..., :6], gamma, 1e-5)
    rope = kv[..., 6:]
    rope = turned(torch.cat([rope[..., ::2], rope[..., 1::2]], -1), cos, sin)
    for b in range(kv.shape[0]):
        for t in range(kv.shape[2]):
            if "cache_mode" not in named:
                k[b, 0, index[b, t]], c[b, 0, index[b, t]] = rope[b, 0, t], normed[b, 0, t]
            else:
                block, at = divmod(int(index[b * kv.shape[2] + t]), k.shape[1])
                k[block, at, 0], c[block, at, 0] = rope[b, 0, t], normed[b, 0, t]
    return (k, c, rope, normed) if named.get("is_output_kv") else (k, c)


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def int32(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


QKV = (2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)
CASES = [
    Case("npu_rms_norm", lambda: (normal(2, 5, 16), normal(16)), rms_norm, trains=True),
    Case("npu_rms_norm", lambda: (normal(3, 4, 6), normal(4, 6), 1e-3), rms_norm, trains=True),
    Case("npu_add_rms_norm", lambda: (normal(4, 7), normal(4, 7), normal(7)), add_rms_norm, trains=True),
    Case("npu_swiglu", lambda: (normal(3, 10),), swiglu, trains=True),
    Case("npu_swiglu", lambda: (normal(3, 4, 5), 1), swiglu, trains=True),
    Case("npu_gelu", lambda: (normal(3, 10),), lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2, trains=True),
    Case(
        "npu_gelu",
        lambda: (normal(7),),
        lambda x, approximate: functional.gelu(x, approximate=approximate),
        {"approximate": "tanh"},
        trains=True,
    ),
    Case("npu_fast_gelu", lambda: (normal(3, 10),), lambda x: x / (1 + torch.exp(-1.702 * x)), trains=True),
    Case(
        "npu_scaled_masked_softmax", lambda: (normal(2, 3, 4, 5), below(2, 1, 4, 5), 0.7), masked_softmax, trains=True
    ),
    Case(
        "npu_scaled_masked_softmax",
        lambda: (normal(1, 2, 6, 6), below(1, 1, 6, 6), 2.0, True),
        masked_softmax,
        trains=True,
    ),
    Case("npu_rotary_mul", lambda: (normal(2, 3, 4, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8)), turned, trains=True),
    Case(
        "npu_rotary_mul",
        lambda: (normal(2, 4, 3, 6), normal(1, 4, 1, 6), normal(1, 4, 1, 6), "interleave"),
        turned,
        trains=True,
    ),
    *(
        Case(
            "npu_rotary_mul",
            lambda mode=mode: (normal(2, 4, 3, 8), normal(1, 4, 1, 8), normal(1, 4, 1, 8), mode),
            turned,
            trains=True,
        )
        for mode in ("quarter", "interleave-half")
    ),
    Case(
        "npu_fusion_attention",
        lambda: (
            normal(2, 4, 5, 8),
            normal(2, 2, 6, 8),
            normal(2, 2, 6, 3),
            4,
            "BNSD",
            normal(1, 4, 5, 6),
            None,
            below(2, 1, 5, 6),
            0.3,
        ),
        fusion_bnsd,
        trains=True,
    ),
    Case("npu_fusion_attention", lambda: (*(normal(2, 5, 12) for _ in range(3)), 3, "BSH"), fusion_bsh, trains=True),
    Case("npu_fusion_attention", lambda: (*(normal(5, 2, 12) for _ in range(3)), 3, "SBH"), fusion_sbh, trains=True),
    Case(
        "npu_fusion_attention",
        lambda: (*(normal(*s) for s in QKV), 4, "BSND"),
        fusion_bsnd(causal),
        {"scale": 0.4, "sparse_mode": 2, "atten_mask": causal(64, 64)},
        trains=True,
    ),
    Case(
        "npu_fusion_attention",
        lambda: (*(normal(*s) for s in QKV), 4, "BSND"),
        fusion_bsnd(causal_at_the_end),
        {"scale": 0.4, "sparse_mode": 3, "atten_mask": causal(64, 64)},
        trains=True,
    ),
    Case(
        "npu_fusion_attention",
        lambda: (*(normal(*s) for s in QKV), 4, "BSND"),
        fusion_bsnd(band(2, 1, shift=1)),
        {"scale": 0.4, "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1, "atten_mask": causal(64, 64)},
        trains=True,
    ),
    Case(
        "npu_fusion_attention",
        lambda: (*(normal(*s) for s in QKV), 4, "BSND"),
        fusion_bsnd(band(2, 0)),
        {"scale": 0.4, "pre_tockens": 2, "next_tockens": 0, "atten_mask": band(2, 0)(5, 6)},
        trains=True,
    ),
    Case(
        "npu_fusion_attention",
        lambda: (normal(8, 4, 6), normal(8, 2, 6), normal(8, 2, 6), 4, "TND"),
        fusion_tnd,
        {"actual_seq_qlen": [3, 7, 0], "actual_seq_kvlen": [2, 8, 0], "sparse_mode": 3, "atten_mask": causal(64, 64)},
        trains=True,
    ),
    *(
        Case(
            "npu_fusion_attention",
            lambda: (*(normal(*s) for s in QKV), 4, "BSND"),
            fusion_bsnd(prefixed(2, 5)),
            {"scale": 0.4, "sparse_mode": mode, "prefix": [2, 5], "atten_mask": mask},
            trains=True,
        )
        for mode, mask in ((5, prefixed(2, 5)(5, 6)), (6, prefixed(1024)(3072, 2048)[0, 0]))
    ),
    *(
        Case(
            "npu_fusion_attention",
            lambda: (normal(7, 4, 6), normal(9, 2, 6), normal(9, 2, 6), 4, "TND"),
            fusion_cut,
            {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [4, 9], "atten_mask": causal(64, 64), **options},
            trains=True,
        )
        for options in (
            {"sparse_mode": 7, "pre_tockens": 9, "next_tockens": -2},
            {"sparse_mode": 8, "pre_tockens": 9, "next_tockens": 1},
            {"sparse_mode": 6, "prefix": [3, 2]},
        )
    ),
    Case(
        "npu_prompt_flash_attention",
        lambda: (normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)),
        prompt,
        {
            "num_heads": 4,
            "num_key_value_heads": 2,
            "input_layout": "BNSD",
            "scale_value": 0.3,
            "atten_mask": band(3, 3)(5, 6),
        },
    ),
    Case(
        "npu_prompt_flash_attention",
        lambda: (normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)),
        prompt,
        {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale_value": 0.3},
    ),
    Case(
        "npu_incre_flash_attention",
        lambda: (normal(2, 1, 16), normal(2, 6, 8), normal(2, 6, 8)),
        next_token,
        {"num_heads": 4, "num_key_value_heads": 2, "actual_seq_lengths": [3, 6], "atten_mask": band(4, 4)(2, 6)},
    ),
    Case("npu_dynamic_quant", lambda: (torch.cat([normal(2, 3, 8), torch.zeros(1, 3, 8)]),), dynamic_quant),
    Case(
        "npu_dynamic_quant",
        lambda: (normal(4, 8),),
        dynamic_quant,
        {"smooth_scales": torch.rand(8) + 0.5},
        types=[torch.float32],
    ),
    Case(
        "npu_dynamic_quant",
        lambda: (normal(5, 8),),
        dynamic_quant,
        {"smooth_scales": torch.rand(3, 8) + 0.5, "group_index": int32(2, 2, 5)},
        types=[torch.float32],
    ),
    Case("npu_quantize", lambda: (normal(3, 4), torch.tensor([0.25, 0.5, 0.125, 0.01]), None, torch.qint8), quantize),
    Case(
        "npu_quantize",
        lambda: (normal(3, 4, 2), torch.tensor([0.25, 0.5, 0.125, 1.0]), int32(3, 100, 20, 0), torch.quint8),
        quantize,
    ),
    Case(
        "npu_quantize",
        lambda: (
            normal(3, 4),
            torch.tensor([4.0, 8.0, 64.0, 0.5]),
            torch.tensor([1.0, 0.0, -2.0, 5.0]),
            torch.qint8,
            -1,
            False,
        ),
        quantize,
    ),
    Case(
        "npu_quant_matmul",
        lambda: (int8(5, 64), int8(64, 7), torch.tensor([2.0**-12])),
        quant_matmul,
        {"offset": torch.tensor([3.0])},
        types=[torch.float32],
    ),
    Case(
        "npu_quant_matmul",
        lambda: (int8(5, 64), int8(64, 7), normal(7) / 1000),
        quant_matmul,
        {
            "pertoken_scale": torch.rand(5),
            "bias": torch.randint(-1000, 1000, (7,), dtype=torch.int32),
            "output_dtype": torch.float16,
        },
        types=[torch.float32],
    ),
    Case(
        "npu_quant_matmul",
        lambda: (int8(5, 64), int8(64, 7), normal(7) / 1000),
        quant_matmul,
        {"pertoken_scale": torch.rand(5), "bias": normal(7), "output_dtype": torch.bfloat16},
        types=[torch.float32],
    ),
    Case(
        "npu_weight_quant_batchmatmul", lambda: (normal(3, 8), int8(8, 5), torch.rand(5) / 100, normal(5)), weight_quant
    ),
    Case(
        "npu_weight_quant_batchmatmul",
        lambda: (normal(3, 8), int8(8, 5), torch.rand(3, 5) / 100, normal(3, 5)),
        weight_quant,
        {"antiquant_group_size": 3, "bias": normal(5)},
    ),
    Case("npu_grouped_matmul", lambda: ([normal(2, 4), normal(3, 5)], [normal(4, 3), normal(5, 6)]), grouped),
    Case(
        "npu_grouped_matmul",
        lambda: ([normal(7, 4)], [normal(3, 4, 5)]),
        grouped,
        {"group_list": torch.tensor([2, 2, 6]), "split_item": 3, "group_type": 0},
    ),
    Case(
        "npu_grouped_matmul",
        lambda: ([normal(7, 4)], [normal(4, 5) for _ in range(3)]),
        grouped,
        {
            "group_list": torch.tensor([2, 0, 5]),
            "split_item": 2,
            "group_type": 0,
            "group_list_type": 1,
            "bias": [normal(5) for _ in range(3)],
        },
    ),
    Case(
        "npu_moe_gating_top_k_softmax",
        lambda: (normal(5, 6), torch.tensor([True, False, False, True, False]), 3),
        gating,
    ),
    Case("npu_moe_gating_top_k_softmax", lambda: (normal(2, 3, 6), None, 2), gating),
    Case(
        "npu_moe_init_routing",
        lambda: (normal(3, 4), int32([0, 3], [1, 4], [2, 5]), int32([1, 2], [0, 1], [0, 2]), 3),
        init_routing,
    ),
    Case(
        "npu_moe_init_routing",
        lambda: (normal(3, 4), int32([0, 3], [1, 4], [2, 5]), int32([1, 2], [0, 1], [0, 2]), 1),
        init_routing,
    ),
    Case(
        "npu_moe_finalize_routing",
        lambda: (
            normal(6, 4),
            normal(3, 4),
            normal(3, 4),
            normal(5, 4),
            normal(3, 2),
            int32(2, 0, 1, 5, 3, 4),
            int32([1, 2], [0, 1], [4, 2]),
        ),
        finalize,
    ),
    Case(
        "npu_moe_finalize_routing",
        lambda: (normal(6, 4), None, None, None, normal(3, 2), int32(2, 0, 1, 5, 3, 4), None, 2),
        finalize,
    ),
    Case(
        "npu_scatter_nd_update", lambda: (normal(4, 5, 3), int32([0, 1], [3, 4]), normal(2, 3)), scattered, trains=True
    ),
    Case("npu_format_cast", lambda: (normal(4, 5), 29), lambda x, _: x, trains=True),
    Case("npu_dtype_cast", lambda: (normal(4, 5), torch.bfloat16), lambda x, dtype: x),
    Case(
        "npu_transpose", lambda: (normal(2, 3, 4), [2, 0, 1]), lambda x, perm: torch.einsum("abc->cab", x), trains=True
    ),
    Case(
        "npu_confusion_transpose",
        lambda: (normal(2, 3, 8), [0, 2, 1, 3], [2, 3, 4, 2], False),
        lambda x, *_: torch.einsum("bsnd->bnsd", x.view(2, 3, 4, 2)),
        trains=True,
    ),
    Case(
        "npu_confusion_transpose",
        lambda: (normal(2, 4, 3, 2), [0, 2, 1, 3], [2, 3, 8], True),
        lambda x, *_: torch.einsum("bnsd->bsnd", x).reshape(2, 3, 8),
        trains=True,
    ),
    Case(
        "npu_kv_rmsnorm_rope_cache",
        lambda: (
            normal(2, 1, 3, 10),
            normal(6),
            normal(2, 1, 3, 4),
            normal(2, 1, 3, 4),
            torch.tensor([[0, 4, 2], [1, 3, 0]]),
            normal(2, 1, 5, 4),
            normal(2, 1, 5, 6),
        ),
        mla_cache,
    ),
    Case(
        "npu_kv_rmsnorm_rope_cache",
        lambda: (
            normal(2, 1, 3, 10),
            normal(6),
            normal(2, 1, 3, 4),
            normal(2, 1, 3, 4),
            torch.tensor([0, 4, 2, 7, 1, 5]),
            normal(2, 4, 1, 4),
            normal(2, 4, 1, 6),
        ),
        mla_cache,
        {"cache_mode": "PA", "is_output_kv": True},
    ),
]
IDS = [f"{case.op}-{i}" for i, case in enumerate(CASES)]
each_case = pytest.mark.parametrize("case", CASES, ids=IDS)
# Compiling takes longer than computing: the quick tests compile each op once.
FIRST = {case.op: i for i, case in reversed([*enumerate(CASES)])}
once_each = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=IDS[i], marks=() if FIRST[c.op] == i else pytest.mark.slow) for i, c in enumerate(CASES)],
)


# How arguments are made and results compared.


def made(
    case: Case, dtype: torch.dtype, device: str = "cpu", trains: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same numbers for every type and device, rounded to the narrowest: what is compared is arithmetic."""
    torch.manual_seed(0)

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            value = value.bfloat16().to(dtype)
        value = value.to(device)
        return value.requires_grad_() if trains and value.is_floating_point() else value

    args = tuple(one(value) for value in case.arguments())
    return args, {name: one(value) for name, value in case.named.items()}


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in tensors(part)] if isinstance(result, tuple | list) else []


def close(got: Any, want: Any, dtype: torch.dtype) -> None:
    found, wanted = tensors(got), tensors(want)
    assert len(found) >= len(wanted) > 0
    for a, b in zip(found, wanted):
        bound = max(TOLERANCE[dtype], TOLERANCE[a.dtype]) if a.is_floating_point() else 0.0
        torch.testing.assert_close(a.detach().cpu().double(), b.detach().cpu().double(), rtol=bound, atol=bound)


def gradients(call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
    result = tensors(call(*args, **named))[0]
    torch.manual_seed(1)
    weights = torch.randn(result.shape, dtype=torch.float64).to(result.dtype).to(result.device)
    wanted = [t for t in tensors(args) if t.requires_grad]
    return [*torch.autograd.grad((result * weights).sum(), wanted)]


# The tests of every op.


@each_case
def test_values(case: Case) -> None:
    for dtype in case.types:
        args, named = made(case, dtype)
        exact, exact_named = made(case, torch.float64)
        got = case.call(*args, **named)
        close(got, case.plain(*exact, **exact_named), dtype)
        args, named = made(case, dtype, "npu")
        on_npu = case.call(*args, **named)
        assert all(t.device.type == "npu" for t in tensors(on_npu))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(tensors(got), tensors(on_npu), strict=True))


@pytest.mark.parametrize("case", [c for c in CASES if c.trains], ids=[i for i, c in zip(IDS, CASES) if c.trains])
def test_gradients(case: Case) -> None:
    want = gradients(case.plain, *made(case, torch.float64, trains=True))
    for dtype in case.types:
        got = gradients(case.call, *made(case, dtype, "npu", trains=True))
        assert [t.dtype for t in got] == [dtype] * len(got)
        for a, b in zip(got, want, strict=True):
            scale = max(1.0, b.abs().max().item())
            torch.testing.assert_close(a.cpu().double() / scale, b / scale, rtol=0, atol=4 * TOLERANCE[dtype])


@once_each
def test_compiled(case: Case) -> None:
    torch._dynamo.reset()
    args, named = made(case, case.types[0], "npu", trains=case.trains)
    compiled = torch.compile(lambda *a: case.call(*a, **named), backend="airgraph", fullgraph=True)
    for a, b in zip(tensors(compiled(*args)), tensors(case.call(*args, **named)), strict=True):
        torch.testing.assert_close(a, b)
    if case.trains:
        for a, b in zip(gradients(compiled, args, {}), gradients(case.call, args, named), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
@each_case
def test_registration(case: Case) -> None:
    """PyTorch's own check of an op: its schema, its shapes without data, dynamic ones too, and its gradient."""
    args, named = made(case, case.types[0], trains=case.trains)
    op = case.call.default if hasattr(case.call, "default") else case.call
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        pytest.skip("an op that is opened has nothing registered but its meaning")
    torch.library.opcheck(op, args, named)


# What only some do.


def test_a_length_that_changes_compiles_once() -> None:
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("airgraph")
    compiled = torch.compile(
        lambda x, g: torch_npu.npu_swiglu(torch_npu.npu_rms_norm(x, g)[0]), backend=count, dynamic=True
    )
    gamma = torch.randn(8, device="npu")
    for rows in (2, 3, 9):
        x = torch.randn(rows, 8, device="npu")
        torch.testing.assert_close(compiled(x, gamma), torch_npu.npu_swiglu(torch_npu.npu_rms_norm(x, gamma)[0]))
    assert count.frame_count == 1


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int8)


# Ops whose first arguments have as many rows as there are tokens, made for a number of them.
TOKENS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Tensor, ...]]]] = {
    "npu_moe_gating_top_k_softmax": (
        lambda x: torch_npu.npu_moe_gating_top_k_softmax(x, k=2),
        lambda n: (normal(n, 8),),
    ),
    "npu_moe_init_routing": (
        lambda x, row, expert: torch_npu.npu_moe_init_routing(x, row, expert, x.shape[0]),
        lambda n: (normal(n, 8), torch.arange(2 * n).int().view(2, n).t().contiguous(), ones(n, 2).int()),
    ),
    "npu_moe_compute_expert_tokens": (
        lambda e: torch_npu.npu_moe_compute_expert_tokens(e, 3),
        lambda n: (ones(n).int(),),
    ),
    "npu_moe_finalize_routing": (
        lambda x, w, p, e: torch_npu.npu_moe_finalize_routing(x, None, None, None, w, p, e),
        lambda n: (normal(2 * n, 8), normal(n, 2), torch.arange(2 * n).int(), ones(n, 2).int()),
    ),
    "npu_grouped_matmul": (
        lambda x, w: torch_npu.npu_grouped_matmul([x], [w], group_list=[1, 2], split_item=3, group_type=0),
        lambda n: (normal(n, 8), normal(2, 8, 4)),
    ),
    "npu_dynamic_quant": (torch_npu.npu_dynamic_quant, lambda n: (normal(n, 8),)),
    "npu_quant_matmul": (
        lambda a, b, s: torch_npu.npu_quant_matmul(a, b, s, output_dtype=torch.bfloat16),
        lambda n: (ones(n, 8), ones(8, 4), normal(4)),
    ),
    "npu_weight_quant_batchmatmul": (
        torch_npu.npu_weight_quant_batchmatmul,
        lambda n: (normal(n, 8), ones(8, 4), normal(4)),
    ),
    "npu_rotary_mul": (
        torch_npu.npu_rotary_mul,
        lambda n: (normal(1, n, 2, 8), normal(1, n, 1, 8), normal(1, n, 1, 8)),
    ),
    "npu_prompt_flash_attention": (
        lambda q: torch_npu.npu_prompt_flash_attention(q, q, q, num_heads=2),
        lambda n: (normal(2, n, 8),),
    ),
    "npu_fusion_attention": (lambda q: torch_npu.npu_fusion_attention(q, q, q, 2, "BSH"), lambda n: (normal(2, n, 8),)),
    "scatter_update": (
        lambda c, p, u: torch_npu.scatter_update(c, p, u, 1),
        lambda n: (normal(2, 50, 4), ones(2).int(), normal(2, n, 4)),
    ),
}


@pytest.mark.parametrize("op", TOKENS)
def test_a_number_of_tokens_that_changes_compiles_once(op: str) -> None:
    call, make = TOKENS[op]
    count = torch._dynamo.testing.CompileCounterWithBackend("airgraph")
    compiled = torch.compile(call, backend=count, dynamic=True, fullgraph=True)
    for tokens in (12, 40, 7):
        given = [t.npu() for t in make(tokens)]
        torch.testing.assert_close(compiled(*given), call(*given), rtol=1e-5, atol=1e-6)
    assert count.frame_count == 1


def test_dropout_with_a_length_that_changes_compiles_once() -> None:
    count = torch._dynamo.testing.CompileCounterWithBackend("airgraph")
    call = lambda q: torch_npu.npu_fusion_attention(q, q, q, 2, "BSH", keep_prob=0.9)[0]  # noqa: E731
    compiled = torch.compile(call, backend=count, dynamic=True, fullgraph=True)
    for tokens in (12, 40, 7):
        q = normal(2, tokens, 8).npu()
        torch.manual_seed(tokens)
        got = compiled(q)
        torch.manual_seed(tokens)
        torch.testing.assert_close(got, call(q), rtol=1e-5, atol=1e-6)
    assert count.frame_count == 1


def test_numbers_kept_for_the_backward_have_no_gradient() -> None:
    y, rstd = torch_npu.npu_rms_norm(torch.randn(2, 4, requires_grad=True), torch.ones(4))
    assert y.requires_grad and not rstd.requires_grad
    assert rstd.shape == (2, 1) and rstd.dtype == torch.float32


def test_the_two_parts_of_a_softmax() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    _, greatest, total, reserved, *numbers = torch_npu.npu_fusion_attention(q, k, v, 3, "BNSD")
    scores = q @ k.mT
    assert greatest.shape == total.shape == (2, 3, 5, 8)
    torch.testing.assert_close(greatest + total.log(), scores.logsumexp(-1, keepdim=True).expand(-1, -1, -1, 8))
    assert reserved.numel() == 0 and numbers == [0, 0, 0]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    ends = [5, 10]
    by_head = torch_npu.npu_fusion_attention(q, k, v, 3, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)[1]
    torch.testing.assert_close(by_head.reshape(-1, 8), greatest.reshape(-1, 8))
    by_token = torch_npu.npu_fusion_attention(
        q, k, v, 3, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends, softmax_layout="TND"
    )[1]
    torch.testing.assert_close(by_token, greatest.transpose(1, 2).flatten(0, 1))


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k = torch.randn(1, 1, 4, 8, requires_grad=True), torch.randn(1, 1, 2, 8)
    mask = causal(4, 4)
    out = torch_npu.npu_fusion_attention(q, k, k, 1, "BNSD", atten_mask=mask, sparse_mode=3)[0]
    assert out[0, 0, :2].abs().sum() == 0 and out[0, 0, 2:].abs().sum() > 0
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.isfinite().all() and grad[0, 0, :2].abs().sum() == 0


CONVERTED = {
    "npu_rms_norm": ["RmsNorm"],
    "npu_add_rms_norm": ["AddRmsNorm"],
    "npu_gelu": ["Gelu"],
    "npu_fast_gelu": ["Mul", "Mul", "Sigmoid"],
    "npu_swiglu": ["Mul", "SplitV", "Swish"],
    "npu_rotary_mul": ["RotaryMul"],
}


@pytest.mark.parametrize("op", CONVERTED)
def test_converted(op: str) -> None:
    """In float32, these are GE ops; halves are the same ops between casts."""
    case = next(c for c in CASES if c.op == op)
    args, named = made(case, torch.float32, "npu")
    traced = make_fx(lambda *a: case.call(*a, **named), tracing_mode="fake")(*args)
    graph, _ = convert(traced, "graph_1", REGISTRY, Journal())
    assert (
        sorted(node.op for node in graph.nodes if node.op not in ("Data", "Const", "Cast", "NetOutput"))
        == CONVERTED[op]
    )
    compiled = torch.compile(lambda *a: case.call(*a, **named), backend="airgraph", fullgraph=True)
    for dtype in (torch.bfloat16, torch.float16):
        args, _ = made(case, dtype, "npu")
        exact, _ = made(case, torch.float64)
        close(compiled(*args), case.plain(*exact, **named), dtype)


def test_a_cast_has_a_gradient_of_the_type_it_came_from() -> None:
    x = torch.randn(3, device="npu", requires_grad=True)
    y = torch_npu.npu_dtype_cast(x, torch.float16)
    assert y.dtype == torch.float16
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.dtype == torch.float32 and grad.tolist() == [1, 1, 1]


def written(case: str) -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
    """An op that writes into its arguments, those it is given, and those it writes into."""
    torch.manual_seed(0)
    if case == "scatter":
        cache = torch.zeros(4, 3, device="npu")
        return torch_npu.npu_scatter_nd_update_, [cache, int32([1], [3]).npu(), torch.ones(2, 3, device="npu")], [cache]
    args = [t.npu() for t in next(c for c in CASES if c.op == "npu_kv_rmsnorm_rope_cache").arguments()]
    return torch_npu.npu_kv_rmsnorm_rope_cache, args, args[5:]


@pytest.mark.parametrize("case", ["scatter", "cache"])
def test_written_in_place(case: str) -> None:
    op, args, caches = written(case)
    before = [t.clone() for t in caches]
    result = op(*args)
    assert (result if isinstance(result, Tensor) else result[0]).data_ptr() == caches[0].data_ptr()
    assert all(not torch.equal(a, b) for a, b in zip(caches, before))
    _, again, compiled_caches = written(case)
    torch.compile(lambda *a: (op(*a), None)[1], backend="airgraph", fullgraph=True)(*again)
    for a, b in zip(compiled_caches, caches):
        torch.testing.assert_close(a, b)


def test_a_format_cast_in_place_is_the_tensor_itself() -> None:
    x = torch.randn(3, device="npu")
    assert torch_npu.npu_format_cast_(x, 29).data_ptr() == x.data_ptr()
    assert torch_npu.npu_format_cast(x, 29).data_ptr() != x.data_ptr()


def test_prefetch_does_nothing() -> None:
    x = torch.ones(3, device="npu")
    assert torch_npu.npu_prefetch(x, None, 1024) is None
    compiled = torch.compile(
        lambda x: (torch_npu.npu_prefetch(x, x, 1024), x + 1)[1], backend="airgraph", fullgraph=True
    )
    assert compiled(x).tolist() == [2, 2, 2]


def test_groups_of_a_matmul_as_numbers() -> None:
    x, weight = torch.randn(6, 4, device="npu"), torch.randn(2, 4, 5, device="npu")
    (got,) = torch_npu.npu_grouped_matmul([x], [weight], group_list=[2, 6], split_item=3, tuning_config=[3])
    torch.testing.assert_close(got, torch.cat([x[:2] @ weight[0], x[2:] @ weight[1]]))


def test_a_mixture_of_experts() -> None:
    """The way there and back, in a captured graph that sees other tokens at each replay."""
    torch.manual_seed(0)
    experts = torch.randn(4, 8, 8, device="npu")
    gate, x = torch.randn(8, 4, device="npu"), torch.randn(6, 8, device="npu")

    def moe() -> Tensor:
        weight, expert, row = torch_npu.npu_moe_gating_top_k_softmax(x @ gate, k=2)
        tokens, places, order = torch_npu.npu_moe_init_routing(x, row, expert, 6)
        counts = (order[:, None] == torch.arange(4, device="npu")).sum(0)
        (tokens,) = torch_npu.npu_grouped_matmul(
            [tokens], [experts], group_list=counts, group_list_type=1, group_type=0, split_item=3
        )
        return torch_npu.npu_moe_finalize_routing(tokens, x, None, None, weight, places, expert)

    def plain() -> Tensor:
        weight, expert = (x @ gate).softmax(-1).topk(2)
        rows = [x[i] + sum(weight[i, j] * (x[i] @ experts[expert[i, j]]) for j in range(2)) for i in range(6)]
        return torch.stack(rows)

    torch.testing.assert_close(moe(), plain())
    torch.testing.assert_close(torch.compile(moe, backend="airgraph", fullgraph=True)(), plain())
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = moe()
    for _ in range(2):
        x.copy_(torch.randn(6, 8))
        graph.replay()
        torch.testing.assert_close(out, plain())


def test_a_sequence_without_tokens() -> None:
    """Between two others: they are as if it were not there, and so are their gradients."""
    q, k = torch.randn(5, 2, 4, requires_grad=True), torch.randn(6, 2, 4, requires_grad=True)
    results = []
    for ends, kv_ends in (([2, 2, 5], [3, 3, 6]), ([2, 5], [3, 6])):
        out = torch_npu.npu_fusion_attention(q, k, k, 2, "TND", actual_seq_qlen=ends, actual_seq_kvlen=kv_ends)[0]
        results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("by_head", [False, True])
def test_keys_in_blocks(layout: str, by_head: bool) -> None:
    """Sequences of 5 and 3 tokens in blocks of 2, wherever those lie; what is behind the last block is any number."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    table = int32([4, 1, 5], [0, 3, -1])
    keys, values = torch.full((6, 2, 2, 8), 9.0), torch.full((6, 2, 2, 8), 9.0)  # [blocks, heads, block, size]
    for b, i in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        keys[table[b, i]], values[table[b, i]] = k[b, :, 2 * i : 2 * i + 2], v[b, :, 2 * i : 2 * i + 2]
    if not by_head:
        keys, values = (t.transpose(1, 2).flatten(2) for t in (keys, values))
    hidden = torch.arange(6) >= torch.tensor([5, 3])[:, None]
    want = attend(q, k, v, hidden[:, None, None], 0.3)
    given = q if layout == "BNSD" else q.transpose(1, 2) if layout == "BSND" else q.transpose(1, 2).flatten(2)
    got = torch_npu.npu_incre_flash_attention(
        given.npu(),
        keys.npu(),
        values.npu(),
        num_heads=4,
        num_key_value_heads=2,
        input_layout=layout,
        scale_value=0.3,
        block_table=table.npu(),
        block_size=2,
        actual_seq_lengths=[5, 3],
    )
    assert got.shape == given.shape
    want = want if layout == "BNSD" else want.transpose(1, 2).reshape(given.shape)
    torch.testing.assert_close(got.cpu(), want)

    named = {"num_key_value_heads": 2, "input_layout": layout, "block_table": table.npu(), "block_size": 2}
    again, _ = torch_npu.npu_fused_infer_attention_score(
        given.npu(), keys.npu(), values.npu(), num_heads=4, scale=0.3, actual_seq_lengths_kv=[5, 3], **named
    )
    second, _ = torch_npu.npu_fused_infer_attention_score_v2(
        given.npu(), keys.npu(), values.npu(), num_query_heads=4, softmax_scale=0.3, actual_seq_kvlen=[5, 3], **named
    )
    assert torch.equal(again, got) and torch.equal(second, got)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_part_of_each_head_for_the_scores_alone(in_blocks: bool) -> None:
    """As MLA has it: one head of keys, and a rotated part of keys and queries that is no part of the values."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 6, 8)
    q_rope, k_rope = torch.randn(2, 4, 3, 2), torch.randn(2, 1, 6, 2)
    hidden = (torch.arange(6) >= torch.tensor([6, 4])[:, None])[:, None, None]
    want = attend(torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1), k, hidden.expand(2, 1, 3, 6), 0.3)
    named: dict[str, Any] = {}
    if in_blocks:  # [blocks, heads, block, size]
        k, k_rope = (t.unflatten(2, (3, 2)).transpose(1, 2).flatten(0, 1) for t in (k, k_rope))
        named = {"block_table": int32([0, 1, 2], [3, 4, 5]).npu(), "block_size": 2}
    got, _ = torch_npu.npu_fused_infer_attention_score_v2(
        q.npu(),
        k.npu(),
        k.npu(),
        query_rope=q_rope.npu(),
        key_rope=k_rope.npu(),
        num_query_heads=4,
        num_key_value_heads=1,
        softmax_scale=0.3,
        input_layout="BNSD",
        actual_seq_kvlen=[6, 4],
        **named,
    )
    torch.testing.assert_close(got.cpu(), want)


class Block(nn.Module):
    """A layer of a language model, by torch_npu's ops or in plain PyTorch."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm1, self.norm2 = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(32, 16, bias=False)
        self.register_buffer("hidden", causal(8, 8))
        angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])
        self.register_buffer("cos", angles.cos().repeat(1, 2)[None, :, None])
        self.register_buffer("sin", angles.sin().repeat(1, 2)[None, :, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x, self.norm1)).unflatten(-1, (4, 12)).split(4, -1)
        h = self.out(self.attention(self.turn(q), self.turn(k), v).flatten(2))
        if self.fused:
            y, _, x = torch_npu.npu_add_rms_norm(x, h, self.norm2)
            return x + self.down(torch_npu.npu_swiglu(self.up(y)))
        x = x + h
        return x + self.down(swiglu(self.up(self.norm(x, self.norm2))))

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return (torch_npu.npu_rms_norm if self.fused else rms_norm)(x, gamma)[0]

    def turn(self, x: Tensor) -> Tensor:
        return (torch_npu.npu_rotary_mul if self.fused else turned)(x, self.cos, self.sin)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            mask = self.hidden
            return torch_npu.npu_fusion_attention(q, k, v, 4, "BSND", atten_mask=mask, scale=0.5, sparse_mode=2)[0]
        return attend(*(t.transpose(1, 2) for t in (q, k, v)), self.hidden[None, None], 0.5).transpose(1, 2)


def losses(fused: bool, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = Block(fused).to("npu" if fused else "cpu")
    x = torch.randn(2, 8, 16).to("npu" if fused else "cpu")
    step = torch.compile(model, backend="airgraph", fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        loss = step(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_layer_of_fused_ops_trains_as_the_plain_one() -> None:
    want = losses(fused=False, compiled=False)
    assert want[-1] < want[0]
    torch.testing.assert_close(losses(fused=True, compiled=False), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses(fused=True, compiled=True), want, rtol=1e-5, atol=0)


REFUSED = [
    (
        "npu_rms_norm",
        (normal(2, 4).double(), normal(4)),
        {},
        "npu_rms_norm: self is torch.float64, and has to be one of float16, bfloat16, float32",
    ),
    (
        "npu_rms_norm",
        (normal(2, 4), normal(3)),
        {},
        r"npu_rms_norm: gamma \[3\] does not fit the last axes of self \[2, 4\]",
    ),
    (
        "npu_add_rms_norm",
        (normal(2, 4), normal(1, 4), normal(4)),
        {},
        r"x1 \[2, 4\] torch.float32 and x2 \[1, 4\] torch.float32 have to be alike",
    ),
    ("npu_swiglu", (normal(2, 5),), {}, r"npu_swiglu: axis -1 of self \[2, 5\] has to be even"),
    ("npu_gelu", (normal(2),), {"approximate": "fast"}, "approximate is 'fast', and has to be 'none' or 'tanh'"),
    (
        "npu_scaled_masked_softmax",
        (normal(1, 1, 2, 2), normal(1, 1, 2, 2)),
        {},
        "mask is torch.float32, and has to be one of bool",
    ),
    (
        "npu_rotary_mul",
        (normal(1, 1, 2, 4),) * 3 + ("thirds",),
        {},
        "rotary_mode is 'thirds', and has to be one of half, interleave, quarter, interleave-half",
    ),
    (
        "npu_rotary_mul",
        (normal(1, 1, 2, 6),) * 3 + ("quarter",),
        {},
        r"the last axis of self \[1, 1, 2, 6\] has to be a multiple of 4",
    ),
    (
        "npu_fusion_attention",
        (normal(1, 1, 2, 4),) * 3 + (1, "BDSN"),
        {},
        "input_layout is 'BDSN', and has to be one of BSH, SBH, BSND, BNSD, TND",
    ),
    (
        "npu_fusion_attention",
        (normal(2, 1, 4),) * 3 + (1, "TND"),
        {},
        "layout TND needs actual_seq_qlen and actual_seq_kvlen",
    ),
    (
        "npu_fusion_attention_grad",
        (normal(1, 1, 2, 4),) * 4 + (1, "BNSD"),
        {},
        "softmax_max, softmax_sum and attention_in of the forward op are needed",
    ),
    (
        "npu_fusion_attention",
        (normal(1, 1, 2, 4),) * 3 + (1, "BNSD"),
        {"sparse_mode": 9},
        "sparse_mode is 9, and has to be one of 0 to 8",
    ),
    (
        "npu_fusion_attention",
        (normal(1, 1, 2, 4),) * 3 + (1, "BNSD"),
        {"prefix": [1]},
        "prefix goes with sparse_mode 5 and 6",
    ),
    (
        "npu_fusion_attention",
        (normal(1, 1, 2, 4),) * 3 + (1, "BNSD"),
        {"prefix": [1, 2], "sparse_mode": 6, "atten_mask": torch.ones(2, 2, dtype=torch.bool)},
        "prefix has 2 numbers for 1 sequences",
    ),
    (
        "npu_fusion_attention",
        (normal(1, 1, 2, 4),) * 3 + (1, "BNSD"),
        {"sparse_mode": 7},
        "sparse_mode 7 is for layout TND",
    ),
    (
        "npu_prompt_flash_attention",
        (normal(1, 1, 2, 4),) * 3,
        {"input_layout": "BNSD", "quant_scale1": normal(1)},
        "npu_prompt_flash_attention: .*: only with query, key and value in int8",
    ),
    (
        "npu_incre_flash_attention",
        (normal(1, 2, 4),) * 3,
        {},
        "query has 2 tokens, and is the next one only\n  try: npu_prompt_flash_attention",
    ),
    (
        "npu_incre_flash_attention",
        (normal(1, 1, 4),) * 3,
        {"block_table": int32([0]), "block_size": 1},
        "block_table needs actual_seq_lengths: how far its blocks are filled",
    ),
    (
        "npu_incre_flash_attention",
        (normal(1, 1, 4),) * 3,
        {"block_table": int32([0]), "block_size": 2, "actual_seq_lengths": [1]},
        "block_size is 2, and a block of key has 1 tokens",
    ),
    (
        "npu_incre_flash_attention",
        (normal(1, 1, 4),) * 3,
        {"padding_mask": int32(1)},
        "npu_incre_flash_attention: padding_mask is not emulated",
    ),
    (
        "npu_dynamic_quant",
        (normal(2, 4),),
        {"dst_type": torch.float16},
        "dst_type torch.float16 is not one of torch.int8, torch.quint4x2, torch.float8_e4m3fn, torch.float8_e5m2",
    ),
    (
        "npu_quantize",
        (normal(2, 4), normal(3), None, torch.qint8),
        {},
        r"npu_quantize: \[3\] numbers do not fit axis 1 of \[2, 4\]",
    ),
    (
        "npu_quant_matmul",
        (normal(2, 4), int8(4, 3), normal(3)),
        {},
        "npu_quant_matmul: x1 is torch.float32, and has to be one of int8",
    ),
    (
        "npu_weight_quant_batchmatmul",
        (normal(2, 4), int8(3, 4), normal(4)),
        {},
        r"x \[2, 4\] and weight \[3, 4\] do not fit",
    ),
    (
        "npu_grouped_matmul",
        ([normal(2, 4)], [normal(4, 3), normal(4, 3)]),
        {},
        "1 x and 2 weights need group_list to be told apart",
    ),
    ("npu_moe_gating_top_k_softmax", (normal(2, 4), None, 5), {}, "k is 5, for 4 experts"),
    (
        "npu_moe_finalize_routing",
        (normal(2, 4), None, None, None, normal(2, 1), int32(0, 1), None, 4),
        {},
        "drop_pad_mode is 4, and has to be 0 to 3",
    ),
    ("npu_transpose", (normal(2, 3), [0, 2]), {}, r"npu_transpose: perm \[0, 2\] is not a permutation of 2 axes"),
    (
        "npu_scatter_nd_update",
        (normal(4, 3), int32([0], [1]), normal(1, 3)),
        {},
        r"updates \[1, 3\] do not fit indices \[2, 1\] into self \[4, 3\]",
    ),
    ("npu_prefetch", (normal(2), None, 0), {}, "max_size is 0, and has to be above zero"),
    (
        "npu_kv_rmsnorm_rope_cache",
        (
            normal(2, 1, 3, 10),
            normal(6),
            normal(2, 1, 3, 4),
            normal(2, 1, 3, 4),
            torch.zeros(2, 3, dtype=torch.int64),
            normal(2, 1, 5, 4),
            normal(2, 1, 5, 6),
        ),
        {"cache_mode": "PA_NZ"},
        "cache_mode 'PA_NZ' is not emulated, only Norm, PA, PA_BNSD",
    ),
]

# The last column of the document's table: every argument it names, given.
BNSD = (normal(1, 1, 2, 4),) * 3
NEXT = (normal(1, 1, 4),) * 3
ONE = normal(1)


def not_emulated(op: str, args: tuple[Any, ...], names: str, **more: Any) -> list[tuple[Any, ...]]:
    """A row for each of the names, given a tensor; the error says what is not known of some."""
    said = {name: f"  the documents do not say: {UNKNOWN[name]}\n" if name in UNKNOWN else "" for name in names.split()}
    return [
        (op, args, {**more, name: ONE}, rf"{op}: {name} is not emulated\n{unknown}  try: +leave it out")
        for name, unknown in said.items()
    ]


GROUPED = ([normal(4, 4)], [normal(4, 3), normal(4, 3)])
GROUPS = {"group_list": torch.tensor([2, 4]), "split_item": 3, "group_type": 0}
MLA = (normal(2, 1, 3, 10), normal(6), normal(2, 1, 3, 4), normal(2, 1, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
FIA, FIA2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
LENGTHS = {"actual_seq_lengths": [2], "actual_seq_lengths_kv": [2]}
NOT_EMULATED = [
    *not_emulated("npu_fusion_attention", (*BNSD, 1, "BNSD"), "padding_mask"),
    (
        "npu_fusion_attention",
        (*BNSD, 1, "BNSD", normal(1, 1, 1024, 2)),
        {},
        r"pse \[1, 1, 1024, 2\] does not fit \[1, 1, 2, 2\]: one number for each query and key; its compressed form is not emulated",
    ),
    (
        "npu_fusion_attention",
        (*(normal(2, 1, 4),) * 3, 1, "TND", normal(1, 1, 2, 2)),
        {"actual_seq_qlen": [2], "actual_seq_kvlen": [2]},
        "pse with layout TND is not emulated",
    ),
    *not_emulated("npu_prompt_flash_attention", BNSD, "padding_mask", input_layout="BNSD"),
    *(
        (
            "npu_prompt_flash_attention",
            BNSD,
            {"input_layout": layout},
            f"input_layout '{layout}' is not emulated, only BSH, BSND, BNSD",
        )
        for layout in ("TND", "NSD", "BNSD_BSND")
    ),
    (
        "npu_prompt_flash_attention",
        BNSD,
        {"input_layout": "BNSD", "sparse_mode": 4},
        "sparse_mode 4 is not emulated, only 0 to 3",
    ),
    (
        "npu_prompt_flash_attention",
        (int8(1, 1, 2, 4),) * 3,
        {"input_layout": "BNSD"},
        "npu_prompt_flash_attention: query, key and value in int8 need dequant_scale1, quant_scale1, dequant_scale2",
    ),
    *not_emulated("npu_incre_flash_attention", NEXT, "padding_mask"),
    (
        "npu_incre_flash_attention",
        (normal(1, 1, 4), int8(1, 1, 4), int8(1, 1, 4)),
        {},
        "npu_incre_flash_attention: key in torch.int8 needs antiquant_scale",
    ),
    ("npu_quantize", (normal(2, 4), normal(4), None, torch.float16), {}, "dtype torch.float16 is none of the op's"),
    (
        "npu_quant_matmul",
        (int8(2, 4), int8(4, 3), normal(3).half()),
        {},
        "npu_quant_matmul: scale is torch.float16, and has to be one of float32, bfloat16, int64",
    ),
    ("npu_trans_quant_param", (normal(3), None, 2), {}, "round_mode is 2, and has to be 0"),
    (
        "npu_quant_matmul",
        (int8(2, 4), int8(4, 3), normal(3)),
        {"group_sizes": [1, 1, 4]},
        "npu_quant_matmul: group_sizes is not emulated",
    ),
    *(
        (op, args, {**named, name: [ONE]}, f"{op}: {name} is not emulated")
        for op, args, named, names in [
            (
                "npu_grouped_matmul",
                GROUPED,
                GROUPS,
                "offset activation_input activation_quant_scale activation_quant_offset",
            )
        ]
        for name in names.split()
    ),
    (
        "npu_grouped_matmul",
        ([int8(4, 4)], [int8(4, 3), int8(4, 3)]),
        {**GROUPS, "output_dtype": torch.float32},
        "x in int8 or int4 gives float16, bfloat16, int32 or int8",
    ),
    (
        "npu_grouped_matmul",
        ([int8(4, 4)], [int8(4, 3), int8(4, 3)]),
        {**GROUPS, "output_dtype": torch.float16},
        "an output of int32 has no scale, and others need one",
    ),
    (
        "npu_grouped_matmul",
        ([int8(4, 4)], [normal(4, 3), normal(4, 3)]),
        GROUPS,
        "x is torch.int8, and weight torch.float32",
    ),
    ("npu_grouped_matmul", GROUPED, {**GROUPS, "scale": [normal(2, 3)]}, "scale and per_token_scale are for x in int8"),
    (
        "npu_grouped_matmul",
        GROUPED,
        {**GROUPS, "antiquant_scale": [normal(2, 3)]},
        "antiquant_scale is for a weight in int8 or int4 and x that is not",
    ),
    (
        "npu_grouped_matmul",
        GROUPED,
        {**GROUPS, "antiquant_offset": [normal(2, 3)]},
        "antiquant_offset needs antiquant_scale",
    ),
    (
        "npu_moe_compute_expert_tokens",
        (torch.tensor([0, 1]), 2),
        {},
        "sorted_expert_for_source_row is torch.int64, and has to be one of int32",
    ),
    ("npu_moe_compute_expert_tokens", (int32(0, 1), 0), {}, "num_expert is 0, and has to be above zero"),
    (
        "scatter_update",
        (normal(2, 4, 3), int32([0, 1]), normal(1, 1, 3), 1),
        {},
        "indices with 2 axes are not emulated, only with 1: a place for each row",
    ),
    (
        "scatter_update_",
        (normal(2, 4, 3), int32(0, 1), normal(2, 1, 3), 0),
        {},
        r"axis is 0, and has to be one of data \[2, 4, 3\] behind the first, which counts the rows",
    ),
    (
        "scatter_update_",
        (normal(2, 4, 3), int32(0, 1), normal(2, 1, 2), 1),
        {},
        r"updates \[2, 1, 2\] do not fit 2 places in data \[2, 4, 3\]",
    ),
    ("npu_grouped_matmul", GROUPED, {**GROUPS, "act_type": 1}, "act_type is for products with per_token_scale"),
    ("npu_grouped_matmul", GROUPED, {**GROUPS, "group_type": 1}, "group_type 1 is not emulated, only -1, 0 and 2"),
    ("npu_grouped_matmul", GROUPED, {**GROUPS, "split_item": 0}, "split_item 0 needs numbers for group_list"),
    (
        "npu_moe_finalize_routing",
        (normal(1, 2, 4), None, None, normal(1, 4), normal(2, 1), int32(0, 1), int32([0], [0]), 3),
        {},
        "bias with drop_pad_mode 1 or 3 is not emulated",
    ),
    (
        "npu_kv_rmsnorm_rope_cache",
        (*MLA, int8(2, 1, 5, 4), int8(2, 1, 5, 6)),
        {},
        "k_cache is torch.int8, and has to be one of float16, bfloat16, float32",
    ),
    *not_emulated(
        "npu_kv_rmsnorm_rope_cache",
        (*MLA, normal(2, 1, 5, 4), normal(2, 1, 5, 6)),
        "k_rope_scale c_kv_scale k_rope_offset c_kv_offset",
    ),
    (
        "npu_kv_rmsnorm_rope_cache",
        (*MLA, normal(2, 1, 5, 4), normal(2, 1, 5, 6)),
        {"cache_mode": "PA_BLK_NZ"},
        "cache_mode 'PA_BLK_NZ' is not emulated, only Norm, PA, PA_BNSD",
    ),
    *not_emulated(FIA, BNSD, "key_rope_antiquant_scale", input_layout="BNSD"),
    *(
        (FIA, BNSD, {"input_layout": "BNSD", name: given}, f"{FIA}: {name}: only with key and value in int8 or int4")
        for name, given in (("antiquant_scale", ONE), ("key_antiquant_mode", 1), ("value_antiquant_mode", 1))
    ),
    *(
        (FIA, BNSD, {"input_layout": "BNSD", name: ONE}, f"{FIA}: {name} needs {name.replace('offset', 'scale')}")
        for name in ("antiquant_offset", "quant_offset2")
    ),
    *not_emulated(FIA2, BNSD, "dequant_scale_key_rope", input_layout="BNSD"),
    *(
        (
            FIA2,
            BNSD,
            {"input_layout": "BNSD", name: given},
            rf"{name}: only with query, key and value in .*\n  try: +leave",
        )
        for name, given in (("query_quant_mode", 3), ("dequant_scale_query", ONE), ("quant_scale_p", ONE))
    ),
    (
        FIA2,
        BNSD,
        {"input_layout": "BNSD", "out_dtype": torch.float16},
        "out_dtype is torch.float16, and query torch.float32",
    ),
    (
        FIA,
        (normal(1, 1, 2, 4), int8(1, 1, 2, 4), int8(1, 1, 2, 4)),
        {"input_layout": "BNSD"},
        f"{FIA}: key in torch.int8 needs antiquant_scale",
    ),
    (FIA, BNSD, {"input_layout": "BNSD", "query_rope": normal(1, 1, 2, 2)}, "query_rope and key_rope go together"),
    *(
        (FIA, BNSD, {"input_layout": "BNSD", name: normal(1, 1, 2, 4)}, "value_shared_prefix go together")
        for name in ("key_shared_prefix", "value_shared_prefix")
    ),
    (FIA, BNSD, {"input_layout": "BNSD", "actual_shared_prefix_len": [1]}, "needs key_shared_prefix"),
    (
        FIA,
        BNSD,
        {"input_layout": "BNSD", "block_table": int32([0]), "block_size": 2},
        "block_table needs actual_seq_lengths_kv: how far its blocks are filled",
    ),
    (
        FIA,
        BNSD,
        {"input_layout": "BNSD", "block_table": int32([0]), "block_size": 3, "actual_seq_lengths_kv": [1]},
        "block_size is 3, and a block of key has 2 tokens",
    ),
    (FIA, BNSD, {"input_layout": "BNSD", "sparse_mode": 5}, "sparse_mode 5 is not emulated, only 0 to 4"),
    *(
        (FIA, (normal(2, 1, 4),) * 3, {"input_layout": "TND", **LENGTHS, name: given}, f"{name} is not emulated")
        for name, given in (("pse_shift", normal(1, 1, 2, 2)), ("kv_padding_size", torch.tensor([0])))
    ),
    (FIA, (normal(2, 1, 4),) * 3, {"input_layout": "TND"}, "layouts TND and NTD need the lengths of queries and keys"),
    (
        FIA,
        (normal(2, 1, 4),) * 3,
        {"input_layout": "TND", **LENGTHS, "atten_mask": below(2, 2)},
        "atten_mask with layout TND needs sparse_mode 2, 3 or 4",
    ),
    (
        FIA,
        BNSD,
        {"input_layout": "BNSD", "kv_padding_size": torch.tensor([0])},
        "kv_padding_size needs actual_seq_lengths_kv",
    ),
]
REFUSED += NOT_EMULATED


@pytest.mark.parametrize(("op", "args", "named", "text"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_refused(op: str, args: tuple[Any, ...], named: dict[str, Any], text: str) -> None:
    with pytest.raises(CompatError, match=text):
        getattr(torch_npu, op)(*args, **named)


# Ops of one's own.


def test_an_op_without_a_reference_says_how_to_add_one() -> None:
    with pytest.raises(AttributeError) as caught:
        torch_npu.npu_not_there  # noqa: B018
    assert str(caught.value).splitlines() == [
        "torch_npu.npu_not_there has no reference in airgraph: docs/ascend.md lists the ops that have one",
        '  try: @airgraph.compat.torch_npu.reference("npu_not_there(Tensor x) -> Tensor") on a function that says in '
        "PyTorch what it does, with the schema of the op",
    ]
    assert not hasattr(torch_npu, "npu_not_there")


def test_a_reference_of_ones_own() -> None:
    @reference("npu_silu_mul_for_test(Tensor x, Tensor y, *, float scale=1.0) -> Tensor")
    def meaning(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        return functional.silu(x) * y * scale

    x, y = torch.randn(2, 4, device="npu"), torch.randn(2, 4, device="npu")
    want = functional.silu(x) * y * 0.5
    assert torch.equal(torch_npu.npu_silu_mul_for_test(x, y, scale=0.5), want)
    assert torch_npu.npu_silu_mul_for_test is meaning is torch.ops.npu.npu_silu_mul_for_test
    compiled = torch.compile(
        lambda x, y: torch_npu.npu_silu_mul_for_test(x, y, scale=0.5), backend="airgraph", fullgraph=True
    )
    torch.testing.assert_close(compiled(x, y), want)
    with pytest.raises(CompatError, match=r"torch_npu.npu_silu_mul_for_test has a reference already"):
        reference("npu_silu_mul_for_test(Tensor x) -> Tensor")
    with pytest.raises(CompatError, match="'npu_silu' is not the schema of an op\n  try: reference"):
        reference("npu_silu")


def test_an_op_of_torch_library() -> None:
    torch.library.define("npu::npu_twice_for_test", "(Tensor x) -> Tensor")
    torch.library.impl("npu::npu_twice_for_test", "CompositeExplicitAutograd")(lambda x: x * 2)
    assert torch_npu.npu_twice_for_test(torch.ones(2, device="npu")).tolist() == [2, 2]


# The document.


def test_the_document_lists_every_op() -> None:
    """In its table, and below it those that are refused and those of gradients; each in backquotes."""
    text = DOCUMENT.read_text().partition("## Fused ops")[2].partition("What the documents")[0]
    listed = set(re.findall(r"`((?:_?npu|scatter|fast|batch)_\w+)`", text))
    ours = {name for name in REFERENCES if "for_test" not in name and "." not in name}
    ours -= {name for name in ours if name.endswith("_functional")}
    ours.discard("npu_deep_norm")  # an example
    others = {"npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"}
    refused = {name for name in references.REFUSED if name.startswith("npu_")}
    assert listed == ours | others | refused


def test_the_examples_of_the_document() -> None:
    text = DOCUMENT.read_text()
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, space)
    mean, rstd, y = torch_npu.npu_deep_norm(
        *(t.npu() for t in (torch.randn(2, 16), torch.randn(2, 16), torch.zeros(16), torch.ones(16)))
    )
    torch.testing.assert_close(y.mean(-1), torch.zeros(2, device="npu"), atol=1e-6, rtol=0)
    assert mean.shape == rstd.shape == (2, 1)
