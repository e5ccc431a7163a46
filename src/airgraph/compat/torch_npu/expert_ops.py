"""More of a mixture of experts: gates with groups, routing by rank, products that end in a gate or in the way back.

    weight, expert, norm = torch_npu.npu_moe_gating_top_k(logits, 8, bias=b, k_group=4, group_count=8, norm_type=1)
    rows, places, counts, scale = torch_npu.npu_moe_init_routing_v2(x, expert, expert_num=64, expert_tokens_num_type=1)
    rows, scales, order, counts = torch_npu.npu_moe_re_routing(rows, counts_of_each_rank)
    y, scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(x, [weight], [weight_scale], x_scale, ends)
    out = torch_npu.npu_grouped_matmul_finalize_routing(y, weight, counts, scale=s, pertoken_scale=t, logit=l, row_index=r)

Places in `npu_moe_init_routing_v2` that belong to no expert of `active_expert_range` are -1, their rows zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu.grouped_products import Expert, apart, expert_of_rows, of_groups
from airgraph.compat.torch_npu.quantisation import npu_dynamic_quant, rounded
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference


@reference(
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1, "
    "int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
    "float eps=1e-20) -> (Tensor, Tensor, Tensor)",
    ge="MoeGatingTopK x bias -> y expert_idx out",
)
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_type`: 0 softmax, 1 sigmoid, 2 the root of softplus. A group counts by its largest, or by its two largest."""
    op = "npu_moe_gating_top_k"
    need_types(op, FLOATS, x=x, bias=bias)
    need(x.dim() == 2, op, f"x has {x.dim()} axes, and has to have 2")
    need(norm_type in (0, 1, 2), op, f"norm_type is {norm_type}, and has to be 0, 1 or 2")
    need(group_select_mode in (0, 1), op, f"group_select_mode is {group_select_mode}, and has to be 0 or 1")
    need(x.shape[1] % group_count == 0, op, f"{x.shape[1]} experts are not {group_count} groups")
    wide = x.float()
    norm = (
        wide.softmax(-1) if norm_type == 0 else wide.sigmoid() if norm_type == 1 else functional.softplus(wide).sqrt()
    )
    chosen = norm if bias is None else norm + bias.float()
    if group_count > 1:
        groups = chosen.unflatten(-1, (group_count, -1))
        score = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(score).scatter(1, score.topk(k_group, -1).indices, 1.0) > 0
        chosen = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    experts = chosen.topk(k, -1).indices
    y = norm.gather(1, experts)
    if norm_type or renorm:
        y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * routed_scaling_factor).to(x.dtype), experts.int(), norm if out_flag else norm.new_empty(0)


@reference(
    "npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
    "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)",
    ge="MoeGatingTopKSoftmax x finished -> y expert_idx softmax_result",
)
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """With `renorm` the largest are found first, and the softmax is of them."""
    op = "npu_moe_gating_top_k_softmax_v2"
    need_types(op, FLOATS, x=x)
    need_types(op, (torch.bool,), finished=finished)
    softmax = x.float().softmax(-1)
    weights, experts = (x.float() if renorm else softmax).topk(k, -1)
    weights = weights.softmax(-1) if renorm else weights
    if finished is not None:
        experts = experts.masked_fill(finished.reshape(x.shape[:-1]).unsqueeze(-1), x.shape[-1])
    shown = softmax if output_softmax and not renorm else softmax.new_empty(0)
    return weights.to(x.dtype), experts.int(), shown


