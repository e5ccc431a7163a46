"""`npu_mla_prolog`, in three versions: all that comes before the attention of MLA, in one op.

    query, query_rope, kv_cache, kr_cache = torch_npu.npu_mla_prolog(
        x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, gamma_cq, gamma_ckv, sin, cos, index, kv_cache, kr_cache)

    c = rms_norm(x · weight_dq) · qc_qr_scale
    [n, r] = c · weight_uq_qr for each head       query = n · weight_uk,  query_rope = rope(r)
    [c, r] = x · weight_dkv_kr                    kv_cache[index] = rms_norm(c) · kc_scale,  kr_cache[index] = rope(r)

Pairs to rotate are neighbours and come out half a head apart. x has a batch axis or none; caches are [blocks, block, 1,
size] and changed in place. `weight_uq_qr` may be int8, or x and all weights but `weight_uk`. Quantised caches and
the chip's private formats are not emulated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu.norms import npu_rms_norm
from airgraph.compat.torch_npu.quantisation import npu_dynamic_quant, products
from airgraph.compat.torch_npu.references import FLOATS, FUNCTIONS, need, need_types, not_emulated, reference
from airgraph.compat.torch_npu.rotary import pairs_apart, rotated

_WEIGHTS = (
    "Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, Tensor weight_dkv_kr, "
    "Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos"
)
_SCALES = (
    "Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None, "
    "Tensor? dequant_scale_w_dkv_kr=None, Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, "
    "Tensor? smooth_scales_cq=None"
)
_EPSILONS = "float rmsnorm_epsilon_cq=1e-05, float rmsnorm_epsilon_ckv=1e-05, str cache_mode='PA_BSND'"
_CACHES = "Tensor(a!) kv_cache, Tensor(b!) kr_cache"
_FIRST = f"{_WEIGHTS}, Tensor cache_index, {_CACHES}, *, {_SCALES}, {_EPSILONS}"
_THIRD = (
    f"{_WEIGHTS}, {_CACHES}, *, Tensor? cache_index=None, {_SCALES}, Tensor? actual_seq_len=None, "
    f"Tensor? k_nope_clip_alpha=None, {_EPSILONS}, bool query_norm_flag=False, int weight_quant_mode=0, "
    "int kv_cache_quant_mode=0, int query_quant_mode=0, int ckvkr_repo_mode=0, int quant_scale_repo_mode=0, "
    "int tile_size=128, float qc_qr_scale=1.0, float kc_scale=1.0"
)


@reference(
    f"npu_mla_prolog_v3({_THIRD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    ge=f"MlaPrologV3 {' '.join(w for w in _WEIGHTS.replace(',', '').split() if w != 'Tensor')} kv_cache kr_cache "
    "-> query query_rope dequant_scale_q_nope query_norm dequant_scale_q_norm kv_cache kr_cache",
)
def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor | None = None,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    actual_seq_len: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    **modes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    op = "npu_mla_prolog"
    not_emulated(op, quant_scale_ckv=quant_scale_ckv, quant_scale_ckr=quant_scale_ckr, actual_seq_len=actual_seq_len)
    not_emulated(op, k_nope_clip_alpha=k_nope_clip_alpha)
    for name in ("kv_cache_quant_mode", "query_quant_mode", "ckvkr_repo_mode", "quant_scale_repo_mode"):
        need(not modes.get(name), op, f"{name} {modes.get(name)} is not emulated, only 0")
    check(op, weight_uk, kv_cache, kr_cache, cache_index, cache_mode)
    need(not query_norm_flag or qc_qr_scale == 1.0, op, "query_norm_flag with a qc_qr_scale is not emulated")
    kind, (heads, nope, _) = rmsnorm_gamma_cq.dtype, weight_uk.shape
    x, lead = token_x.flatten(0, -2), token_x.shape[:-1]
    sin, cos = (t.flatten(0, -2).float() for t in (rope_sin, rope_cos))
    down = by_weight(op, x, dequant_scale_x, weight_dq, dequant_scale_w_dq).to(kind)
    normed = npu_rms_norm(down, rmsnorm_gamma_cq, rmsnorm_epsilon_cq)[0]
    wide, scale = normed.float() * qc_qr_scale, None
    if weight_uq_qr.dtype == torch.int8:
        smooth = None if smooth_scales_cq is None else smooth_scales_cq.flatten()
        wide, scale = npu_dynamic_quant(wide, smooth_scales=smooth)
    up = by_weight(op, wide, scale, weight_uq_qr, dequant_scale_w_uq_qr).unflatten(-1, (heads, -1))
    query = torch.einsum("tnd,ndc->tnc", up[..., :nope], weight_uk.float())
    query_rope = rope(up[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1))
    both = by_weight(op, x, dequant_scale_x, weight_dkv_kr, dequant_scale_w_dkv_kr).to(kind)
    latent, key_rope = both.split([rmsnorm_gamma_ckv.shape[0], cos.shape[-1]], -1)
    latent = npu_rms_norm(latent, rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)[0].float() * kc_scale
    assert cache_index is not None
    write(kv_cache, latent, cache_index)
    write(kr_cache, rope(key_rope.float(), cos, sin), cache_index)
    none, empty = x.new_zeros(1, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    norm = normed.unflatten(0, lead) if query_norm_flag else x.new_empty(0, dtype=kind)
    return query.unflatten(0, lead).to(kind), query_rope.unflatten(0, lead).to(kind), none, norm, empty


_NAMES = (*(w for w in _WEIGHTS.replace(",", "").split() if w != "Tensor"), "cache_index", "kv_cache", "kr_cache")
_LINE = f"{' '.join(_NAMES)} -> query query_rope"


@reference(
    f"npu_mla_prolog_v2({_FIRST}) -> (Tensor, Tensor, Tensor(a!), Tensor(b!), Tensor)",
    ge=f"MlaPrologV2 {_LINE} dequant_scale_q_nope kv_cache kr_cache",
)
def npu_mla_prolog_v2(*args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = {**dict(zip(_NAMES, args)), **named}
    query, query_rope, scale, _, _ = FUNCTIONS["npu_mla_prolog_v3"](**given)
    return query, query_rope, given["kv_cache"], given["kr_cache"], scale


@reference(
    f"npu_mla_prolog({_FIRST}) -> (Tensor, Tensor, Tensor(a!), Tensor(b!))", ge=f"MlaProlog {_LINE} kv_cache kr_cache"
)
def npu_mla_prolog(*args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, ...] = FUNCTIONS["npu_mla_prolog_v2"](*args, **named)
    return found[0], found[1], found[2], found[3]


def by_weight(op: str, x: Tensor, scale_x: Tensor | None, weight: Tensor, scale_w: Tensor | None) -> Tensor:
    """x · weight in float32, of numbers in int8 by their scales."""
    if weight.dtype != torch.int8:
        need(x.dtype != torch.int8, op, "token_x is torch.int8, and a weight is not")
        return x.float() @ weight.float()
    need(x.dtype == torch.int8 and scale_x is not None, op, "a weight in int8 needs token_x in int8 and its scale")
    need(scale_w is not None, op, "a weight in int8 needs its dequant_scale")
    assert scale_x is not None and scale_w is not None
    return products(x, weight).float() * scale_x.reshape(-1, 1).float() * scale_w.reshape(1, -1).float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = pairs_apart(x)
    return x * cos + rotated(x) * sin


def write(cache: Tensor, rows: Tensor, index: Tensor) -> None:
    """rows [tokens, size] into [blocks, block, 1, size]."""
    block, place = cache.shape[1], index.flatten()
    cache[place.div(block, rounding_mode="floor"), place % block, 0] = rows.to(cache.dtype)


def check(op: str, weight_uk: Tensor, kv_cache: Tensor, kr_cache: Tensor, index: Tensor | None, mode: str) -> None:
    need(mode == "PA_BSND", op, f"cache_mode {mode!r} is not emulated, only 'PA_BSND'")
    need(index is not None, op, "cache_index has to be given")
    need_types(op, (torch.int64,), cache_index=index)
    need_types(op, FLOATS, weight_uk=weight_uk, kv_cache=kv_cache, kr_cache=kr_cache)
    for name, cache in (("kv_cache", kv_cache), ("kr_cache", kr_cache)):
        need(
            cache.dim() == 4 and cache.shape[2] == 1,
            op,
            f"{name} {list(cache.shape)} has to be [blocks, block, 1, size]",
        )
