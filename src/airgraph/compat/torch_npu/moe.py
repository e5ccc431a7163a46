"""A mixture of experts: which expert a token goes to, in what order, and the way back.

    weight, expert, row = torch_npu.npu_moe_gating_top_k_softmax(logits, k=2)
    tokens, places, experts = torch_npu.npu_moe_init_routing(x, row, expert, active_num=x.shape[0])
    ends = torch_npu.npu_moe_compute_expert_tokens(experts, 8)      where the tokens of each of 8 experts end
    ...                                                     each expert on its tokens, which lie side by side
    y = torch_npu.npu_moe_finalize_routing(tokens, None, None, None, weight, places, expert)

    rows, places = torch_npu.npu_moe_token_permute(x, expert)       the same in two ops, without row numbers
    y = torch_npu.npu_moe_token_unpermute(rows, places, weight)

Row numbers go down the columns: the j-th choice of token i is number j · tokens + i, and number r belongs to token
r mod tokens. In `npu_moe_finalize_routing` with drop_pad_mode 2 or 3 they go along the rows;
with 1 or 3, tokens have been dropped, and the rows are [experts, capacity, size].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, reference


@reference("npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)")
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """A token that is `finished` goes to the expert behind the last one: to none."""
    op = "npu_moe_gating_top_k_softmax"
    need_types(op, FLOATS, x=x)
    need_types(op, (torch.bool,), finished=finished)
    need(x.dim() in (2, 3), op, f"x has {x.dim()} axes, and has to have 2 or 3")
    need(0 < k <= x.shape[-1], op, f"k is {k}, for {x.shape[-1]} experts")
    weights, experts = x.float().softmax(-1).topk(k, -1)
    if finished is not None:
        experts = experts.masked_fill(finished.reshape(x.shape[:-1]).unsqueeze(-1), x.shape[-1])
    rows = torch.arange(math.prod(x.shape[:-1]) * k, dtype=torch.int32, device=x.device)
    return weights.to(x.dtype), experts.int(), rows.view(k, -1).t().reshape(experts.shape)


@reference(
    "npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, SymInt active_num) -> (Tensor, Tensor, Tensor)"
)
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    op = "npu_moe_init_routing"
    need_types(op, FLOATS, x=x)
    need_types(op, (torch.int32,), row_idx=row_idx, expert_idx=expert_idx)
    need(x.dim() == 2 and expert_idx.dim() == 2, op, "x and expert_idx have to have 2 axes")
    need(row_idx.shape == expert_idx.shape, op, "row_idx and expert_idx have to have one shape")
    experts, order = expert_idx.flatten().sort(stable=True)
    rows = row_idx.flatten()[order]
    places = torch.zeros_like(rows).scatter(
        0, rows.long(), torch.arange(rows.shape[0], dtype=torch.int32, device=x.device)
    )
    active = torch.sym_min(active_num, x.shape[0]) * expert_idx.shape[1]
    return x[rows[:active].long() % x.shape[0]], places, experts


@reference("npu_moe_compute_expert_tokens(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor")
def npu_moe_compute_expert_tokens(sorted_experts: Tensor, num_expert: int) -> Tensor:
    op = "npu_moe_compute_expert_tokens"
    need_types(op, (torch.int32,), sorted_expert_for_source_row=sorted_experts)
    need(
        sorted_experts.dim() == 1,
        op,
        f"sorted_expert_for_source_row has {sorted_experts.dim()} axes, and has to have 1",
    )
    need(num_expert > 0, op, f"num_expert is {num_expert}, and has to be above zero")
    experts = torch.arange(num_expert, dtype=torch.int32, device=sorted_experts.device)
    return torch.searchsorted(sorted_experts, experts, right=True, out_int32=True)


@reference(
    "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? scales, "
    "Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor"
)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
) -> Tensor:
    op = "npu_moe_finalize_routing"
    rows = expanded_permuted_rows
    need_types(op, FLOATS, expanded_permuted_rows=rows, skip1=skip1, skip2=skip2, bias=bias, scales=scales)
    need(drop_pad_mode in (None, 0, 1, 2, 3), op, f"drop_pad_mode is {drop_pad_mode}, and has to be 0 to 3")
    drops = drop_pad_mode in (1, 3)
    need(rows.dim() == (3 if drops else 2), op, f"expanded_permuted_rows has {rows.dim()} axes")
    need(not drops or bias is None, op, "bias with drop_pad_mode 1 or 3 is not emulated")
    need(skip1 is not None or skip2 is None, op, "skip2 needs skip1")
    need(bias is None or export_for_source_row is not None, op, "bias needs export_for_source_row, to tell whose it is")
    choices = 1 if scales is None else scales.shape[1]
    places = expanded_src_to_dst_row.long()
    places = places.view(-1, choices) if drop_pad_mode in (2, 3) else places.view(choices, -1).t()
    if drops:
        chosen = rows.flatten(0, 1).float()[places.clamp(min=0)].masked_fill((places < 0).unsqueeze(-1), 0.0)
    else:
        chosen = rows.float()[places]  # [tokens, choices, size]
    if bias is not None and export_for_source_row is not None:
        chosen = chosen + bias.float()[export_for_source_row.long()]
    if scales is not None:
        chosen = chosen * scales.float().unsqueeze(-1)
    total = chosen.sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(rows.dtype)


@reference(
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) "
    "-> (Tensor, Tensor)",
    opened=True,
)
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """A row for each choice of a token, by expert; and where each choice went."""
    op = "npu_moe_token_permute"
    need_types(op, FLOATS, tokens=tokens)
    need(not padded_mode, op, "padded_mode is not emulated")
    need(indices.dim() in (1, 2), op, f"indices has {indices.dim()} axes, and has to have 1 or 2")
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    order = indices.flatten().argsort(stable=True)
    taken = order[:num_out_tokens] if num_out_tokens else order
    return tokens[taken.div(choices, rounding_mode="floor")], order.argsort().int()


@reference(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
    "int[]? restore_shape=None) -> Tensor",
    opened=True,
)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,  # for padded_mode only
) -> Tensor:
    """The way back: the rows of a token's choices, times `probs`, summed."""
    op = "npu_moe_token_unpermute"
    need_types(op, FLOATS, permuted_tokens=permuted_tokens, probs=probs)
    need(not padded_mode, op, "padded_mode is not emulated")
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    chosen = rows.float().unflatten(0, (-1, probs.shape[-1])) * probs.float().unsqueeze(-1)
    return chosen.sum(1).to(permuted_tokens.dtype)
