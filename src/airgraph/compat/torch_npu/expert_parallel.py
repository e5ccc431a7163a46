"""Tokens that go to experts on other ranks, and come back.

    rows, scales, idx, counts, ends, _, _ = torch_npu.npu_moe_distribute_dispatch(x, ids, group, ranks, rank, experts)
    y = torch_npu.npu_moe_distribute_combine(rows, ids, idx, ends, weights, group, ranks, rank, experts)
    y, _, _ = torch_npu.npu_alltoallv_gmm(x, weight, group, ranks, sent, received)         exchange, then by groups
    y, _ = torch_npu.npu_gmm_alltoallv(y, weight, group, ranks, sent, received)            the way back

A graph has one node for each, which runs collectives and arithmetic. How many tokens go where is not known before it runs,
and a graph's sizes are; so dispatch and combine gather the tokens of all ranks and take what they need. All ranks have as
many tokens as this one. Rows behind the last token are zeros. Not emulated: tensor parallelism.

The first ranks may have shared experts instead, which see every token: rank r sends its tokens to one of the ranks that
have a copy of a shared expert, r modulo their number. What they give back is added without a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from airgraph.compat.torch_npu.between_devices import exchanged, gathered, summed
from airgraph.compat.torch_npu.norms import npu_add_rms_norm
from airgraph.compat.torch_npu.quantisation import rounded
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference


# -- dispatch and combine -------------------------------------------------------------------------------------------
class Placement(NamedTuple):
    """Which rank has which experts. Each rank has `local` numbers; one with a shared expert uses the first of its own."""

    ranks: int
    experts: int
    shared_ranks: int
    shared: int  # how many shared experts there are on ranks of their own

    @property
    def local(self) -> int:
        return self.experts // (self.ranks - self.shared_ranks)

    @property
    def nobody(self) -> int:
        """The number behind the last: of tokens that go nowhere."""
        return self.ranks * self.local

    def choices(self, ids: Tensor, rank: int, named: dict[str, Any]) -> Tensor:
        """The numbers that each token goes to, those of shared experts first. Nobody's are the tokens and the choices that
        the mask leaves out, and experts behind the last, which compute nothing."""
        mask = active(named)
        numbers = torch.where(ids < self.experts, ids + self.shared_ranks * self.local, self.nobody)
        numbers = numbers if mask is None else torch.where(mask, numbers, self.nobody)
        if not self.shared:
            return numbers
        copies = self.shared_ranks // self.shared
        to = [(rank % copies + e * copies) * self.local for e in range(self.shared)]
        every = torch.tensor(to, dtype=ids.dtype, device=ids.device).expand(ids.shape[0], -1)
        whole = every if mask is None else torch.where(mask.any(-1, keepdim=True), every, self.nobody)
        return torch.cat([whole, numbers.to(ids.dtype)], 1)

    def weighted(self, scales: Tensor) -> Tensor:
        """The weights of all choices."""
        return torch.cat([scales.new_ones(scales.shape[0], self.shared), scales], 1).float()

    def most(self, rank: int, tokens: int, k: int) -> int:
        """How many rows a rank has; `tokens` are those of all ranks."""
        if rank < self.shared_ranks:
            return tokens * self.shared // self.shared_ranks
        return tokens * min(self.local, k)

    def smoothing(self, rank: int, numbers: Tensor) -> Tensor:
        """The rows of the smoothing scales, where shared experts come first."""
        if rank < self.shared_ranks:
            return torch.zeros_like(numbers) + rank // (self.shared_ranks // self.shared)
        return (numbers - self.shared_ranks * self.local).clamp(min=0) + self.shared


def placement(op: str, ranks: int, rank: int, experts: int, named: dict[str, Any]) -> Placement:
    usual = {"tp_world_size": (0, 1), "tp_rank_id": (0,), "expert_shard_type": (0,), "comm_quant_mode": (0, 2)}
    others = {name: named[name] for name, allowed in usual.items() if named.get(name, allowed[0]) not in allowed}
    not_emulated(op, **others, **{name: named.get(name) for name in ("elastic_info", "performance_info")})
    need(0 <= rank < ranks, op, f"ep_rank_id {rank} is none of {ranks} ranks")
    shared_ranks = named.get("shared_expert_rank_num", 0)
    shared = named.get("shared_expert_num", 1) if shared_ranks else 0
    need(0 <= shared_ranks < ranks, op, f"shared_expert_rank_num {shared_ranks} leaves no rank of {ranks} for experts")
    need(not shared_ranks or (shared > 0 and shared_ranks % shared == 0), op, "each shared expert needs as many ranks")
    others = ranks - shared_ranks
    need(experts % others == 0, op, f"{experts} experts are not parts for {others} ranks")
    return Placement(ranks, experts, shared_ranks, shared)


def active(named: dict[str, Any]) -> Tensor | None:
    """The mask of tokens as one of choices."""
    mask: Tensor | None = named.get("x_active_mask")
    return mask if mask is None or mask.dim() == 2 else mask.unsqueeze(-1)


def order(numbers: Tensor, local: int) -> Tensor:
    """For each pair of a token and an expert, of all ranks, its place among the rows of the rank that has the expert:
    by expert, then by rank and token."""
    flat = numbers.flatten().long()
    earlier = torch.arange(flat.shape[0], device=numbers.device)
    before = (flat.unsqueeze(0) < flat.unsqueeze(1)) | (
        (flat.unsqueeze(0) == flat.unsqueeze(1)) & (earlier < earlier.unsqueeze(1))
    )
    same_rank = (flat // local).unsqueeze(0) == (flat // local).unsqueeze(1)
    return (before & same_rank).sum(1)


_DISPATCH = (
    "Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
    "Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, {more}str group_tp='', "
    "int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, "
    "int shared_expert_rank_num=0, int quant_mode=0, int global_bs=0, int expert_token_nums_type=1{last}"
)
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def dispatched(
    op: str,
    x: Tensor,
    expert_ids: Tensor,
    group: str,
    ranks: int,
    rank: int,
    experts: int,
    scales: Tensor | None = None,
    expert_scales: Tensor | None = None,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **named: Any,
) -> tuple[Tensor, ...]:
    need_types(op, FLOATS[:2], x=x)
    where = placement(op, ranks, rank, experts, named)
    need(quant_mode in (0, 2), op, f"quant_mode is {quant_mode}, and has to be 0 or 2")
    tokens, k = expert_ids.shape
    local = where.local
    most = where.most(rank, global_bs or tokens * ranks, k)
    ids = gathered(where.choices(expert_ids, rank, named), ranks, group)
    place, flat = order(ids, local), ids.flatten().long()
    mine = flat // local == rank
    source = gathered(x, ranks, group).repeat_interleave(ids.shape[1], 0)
    slot = torch.where(mine, place, most)  # those of other ranks go behind the last row, which is dropped
    rows = x.new_zeros(most + 1, x.shape[1]).index_copy(0, slot, source)[:most]
    expert = flat.new_zeros(most + 1).index_copy(0, slot, flat)[:most]
    each = torch.arange(1 if rank < where.shared_ranks else local, device=x.device) + rank * local
    by = (flat.view(ranks, -1).unsqueeze(0) == each.view(-1, 1, 1)).sum(-1)  # [local experts, ranks]
    counts = by.sum(1)
    nums = counts if expert_token_nums_type == 1 else counts.cumsum(0)
    weights = x.new_empty(0, dtype=torch.float32)
    if expert_scales is not None:
        given = gathered(where.weighted(expert_scales), ranks, group).flatten()
        weights = given.new_zeros(most + 1).index_copy(0, slot, given)[:most]
    dynamic = x.new_empty(0, dtype=torch.float32)
    if quant_mode == 2:
        wide = rows.float() if scales is None else rows.float() * scales.float()[where.smoothing(rank, expert)]
        dynamic = wide.abs().amax(-1) / 127
        rows = rounded(wide / dynamic.masked_fill(dynamic == 0, 1.0).unsqueeze(-1), torch.int8)
    own = place.view(ranks, -1)[rank].int()
    none = counts.new_zeros(1, dtype=torch.int32)
    return rows, dynamic, own, nums.long(), by.flatten().cumsum(0).int(), none, weights


_RECEIVED = "-> expand_x dynamic_scales {} expert_token_nums ep_recv_count tp_recv_count expand_scales"


@reference(
    f"npu_moe_distribute_dispatch({_DISPATCH.format(more='', last='')}) -> {_SEVEN}",
    ge=f"MoeDistributeDispatch {_RECEIVED.format('expand_idx')}",
    collective=True,
)
def npu_moe_distribute_dispatch(
    x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int, moe_expert_num: int, **named: Any
) -> tuple[Tensor, ...]:
    op = "npu_moe_distribute_dispatch"
    return dispatched(op, x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **named)


_SPECIAL = ", str comm_alg='', int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0"
_INFO = "Tensor? elastic_info=None, Tensor? performance_info=None, "


@reference(
    f"npu_moe_distribute_dispatch_v2({_DISPATCH.format(more=_INFO, last=_SPECIAL)}) -> {_SEVEN}",
    ge=f"MoeDistributeDispatchV2 {_RECEIVED.format('assist_info_for_combine')}",
    collective=True,
)
def npu_moe_distribute_dispatch_v2(
    x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int, moe_expert_num: int, **named: Any
) -> tuple[Tensor, ...]:
    op = "npu_moe_distribute_dispatch_v2"
    return dispatched(op, x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **named)


_COMBINE = (
    "Tensor expand_x, Tensor expert_ids, Tensor {info}, Tensor ep_send_counts, Tensor expert_scales, str group_ep, "
    "int ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? tp_send_counts=None, "
    "Tensor? x_active_mask=None, {more}Tensor? expand_scales=None, Tensor? shared_expert_x=None, {special}"
    "str group_tp='', int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, "
    "int shared_expert_rank_num=0, int global_bs=0, {last}"
)


def combined(
    op: str, rows: Tensor, ids: Tensor, scales: Tensor, group: str, ranks: int, rank: int, experts: int, named: Any
) -> Tensor:
    need_types(op, FLOATS[:2], expand_x=rows)
    where = placement(op, ranks, rank, experts, named)
    mine = where.choices(ids, rank, named)
    place = order(gathered(mine, ranks, group), where.local).view(ranks, *mine.shape)[rank]
    owner, sent = mine.long() // where.local, mine < where.nobody
    tokens = named.get("global_bs") or ids.shape[0] * ranks
    most = max(where.most(r, tokens, ids.shape[1]) for r in range(ranks))  # ranks of both kinds send as many rows
    rows = torch.nn.functional.pad(rows, (0, 0, 0, max(most - rows.shape[0], 0)))
    whole = gathered(sent_in_int8(rows) if named.get("comm_quant_mode") else rows, ranks, group)
    back = whole[torch.where(sent, owner * rows.shape[0] + place, 0)].float().masked_fill(~sent.unsqueeze(-1), 0.0)
    y = (back * where.weighted(scales).unsqueeze(-1)).sum(1)
    if named.get("copy_expert_num") or named.get("const_expert_num"):
        y = y + computed_here(op, ids, scales, experts, named)
    extra = named.get("shared_expert_x")
    y = y if extra is None else y + extra.float().reshape(y.shape)
    return y.to(rows.dtype)


def sent_in_int8(rows: Tensor) -> Tensor:
    """What arrives of rows that travel in int8: eight elements share a scale, the largest of them / 127, which travels in
    the type of the rows."""
    padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % 8)).unflatten(1, (-1, 8))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    values = rounded(padded / scale.masked_fill(scale == 0, 1.0), torch.int8).float()
    return (values * scale.to(rows.dtype)).flatten(1)[:, : rows.shape[1]].to(rows.dtype)


def computed_here(op: str, ids: Tensor, scales: Tensor, experts: int, named: dict[str, Any]) -> Tensor:
    """What experts give that no rank has, for a token's own row x: x, or alpha_1 · x + alpha_2 · v of the expert.

    Behind the other experts come those that give zeros, then those that copy, then the constant ones.
    """
    x, first = named.get("ori_x"), experts + named.get("zero_expert_num", 0)
    copies, constants = named.get("copy_expert_num", 0), named.get("const_expert_num", 0)
    need(x is not None, op, "copy_expert_num and const_expert_num need ori_x")
    assert x is not None
    mask = active(named)
    weights = scales.float() if mask is None else scales.float() * mask

    def weight_of(start: int, count: int) -> Tensor:
        """[tokens, experts from `start` on]"""
        numbers = torch.arange(start, start + count, device=ids.device)
        return ((ids.unsqueeze(-1) == numbers) * weights.unsqueeze(-1)).sum(1)

    y = x.float() * weight_of(first, copies).sum(1, keepdim=True)
    if not constants:
        return y
    coefficients = [named.get(name) for name in ("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")]
    need(all(c is not None for c in coefficients), op, "const_expert_num needs both alphas and v")
    one, two, v = (c.float() for c in coefficients if c is not None)
    weight = weight_of(first + copies, constants)
    return y + x.float() * (weight @ one).unsqueeze(1) + (weight * two) @ v


@reference(
    "npu_moe_distribute_combine("
    + _COMBINE.format(
        info="expand_idx",
        more="Tensor? activation_scale=None, Tensor? weight_scale=None, Tensor? group_list=None, ",
        special="",
        last="int out_dtype=0, int comm_quant_mode=0, int group_list_type=0",
    )
    + ") -> Tensor",
    ge="MoeDistributeCombine -> x",
    collective=True,
)
def npu_moe_distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **named: Any,
) -> Tensor:
    op = "npu_moe_distribute_combine"
    return combined(op, expand_x, expert_ids, expert_scales, group_ep, ep_world_size, ep_rank_id, moe_expert_num, named)


@reference(
    "npu_moe_distribute_combine_v2("
    + _COMBINE.format(
        info="assist_info_for_combine",
        more="",
        special="Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, "
        "Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, Tensor? performance_info=None, ",
        last=f"int comm_quant_mode=0{_SPECIAL}",
    )
    + ") -> Tensor",
    ge="MoeDistributeCombineV2 -> x",
    collective=True,
)
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **named: Any,
) -> Tensor:
    op = "npu_moe_distribute_combine_v2"
    return combined(op, expand_x, expert_ids, expert_scales, group_ep, ep_world_size, ep_rank_id, moe_expert_num, named)


@reference(
    "npu_moe_distribute_combine_add_rms_norm("
    + _COMBINE.format(
        info="expand_idx",
        more="Tensor? activation_scale=None, Tensor? weight_scale=None, Tensor? group_list=None, ",
        special="",
        last="int out_dtype=0, int comm_quant_mode=0, int group_list_type=0, str comm_alg='', float norm_eps=1e-06",
    ).replace("str group_ep", "Tensor residual_x, Tensor gamma, str group_ep")
    + ") -> (Tensor, Tensor, Tensor)",
    ge="MoeDistributeCombineAddRmsNorm -> y rstd x",
    collective=True,
)
def npu_moe_distribute_combine_add_rms_norm(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor,
    gamma: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    norm_eps: float = 1e-6,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of what comes back and `residual_x`, 1 / √(…), and their sum: [tokens, 1, …]."""
    op = "npu_moe_distribute_combine_add_rms_norm"
    back = combined(op, expand_x, expert_ids, expert_scales, group_ep, ep_world_size, ep_rank_id, moe_expert_num, named)
    y, rstd, x = npu_add_rms_norm(back.unsqueeze(1), residual_x.reshape(-1, 1, back.shape[1]), gamma, norm_eps)
    return y, rstd, x