@reference(
    "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, "
    "int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
    "bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    ge="MoeInitRoutingV3 -> expanded_x expanded_row_idx expert_tokens_count_or_cumsum expanded_scale",
)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "npu_moe_init_routing_v2"
    need_types(op, (torch.int32,), expert_idx=expert_idx)
    need(drop_pad_mode in (0, 1), op, f"drop_pad_mode is {drop_pad_mode}, and has to be 0 or 1")
    need(quant_mode in (-1, 0, 1), op, f"quant_mode {quant_mode} is not emulated, only -1, 0 and 1")
    need(expert_num > 0, op, f"expert_num is {expert_num}, and has to be above zero")
    begin, end = active_expert_range or (0, expert_num)
    if drop_pad_mode:
        need(expert_capacity > 0 and row_idx_type == 0, op, "drop_pad_mode 1 needs expert_capacity, and row_idx_type 0")
        plain = quant_mode == -1 and scale is None and (begin, end) == (0, expert_num)
        need(plain, op, "drop_pad_mode 1 is emulated for all experts and without scales only")
        return with_capacity(x, expert_idx, expert_num, expert_capacity, expert_tokens_num_type)
    flat = expert_idx.flatten().long()
    known = (flat >= begin) & (flat < end)
    experts, order = torch.where(known, flat, expert_num).sort(stable=True)
    valid = experts < expert_num
    limit = flat.shape[0] if active_num <= 0 else min(active_num, flat.shape[0])
    counts = (experts.unsqueeze(0) == torch.arange(begin, end, device=x.device).unsqueeze(1)).sum(1)
    places = order.masked_fill(~valid, -1) if row_idx_type else places_of(order, valid)
    token = order[:limit].div(expert_idx.shape[1], rounding_mode="floor")
    rows, found = quantised_rows(op, x[token], (experts[:limit] - begin), token, scale, offset, quant_mode)
    rows = rows.masked_fill(~valid[:limit].unsqueeze(-1), 0)
    return rows, places.int(), tokens_of(counts, begin, expert_num, expert_tokens_num_type), found


