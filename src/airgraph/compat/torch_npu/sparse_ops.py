"""Attention over chosen keys, and rules that take the place of attention.

    chosen, _ = torch_npu.npu_lightning_indexer(q, k, w, sparse_count=2048)     the keys with the largest Σ w · relu(q · k)
    out, _, _ = torch_npu.npu_sparse_flash_attention(q, k, v, chosen, 0.1, query_rope=a, key_rope=b)
    out, state = torch_npu.npu_chunk_gated_delta_rule(q, k, v, beta=b, initial_state=s, actual_seq_lengths=n, g=g)

Queries are [batch, length, heads, size] ("BSND"), or tokens of all sequences one after another ("TND", with lengths that
say where each ends); keys too, or in blocks of a cache ("PA_BSND", with a block table). Sparse mode 3: a query sees no key
behind it, the last query standing at the last key. Places without a key are -1, and come last.

    y = torch_npu.npu_masked_causal_conv1d(x, weight, mask=m)

x [length, batch, size], weight [width, size]: each channel by itself, with zeros before the first token; the mask [batch,
length] is True where a result counts, and others are zeros.

Gated delta rule: S = α·S + β·(v - α·S·k)·kᵀ, α = exp(g), and the result is S·q·scale, token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu.caching import without_gaps
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

ALL = 9223372036854775807


class Queries(NamedTuple):
    """Tokens [tokens, heads, size], and for each its sequence, its place there and that sequence's length."""

    tokens: Tensor
    sequence: Tensor
    place: Tensor
    length: Tensor

    @property
    def real(self) -> Tensor:
        return self.place < self.length


def queries(op: str, x: Tensor, layout: str, lengths: Tensor | None) -> Queries:
    need(layout in ("BSND", "TND"), op, f"layout_query is {layout!r}, and has to be 'BSND' or 'TND'")
    if layout == "TND":
        need(lengths is not None, op, "layout 'TND' needs actual_seq_lengths_query")
        assert lengths is not None
        ends = lengths.long()
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(ends, rows, right=True).clamp(max=ends.shape[0] - 1)
        begins = functional.pad(ends, (1, 0))[:-1]
        return Queries(x, sequence, rows - begins[sequence], (ends - begins)[sequence])
    batch, length = x.shape[:2]
    sequence = torch.arange(batch, device=x.device).repeat_interleave(length)
    place = torch.arange(length, device=x.device).repeat(batch)
    each = torch.full((batch,), length, device=x.device) if lengths is None else lengths.long()
    return Queries(x.flatten(0, 1), sequence, place, each[sequence])


