"""Which keys a query sees in `npu_fused_infer_attention_score`: lengths, padding, sparse modes, masks and prefixes.

Lengths may be numbers of the host that change from one replay to the next, so nothing here has a size that depends on
them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import need
from airgraph.errors import CompatError

OP = "npu_fused_infer_attention_score"
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