def with_capacity(
    x: Tensor, expert_idx: Tensor, experts: int, capacity: int, kind: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[experts, capacity, size], with zeros where an expert has fewer tokens, and without those that it has no place for;
    where each choice went among these rows, -1 for nowhere; how many tokens each expert was chosen by."""
    expert, order = expert_idx.flatten().long().sort(stable=True)
    counts = (expert.unsqueeze(0) == torch.arange(experts, device=x.device).unsqueeze(1)).sum(1)
    rank = torch.arange(order.shape[0], device=x.device) - (counts.cumsum(0) - counts)[expert]
    slot = torch.where(rank < capacity, expert * capacity + rank, -1)
    behind = experts * capacity  # a row that is cut off
    token = order.div(expert_idx.shape[1], rounding_mode="floor")
    rows = x.new_zeros(behind + 1, x.shape[1]).index_copy(0, torch.where(slot < 0, behind, slot), x[token])
    places = torch.zeros_like(order).scatter(0, order, slot)
    none = x.new_empty(0, dtype=torch.float32)
    return rows[:-1].unflatten(0, (experts, capacity)), places.int(), tokens_of(counts, 0, experts, kind), none


def places_of(order: Tensor, valid: Tensor) -> Tensor:
    """Where each choice went; -1 for one that goes nowhere."""
    numbers = torch.arange(order.shape[0], device=order.device)
    return torch.zeros_like(order).scatter(0, order, numbers.masked_fill(~valid, -1))


def quantised_rows(
    op: str, rows: Tensor, expert: Tensor, token: Tensor, scale: Tensor | None, offset: Tensor | None, mode: int
) -> tuple[Tensor, Tensor]:
    """As they are, with the token's scale if there is one; by one scale for all; or by one for each row."""
    none = rows.new_empty(0, dtype=torch.float32)
    if mode == -1:
        return rows, none if scale is None else scale[token]
    if mode == 0:
        need(scale is not None and offset is not None, op, "quant_mode 0 needs scale and offset")
        assert scale is not None and offset is not None
        return rounded(rows.float() * scale.float() + offset.float(), torch.int8), none
    wide = rows.float()
    if scale is not None:
        wide = wide * scale.float()[expert.clamp(0, scale.shape[0] - 1)]
    found: tuple[Tensor, Tensor] = npu_dynamic_quant(wide)
    return found


def tokens_of(counts: Tensor, begin: int, experts: int, kind: int) -> Tensor:
    """Ends, counts, or pairs of expert and count for those that have any, with zeros behind."""
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    first = (counts == 0).sort(stable=True).indices
    numbers = (first + begin).masked_fill(counts[first] == 0, 0)
    return functional.pad(torch.stack([numbers, counts[first]], 1), (0, 0, 0, experts - counts.shape[0]))


@reference(
    "npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None, "
    "int expert_token_num_type=1, int idx_type=0) -> (Tensor, Tensor, Tensor, Tensor)",
    ge="MoeReRouting -> permute_tokens permute_per_token_scales permute_token_idx expert_token_num",
)
def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens that lie rank by rank, in each by expert, are put expert by expert, in each by rank."""
    op = "npu_moe_re_routing"
    counts = expert_token_num_per_rank
    need(counts.dim() == 2, op, "expert_token_num_per_rank has to have a row for each rank")
    need(expert_token_num_type in (0, 1) and idx_type in (0, 1), op, "expert_token_num_type and idx_type are 0 or 1")
    ranks, experts = counts.shape
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    cell = torch.searchsorted(counts.long().flatten().cumsum(0), rows, right=True)
    key = torch.where(cell < ranks * experts, cell % experts * ranks + cell // experts, ranks * experts)
    order = key.sort(stable=True).indices
    place = order if idx_type == 0 else torch.zeros_like(order).scatter(0, order, rows)
    total = counts.sum(0, dtype=counts.dtype)
    total = total.cumsum(0, dtype=counts.dtype) if expert_token_num_type == 0 else total
    scales = tokens.new_empty(0, dtype=torch.float32) if per_token_scales is None else per_token_scales[order]
    return tokens[order], scales, place.int(), total


@reference(
    "npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, "
    "Tensor group_list, *, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, "
    "int? dequant_mode=0, int? dequant_dtype=0, int? quant_mode=0, int? quant_dtype=1, int? group_list_type=0, "
    "int[]? tuning_config=None) -> (Tensor, Tensor)",
    ge="GroupedMatmulSwigluQuantV2 x x_scale group_list weight weight_scale weight_assist_matrix bias smooth_scale "
    "-> y y_scale",
)
def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    smooth_scale: Tensor | None = None,
    weight_assist_matrix: Sequence[Tensor] | None = None,
    bias: Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 0,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    op = "npu_grouped_matmul_swiglu_quant_v2"
    not_emulated(op, weight_assist_matrix=weight_assist_matrix, bias=bias, smooth_scale=smooth_scale)
    need(not dequant_mode and not quant_mode, op, "other modes than a scale for each row are not emulated")
    need(quant_dtype in (0, 1), op, f"quant_dtype {quant_dtype} is not emulated, only torch.int8 (1)")
    for t in (x, *weight):
        need_types(op, (torch.int8,), x_or_weight=t)
    pairs = zip(apart(weight, weight), apart(weight_scale, weight))
    experts = [Expert(w, None, s, (None, None)) for w, s in pairs if w is not None]
    y = of_groups(x, experts, x_scale, expert_of_rows(group_list, group_list_type, x))
    gate, up = y.chunk(2, -1)
    found: tuple[Tensor, Tensor] = npu_dynamic_quant(functional.silu(gate) * up)
    return found


@reference(
    "npu_grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale, *, "
    "Tensor? bias=None, Tensor? offset=None) -> (Tensor, Tensor, Tensor)"
)
def npu_grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`group_list`: where each group ends. The third result is empty, as there."""
    not_emulated("npu_grouped_matmul_swiglu_quant", bias=bias, offset=offset)
    y, scale = npu_grouped_matmul_swiglu_quant_v2(x, [weight], [weight_scale], x_scale, group_list)
    return y, scale, scale.new_empty(0)


@reference(
    "npu_grouped_matmul_finalize_routing(Tensor x, Tensor w, Tensor group_list, *, Tensor? scale=None, Tensor? bias=None, "
    "Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? shared_input=None, Tensor? logit=None, "
    "Tensor? row_index=None, ScalarType? dtype=None, float? shared_input_weight=1.0, int? shared_input_offset=0, "
    "int? output_bs=0, int? group_list_type=1, int[]? tuning_config=None) -> Tensor",
    ge="GroupedMatmulFinalizeRouting x w scale bias pertoken_scale group_list shared_input logit row_index offset",
)
def npu_grouped_matmul_finalize_routing(
    x: Tensor,
    w: Tensor,
    group_list: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    shared_input: Tensor | None = None,
    logit: Tensor | None = None,
    row_index: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shared_input_weight: float | None = 1.0,
    shared_input_offset: int | None = 0,
    output_bs: int | None = 0,
    group_list_type: int | None = 1,
    tuning_config: Sequence[int] | None = None,
) -> Tensor:
    """Rows of a token are added up, each times its logit; the shared experts' result is added from `…_offset` on."""
    op = "npu_grouped_matmul_finalize_routing"
    not_emulated(op, offset=offset)
    need_types(op, (torch.int8,), x=x)
    need_types(op, (torch.int8, torch.int32), w=w)
    need(dtype in (None, torch.float32), op, f"dtype {dtype} is not one of the op's, only torch.float32")
    need(scale is not None and row_index is not None, op, "scale and row_index have to be given")
    assert scale is not None and row_index is not None
    biases = [None] * w.shape[0] if bias is None else [*bias]
    experts = [Expert(one, b, s, (None, None)) for one, b, s in zip(w, biases, scale)]
    y = of_groups(x, experts, pertoken_scale, expert_of_rows(group_list, group_list_type, x))
    y = y if logit is None else y * logit.float().unsqueeze(-1)
    out = y.new_zeros(output_bs or x.shape[0], y.shape[1])
    if shared_input is not None:
        begin = shared_input_offset or 0
        shared = shared_input.float() * (1.0 if shared_input_weight is None else shared_input_weight)
        out = functional.pad(shared, (0, 0, begin, out.shape[0] - begin - shared.shape[0]))
    return out.index_add(0, row_index.long(), y)


@reference(
    "npu_moe_update_expert(Tensor expert_ids, Tensor eplb_table, *, Tensor? expert_scales=None, "
    "Tensor? pruning_threshold=None, Tensor? active_mask=None, int local_rank_id=-1, int world_size=-1, "
    "int balance_mode=0) -> (Tensor, Tensor)",
    ge="MoeUpdateExpert -> balanced_expert_ids balanced_active_mask",
)
def npu_moe_update_expert(
    expert_ids: Tensor,
    eplb_table: Tensor,
    *,
    expert_scales: Tensor | None = None,
    pruning_threshold: Tensor | None = None,
    active_mask: Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = 0,
) -> tuple[Tensor, Tensor]:
    """Which copy of its experts a token goes to: a row of the table has their number, then where they are. `balance_mode`
    0 chooses by this rank, 1 by the token. Experts below their share of a token's scales are left out of the mask."""
    op = "npu_moe_update_expert"
    need_types(op, (torch.int32, torch.int64), expert_ids=expert_ids)
    need(balance_mode in (0, 1), op, f"balance_mode is {balance_mode}, and has to be 0 or 1")
    need((expert_scales is None) == (pruning_threshold is None), op, "expert_scales and pruning_threshold go together")
    rows = eplb_table.long()[expert_ids.long()]
    count = rows[..., 0]
    if balance_mode == 0:
        need(0 <= local_rank_id < world_size, op, f"local_rank_id {local_rank_id} is none of {world_size}")
        place = local_rank_id // ((world_size + count - 1) // count)
    else:
        place = torch.arange(expert_ids.shape[0], device=count.device).unsqueeze(-1) % count
    chosen = rows.gather(-1, (place + 1).unsqueeze(-1)).squeeze(-1).to(expert_ids.dtype)
    kept = torch.ones_like(chosen, dtype=torch.bool)
    if expert_scales is not None and pruning_threshold is not None:
        wide = expert_scales.float()
        kept = wide > wide.sum(-1, keepdim=True) * pruning_threshold.float().reshape(1, -1)
    return chosen, kept if active_mask is None else kept & active_mask.unsqueeze(-1)
