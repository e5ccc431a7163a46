"""Numbers in eight bits, and matmuls of them.

    q, scale = torch_npu.npu_dynamic_quant(x)                           scale = max|row| / 127, q = round(x / scale)
    q = torch_npu.npu_quantize(x, scales, zeros, torch.qint8, axis=-1)  round(x / scales) + zeros
    y = torch_npu.npu_quant_matmul(a, b, scale, pertoken_scale=s, output_dtype=torch.bfloat16)
    y = torch_npu.npu_weight_quant_batchmatmul(x, weight, scale, offset)    x @ ((weight + offset) · scale)
    ys = torch_npu.npu_grouped_matmul([x], [w1, w2], group_list=ends, split_item=3, group_type=0)
    packed = torch_npu.npu_trans_quant_param(scale, offset)             one int64 for each scale, as some outputs want it

Sums of products of int8 are exact. int4 packed into int32 and eight-bit floats are not emulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

QUANTISED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
PLAIN = (torch.int8, torch.uint8, torch.int32)


@reference(
    "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, ScalarType? dst_type=None) "
    "-> (Tensor, Tensor)"
)
def npu_dynamic_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    op = "npu_dynamic_quant"
    need_types(op, FLOATS, input=x, smooth_scales=smooth_scales)
    need(x.dim() > 1, op, "input has to have two axes or more")
    need(dst_type in (None, torch.int8), op, f"dst_type {dst_type} is not emulated, only torch.int8")
    wide = x.float()
    if smooth_scales is not None:
        wide = wide * smoothing(op, x, smooth_scales, group_index)
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return torch.round(wide / scale.masked_fill(scale == 0, 1.0)).to(torch.int8), scale.squeeze(-1)


def smoothing(op: str, x: Tensor, scales: Tensor, group_index: Tensor | None) -> Tensor:
    """A row of factors for all rows, or for each its group's: group i ends where `group_index[i]` says."""
    need(scales.shape[-1] == x.shape[-1], op, f"smooth_scales {list(scales.shape)} does not fit input {list(x.shape)}")
    if group_index is None:
        need(scales.dim() == 1, op, "smooth_scales with more than one row needs group_index")
        return scales.float()
    need(scales.dim() == 2, op, "smooth_scales has to have a row for each group")
    rows = torch.arange(math.prod(x.shape[:-1]), device=x.device)
    group = torch.searchsorted(group_index.to(rows.dtype), rows, right=True).clamp(max=scales.shape[0] - 1)
    return scales.float()[group].view(x.shape)


@reference(
    "npu_quantize(Tensor self, Tensor scales, Tensor? zero_points, ScalarType dtype, int axis=1, bool div_mode=True) "
    "-> Tensor"
)
def npu_quantize(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype, axis: int = 1, div_mode: bool = True
) -> Tensor:
    op = "npu_quantize"
    need_types(op, FLOATS, self=x, scales=scales)
    target = QUANTISED.get(dtype, dtype)
    need(target in PLAIN, op, f"dtype {dtype} is not emulated, only qint8, quint8 and int32")
    if not div_mode:  # there it is the last axis or the one before
        axis = -2 if axis == -2 else -1
    factor = along(op, scales, x, axis).float()
    wide = x.float() / factor if div_mode else x.float() * factor
    if zero_points is not None:
        wide = wide + along(op, zero_points, x, axis).float()
    return rounded(wide, target)