@reference(
    "_npu_distribute_barrier(Tensor x_ref, str group, int world_size, *, Tensor? time_out=None, "
    "Tensor? elastic_info=None) -> Tensor",
    ge="DistributeBarrier x_ref time_out elastic_info -> x_ref",
    collective=True,
)
def _npu_distribute_barrier(
    x_ref: Tensor, group: str, world_size: int, *, time_out: Tensor | None = None, elastic_info: Tensor | None = None
) -> Tensor:
    """`x_ref`, when all ranks have come here. Nothing is given up after `time_out`."""
    not_emulated("_npu_distribute_barrier", elastic_info=elastic_info)
    summed(torch.zeros(1, device=x_ref.device), group)
    return x_ref.clone()


torch.fx.node.has_side_effect(torch.ops.npu._npu_distribute_barrier.default)


# -- exchanges with products ----------------------------------------------------------------------------------------
_EXCHANGE = (
    "Tensor gmm_x, Tensor gmm_weight, str hcom, int ep_world_size, int[] send_counts, int[] recv_counts, *, "
    "Tensor? send_counts_tensor=None, Tensor? recv_counts_tensor=None, Tensor? mm_x=None, Tensor? mm_weight=None, "
    "bool trans_gmm_weight=False, bool trans_mm_weight=False"
)


