"""`npu_fused_infer_attention_score` and its second version: attention whose lengths are numbers of the host.

    out, lse = torch_npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=8, input_layout="BNSD", scale=0.125, actual_seq_lengths_kv=[17, 5])

softmax(q·kᵀ·scale)·v for each head, computed in float32: keys past a sequence's length take no part, queries past
theirs give zeros. The lengths change from token to token in decoding, which makes this the op that replay-time updates
are for. What there is: layouts BSH, BSND and BNSD, grouped heads, a mask (True hides), sparse modes 0, 2 and 3, the
logarithm of the sums; `query_rope` and `key_rope`, a part of each head that takes part in the scores alone; keys and
values that all sequences begin with (`key_shared_prefix`). Quantised arguments are in the schema and refused.

Keys and values may lie in blocks of a cache, [blocks, block_size, heads · size] or [blocks, heads, block_size, size]:
`block_table` [batch, …] has the numbers of a sequence's blocks, and the lengths say how far they are filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated

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
# Arguments of the second version that are the first's.
_SAME = ("pre_tokens", "next_tokens", "input_layout", "sparse_mode", "inner_precise", "block_table", "block_size")
_OUT = ", Tensor? workspace=None, Tensor(a!)[] out) -> ()"
_LAYOUTS = ("BSH", "BSND", "BNSD")
Lengths = Sequence[int] | Tensor


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
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
    block_table: Tensor | None = None,
    block_size: int = 0,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    not_emulated(OP, pse_shift=pse_shift, **others)
    check_prefix(key_shared_prefix, value_shared_prefix, block_table, query_rope, atten_mask, actual_shared_prefix_len)
    check(query, key, value, query_rope, key_rope, input_layout, sparse_mode)
    if block_table is not None:
        check_blocks(OP, key, block_table, block_size, actual_seq_lengths_kv is not None, "actual_seq_lengths_kv")
        key_heads = num_key_value_heads or num_heads
        key, value = (one_piece(cache, block_table, key_heads, input_layout) for cache in (key, value))
        key_rope = None if key_rope is None else one_piece(key_rope, block_table, key_heads, input_layout)
    band = sparse_mode == 0 and atten_mask is not None and min(pre_tokens, next_tokens) < max(atten_mask.shape[-2:])
    need(not band, OP, "pre_tokens and next_tokens are not emulated", hint="put the band into atten_mask")
    q, k, v = (split(t, input_layout, n) for t, n in zip((query, key, value), heads(num_heads, num_key_value_heads)))
    if query_rope is not None and key_rope is not None:
        q = torch.cat([q, split(query_rope, input_layout, num_heads)], -1)
        k = torch.cat([k, split(key_rope, input_layout, num_key_value_heads or num_heads)], -1)
    prefix = 0 if key_shared_prefix is None else key_shared_prefix.shape[2 if input_layout == "BNSD" else 1]
    mask = atten_mask[..., prefix:] if prefix and sparse_mode == 0 and atten_mask is not None else atten_mask
    hidden = hidden_places(q, k, mask, actual_seq_lengths, actual_seq_lengths_kv, sparse_mode)
    if key_shared_prefix is not None and value_shared_prefix is not None:
        count = num_key_value_heads or num_heads
        k, v = (
            torch.cat([split(start, input_layout, count).expand(t.shape[0], -1, -1, -1), t], 2)
            for start, t in ((key_shared_prefix, k), (value_shared_prefix, v))
        )
        first_mask = atten_mask[..., :prefix] if mask is not atten_mask and atten_mask is not None else None
        hidden = torch.cat(joint(q, k, prefix, first_mask, actual_shared_prefix_len, hidden), -1)
    result, lse = attention(q, k, v, scale, hidden, actual_seq_lengths)
    return joined(result, query, input_layout), lse if softmax_lse_flag else lse.new_zeros(1)


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
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    not_emulated(f"{OP}_v2", **{name: value for name, value in others.items() if name not in _SAME})
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
        **others,
    )


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    layout: str,
    sparse_mode: int,
) -> None:
    need_types(OP, FLOATS, query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    need(query.dtype == key.dtype == value.dtype, OP, "query, key and value have to have one type")
    need((query_rope is None) == (key_rope is None), OP, "query_rope and key_rope go together")
    need(layout in _LAYOUTS, OP, f"input_layout {layout!r} is not emulated, only {', '.join(_LAYOUTS)}")
    need(sparse_mode in (0, 2, 3), OP, f"sparse_mode {sparse_mode} is not emulated, only 0, 2 and 3")


# Keys in blocks.


def check_prefix(
    key: Tensor | None,
    value: Tensor | None,
    block_table: Tensor | None,
    rope: Tensor | None,
    mask: Tensor | None,
    length: Sequence[int] | None,
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
    q: Tensor, k: Tensor, prefix: int, mask: Tensor | None, length: Sequence[int] | None, own: Tensor | None
) -> list[Tensor]:
    """What a query does not see of the prefix, which no rule about its own sequence hides, and of its own keys."""
    shape = (q.shape[0], 1, q.shape[2])
    start = torch.zeros(*shape, prefix, dtype=torch.bool, device=q.device)
    if length is not None:
        start = start | (torch.arange(prefix, device=q.device) >= length[0])
    if mask is not None:
        start = start | (mask.bool() if mask.dim() == 4 else mask.bool().reshape(-1, 1, *mask.shape[-2:]))
    rest = torch.zeros(*shape, k.shape[2] - prefix, dtype=torch.bool, device=q.device)
    return [start, rest if own is None else rest | own]


def check_blocks(op: str, key: Tensor, table: Tensor, size: int, lengths: bool, name: str) -> None:
    need(lengths, op, f"block_table needs {name}: how far its blocks are filled")
    need_types(op, (torch.int32,), block_table=table)
    need(size == key.shape[-2], op, f"block_size is {size}, and a block of key has {key.shape[-2]} tokens")


def one_piece(cache: Tensor, table: Tensor, heads: int, layout: str) -> Tensor:
    """The blocks of each sequence side by side, in the layout of the query. Numbers behind its last block may be
    anything: what they name is behind its length, too."""
    x = cache[table.long().clamp(0, cache.shape[0] - 1)]
    if cache.dim() == 4:  # [batch, blocks, heads, block, size]
        x = x.transpose(1, 2).flatten(2, 3)
    else:  # [batch, blocks, block, heads · size]
        x = x.flatten(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2)
    return x if layout == "BNSD" else x.transpose(1, 2).flatten(2) if layout == "BSH" else x.transpose(1, 2)


# The arithmetic, on [batch, heads, length, size].


def heads(query_heads: int, key_heads: int) -> tuple[int, int, int]:
    return query_heads, key_heads or query_heads, key_heads or query_heads


def split(x: Tensor, layout: str, count: int) -> Tensor:
    if layout == "BSH":
        x = x.unflatten(2, (count, -1))
    return x if layout == "BNSD" else x.transpose(1, 2)


def joined(x: Tensor, query: Tensor, layout: str) -> Tensor:
    x = x.to(query.dtype)
    if layout != "BNSD":
        x = x.transpose(1, 2)
    return x.reshape(query.shape) if layout == "BSH" else x.contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (t.float().unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    result = (scores - lse).exp() @ v
    nothing = lse == -math.inf  # a query that sees no key
    if lengths is not None:
        nothing = nothing | (positions(q, 2) >= per_batch(lengths, q))
    return result.masked_fill(nothing, 0.0), lse


def hidden_places(
    q: Tensor, k: Tensor, mask: Tensor | None, query_lengths: Lengths | None, lengths: Lengths | None, sparse_mode: int
) -> Tensor | None:
    """True where a key takes no part."""
    parts: list[Tensor] = []
    row, column = positions(q, 2), positions(k, 2).transpose(-1, -2)
    if lengths is not None:
        parts.append(column >= per_batch(lengths, q))
    if sparse_mode == 0 and mask is not None:
        parts.append(mask.bool() if mask.dim() == 4 else mask.bool().reshape(-1, 1, *mask.shape[-2:]))
    if sparse_mode == 2:  # causal from the first query on
        parts.append(column > row)
    if sparse_mode == 3:  # causal up to the last query
        last = k.shape[2] if lengths is None else per_batch(lengths, q)
        last_query = q.shape[2] if query_lengths is None else per_batch(query_lengths, q)
        parts.append(column > row + (last - last_query))
    hidden = None
    for part in parts:
        hidden = part if hidden is None else hidden | part
    return hidden


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
    # Numbers of the host: they travel with the call, a tensor of them would be copied.
    return torch.cat([torch.full((1, 1, 1, 1), n, device=q.device) for n in given])


# Registration.


def _define(name: str, arguments: str, compute: Any) -> Any:
    torch.library.define(f"npu::{name}", f"({arguments}) -> (Tensor, Tensor)")
    torch.library.define(f"npu::{name}.out", f"({arguments}{_OUT}")

    def out_version(*args: Any, workspace: Tensor | None = None, out: Sequence[Tensor], **kwargs: Any) -> None:
        for target, value in zip(out, compute(*args, **kwargs)):
            target.copy_(value)

    torch.library.impl(f"npu::{name}", "CompositeExplicitAutograd")(compute)
    torch.library.impl(f"npu::{name}.out", "CompositeExplicitAutograd")(out_version)
    return getattr(torch.ops.npu, name)


npu_fused_infer_attention_score = _define("npu_fused_infer_attention_score", _FIRST, first)
npu_fused_infer_attention_score_v2 = _define("npu_fused_infer_attention_score_v2", _SECOND, second)


def _npu_fused_infer_attention_score_get_max_workspace(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The workspace of the `.out` version, which needs none here."""
    return query.new_empty(0)


_npu_fused_infer_attention_score_v2_get_max_workspace = _npu_fused_infer_attention_score_get_max_workspace