def along(op: str, values: Tensor, x: Tensor, axis: int) -> Tensor:
    """One number for each place of an axis, or one for all."""
    if values.dim() == x.dim() and values.dim() > 1:
        return values
    count = values.numel()
    need(
        values.dim() <= 1 and (count == 1 or count == x.shape[axis]),
        op,
        f"{list(values.shape)} numbers do not fit axis {axis} of {list(x.shape)}",
    )
    shape = [1] * x.dim()
    shape[axis] = count
    return values.reshape(shape)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest whole number, half to even, and to the nearest the type has."""
    limits = torch.iinfo(dtype)
    return torch.round(x).double().clamp(limits.min, limits.max).to(dtype)


@reference(
    "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
    "Tensor? bias=None, ScalarType? output_dtype=None, SymInt[]? group_sizes=None) -> Tensor"
)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    group_sizes: Sequence[int] | None = None,
) -> Tensor:
    op = "npu_quant_matmul"
    need_types(op, (torch.int8,), x1=x1, x2=x2)
    need_types(op, (torch.float32, torch.bfloat16, torch.int64), scale=scale)
    need_types(op, (torch.float32,), offset=offset, pertoken_scale=pertoken_scale)
    not_emulated(op, group_sizes=group_sizes)
    target = output_dtype or torch.int8
    need(target in (torch.int8, torch.int32, *FLOATS[:2]), op, f"output_dtype {target} is not one of the op's")
    need(offset is None or target == torch.int8, op, "offset is for an output of int8")
    sums = products(x1, x2)
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
    if target == torch.int32:
        return sums
    if scale.dtype == torch.int64:
        scale, packed = unpacked(scale)
        offset = packed if offset is None else offset
    y = sums.float() * scale.float()
    if pertoken_scale is not None:
        y = y * pertoken_scale.unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.float()
    if target == torch.int8:
        return rounded(y if offset is None else y + offset, torch.int8)
    return y.to(target)


# Bits of a packed scale: 0 to 31 a float32 of which 19 count, 37 to 45 the offset in two's complement, 46 always set.
SCALE_BITS, OFFSET_AT, MARK = 0xFFFFE000, 37, 1 << 46


@reference("npu_trans_quant_param(Tensor scale, Tensor? offset=None, int round_mode=0) -> Tensor")
def npu_trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int = 0) -> Tensor:
    op = "npu_trans_quant_param"
    need_types(op, (torch.float32,), scale=scale, offset=offset)
    need(round_mode == 0, op, f"round_mode {round_mode} is not emulated, only 0")
    packed = (scale.contiguous().view(torch.int32).long() & SCALE_BITS) | MARK
    if offset is not None:
        packed = packed | ((torch.round(offset).clamp(-256, 255).long() & 0x1FF) << OFFSET_AT)
    return packed


def unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the offset in each number."""
    low = packed & 0xFFFFFFFF
    scale = (low - ((low >> 31) << 32)).int().view(torch.float32)  # as a signed number of 32 bits
    nine = (packed >> OFFSET_AT) & 0x1FF
    return scale, (nine - ((nine >> 8) << 9)).float()


def products(x1: Tensor, x2: Tensor) -> Tensor:
    """x1 @ x2 in int32. In float64, whose matmul is exact here and much faster than that of whole numbers."""
    return (x1.double() @ x2.double()).to(torch.int32)


@reference(
    "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None, "
    "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0, "
    "int inner_precise=0) -> Tensor"
)
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
) -> Tensor:
    op = "npu_weight_quant_batchmatmul"
    need_types(op, FLOATS, x=x, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset, bias=bias)
    need_types(op, (torch.int8,), weight=weight)
    not_emulated(op, quant_scale=quant_scale, quant_offset=quant_offset)
    need(x.shape[-1] == weight.shape[-2], op, f"x {list(x.shape)} and weight {list(weight.shape)} do not fit")
    wide = weight.float()
    if antiquant_offset is not None:
        wide = wide + for_weight(antiquant_offset, weight, antiquant_group_size)
    y = x.float() @ (wide * for_weight(antiquant_scale, weight, antiquant_group_size))
    return (y if bias is None else y + bias.float()).to(x.dtype)


def for_weight(values: Tensor, weight: Tensor, group: int) -> Tensor:
    """One for all, one for a column, or one for each `group` rows of a column."""
    if group == 0 or values.dim() < 2:
        return values.float()
    return values.float().repeat_interleave(group, -2)[..., : weight.shape[-2], :]


# Grouped matmul: rows of x in groups, each with a weight of its own.

_GROUPED = (
    "Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
    "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
    "{group_list}, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type={group_type}, int? group_list_type=0, "
    "int? act_type=0, int[]? tuning_config=None, ScalarType? output_dtype=None) -> Tensor[]"
)