def shared(x: Tensor | None, weight: Tensor | None, transposed: bool, like: Tensor) -> Tensor:
    """The product of the shared experts; nothing where there are none."""
    if x is None or weight is None:
        return like.new_empty(0)
    return x @ (weight.t() if transposed else weight)


def of_ranks(op: str, counts: Sequence[int], ranks: int, experts: int) -> list[int]:
    need(len(counts) == ranks * experts, op, f"counts are not {ranks * experts} numbers")
    return [sum(counts[r * experts : (r + 1) * experts]) for r in range(ranks)]


def to_experts(
    op: str, x: Tensor, ranks: int, experts: int, sent: Sequence[int], received: Sequence[int], hcom: str
) -> list[Tensor]:
    """The rows for each expert of this rank, those of one rank after another's. Counts are by rank and then by expert."""
    got = exchanged(x, of_ranks(op, received, ranks, experts), of_ranks(op, sent, ranks, experts), hcom)
    parts = got.split(list(received))
    return [torch.cat([parts[r * experts + e] for r in range(ranks)]) for e in range(experts)]


def from_experts(
    op: str, x: Tensor, weights: Tensor, ranks: int, sent: Sequence[int], received: Sequence[int], hcom: str
) -> Tensor:
    """The way back: rows of each expert times its weights, to the ranks they came from."""
    experts = weights.shape[0]
    sizes = of_ranks(op, received, ranks, experts), of_ranks(op, sent, ranks, experts)
    rows = x.split([sent[r * experts + e] for e in range(experts) for r in range(ranks)])
    parts = [part @ weights[i // ranks] for i, part in enumerate(rows)]
    return exchanged(torch.cat([parts[e * ranks + r] for r in range(ranks) for e in range(experts)]), *sizes, hcom)


@reference(
    f"npu_alltoallv_gmm({_EXCHANGE}, bool permute_out_flag=False, str? comm_mode=None) -> (Tensor, Tensor, Tensor)",
    ge="AlltoAllvGroupedMatMul hcom:group -> gmm_y mm_y permute_out",
    collective=True,
)
def npu_alltoallv_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_counts_tensor: Tensor | None = None,
    recv_counts_tensor: Tensor | None = None,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    permute_out_flag: bool = False,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What arrives is put by expert and then by rank."""
    op = "npu_alltoallv_gmm"
    need_types(op, FLOATS[:2], gmm_x=gmm_x, gmm_weight=gmm_weight)
    not_emulated(op, send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor)
    by_expert = to_experts(op, gmm_x, ep_world_size, gmm_weight.shape[0], send_counts, recv_counts, hcom)
    weights = gmm_weight.transpose(1, 2) if trans_gmm_weight else gmm_weight
    y = torch.cat([rows @ weights[e] for e, rows in enumerate(by_expert)])
    permuted = torch.cat(by_expert) if permute_out_flag else gmm_x.new_empty(0)
    return y, shared(mm_x, mm_weight, trans_mm_weight, gmm_x), permuted


@reference(
    f"npu_gmm_alltoallv({_EXCHANGE}) -> (Tensor, Tensor)",
    ge="GroupedMatMulAlltoAllv hcom:group -> y mm_y",
    collective=True,
)
def npu_gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_counts_tensor: Tensor | None = None,
    recv_counts_tensor: Tensor | None = None,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows are by expert and then by rank."""
    op = "npu_gmm_alltoallv"
    need_types(op, FLOATS[:2], gmm_x=gmm_x, gmm_weight=gmm_weight)
    not_emulated(op, send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor)
    weights = gmm_weight.transpose(1, 2) if trans_gmm_weight else gmm_weight
    y = from_experts(op, gmm_x, weights, ep_world_size, send_counts, recv_counts, hcom)
    return y, shared(mm_x, mm_weight, trans_mm_weight, gmm_x)
