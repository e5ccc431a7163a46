"""Attention over a cache in blocks, as serving engines call it: `_npu_paged_attention` and `_npu_reshape_and_cache`.

    torch_npu._npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices)
    torch_npu._npu_paged_attention(query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table,
                                   context_lens, out)

query [tokens, heads, size]: one token of each sequence. Caches [blocks, block, kv heads, size]. Row i of `block_table`
names the blocks of sequence i, of whose places the first `context_lens[i]` count. The result is written to `out`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, reference


@reference(
    "_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, "
    "float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out, Tensor? workspace=None) -> Tensor(a!)",
    opened=True,
)
def _npu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    workspace: Tensor | None = None,
) -> Tensor:
    op = "_npu_paged_attention"
    need_types(op, FLOATS, query=query, key_cache=key_cache, value_cache=value_cache)
    need(num_heads % num_kv_heads == 0, op, f"{num_heads} heads cannot share {num_kv_heads} heads of keys")
    need(
        key_cache.dim() == 4, op, f"key_cache has {key_cache.dim()} axes, and 4 are needed: blocks, block, heads, size"
    )
    tokens, device = query.shape[0], query.device
    blocks = block_table[:tokens].to(device).long().clamp(min=0)  # unused places may hold anything
    keys, values = (cache[blocks].flatten(1, 2).float() for cache in (key_cache, value_cache))
    asked = query.reshape(tokens, num_kv_heads, num_heads // num_kv_heads, -1).float()
    scores = torch.einsum("tgqd,tngd->tgqn", asked, keys) * scale_value
    places = torch.arange(keys.shape[1], device=device)
    beyond = places >= context_lens[:tokens].to(device).unsqueeze(-1)
    shares = scores.masked_fill(beyond[:, None, None], float("-inf")).softmax(-1).nan_to_num()  # no key: zeros
    values = values.masked_fill(beyond[:, :, None, None], 0.0)
    found = torch.einsum("tgqn,tngd->tgqd", shares, values).reshape(out.shape)
    return out.copy_(found.to(out.dtype))


@reference(
    "_npu_paged_attention_get_workspace(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, "
    "int num_heads, float scale_value, Tensor block_table, Tensor context_lens, Tensor out) -> Tensor"
)
def _npu_paged_attention_get_workspace(query: Tensor, *others: Any) -> Tensor:
    """Memory for the op to work in; here it needs none."""
    return query.new_empty(0, dtype=torch.uint8)


@reference(
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_indices) "
    "-> ()",
    opened=True,
)
def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Token i goes into place `slot_indices[i]`, counted through all blocks."""
    slots = slot_indices.to(key.device).long()
    for cache, rows in ((key_cache, key), (value_cache, value)):
        size = cache.shape[1]
        cache.index_put_((slots.div(size, rounding_mode="floor"), slots % size), rows.to(cache.dtype))