class Expert(NamedTuple):
    """A weight with what goes with it: `scale` for int8 by int8, `antiquant` (scale, offset) for a weight alone in int8."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    antiquant: tuple[Tensor | None, Tensor | None]


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,  # for speed only
    output_dtype: torch.dtype | None = None,
    **others: Any,
) -> list[Tensor]:
    op = "npu_grouped_matmul"
    not_emulated(op, **others)
    need(not act_type, op, f"act_type {act_type} is not emulated, only 0")
    need(group_type in (None, -1, 0), op, f"group_type {group_type} is not emulated, only -1 and 0")
    need(group_list_type in (None, 0, 1), op, f"group_list_type {group_list_type} is not emulated, only 0 and 1")
    check_quantised(op, x, weight, scale, per_token_scale, antiquant_scale, output_dtype)
    need(antiquant_offset is None or antiquant_scale is not None, op, "antiquant_offset needs antiquant_scale")
    target = output_dtype or x[0].dtype
    lists = (bias, scale, antiquant_scale, antiquant_offset)
    experts = [Expert(w, b, s, (a, o)) for w, b, s, a, o in zip(*(apart(given, weight) for given in (weight, *lists)))]
    rows = [None] * len(x) if per_token_scale is None else per_token_scale
    if group_list is None:
        need(len(x) == len(experts), op, f"{len(x)} x and {len(experts)} weights need group_list to be told apart")
        ys = [product(one, expert, by_row).to(target) for one, expert, by_row in zip(x, experts, rows)]
        return [torch.cat(ys)] if split_item in (2, 3) else ys
    need(len(x) == 1, op, f"{len(x)} x with group_list is not emulated, only one")
    need(split_item in (2, 3), op, f"split_item {split_item} with group_list is not emulated, only 2 and 3: one output")
    return [one_after_another(x[0], experts, rows[0], ends_of(group_list, group_list_type, x[0])).to(target)]


def check_quantised(
    op: str,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    scale: Sequence[Tensor] | None,
    by_row: Sequence[Tensor] | None,
    antiquant: Sequence[Tensor] | None,
    output_dtype: torch.dtype | None,
) -> None:
    """int8 by int8 has scales, floats by int8 the others, and floats by floats none."""
    for t in (*x, *weight):
        need_types(op, (*FLOATS, torch.int8), x_or_weight=t)
    exact, stored = x[0].dtype == torch.int8, weight[0].dtype == torch.int8
    need(stored or not exact, op, f"x is torch.int8, and weight {weight[0].dtype}")
    need(exact or (scale is None and by_row is None), op, "scale and per_token_scale are for x in int8")
    need(
        (antiquant is not None) == (stored and not exact),
        op,
        "antiquant_scale is for a weight in int8 and x that is not",
    )
    if exact:
        need(output_dtype in (*FLOATS[:2], torch.int32), op, "x in int8 needs output_dtype float16, bfloat16 or int32")
        need(
            (scale is None) == (output_dtype == torch.int32), op, "an output of int32 has no scale, and others need one"
        )


def apart(given: Sequence[Tensor] | None, weight: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """One for each expert: lists have one each, or a single tensor with the experts along its first axis."""
    in_one = len(weight) == 1 and weight[0].dim() == 3
    count = weight[0].shape[0] if in_one else len(weight)
    if given is None:
        return [None] * count
    return [*given[0]] if len(given) == 1 and (in_one or count > 1) else [*given]


def product(x: Tensor, expert: Expert, by_row: Tensor | None) -> Tensor:
    weight, bias, scale, (antiquant, offset) = expert
    if x.dtype == torch.int8:
        sums = products(x, weight)
        if bias is not None and bias.dtype == torch.int32:
            sums, bias = sums + bias, None
        if scale is None:
            return sums
        y = sums.float() * (unpacked(scale)[0] if scale.dtype == torch.int64 else scale.float())
        y = y if by_row is None else y * by_row.float().unsqueeze(-1)
    else:
        wide = weight.float() if antiquant is None else opened_weight(weight, antiquant, offset)
        y = x.float() @ wide
    return y if bias is None else y + bias.float()


def opened_weight(weight: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """(weight + offset) · scale, for a column or for each group of its rows."""
    group = weight.shape[-2] // scale.shape[-2] if scale.dim() > 1 else 0
    wide = weight.float() if offset is None else weight.float() + for_weight(offset, weight, group)
    return wide * for_weight(scale, weight, group)


def ends_of(group_list: Tensor | Sequence[int], kind: int | None, x: Tensor) -> Tensor:
    """Where each group ends; `group_list` says that, or how many rows it has."""
    if not isinstance(group_list, Tensor):
        group_list = torch.cat([torch.full((1,), n, device=x.device) for n in group_list])
    return group_list.long().cumsum(0) if kind == 1 else group_list.long()


def one_after_another(x: Tensor, experts: Sequence[Expert], by_row: Tensor | None, ends: Tensor) -> Tensor:
    """Every weight on every row, of which its group's are taken: sizes that only the device knows stay there, as a graph
    needs it. Rows behind the last group are zeros."""
    group = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True).unsqueeze(-1)
    y: Tensor | int = 0
    for i, expert in enumerate(experts):
        y = torch.where(group == i, product(x, expert, by_row), y)
    assert isinstance(y, Tensor)
    return y


for _name, _groups, _kind in (("", "Tensor? group_list=None", "None"), (".List", "int[]? group_list=None", "-1")):
    reference(f"npu_grouped_matmul{_name}({_GROUPED.format(group_list=_groups, group_type=_kind)}")(grouped_matmul)
