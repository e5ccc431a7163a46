"""Ops that norm and rotate what attention needs of a token, and write it into caches in place.

    k_cache, ckv_cache, k_rope, c_kv = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, index, k_cache, ckv_cache, cache_mode="PA", is_output_kv=True)

kv [batch, 1, tokens, norm + rope] is cut into what is normed, which goes into `ckv_cache`, and what is rotated, which goes
into `k_cache`; both are changed in place. Pairs to rotate are neighbours in kv and lie half a head apart in the cache.
Cache mode "Norm": caches [batch, 1, length, size], index [batch, tokens] is a place in its batch; "PA" and "PA_BNSD":
caches [blocks, block, 1, size], index [batch · tokens] is a place among all. Caches in the chip's private format and in
int8 are not emulated, and a negative index is a place counted from the end, not one to leave out.

`npu_qkv_rms_norm_rope_cache` has [tokens, heads · size] and caches [blocks, heads · size / 16, block, 16], in which the
numbers of a token lie 16 at a time (32 where they are int8). `npu_rope_quant_kvcache` has heads of queries, keys and values
side by side. In these and in `npu_scatter_pa_kv_cache` a place of -1 is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from airgraph.compat.torch_npu.norms import npu_rms_norm
from airgraph.compat.torch_npu.quantisation import rounded
from airgraph.compat.torch_npu.references import FLOATS, FUNCTIONS, need, need_types, not_emulated, reference
from airgraph.compat.torch_npu.rotary import npu_rotary_mul, pairs_apart, rotated

MODES = ("Norm", "PA", "PA_BNSD")


_KV = (
    "Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor(a!) k_cache, Tensor(b!) ckv_cache, *, "
    "Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, "
    "float epsilon=1e-05, str cache_mode='Norm', bool is_output_kv=False"
)


@reference(
    f"npu_kv_rmsnorm_rope_cache_v2({_KV}) -> (Tensor, Tensor)", ge="KvRmsNormRopeCache -> k_rope c_kv k_cache ckv_cache"
)
def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **scales: object,
) -> tuple[Tensor, Tensor]:
    op = "npu_kv_rmsnorm_rope_cache"
    check(op, kv, gamma, cos, index, k_cache, ckv_cache, cache_mode)
    not_emulated(op, **scales)
    normed, rope = kv.split([gamma.shape[0], cos.shape[-1]], -1)
    normed, _ = npu_rms_norm(normed, gamma, epsilon)
    rope = npu_rotary_mul(pairs_apart(rope), cos, sin)
    write(k_cache, rope, index, cache_mode)
    write(ckv_cache, normed, index, cache_mode)
    return (rope, normed) if is_output_kv else (kv.new_empty(0), kv.new_empty(0))


@reference(
    f"npu_kv_rmsnorm_rope_cache({_KV}) -> (Tensor(a!), Tensor(b!), Tensor, Tensor)",
    ge="KvRmsNormRopeCache -> k_rope c_kv k_cache ckv_cache",
)
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    **named: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    meaning = FUNCTIONS["npu_kv_rmsnorm_rope_cache_v2"]
    rope, normed = meaning(kv, gamma, cos, sin, index, k_cache, ckv_cache, **named)
    return k_cache, ckv_cache, rope, normed


def write(cache: Tensor, rows: Tensor, index: Tensor, mode: str) -> None:
    """rows [batch, 1, tokens, size] into their places."""
    if mode == "Norm":
        batch = torch.arange(cache.shape[0], device=cache.device).unsqueeze(-1)
        cache[:, 0].index_put_((batch, index), rows[:, 0])
    else:
        size = cache.shape[1]
        place = (index.div(size, rounding_mode="floor"), index % size, torch.zeros_like(index))
        cache.index_put_(place, rows.flatten(0, 2))


def check(
    op: str, kv: Tensor, gamma: Tensor, cos: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, mode: str
) -> None:
    need(mode in MODES, op, f"cache_mode {mode!r} is not emulated, only {', '.join(MODES)}")
    need_types(op, FLOATS, kv=kv, gamma=gamma, k_cache=k_cache, ckv_cache=ckv_cache)
    need_types(op, (torch.int64,), index=index)
    need(kv.dim() == 4 and kv.shape[1] == 1, op, f"kv {list(kv.shape)} has to be [batch, 1, tokens, size]")
    need(
        kv.shape[-1] == gamma.shape[0] + cos.shape[-1],
        op,
        f"kv has {kv.shape[-1]} numbers a token, gamma {gamma.shape[0]} and cos {cos.shape[-1]}",
    )
    shape = [kv.shape[0], kv.shape[2]] if mode == "Norm" else [kv.shape[0] * kv.shape[2]]
    need([*index.shape] == shape, op, f"index {list(index.shape)} has to be {shape} in cache mode {mode}")


@reference(
    "npu_qkv_rms_norm_rope_cache(Tensor qkv, Tensor q_gamma, Tensor k_gamma, Tensor cos, Tensor sin, Tensor index, "
    "Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, int[4] qkv_size, int[3] head_nums, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_offset=None, Tensor? v_offset=None, float epsilon=1e-06, "
    "str cache_mode='PA_NZ', bool is_output_qkv=False) -> (Tensor, Tensor, Tensor)",
    ge="QkvRmsNormRopeCache -> q_out_before_quant k_out_before_quant v_out_before_quant q_out k_cache v_cache",
)
def npu_qkv_rms_norm_rope_cache(
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv_size: Sequence[int],
    head_nums: Sequence[int],
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_offset: Tensor | None = None,
    v_offset: Tensor | None = None,
    epsilon: float = 1e-6,
    cache_mode: str = "PA_NZ",
    is_output_qkv: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "npu_qkv_rms_norm_rope_cache"
    need_types(op, FLOATS, qkv=qkv, q_gamma=q_gamma, k_gamma=k_gamma, cos=cos, sin=sin)
    need(cache_mode == "PA_NZ", op, f"cache_mode {cache_mode!r} is not one of the op's, only 'PA_NZ'")
    size = qkv_size[3]
    need(
        qkv.dim() == 2 and qkv.shape[1] == sum(head_nums) * size,
        op,
        f"qkv {list(qkv.shape)} has to have {sum(head_nums)} heads of {size} numbers",
    )
    q, k, v = qkv.view(-1, sum(head_nums), size).split([*head_nums], 1)
    q, k = (
        half_rotated(npu_rms_norm(x, gamma, epsilon)[0], cos.unsqueeze(1), sin.unsqueeze(1))
        for x, gamma in ((q, q_gamma), (k, k_gamma))
    )
    q_out.copy_(q.flatten(1))
    for cache, x, scale, offset in ((k_cache, k, k_scale, k_offset), (v_cache, v, v_scale, v_offset)):
        write_blocks(cache, scaled(op, x, scale, offset, cache).flatten(1), index)
    if is_output_qkv:
        return q.flatten(1), k.flatten(1), v.flatten(1).clone()
    return qkv.new_empty(0), qkv.new_empty(0), qkv.new_empty(0)


def half_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    return (wide * cos.float() + rotated(wide) * sin.float()).to(x.dtype)


def scaled(op: str, x: Tensor, scale: Tensor | None, offset: Tensor | None, cache: Tensor) -> Tensor:
    """As the cache holds it: x / scale + offset where that is int8."""
    need((scale is not None) == (cache.dtype == torch.int8), op, f"a cache of {cache.dtype} does not go with its scale")
    if scale is None:
        return x.to(cache.dtype)
    wide = x.float() / scale.float()
    return rounded(wide if offset is None else wide + offset.float(), torch.int8)


def write_blocks(cache: Tensor, rows: Tensor, index: Tensor) -> None:
    """rows [tokens, size] into [blocks, size / n, block, n]."""
    write_slots(cache.transpose(1, 2), rows.view(rows.shape[0], cache.shape[1], cache.shape[3]), index)


def write_slots(cache: Tensor, rows: Tensor, index: Tensor) -> None:
    """rows [tokens, …] into [blocks, block, …]."""
    block = cache.shape[1]
    at, rows = without_gaps(index, rows, lambda place: cache[place // block, place % block])
    cache[at // block, at % block] = rows


def without_gaps(index: Tensor, rows: Tensor, held: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Places that are negative are those of the first token that has one, with its row: written twice, the same.
    Where no token has a place, what the first place holds stays."""
    valid = index >= 0
    first = valid.to(torch.int32).argmax(0, keepdim=True)
    place = index[first].clamp(min=0)
    shape = (-1, *[1] * (rows.dim() - 1))
    other = torch.where(valid[first].view(shape), rows[first], held(place).to(rows.dtype))
    return torch.where(valid, index, place), torch.where(valid.view(shape), rows, other)