def keys(op: str, x: Tensor, layout: str, lengths: Tensor | None, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """[sequences, keys, size] of the one head there is, and how many of them count."""
    need(x.shape[-2] == 1, op, f"keys have {x.shape[-2]} heads, and have to have 1")
    x = x.squeeze(-2)
    if layout == "PA_BSND":
        need(
            table is not None and lengths is not None, op, "layout 'PA_BSND' needs block_table and lengths of the keys"
        )
        assert table is not None and lengths is not None
        return x[table.long().clamp(min=0)].flatten(1, 2), lengths.long()
    if layout == "TND":
        need(lengths is not None, op, "layout 'TND' needs lengths of the keys")
        assert lengths is not None
        begins = functional.pad(lengths.long(), (1, 0))[:-1]
        rows = begins.unsqueeze(1) + torch.arange(x.shape[0], device=x.device)
        return x[rows.clamp(max=x.shape[0] - 1)], lengths.long() - begins
    need(layout == "BSND", op, f"the layout of keys is {layout!r}, and has to be 'BSND', 'TND' or 'PA_BSND'")
    whole = torch.full((x.shape[0],), x.shape[1], device=x.device)
    return x, whole if lengths is None else lengths.long()


def visible(q: Queries, count: Tensor, places: Tensor, mode: int) -> Tensor:
    """Whether a query sees the keys at `places` [tokens or 1, …]."""
    limit = count[q.sequence]
    shape = (-1, *[1] * (places.dim() - 1))
    seen = (places >= 0) & (places < limit.view(shape)) & q.real.view(shape)
    return seen & (places <= (q.place + limit - q.length).view(shape)) if mode == 3 else seen


@reference(
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND', "
    f"int sparse_count=2048, int sparse_mode=3, int pre_tokens={ALL}, int next_tokens={ALL}, bool return_value=False) "
    "-> (Tensor, Tensor)",
    ge="LightningIndexer return_value:return_values -> sparse_indices sparse_values",
)
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = ALL,
    next_tokens: int = ALL,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest come first, -1 behind the last."""
    op = "npu_lightning_indexer"
    need_types(op, FLOATS, query=query, key=key, weights=weights)
    check(op, sparse_mode, pre_tokens, next_tokens)
    q = queries(op, query, layout_query, actual_seq_lengths_query)
    k, count = keys(op, key, layout_key, actual_seq_lengths_key, block_table)
    scores = torch.einsum("tnd,tsd->tns", q.tokens.float(), k.float()[q.sequence]).relu()
    best, chosen = largest(scores * weights.float().reshape(*scores.shape[:2], 1), q, count, sparse_count, sparse_mode)
    values = best.to(query.dtype).unsqueeze(1) if return_value else best.new_empty(0, dtype=query.dtype)
    if layout_query == "BSND":
        chosen = chosen.unflatten(0, query.shape[:2])
        values = values.unflatten(0, query.shape[:2]) if return_value else values
    return chosen, values


def largest(scores: Tensor, q: Queries, count: Tensor, wanted: int, mode: int) -> tuple[Tensor, Tensor]:
    """Of the sums over heads of scores [tokens, heads, keys], the largest and where they are; -1 behind the last."""
    keys_there = scores.shape[-1]
    summed = functional.pad(scores.sum(1), (0, max(wanted - keys_there, 0)))
    places = torch.arange(summed.shape[1], device=scores.device).unsqueeze(0)
    seen = visible(q, count, places, mode) & (places < keys_there)
    best, chosen = summed.masked_fill(~seen, float("-inf")).topk(wanted, -1)
    return best, chosen.masked_fill(best == float("-inf"), -1).int().unsqueeze(1)


@reference(
    "npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    "Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND', "
    f"int sparse_count=2048, int sparse_mode=3, int pre_tokens={ALL}, int next_tokens={ALL}, int? query_dtype=None, "
    "int? key_dtype=None) -> Tensor",
    ge="QuantLightningIndexer -> sparse_indices",
)
def npu_quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = ALL,
    next_tokens: int = ALL,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
) -> Tensor:
    """`npu_lightning_indexer` of int8 or eight-bit floats, with a scale for each head of a query and for each key."""
    op = "npu_quant_lightning_indexer"
    need_types(op, (torch.int8, torch.float8_e4m3fn), query=query, key=key)
    check(op, sparse_mode, pre_tokens, next_tokens)
    need(query_quant_mode == key_quant_mode == 0, op, "the quant modes have to be 0")
    q = queries(op, query, layout_query, actual_seq_lengths_query)
    k, count = keys(op, key, layout_key, actual_seq_lengths_key, block_table)
    of_keys, _ = keys(op, key_dequant_scale.unsqueeze(-1), layout_key, actual_seq_lengths_key, block_table)
    scores = torch.einsum("tnd,tsd->tns", q.tokens.float(), k.float()[q.sequence])
    shape = (*scores.shape[:2], 1)
    scores = (scores * query_dequant_scale.float().reshape(shape) * of_keys.float()[q.sequence].mT).relu()
    _, chosen = largest(scores * weights.float().reshape(shape), q, count, sparse_count, sparse_mode)
    return chosen.unflatten(0, query.shape[:2]) if layout_query == "BSND" else chosen


@reference(
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, "
    "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
    f"str layout_kv='BSND', int sparse_mode=3, int pre_tokens={ALL}, int next_tokens={ALL}, int attention_mode=0, "
    "bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)",
    ge="SparseFlashAttention -> attention_out softmax_max softmax_sum",
)
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL,
    next_tokens: int = ALL,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q·kᵀ·scale)·v over the keys that `sparse_indices` names, `sparse_block_size` at a time."""
    op = "npu_sparse_flash_attention"
    need_types(op, FLOATS, query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    check(op, sparse_mode, pre_tokens, next_tokens)
    need(not return_softmax_lse, op, "return_softmax_lse is not emulated")
    need((query_rope is None) == (key_rope is None), op, "query_rope and key_rope go together")
    q = queries(op, query, layout_query, actual_seq_lengths_query)
    k, count = keys(op, key, layout_kv, actual_seq_lengths_kv, block_table)
    v, _ = keys(op, value, layout_kv, actual_seq_lengths_kv, block_table)
    asked = q.tokens.float()
    if query_rope is not None and key_rope is not None:
        asked = torch.cat([asked, queries(op, query_rope, layout_query, actual_seq_lengths_query).tokens.float()], -1)
        k = torch.cat([k, keys(op, key_rope, layout_kv, actual_seq_lengths_kv, block_table)[0]], -1)
    places = chosen_places(sparse_indices, sparse_block_size, asked.shape[0])
    out = attended(asked * scale_value, k, v, q, visible(q, count, places, sparse_mode), places).to(query.dtype)
    none = out.new_empty(0, dtype=torch.float32)
    return out.unflatten(0, query.shape[:2]) if layout_query == "BSND" else out, none, none.clone()


def chosen_places(indices: Tensor, block: int, tokens: int) -> Tensor:
    """The keys [tokens, keys] that blocks of them are, -1 where there is none."""
    blocks = indices.reshape(tokens, -1).long()
    first = torch.where(blocks < 0, -1, blocks * block).unsqueeze(-1)
    return torch.where(first < 0, -1, first + torch.arange(block, device=blocks.device)).flatten(1)


def attended(asked: Tensor, k: Tensor, v: Tensor, q: Queries, seen: Tensor, places: Tensor) -> Tensor:
    """softmax(q·kᵀ)·v over the keys at `places` that are seen."""
    rows, at = q.sequence.unsqueeze(1), places.clamp(0, k.shape[1] - 1)
    scores = torch.einsum("tnd,tsd->tns", asked, k.float()[rows, at])
    shares = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("tns,tsd->tnd", shares, v.float()[rows, at])


@reference(
    "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
    "float scale_value, int key_quant_mode, int value_quant_mode, *, Tensor? key_dequant_scale=None, "
    "Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', "
    f"int sparse_mode=3, int pre_tokens={ALL}, int next_tokens={ALL}, int attention_mode=0, "
    "int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, int? key_dtype=None, int? value_dtype=None) "
    "-> Tensor",
    ge="KvQuantSparseFlashAttention -> attention_out",
)
def npu_kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL,
    next_tokens: int = ALL,
    attention_mode: int = 0,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
) -> Tensor:
    """Attention over chosen keys of MLA, whose bytes are: the key and value in eight bits, the rotated part in the type
    of the query, and a scale in float32 for each `tile_size`. The result has the size of the value."""
    op = "npu_kv_quant_sparse_flash_attention"
    need_types(op, FLOATS[:2], query=query)
    need_types(op, (torch.int8, torch.float8_e4m3fn), key=key, value=value)
    check(op, sparse_mode, pre_tokens, next_tokens)
    not_emulated(op, key_dequant_scale=key_dequant_scale, value_dequant_scale=value_dequant_scale)
    need(key_quant_mode == value_quant_mode == 2, op, "the quant modes have to be 2")
    need(attention_mode == 2 and quant_scale_repo_mode == 1, op, "attention_mode has to be 2, and the repo mode 1")
    q = queries(op, query, layout_query, actual_seq_lengths_query)
    stored, count = keys(op, key, layout_kv, actual_seq_lengths_kv, block_table)
    size, rope = value.shape[-1], 2 * rope_head_dim
    parts = (stored[..., :size], stored[..., size : size + rope], stored[..., size + rope :])
    scale = parts[2].contiguous().view(torch.float32).repeat_interleave(tile_size, -1)[..., :size]
    v = parts[0].float() * scale
    k = torch.cat([v, parts[1].contiguous().view(query.dtype).float()], -1)
    places = chosen_places(sparse_indices, sparse_block_size, q.tokens.shape[0])
    seen = visible(q, count, places, sparse_mode)
    out = attended(q.tokens.float() * scale_value, k, v, q, seen, places).to(query.dtype)
    return out.unflatten(0, query.shape[:2]) if layout_query == "BSND" else out


def check(op: str, mode: int, before: int, after: int) -> None:
    need(mode in (0, 3), op, f"sparse_mode is {mode}, and has to be 0 or 3")
    need(before == after == ALL, op, "pre_tokens and next_tokens are not emulated")


# The gated delta rule.


@reference(
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
    "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    ge="RecurrentGatedDeltaRule query key value beta state actual_seq_lengths ssm_state_indices g gk num_accepted_tokens "
    "-> out state",
)
def npu_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """The state after token i goes to `state[ssm_state_indices[i]]`; a sequence begins with that of its last accepted
    token, which is its first where `num_accepted_tokens` is not given."""
    op = "npu_recurrent_gated_delta_rule"
    need(beta is not None, op, "beta has to be given")
    need(
        actual_seq_lengths is not None and ssm_state_indices is not None, op, "lengths and ssm_state_indices are needed"
    )
    assert beta is not None and actual_seq_lengths is not None and ssm_state_indices is not None
    sequence, first, begins = sequences(query.shape[0], actual_seq_lengths)
    accepted = torch.ones_like(begins) if num_accepted_tokens is None else num_accepted_tokens.long()
    slots = ssm_state_indices.long()
    start = state.float()[slots[begins + accepted - 1]]
    out = torch.zeros(value.shape, device=value.device)
    carried = start[:1]
    for t in range(query.shape[0]):
        carried = torch.where(first[t], start[sequence[t : t + 1]], carried)
        carried, out[t] = delta_step(carried, t, query, key, value, beta, g, gk, scale)
        state.index_copy_(0, slots[t : t + 1], carried.to(state.dtype))
    return out.to(value.dtype)


@reference(
    "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None, Tensor? initial_state=None, "
    "Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None) -> (Tensor, Tensor)",
    ge="ChunkGatedDeltaRule query key value beta initial_state actual_seq_lengths g scale:scale_value -> out final_state",
)
def npu_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    op = "npu_chunk_gated_delta_rule"
    need(beta is not None, op, "beta has to be given")
    need(initial_state is not None and actual_seq_lengths is not None, op, "initial_state and lengths have to be given")
    assert beta is not None and initial_state is not None and actual_seq_lengths is not None
    sequence, _, _ = sequences(query.shape[0], actual_seq_lengths)
    states = initial_state.float().clone()
    out = torch.zeros(value.shape, device=value.device)
    for t in range(query.shape[0]):
        at = sequence[t : t + 1]
        carried, out[t] = delta_step(states[at], t, query, key, value, beta, g, None, scale)
        states.index_copy_(0, at, carried)
    return out.to(value.dtype), states.to(initial_state.dtype)


def sequences(tokens: int, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of each token, whether it is the first there, and where each begins."""
    ends = lengths.long().cumsum(0)
    begins = ends - lengths.long()
    rows = torch.arange(tokens, device=lengths.device)
    sequence = torch.searchsorted(ends, rows, right=True).clamp(max=ends.shape[0] - 1)
    return sequence, rows == begins[sequence], begins


def delta_step(
    state: Tensor,
    t: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """state [1, heads, values, keys]; heads of queries and keys serve several of values."""
    share = value.shape[1] // key.shape[1]
    q, k = (x[t].float().repeat_interleave(share, 0) for x in (query, key))
    if g is not None:
        state = state * torch.exp(g[t].float())[:, None, None]
    if gk is not None:
        state = state * torch.exp(gk[t].float())[:, None, :]
    missing = (value[t].float() - torch.einsum("bhvk,hk->bhv", state, k)) * beta[t].float()[:, None]
    state = state + missing.unsqueeze(-1) * k.unsqueeze(1)
    return state, torch.einsum("bhvk,hk->bhv", state, q)[0] * (1.0 if scale is None else scale)


@reference(
    "npu_masked_causal_conv1d(Tensor input, Tensor weight, *, Tensor? mask=None) -> Tensor",
    ge="MaskedCausalConv1d input:x",
)
def npu_masked_causal_conv1d(x: Tensor, weight: Tensor, *, mask: Tensor | None = None) -> Tensor:
    op = "npu_masked_causal_conv1d"
    need_types(op, FLOATS, input=x, weight=weight)
    need_types(op, (torch.bool,), mask=mask)
    need(x.dim() == 3 and weight.dim() == 2, op, "input has to have three axes, and weight two")
    before = weight.shape[0] - 1
    padded = functional.pad(x.float(), (0, 0, 0, 0, before, 0))
    parts = [padded[i : i + x.shape[0]] * weight[i].float() for i in range(weight.shape[0])]
    y = torch.stack(parts).sum(0)
    return (y if mask is None else y.masked_fill(~mask.t().unsqueeze(-1), 0.0)).to(x.dtype)


# Causal convolutions with a state.

_CONV = (
    "*, Tensor? query_start_loc=None, Tensor? cache_indices=None, Tensor? initial_state_mode=None, Tensor? bias=None, "
    "Tensor? num_accepted_tokens=None, str? {activation}='None', int? pad_slot_id=-1, int? run_mode=0, "
    "int? residual_connection=0"
)
_NAMED = "@None=0,silu=1,swish=2"


@reference(
    "npu_fused_causal_conv1d(Tensor x, Tensor weight, Tensor(a!) conv_states, "
    + _CONV.format(activation="activation_mode")
    + ") -> Tensor",
    ge=f"FusedCausalConv1d activation_mode{_NAMED} -> y conv_states",
)
def npu_fused_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    initial_state_mode: Tensor | None = None,
    bias: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    activation_mode: str | None = "None",
    pad_slot_id: int | None = -1,
    run_mode: int | None = 0,
    residual_connection: int | None = 0,
) -> Tensor:
    """Each channel by itself, behind the last tokens of its sequence, which `conv_states` keeps: those of this call take
    their place. x [tokens, size] with the beginnings of sequences, or [batch, length, size]; weight [width, size]. A
    sequence without a slot gives zeros."""
    op = "npu_fused_causal_conv1d"
    need_types(op, FLOATS[:2], x=x, weight=weight, conv_states=conv_states)
    not_emulated(op, num_accepted_tokens=num_accepted_tokens)
    need(activation_mode in (None, "None", "silu", "swish"), op, f"activation {activation_mode!r} is none of the op's")
    before = weight.shape[0] - 1
    need(
        conv_states.shape[1] == before,
        op,
        f"states of {conv_states.shape[1]} tokens are not emulated, only of {before}",
    )
    tokens = x if x.dim() == 2 else x.flatten(0, 1)
    if x.dim() == 3:
        starts = torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
    else:
        need(query_start_loc is not None, op, "x with two axes needs query_start_loc")
        assert query_start_loc is not None
        starts = query_start_loc.long()
    lengths = starts.diff()
    sequence, _, begins = sequences(tokens.shape[0], lengths)
    slots = torch.arange(lengths.shape[0], device=x.device) if cache_indices is None else cache_indices.long()
    skipped = slots == (-1 if pad_slot_id is None else pad_slot_id)
    history = conv_states.float()[slots.masked_fill(skipped, 0)]
    if initial_state_mode is not None and not run_mode:
        history = history * (initial_state_mode != 0).view(-1, 1, 1)
    wide = tokens.float()

    def at(who: Tensor, place: Tensor) -> Tensor:
        """What stands at a place of a sequence; before its beginning, what came before."""
        row = (begins[who] + place).clamp(0, tokens.shape[0] - 1)
        old = history[who, (place + before).clamp(0, before - 1)]
        return torch.where((place >= 0).unsqueeze(-1), wide[row], old)

    place = torch.arange(tokens.shape[0], device=x.device) - begins[sequence]
    y = torch.stack([at(sequence, place - before + i) * weight[i].float() for i in range(before + 1)]).sum(0)
    y = y if bias is None else y + bias.float()
    y = y if activation_mode in (None, "None") else functional.silu(y)
    y = y + wide if residual_connection else y
    y = y.masked_fill(skipped[sequence].unsqueeze(-1), 0.0).to(x.dtype)
    who = torch.arange(lengths.shape[0], device=x.device)
    new = torch.stack([at(who, lengths - before + i) for i in range(before)], 1).to(conv_states.dtype)
    where, rows = without_gaps(slots.masked_fill(skipped, -1), new, lambda index: conv_states[index])
    conv_states.index_copy_(0, where, rows)
    return y.view(x.shape)


@reference(
    "npu_fused_causal_conv1d_v2(Tensor(a!) x, Tensor weight, Tensor(b!) conv_states, "
    + _CONV.format(activation="activation")
    + ", int? max_query_len=-1, Tensor? num_computed_tokens=None, Tensor? block_idx_first_scheduled_token=None, "
    "Tensor? block_idx_last_scheduled_token=None, Tensor? initial_state_idx=None, int? block_size=128, "
    "str? conv_mode='default') -> ()",
    ge=f"InplaceFusedCausalConv1d activation:activation_mode{_NAMED} conv_mode@default=0,pangu=1 -> x conv_states",
)
def npu_fused_causal_conv1d_v2(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    *,
    activation: str | None = "None",
    max_query_len: int | None = -1,
    num_computed_tokens: Tensor | None = None,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    block_size: int | None = 128,
    conv_mode: str | None = "default",
    **named: object,
) -> None:
    """The same, written over x."""
    op = "npu_fused_causal_conv1d_v2"
    not_emulated(
        op,
        num_computed_tokens=num_computed_tokens,
        block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
    )
    need(conv_mode in (None, "default"), op, f"conv_mode {conv_mode!r} is not emulated, only 'default'")
    x.copy_(npu_fused_causal_conv1d(x, weight, conv_states, activation_mode=activation, **named))
