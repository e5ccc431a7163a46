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

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from airgraph.compat.torch_npu import attention_scales
from airgraph.compat.torch_npu.attention_scales import FLOAT8, Float8Steps, Int8Steps, Quantised
from airgraph.compat.torch_npu.mx_quantisation import FORMATS, NUMBERS, narrowed
from airgraph.compat.torch_npu.quantisation import rounded
from airgraph.compat.torch_npu.references import FLOATS, FUNCTIONS, element_type, need, need_types, not_emulated
from airgraph.errors import CompatError

OP = "npu_fused_infer_attention_score"

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
FAR = 2147483647
Lengths = Sequence[int] | Tensor


class Places(NamedTuple):
    """Where queries and keys are in their sequences, for [batch, 1, queries, keys] or what broadcasts to that.

    `outside`: queries of no sequence, whose results are zeros. `strange`: keys that a query cannot see whatever the mode,
    those of other sequences and of none.
    """

    row: Tensor
    column: Tensor
    queries: Tensor | int
    keys: Tensor | int
    outside: Tensor | None
    strange: Tensor | None


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


def hidden_keys(
    places: Places, single: bool, mask: Tensor | None, mode: int, tokens: tuple[int, int], prefix: int
) -> tuple[Tensor | None, Tensor | None]:
    """What a query does not see of its own sequence, and the part of the mask that is about a shared prefix."""
    own, of_prefix = None if mask is None else by_head(mask, single), None
    if prefix and mode in (0, 1) and own is not None:
        of_prefix, own = own[..., :prefix], own[..., prefix:]
    by_mode = hidden_places(places, own, mode, tokens)
    if single:  # the chip takes the mask alone, which modes 2 to 4 have no whole one of
        by_mode = own if mode in (0, 1) else None
    return merged(places.strange, by_mode), of_prefix


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


def joint(
    q: Tensor, k: Tensor, prefix: int, mask: Tensor | None, length: Lengths | None, own: Tensor | None
) -> list[Tensor]:
    """What a query does not see of the prefix, which no rule about its own sequence hides, and of its own keys."""
    shape = (q.shape[0], 1, q.shape[2])
    start = torch.zeros(*shape, prefix, dtype=torch.bool, device=q.device)
    if length is not None:
        start = start | (torch.arange(prefix, device=q.device) >= length[0])
    if mask is not None:
        start = start | mask
    rest = torch.zeros(*shape, k.shape[2] - prefix, dtype=torch.bool, device=q.device)
    return [start, rest if own is None else rest | own]


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


# Which keys a query sees.


def batch_places(
    q: Tensor,
    k: Tensor,
    query_lengths: Lengths | None,
    key_lengths: Lengths | None,
    query_padding: Tensor | None,
    key_padding: Tensor | None,
) -> Places:
    """Sequences that begin at the first place of their row, or end where the padding begins."""
    row, queries, outside = sequence_places(q, query_lengths, query_padding)
    column, keys, strange = sequence_places(k, key_lengths, key_padding)
    strange = None if strange is None else strange.transpose(-1, -2)
    return Places(row, column.transpose(-1, -2), queries, keys, outside, strange)


def sequence_places(
    x: Tensor, lengths: Lengths | None, padding: Tensor | None
) -> tuple[Tensor, Tensor | int, Tensor | None]:
    """The place of each token in its sequence, the lengths, and what is of no sequence."""
    place = positions(x, 2)
    if lengths is None:
        return place, x.shape[2], None
    length = per_batch(lengths, x)
    if padding is None:
        return place, length, place >= length
    begin = x.shape[2] - padding.to(x.device, torch.int64).clamp(min=0).reshape(1, 1, 1, 1) - length
    place = place - begin
    return place, length, (place >= length) | (place < 0) | (begin < 0)


