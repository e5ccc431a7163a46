"""Ops that prepare a token for attention and write it into caches, and those that rotate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.errors import CompatError
from tests.compat.graph_cases import GraphCase, check_compiled, check_eager


def rms(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gamma


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs half a head apart as complex numbers."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos.expand_as(x), sin.expand_as(x)
    return torch.cat([a * c[..., :half] - b * s[..., :half], b * c[..., half:] + a * s[..., half:]], -1)


def evens_first(x: Tensor) -> Tensor:
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def kv_cache(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k: Tensor, c: Tensor, **named: Any
) -> Any:
    normed = rms(kv[..., :8], gamma, named.get("epsilon", 1e-5))
    rope = by_halves(evens_first(kv[..., 8:]), cos, sin)
    for b in range(2):
        for t in range(3):
            place = int(index[b * 3 + t])
            k[place // 4, place % 4, 0] = rope[b, 0, t]
            c[place // 4, place % 4, 0] = normed[b, 0, t]
    return rope, normed, k, c


def kv_arguments() -> tuple[Any, ...]:
    kv, gamma, cos, sin = (
        torch.randn(2, 1, 3, 12),
        torch.rand(8) + 0.5,
        torch.randn(2, 1, 3, 4),
        torch.randn(2, 1, 3, 4),
    )
    return kv, gamma, cos, sin, torch.tensor([7, 1, 0, 9, 3, 11]), torch.randn(3, 4, 1, 4), torch.randn(3, 4, 1, 8)


def qkv(
    x: Tensor,
    qg: Tensor,
    kg: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    size: Any,
    heads: Any,
    **named: Any,
) -> Any:
    q, k, v = x[:, :64].view(5, 2, 32), x[:, 64:96], x[:, 96:]
    q = by_halves(rms(q, qg, 1e-6), cos.unsqueeze(1), sin.unsqueeze(1)).reshape(5, 64)
    k = by_halves(rms(k, kg, 1e-6), cos, sin)
    for t, place in enumerate(index.tolist()):
        if place >= 0:
            k_cache[place // 16, :, place % 16] = k[t].view(2, 16)
            v_cache[place // 16, :, place % 16] = torch.round(v[t] / 0.05 + 1).clamp(-128, 127).view(1, 32)
    return q, k, v, q, k_cache, v_cache


def qkv_arguments() -> tuple[Any, ...]:
    place = torch.tensor([3, 20, -1, 0, 31])
    caches = torch.randn(2, 2, 16, 16), torch.zeros(2, 1, 16, 32, dtype=torch.int8)
    start = (
        torch.randn(5, 128),
        torch.rand(32) + 0.5,
        torch.rand(32) + 0.5,
        torch.randn(5, 32),
        torch.randn(5, 32),
        place,
    )
    return *start, torch.zeros(5, 64), *caches, [5, 1, 4, 32], [2, 1, 1]


def rope_quant(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    at: Tensor,
    ks: Tensor,
    vs: Tensor,
    sizes: Any,
    **named: Any,
) -> Any:
    if "weight_scale" in named:
        x = (x + named["bias"]) * named["weight_scale"] * named["activation_scale"].unsqueeze(-1)
        x = x.to(torch.float16).double()  # it goes on in the type of cos
    q, k, v = x[..., :16].unflatten(-1, (2, 8)), x[..., 16:24].unsqueeze(-2), x[..., 24:].unsqueeze(-2)
    q, k = (by_halves(t, cos.unsqueeze(-2), sin.unsqueeze(-2)).to(torch.float16).double() for t in (q, k))
    for cache, rows, scale in ((k_cache, k, ks), (v_cache, v, vs)):
        for b in range(2):
            for t in range(3):
                number = torch.round(rows[b, t] / scale).clamp(-128, 127).to(torch.int8)
                if named.get("cache_mode") == "page":
                    cache.view(-1, 1, 8)[at[b * 3 + t]] = number
                else:
                    cache[b, at[b] + t] = number
    return q, k_cache, v_cache


def rope_quant_arguments(sums: bool, page: bool) -> tuple[Any, ...]:
    x = torch.randint(-50, 50, (2, 3, 32), dtype=torch.int32) if sums else torch.randn(2, 3, 32).half()
    at = torch.tensor([5, 0, 9, 3, 11, 2] if page else [2, 1], dtype=torch.int32)
    caches = torch.zeros((3, 4, 1, 8) if page else (2, 6, 1, 8), dtype=torch.int8)
    scales = torch.rand(8) * 0.05 + 0.02, torch.rand(8) * 0.05 + 0.02
    return x, torch.randn(2, 3, 8).half(), torch.randn(2, 3, 8).half(), caches, caches.clone(), at, *scales, [16, 8, 8]


def scatter(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, **named: Any) -> Any:
    for t, place in enumerate(slots.tolist()):
        if place >= 0:
            keys[place // 4, place % 4] = key[t]
            values[place // 4, place % 4] = value[t]
    return keys, values


def scatter_in_pieces(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, **named: Any) -> Any:
    for t, place in enumerate(slots.tolist()):
        for cache, rows in ((keys, key), (values, value)):
            cache[place // 4, :, place % 4] = rows[t].reshape(2, 16)
    return keys, values


def prolog(
    x: Tensor,
    dq: Tensor,
    uq: Tensor,
    uk: Tensor,
    dkv: Tensor,
    gq: Tensor,
    gkv: Tensor,
    sin: Tensor,
    cos: Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    index, kv, kr = (named["cache_index"], *rest) if "cache_index" in named else rest
    c = rms(x @ dq, gq, 1e-5) * named.get("qc_qr_scale", 1.0)
    both = (c @ uq).unflatten(-1, (3, 10))
    query = torch.stack([both[..., n, :6] @ uk[n] for n in range(3)], -2)
    rope = by_halves(evens_first(both[..., 6:]), cos.unsqueeze(-2), sin.unsqueeze(-2))
    down = x @ dkv
    latent = rms(down[..., :5], gkv, 1e-5) * named.get("kc_scale", 1.0)
    key = by_halves(evens_first(down[..., 5:]), cos, sin)
    for t, place in enumerate(index.flatten().tolist()):
        kv[place // 4, place % 4, 0] = latent.reshape(-1, 5)[t]
        kr[place // 4, place % 4, 0] = key.reshape(-1, 4)[t]
    return query, rope, kv, kr


def prolog_first(*args: Any, **named: Any) -> Any:
    return prolog(*args, **named)


def prolog_second(*args: Any, **named: Any) -> Any:
    query, rope, kv, kr = prolog(*args, **named)
    return query, rope, torch.zeros(1), kv, kr


def prolog_third(*args: Any, **named: Any) -> Any:
    query, rope, kv, kr = prolog(*args, **named)
    c = rms(args[0] @ args[1], args[5], 1e-5)
    norm = c if named.get("query_norm_flag") else torch.zeros(0)
    return query, rope, torch.zeros(1), norm, torch.zeros(0), kv, kr


def prolog_arguments(third: bool = False) -> tuple[Any, ...]:
    weights = torch.randn(7, 8) / 3, torch.randn(8, 30) / 3, torch.randn(3, 6, 5) / 3, torch.randn(7, 9) / 3
    gammas = torch.rand(8) + 0.5, torch.rand(5) + 0.5
    angles, caches = (torch.randn(2, 2, 4), torch.randn(2, 2, 4)), (torch.randn(3, 4, 1, 5), torch.randn(3, 4, 1, 4))
    index = () if third else (torch.tensor([[3, 8], [0, 5]]),)
    return torch.randn(2, 2, 7), *weights, *gammas, *angles, *index, *caches


INDEX = {"cache_index": torch.tensor([[3, 8], [0, 5]])}
PLACES = torch.tensor([[2, 0, 6], [4, 1, 2]])
CASES = [
    GraphCase(
        "npu_kv_rmsnorm_rope_cache_v2",
        "KvRmsNormRopeCache",
        kv_arguments,
        kv_cache,
        {"cache_mode": "PA", "is_output_kv": True},
        (5, 6),
    ),
    GraphCase(
        "npu_kv_rmsnorm_rope_cache",
        "KvRmsNormRopeCache",
        kv_arguments,
        kv_cache,
        {"cache_mode": "PA", "is_output_kv": True},
        (5, 6),
    ),
    GraphCase(
        "npu_qkv_rms_norm_rope_cache",
        "QkvRmsNormRopeCache",
        qkv_arguments,
        qkv,
        {"v_scale": torch.full((1, 32), 0.05), "v_offset": torch.ones(1, 32), "is_output_qkv": True},
        (6, 7, 8),
    ),
    GraphCase(
        "npu_rope_quant_kvcache",
        "DequantRopeQuantKvcache",
        lambda: rope_quant_arguments(False, False),
        lambda *a, **n: (rope_quant(*a, **n)[0], torch.zeros(0), torch.zeros(0), *rope_quant(*a, **n)[1:]),
        {},
        (3, 4),
        2e-3,
    ),
    GraphCase(
        "npu_dequant_rope_quant_kvcache",
        "DequantRopeQuantKvcache",
        lambda: rope_quant_arguments(True, True),
        lambda *a, **n: (rope_quant(*a, **n)[0], torch.zeros(0), torch.zeros(0), *rope_quant(*a, **n)[1:]),
        {
            "cache_mode": "page",
            "weight_scale": torch.rand(32) * 0.03,
            "activation_scale": torch.rand(2, 3),
            "bias": torch.randint(-9, 9, (32,), dtype=torch.int32),
        },
        (3, 4),
        2e-3,
    ),
    GraphCase(
        "npu_scatter_pa_kv_cache",
        "ScatterPaKvCache",
        lambda: (
            torch.randn(3, 2, 4),
            torch.randn(3, 2, 4),
            torch.randn(2, 4, 2, 4),
            torch.randn(2, 4, 2, 4),
            torch.tensor([6, -1, 1], dtype=torch.int32),
        ),
        scatter,
        {},
        (2, 3),
    ),
    GraphCase(
        "npu_scatter_pa_kv_cache",
        "ScatterPaKvCache",
        lambda: (
            torch.randn(3, 2, 16),
            torch.randn(3, 2, 16),
            torch.randn(2, 2, 4, 16),
            torch.randn(2, 2, 4, 16),
            torch.tensor([6, 3, 1]),
        ),
        scatter_in_pieces,
        {},
        (2, 3),
    ),
    GraphCase("npu_mla_prolog", "MlaProlog", prolog_arguments, prolog_first, {}, (10, 11)),
    GraphCase("npu_mla_prolog_v2", "MlaPrologV2", prolog_arguments, prolog_second, {}, (10, 11)),
    GraphCase(
        "npu_mla_prolog_v3",
        "MlaPrologV3",
        lambda: prolog_arguments(True),
        prolog_third,
        {**INDEX, "qc_qr_scale": 0.5, "kc_scale": 2.0},
        (9, 10),
    ),
    GraphCase(
        "npu_mla_prolog_v3",
        "MlaPrologV3",
        lambda: prolog_arguments(True),
        prolog_third,
        {**INDEX, "query_norm_flag": True},
        (9, 10),
    ),
    GraphCase(
        "npu_apply_rotary_pos_emb",
        "ApplyRotaryPosEmb",
        lambda: (
            torch.randn(2, 3, 4, 8),
            torch.randn(2, 3, 1, 8),
            torch.randn(2, 3, 1, 8),
            torch.randn(2, 3, 1, 8),
            "BSND",
        ),
        lambda q, k, cos, sin, layout: (by_halves(q, cos, sin), by_halves(k, cos, sin)),
    ),
    GraphCase(
        "npu_interleave_rope",
        "InterleaveRope",
        lambda: (torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8)),
        lambda x, cos, sin: by_halves(evens_first(x), cos, sin),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_eager(case: GraphCase) -> None:
    check_eager(case)


def test_compiled(tmp_path: Path) -> None:
    check_compiled(CASES, tmp_path)


def test_prolog_with_weights_in_int8() -> None:
    torch.manual_seed(0)
    x, dq, uq, uk, dkv, *rest = prolog_arguments()
    whole = torch.ops.npu.npu_mla_prolog(*(t.npu() for t in (x, dq, uq, uk, dkv, *rest)))
    scale = uq.abs().amax(0, keepdim=True) / 127
    quantised = torch.round(uq / scale).to(torch.int8)
    args = (x, dq, quantised, uk, dkv, *rest)
    got = torch_npu.npu_mla_prolog(*(t.npu() for t in args), dequant_scale_w_uq_qr=scale.npu())
    for g, e in zip(got, whole):
        torch.testing.assert_close(g, e, rtol=0.1, atol=0.05)


def test_no_token_has_a_place() -> None:
    caches = torch.randn(2, 4, 2, 4).npu(), torch.randn(2, 4, 2, 4).npu()
    before = [cache.clone() for cache in caches]
    rows = torch.randn(3, 2, 4).npu()
    torch_npu.npu_scatter_pa_kv_cache(rows, rows, *caches, torch.tensor([-1, -1, -1]).npu())
    torch.testing.assert_close([*caches], before, rtol=0, atol=0)


def test_what_is_not_emulated() -> None:
    args = [t.npu() for t in prolog_arguments()]
    with pytest.raises(CompatError, match="npu_mla_prolog: quant_scale_ckv is not emulated"):
        torch_npu.npu_mla_prolog(*args, quant_scale_ckv=torch.ones(1, 5).npu())
    with pytest.raises(CompatError, match="cache_mode 'PA_NZ' is not emulated, only 'PA_BSND'"):
        torch_npu.npu_mla_prolog(*args, cache_mode="PA_NZ")
    with pytest.raises(CompatError, match="rotary_mode is 'thirds', and has to be one of"):
        x = torch.zeros(1, 1, 1, 4).npu()
        torch_npu.npu_apply_rotary_pos_emb(x, x, x, x, rotary_mode="thirds")