_ROPE_QUANT = (
    "Tensor x, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, Tensor scale_k, "
    "Tensor scale_v, int[3] size_splits, *, Tensor? offset_k=None, Tensor? offset_v=None, {dequant}int quant_mode=0, "
    "str input_layout='BSND', bool kv_output=False, str cache_mode='contiguous'"
)
_ROPE_QUANT_GE = (
    "DequantRopeQuantKvcache x cos sin k_cache v_cache indices scale_k scale_v offset_k offset_v "
    "{dequant}quant_mode=static|dynamic input_layout:layout -> q k v k_cache v_cache"
)


@reference(
    "npu_dequant_rope_quant_kvcache("
    + _ROPE_QUANT.format(dequant="Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, ")
    + ") -> (Tensor, Tensor, Tensor, Tensor(a!), Tensor(b!))",
    ge=_ROPE_QUANT_GE.format(dequant="weight_scale activation_scale bias "),
)
def npu_dequant_rope_quant_kvcache(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    scale_k: Tensor,
    scale_v: Tensor,
    size_splits: Sequence[int],
    *,
    offset_k: Tensor | None = None,
    offset_v: Tensor | None = None,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_mode: int = 0,
    input_layout: str = "BSND",
    kv_output: bool = False,
    cache_mode: str = "contiguous",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    op = "npu_rope_quant_kvcache"
    need(quant_mode == 0, op, f"quant_mode {quant_mode} is not one of the op's, only 0")
    need(input_layout == "BSND", op, f"input_layout {input_layout!r} is not one of the op's, only 'BSND'")
    need(
        cache_mode in ("contiguous", "page"), op, f"cache_mode is {cache_mode!r}, and has to be 'contiguous' or 'page'"
    )
    need_types(op, (torch.int8,), k_cache=k_cache, v_cache=v_cache)
    if x.dtype == torch.int32:
        x = opened_sums(x, weight_scale, activation_scale, bias).to(cos.dtype)
    size = k_cache.shape[-1]
    q, k, v = (part.unflatten(-1, (-1, size)) for part in x.split([*size_splits], -1))
    cos, sin = (t.reshape(*q.shape[:-2], 1, size) for t in (cos, sin))
    q, k = half_rotated(q, cos, sin), half_rotated(k, cos, sin)
    for cache, rows, scale, offset in ((k_cache, k, scale_k, offset_k), (v_cache, v, scale_v, offset_v)):
        write_heads(cache, scaled(op, rows, scale, offset, cache), indices, cache_mode)
    if not kv_output:
        k, v = x.new_empty(0, dtype=q.dtype), x.new_empty(0, dtype=q.dtype)
    return q, k, v.clone(), k_cache, v_cache


@reference(
    "npu_rope_quant_kvcache("
    + _ROPE_QUANT.format(dequant="")
    + ") -> (Tensor, Tensor, Tensor, Tensor(a!), Tensor(b!))",
    ge=_ROPE_QUANT_GE.format(dequant=""),
)
def npu_rope_quant_kvcache(x: Tensor, *args: object, **named: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_types("npu_rope_quant_kvcache", FLOATS[:2], x=x)
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    found = FUNCTIONS["npu_dequant_rope_quant_kvcache"](x, *args, **named)
    return found


def opened_sums(x: Tensor, weight_scale: Tensor | None, activation_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Sums of products of int8 as the numbers they stand for, in float32."""
    need(weight_scale is not None, "dequantisation", "x in int32 needs weight_scale")
    assert weight_scale is not None
    if bias is not None and bias.dtype == torch.int32:
        x, bias = x + bias, None
    y = x.float() * weight_scale.float()
    if activation_scale is not None:
        y = y * activation_scale.float().reshape(*x.shape[:-1], 1)
    return y if bias is None else y + bias.float()


def write_heads(cache: Tensor, rows: Tensor, indices: Tensor, mode: str) -> None:
    """rows [batch, tokens, heads, size] or [batch, heads, size]; "contiguous": token t of batch i goes to indices[i] + t
    of its own part of the cache, "page": to a place counted through all blocks."""
    indices = indices.long()
    if mode == "page":
        block = cache.shape[1]
        rows = rows.flatten(0, -3)
        cache.index_put_((indices.div(block, rounding_mode="floor"), indices % block), rows)
        return
    rows = rows if rows.dim() == 4 else rows.unsqueeze(1)
    batch = torch.arange(rows.shape[0], device=cache.device).unsqueeze(1)
    place = indices.unsqueeze(1) + torch.arange(rows.shape[1], device=cache.device)
    cache.index_put_((batch, place), rows)


@reference(
    "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "*, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None) -> ()",
    ge="ScatterPaKvCache key key_cache slot_mapping value value_cache compress_lens compress_seq_offsets seq_lens "
    "-> key_cache value_cache",
)
def npu_scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **compressed: object
) -> None:
    """Caches [blocks, block, heads, size], or [blocks, heads · size / n, block, n] as one told by its shape."""
    op = "npu_scatter_pa_kv_cache"
    not_emulated(op, **compressed)
    need_types(op, (torch.int32, torch.int64), slot_mapping=slot_mapping)
    slots = slot_mapping.long()
    for cache, rows in ((key_cache, key), (value_cache, value)):
        need(cache.dim() == 4, op, f"a cache has {cache.dim()} axes, and has to have 4")
        need(cache.dtype == rows.dtype, op, f"a cache of {cache.dtype} for rows of {rows.dtype}")
        if cache.shape[2:] == rows.shape[1:]:
            write_slots(cache, rows, slots)
        else:
            write_blocks(cache, rows.flatten(1), slots)