def packed_places(
    q: Tensor, k: Tensor, query_lengths: Lengths | None, key_lengths: Lengths | None, in_blocks: bool
) -> Places:
    """Sequences one after another. (The sizes of what is computed do not depend on their lengths, so that these may
    change from one replay to the next.)"""
    if query_lengths is None or key_lengths is None:
        raise CompatError(f"{OP}: layouts TND and NTD need the lengths of queries and keys")
    need(len(query_lengths) == len(key_lengths), OP, "as many lengths of queries as of keys are needed")
    owner, row, sizes = packed(q.shape[2], query_lengths, q.device)
    if in_blocks:
        need(len(key_lengths) == k.shape[0], OP, f"{len(key_lengths)} lengths for {k.shape[0]} rows of block_table")
        key_sizes = as_vector(key_lengths, q.device)
        batch, length = (torch.arange(k.shape[axis], device=q.device) for axis in (0, 2))
        column = length.expand(k.shape[0], -1).flatten()
        key_owner = batch.unsqueeze(1).expand(-1, k.shape[2]).flatten()
        unused = column >= key_sizes[key_owner]
    else:
        key_owner, column, key_sizes = packed(k.shape[2], key_lengths, q.device)
        unused = key_owner == len(key_lengths)
    own = owner.clamp(max=len(query_lengths) - 1)
    strange = (owner.unsqueeze(1) != key_owner) | unused
    outside = owner == len(query_lengths)
    as_rows = [x.view(1, 1, -1, 1) for x in (row, sizes[own], key_sizes[own], outside)]
    return Places(as_rows[0], column.view(1, 1, 1, -1), as_rows[1], as_rows[2], as_rows[3], strange[None, None])


def packed(count: int, ends: Lengths, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each token the number of its sequence and its place in it; the lengths of the sequences."""
    bounds = torch.nn.functional.pad(as_vector(ends, device), (1, 0))
    token = torch.arange(count, device=device)
    owner = (token.unsqueeze(1) >= bounds[1:]).sum(-1)
    return owner, token - bounds[owner], bounds[1:] - bounds[:-1]


def hidden_places(places: Places, mask: Tensor | None, sparse_mode: int, tokens: tuple[int, int]) -> Tensor | None:
    """True where the mode hides a key."""
    row, column, (before, after) = places.row, places.column, tokens
    last = row + (places.keys - places.queries)  # the row, if the last query is at the last key
    match sparse_mode:
        case 0 if mask is not None and min(tokens) < FAR:
            return mask | (column > row + after) | (column < row - before)
        case 0 | 1:
            return mask
        case 2:
            return column > row
        case 3:
            return column > last
    return (column > last + after) | (column < last - before)


def by_head(mask: Tensor, single: bool) -> Tensor:
    """A mask as [batch, heads, queries, keys] or what broadcasts to that; of a single query it may be [batch, keys]."""
    if mask.dim() == 4:
        return mask.bool()
    return mask.bool().reshape(-1, 1, *([1] if single else mask.shape[-2:-1]), mask.shape[-1])


def merged(*parts: Tensor | None) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return functools.reduce(torch.logical_or, found) if found else None


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


def positions(x: Tensor, axis: int) -> Tensor:
    """0, 1, … along an axis, as [1, 1, length, 1]."""
    return torch.arange(x.shape[axis], device=x.device).view(1, 1, -1, 1)


def per_batch(lengths: Lengths, q: Tensor) -> Tensor:
    """A length for each sequence, as [batch, 1, 1, 1]; one for all may be given. (`torchair.ops` has them as tensors.)"""
    if len(lengths) not in (1, q.shape[0]):
        raise RuntimeError(f"{len(lengths)} sequence lengths for a batch of {q.shape[0]}")
    if isinstance(lengths, Tensor):
        return lengths.to(q.device, torch.int64).reshape(-1, 1, 1, 1)
    given = [*lengths] * (q.shape[0] if len(lengths) == 1 else 1)
    return as_vector(given, q.device).view(-1, 1, 1, 1)


def as_vector(numbers: Lengths, device: torch.device) -> Tensor:
    """Numbers of the host travel with the call; a tensor made of all of them would be copied."""
    if isinstance(numbers, Tensor):
        return numbers.to(device, torch.int64)
    return torch.cat([torch.full((1,), n, device=device) for n in numbers])


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
