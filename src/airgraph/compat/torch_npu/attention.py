"""`npu_fused_infer_attention_score` and its second version: attention whose lengths are numbers of the host.

    out, lse = torch_npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=8, input_layout="BNSD", scale=0.125, actual_seq_lengths_kv=[17, 5])

softmax(q·kᵀ·scale + pse_shift)·v for each head, computed in float32: keys past a sequence's length take no part, queries
past theirs give zeros. The lengths change from token to token in decoding, which makes this the op that replay-time updates
are for. What there is:

    layouts      BSH, BSND, BNSD; TND and NTD, where sequences lie one after another and lengths are sums of lengths;
                 results in another layout than the query (BNSD_BSND, …)
    sparse modes 0 a mask (True hides) and the band from pre_tokens before to next_tokens after a query; 1 the mask alone;
                 2 causal from the first query on; 3 causal up to the last query; 4 a band up to the last query
    more         grouped heads, the logarithm of the sums, `learnable_sink` (a logit of each head that takes part in the
                 sum alone), sequences at the right end of their rows (`query_padding_size`, `kv_padding_size`: how much
                 follows them), `query_rope` and `key_rope` (a part of each head for the scores alone), keys and values
                 that all sequences begin with (`key_shared_prefix`)

Outside TND a single query takes the mask alone, whatever the mode. Quantised arguments are those of `attention_scales`.

Keys and values may lie in blocks of a cache, [blocks, block_size, heads · size] or [blocks, heads, block_size, size]:
`block_table` [batch, …] has the numbers of a sequence's blocks, and the lengths (of each sequence, in TND too) say how far
they are filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu import attention_scales
from airgraph.compat.torch_npu.attention_places import (
    FAR,
    OP,
    Lengths,
    batch_places,
    hidden_keys,
    joint,
    merged,
    packed_places,
)
from airgraph.compat.torch_npu.attention_scales import FLOAT8, Float8Steps, Int8Steps, Quantised
from airgraph.compat.torch_npu.mx_quantisation import FORMATS, NUMBERS, narrowed
from airgraph.compat.torch_npu.quantisation import rounded
from airgraph.compat.torch_npu.references import FLOATS, FUNCTIONS, element_type, need, need_types, not_emulated

_FIRST = (
    "Tensor query, Tensor key, Tensor value, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, *, int num_heads=1, float scale=1.0, "
    "int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', int num_key_value_heads=0, "
    "int sparse_mode=0, int inner_precise=0, bool softmax_lse_flag=False, Tensor? block_table=None, int block_size=0, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, "
    "Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, "
    "Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? key_rope_antiquant_scale=None, int antiquant_mode=0, "
    "int key_antiquant_mode=0, int value_antiquant_mode=0"
)
_SECOND = (
    "Tensor query, Tensor key, Tensor value, Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, *, "
    "int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, int pre_tokens=2147483647, "
    "int next_tokens=2147483647, str input_layout='BSH', int sparse_mode=0, int inner_precise=0, "
    "bool return_softmax_lse=False, Tensor? block_table=None, int block_size=0, Tensor? dequant_scale_query=None, "
    "Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, "
    "Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, "
    "Tensor? quant_offset_out=None, Tensor? learnable_sink=None, int query_quant_mode=0, int key_quant_mode=0, "
    "int value_quant_mode=0, int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None, "
    "int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, Tensor? quant_scale_p=None, "
    "int? out_dtype=None"
)
_OUT = ", Tensor? workspace=None, Tensor(a!)[] out) -> ()"
PACKED = ("TND", "NTD")  # sequences one after another, without a batch
LAYOUTS = (
    "BSH",
    "BSND",
    "BNSD",
    *PACKED,
    "BSH_BNSD",
    "BSND_BNSD",
    "BNSD_BSND",
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
    "TND_NTD",
    "NTD_TND",
)


def first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Lengths | None = None,
    actual_seq_lengths_kv: Lengths | None = None,
    *,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = FAR,
    next_tokens: int = FAR,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
    block_table: Tensor | None = None,
    block_size: int = 0,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    query_padding_size: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Lengths | None = None,
    learnable_sink: Tensor | None = None,
    out_dtype: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    bits = Quantised(**{name: others.pop(name) for name in Quantised._fields if name in others})
    not_emulated(OP, **others)
    check_prefix(key_shared_prefix, value_shared_prefix, block_table, query_rope, atten_mask, actual_shared_prefix_len)
    need_types(OP, (key.dtype,), key_shared_prefix=key_shared_prefix, value_shared_prefix=value_shared_prefix)
    check(query_rope, key_rope, input_layout, sparse_mode)
    layout, _, result_layout = input_layout.partition("_")
    attention_scales.check(OP, bits, query, key, value, layout in PACKED)
    whole, in_int8, in_float8 = key.dtype in attention_scales.CODES, query.dtype == torch.int8, query.dtype == FLOAT8
    not_emulated(
        f"{OP} with keys in {key.dtype}",
        **({"query_rope": query_rope} if whole else {}),
        **({"key_shared_prefix": key_shared_prefix} if in_int8 or in_float8 else {}),
    )
    check_packed(layout, sparse_mode, atten_mask, query_padding_size, kv_padding_size, pse_shift, key_shared_prefix)
    check_padding(actual_seq_lengths, actual_seq_lengths_kv, query_padding_size, kv_padding_size)
    if block_table is not None:
        check_blocks(OP, key, block_table, block_size, actual_seq_lengths_kv is not None, "actual_seq_lengths_kv")
    read = reader(layout, num_key_value_heads or num_heads, block_table)
    q, k, v = split(query, layout, num_heads), *(read(attention_scales.codes(t)) for t in (key, value))
    starts = [read(attention_scales.codes(t)) for t in (key_shared_prefix, value_shared_prefix) if t is not None]
    if whole and not in_int8:
        k, v, starts = cached_numbers(bits, (k, v), starts, block_table, paged=in_float8 and block_table is not None)
    if in_float8 and bits.dequant_scale_query is not None:
        q = query_numbers(bits, q, layout, num_heads)
    if query_rope is not None and key_rope is not None:
        q, k = torch.cat([q, split(query_rope, layout, num_heads)], -1), torch.cat([k, read(key_rope)], -1)
    if layout in PACKED:
        places = packed_places(q, k, actual_seq_lengths, actual_seq_lengths_kv, block_table is not None)
        k, v = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (k, v))  # all sequences in a row
    else:
        places = batch_places(q, k, actual_seq_lengths, actual_seq_lengths_kv, query_padding_size, kv_padding_size)
    prefix = 0 if key_shared_prefix is None else key_shared_prefix.shape[2 if layout == "BNSD" else 1]
    single = layout not in PACKED and q.shape[2] == 1
    hidden, of_prefix = hidden_keys(places, single, atten_mask, sparse_mode, (pre_tokens, next_tokens), prefix)
    if starts:
        k, v = (torch.cat([start.expand(t.shape[0], -1, -1, -1), t], 2) for start, t in zip(starts, (k, v)))
        hidden = torch.cat(joint(q, k, prefix, of_prefix, actual_shared_prefix_len, hidden), -1)
    result, lse = attention(q, k, v, scale, pse_shift, hidden, places.outside, learnable_sink, bits.steps(query.dtype))
    if bits.quant_scale2 is not None:
        result = attention_scales.to_int8(OP, result, bits.quant_scale2, bits.quant_offset2)
    else:
        result = result.to(result_type(query.dtype, out_dtype))
    out = joined(result, result_layout or layout)
    lse = lse[0].transpose(0, 1) if layout in PACKED else lse
    return out, lse.contiguous() if softmax_lse_flag else lse.new_zeros(1)


def cached_numbers(
    bits: Quantised, cache: tuple[Tensor, Tensor], starts: list[Tensor], block_table: Tensor | None, paged: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Keys, values and their shared prefixes from codes. `paged`: scales by token of a paged cache are paged, too."""
    scales = [how for how in bits.caches() if how is not None]
    if paged:
        scales = [how._replace(mode=5) if how.mode == 3 else how for how in scales]
    starts = attention_scales.dequantised_prefixes(OP, starts, scales)
    k, v = (attention_scales.dequantised(OP, t, how, block_table) for t, how in zip(cache, scales))
    return k, v, starts


def query_numbers(bits: Quantised, q: Tensor, layout: str, heads: int) -> Tensor:
    """Queries from codes of eight bits."""
    numbers, mode = bits.dequant_scale_query, bits.query_quant_mode
    assert numbers is not None
    if mode == 3:  # as the query without its last axis
        numbers = split(numbers.unsqueeze(-1), "BSND" if layout == "BSH" else layout, heads)
    return attention_scales.scaled_query(OP, q, numbers, mode)


def result_type(query: torch.dtype, number: int | None) -> torch.dtype:
    """`out_dtype` is for quantised queries: attention in floating point has results of the query's type."""
    usual = {torch.int8: torch.float16, FLOAT8: torch.bfloat16}.get(query, query)
    if number is None:
        return usual
    known = NUMBERS.get(number)
    need(known is not None, OP, f"out_dtype {number} is none of torch.float16, torch.bfloat16 and torch.float32")
    need(query in (torch.int8, FLOAT8) or known == query, OP, f"out_dtype is {known}, and query {query}")
    assert known is not None
    return known


def reader(layout: str, heads: int, block_table: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Keys, values and what belongs to them, as [batch, heads, length, size]."""
    if block_table is not None:
        return lambda cache: one_piece(cache, block_table, heads)
    return lambda x: split(x, layout, heads)


def second(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_kvlen: Lengths | None = None,
    *,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = FAR,
    next_tokens: int = FAR,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    block_table: Tensor | None = None,
    block_size: int = 0,
    learnable_sink: Tensor | None = None,
    dequant_scale_key: Tensor | None = None,
    dequant_offset_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None,
    dequant_offset_value: Tensor | None = None,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    quant_scale_out: Tensor | None = None,
    quant_offset_out: Tensor | None = None,
    dequant_scale_query: Tensor | None = None,
    query_quant_mode: int = 0,
    quant_scale_p: Tensor | None = None,
    out_dtype: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    tensors = {"query": query, "key": key, "value": value, "query_rope": query_rope, "key_rope": key_rope}
    tensors |= {"dequant_scale_query": dequant_scale_query, "dequant_scale_key": dequant_scale_key}
    tensors |= {"dequant_scale_value": dequant_scale_value}
    check_declared(f"{OP}_v2", tensors, {n: others.pop(n) for n in [*others] if n.endswith("_dtype")})
    element_type(f"{OP}_v2", "out_dtype", out_dtype)
    not_emulated(f"{OP}_v2", **others)
    return first(
        query,
        key,
        value,
        pse_shift,
        atten_mask,
        actual_seq_qlen,
        actual_seq_kvlen,
        num_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        scale=softmax_scale,
        softmax_lse_flag=return_softmax_lse,
        query_rope=query_rope,
        key_rope=key_rope,
        learnable_sink=learnable_sink,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        block_table=block_table,
        block_size=block_size,
        key_antiquant_scale=dequant_scale_key,
        key_antiquant_offset=dequant_offset_key,
        key_antiquant_mode=key_quant_mode,
        value_antiquant_scale=dequant_scale_value,
        value_antiquant_offset=dequant_offset_value,
        value_antiquant_mode=value_quant_mode,
        quant_scale2=quant_scale_out,
        quant_offset2=quant_offset_out,
        dequant_scale_query=dequant_scale_query,
        query_quant_mode=query_quant_mode,
        quant_scale_p=quant_scale_p,
        out_dtype=out_dtype,
    )


def check_declared(op: str, tensors: dict[str, Tensor | None], numbers: dict[str, int | None]) -> None:
    """`query_dtype` and its like say the type of a tensor whose torch type does not: here each tensor has its own."""
    for name, number in numbers.items():
        tensor = tensors.get(name.removesuffix("_dtype"))
        if element_type(op, name, number) is None:
            continue
        need(tensor is not None, op, f"{name} is given, and {name.removesuffix('_dtype')} is not", hint="leave it out")
        assert tensor is not None
        said = {**NUMBERS, **{n: f.dtype for n, f in FORMATS.items()}, 1: torch.int8, 3: torch.int32}.get(number or 0)
        need(said == tensor.dtype, op, f"{name} {number} says {said}, and the tensor is {tensor.dtype}", "leave it out")


def check(query_rope: Tensor | None, key_rope: Tensor | None, layout: str, sparse_mode: int) -> None:
    need_types(OP, FLOATS, query_rope=query_rope, key_rope=key_rope)
    need((query_rope is None) == (key_rope is None), OP, "query_rope and key_rope go together")
    need(layout in LAYOUTS, OP, f"input_layout {layout!r} is not emulated, only {', '.join(LAYOUTS)}")
    need(sparse_mode in range(5), OP, f"sparse_mode {sparse_mode} is not emulated, only 0 to 4")


def check_packed(layout: str, sparse_mode: int, mask: Tensor | None, *others: Tensor | None) -> None:
    if layout not in PACKED:
        return
    names = ("query_padding_size", "kv_padding_size", "pse_shift", "key_shared_prefix")
    not_emulated(f"{OP} with layout {layout}", **dict(zip(names, others)))
    own_mask = sparse_mode in (0, 1) and mask is not None
    need(not own_mask, OP, f"atten_mask with layout {layout} needs sparse_mode 2, 3 or 4")


def check_padding(
    lengths: Lengths | None, key_lengths: Lengths | None, padding: Tensor | None, key_padding: Tensor | None
) -> None:
    need(key_padding is None or key_lengths is not None, OP, "kv_padding_size needs actual_seq_lengths_kv")
    need(padding is None or lengths is not None, OP, "query_padding_size needs actual_seq_lengths")


# Prefixes and blocks.


def check_prefix(
    key: Tensor | None,
    value: Tensor | None,
    block_table: Tensor | None,
    rope: Tensor | None,
    mask: Tensor | None,
    length: Lengths | None,
) -> None:
    """Keys and values that every sequence of the batch begins with, [1, …] as the others are laid out."""
    need((key is None) == (value is None), OP, "key_shared_prefix and value_shared_prefix go together")
    if key is None:
        need(length is None, OP, "actual_shared_prefix_len needs key_shared_prefix")
        return
    need(block_table is None and rope is None, OP, "a shared prefix goes neither with blocks nor with query_rope")
    need(key.shape[0] == 1, OP, f"key_shared_prefix {list(key.shape)} has to have a batch of 1")
    need(length is None or len(length) == 1, OP, "actual_shared_prefix_len has to be one number")
    need(length is None or mask is None, OP, "actual_shared_prefix_len with atten_mask is not emulated")


def check_blocks(op: str, key: Tensor, table: Tensor, size: int, lengths: bool, name: str) -> None:
    need(lengths, op, f"block_table needs {name}: how far its blocks are filled")
    need_types(op, (torch.int32,), block_table=table)
    need(size == key.shape[-2], op, f"block_size is {size}, and a block of key has {key.shape[-2]} tokens")


def one_piece(cache: Tensor, table: Tensor, heads: int) -> Tensor:
    """The blocks of each sequence side by side, as [batch, heads, length, size]. Numbers behind its last block may be
    anything: what they name is behind its length, too."""
    x = cache[table.long().clamp(0, cache.shape[0] - 1)]
    if cache.dim() == 4:  # [batch, blocks, heads, block, size]
        return x.transpose(1, 2).flatten(2, 3)
    return x.flatten(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2)  # of [batch, blocks, block, heads · size]


# Layouts, to and from [batch, heads, length, size].


def split(x: Tensor, layout: str, count: int) -> Tensor:
    match layout:
        case "BSH":
            return x.unflatten(2, (count, -1)).transpose(1, 2)
        case "BSND":
            return x.transpose(1, 2)
        case "TND":
            return x.transpose(0, 1).unsqueeze(0)
        case "NTD":
            return x.unsqueeze(0)
    return x


def joined(x: Tensor, layout: str) -> Tensor:
    match layout:
        case "BSH":
            return x.transpose(1, 2).flatten(2)
        case "BSND":
            x = x.transpose(1, 2)
        case "NBSD":
            x = x.transpose(0, 1)
        case "TND":
            x = x[0].transpose(0, 1)
        case "NTD":
            x = x[0]
    return x.contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    shift: Tensor | None,
    hidden: Tensor | None,
    outside: Tensor | None,
    sink: Tensor | None,
    steps: Int8Steps | Float8Steps | None,
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (t.float().unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * (scale * steps.scores if isinstance(steps, Int8Steps) else scale)
    if shift is not None:
        scores = scores + shift[..., : scores.shape[-2], : scores.shape[-1]].float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    nothing = merged(lse == -math.inf, outside)  # a query that sees no key, or that there is not
    if sink is not None:
        lse = torch.logaddexp(lse, sink.float().view(1, -1, 1, 1))
    assert nothing is not None
    match steps:
        case None:
            result = (scores - lse).exp() @ v
        case Int8Steps():  # in float64 sums of products of whole numbers are exact
            weights = rounded((scores - lse).exp() * steps.weights, torch.int8)
            result = (weights.double() @ v.double()).float() * steps.result
        case Float8Steps():
            top = scores.amax(-1, keepdim=True)
            weights = narrowed((scores - top).exp() * steps.weights, 24).float()  # torch.float8_e4m3fn
            result = weights @ v * ((top - lse).exp() / steps.weights)
    return result.masked_fill(nothing, 0.0), lse


# Registration.


def _define(name: str, arguments: str, compute: Any) -> Any:
    torch.library.define(f"npu::{name}", f"({arguments}) -> (Tensor, Tensor)")
    torch.library.define(f"npu::{name}.out", f"({arguments}{_OUT}")

    def out_version(*args: Any, workspace: Tensor | None = None, out: Sequence[Tensor], **kwargs: Any) -> None:
        for target, value in zip(out, compute(*args, **kwargs)):
            target.copy_(value)

    FUNCTIONS[name] = compute
    torch.library.impl(f"npu::{name}", "CompositeExplicitAutograd")(compute)
    torch.library.impl(f"npu::{name}.out", "CompositeExplicitAutograd")(out_version)
    return getattr(torch.ops.npu, name)


npu_fused_infer_attention_score = _define("npu_fused_infer_attention_score", _FIRST, first)
npu_fused_infer_attention_score_v2 = _define("npu_fused_infer_attention_score_v2", _SECOND, second)


def _npu_fused_infer_attention_score_get_max_workspace(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The workspace of the `.out` version, which needs none here."""
    return query.new_empty(0)


_npu_fused_infer_attention_score_v2_get_max_workspace = _npu_fused_infer_attention_score_get_max_workspace
