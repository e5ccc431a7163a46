"""Numbers in eight and in four bits, and matmuls of them.

    q, scale = torch_npu.npu_dynamic_quant(x)                           scale = max|row| / 127, q = round(x / scale)
    q = torch_npu.npu_quantize(x, scales, zeros, torch.qint8, axis=-1)  round(x / scales) + zeros
    y = torch_npu.npu_quant_matmul(a, b, scale, pertoken_scale=s, output_dtype=torch.bfloat16)
    y = torch_npu.npu_weight_quant_batchmatmul(x, weight, scale, offset)    x @ ((weight + offset) · scale)
    packed = torch_npu.npu_convert_weight_to_int4pack(weight)           eight int4 in an int32
    packed = torch_npu.npu_trans_quant_param(scale, offset)             one int64 for each scale, as some outputs want it

PyTorch has no int4: where an op takes int32 for it, each has eight, the first in its lowest bits. Sums of products of
whole numbers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

QUANTISED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
PLAIN = (torch.int8, torch.uint8, torch.int32)
# The largest number of each type that a row's scale is found for; quint4x2 stands for int4.
LARGEST = {torch.int8: 127.0, torch.quint4x2: 7.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


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
    need(
        dst_type is None or dst_type in LARGEST, op, f"dst_type {dst_type} is not one of {', '.join(map(str, LARGEST))}"
    )
    target = dst_type or torch.int8
    wide = x.float()
    if smooth_scales is not None:
        wide = wide * smoothing(op, x, smooth_scales, group_index)
    scale = wide.abs().amax(-1, keepdim=True) / LARGEST[target]
    unit = wide / scale.masked_fill(scale == 0, 1.0)
    if target == torch.quint4x2:
        return packed_int4(torch.round(unit)), scale.squeeze(-1)
    return (torch.round(unit) if target == torch.int8 else unit).to(target), scale.squeeze(-1)


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
    need(
        QUANTISED.get(dtype, dtype) in (*PLAIN, *LARGEST),
        op,
        f"dtype {dtype} is none of the op's: whole numbers in 4, 8 or 32 bits, and eight-bit floats",
    )
    target = QUANTISED.get(dtype, dtype)
    if not div_mode:  # there it is the last axis or the one before
        axis = -2 if axis == -2 else -1
    factor = along(op, scales, x, axis).float()
    wide = x.float() / factor if div_mode else x.float() * factor
    if zero_points is not None:
        wide = wide + along(op, zero_points, x, axis).float()
    if target == torch.quint4x2:
        return packed_int4(torch.round(wide).clamp(-8, 7))
    if target in PLAIN:
        return rounded(wide, target)
    return wide.clamp(-LARGEST[target], LARGEST[target]).to(target)


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


# -- int4 -----------------------------------------------------------------------------------------------------------
@reference("npu_convert_weight_to_int4pack(Tensor weight, int inner_k_tiles=0) -> Tensor")
def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    op = "npu_convert_weight_to_int4pack"
    need_types(op, (torch.int32,), weight=weight)
    need(weight.shape[-1] % 8 == 0, op, f"the last axis of weight {list(weight.shape)} has to be a multiple of 8")
    return packed_int4(weight)


def packed_int4(code: Tensor) -> Tensor:
    """Whole numbers from -8 to 7, eight along the last axis to an int32."""
    shifts = 4 * torch.arange(8, device=code.device)
    whole = ((code.to(torch.int64) & 15).unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


def unpacked_int4(packed: Tensor, axis: int = -1) -> Tensor:
    """The numbers as int8: eight times as many along an axis."""
    shifts = 4 * torch.arange(8, device=packed.device)
    four = (packed.movedim(axis, -1).long().unsqueeze(-1) >> shifts) & 15
    return torch.where(four >= 8, four - 16, four).flatten(-2).movedim(-1, axis).to(torch.int8)


def unpacked_weight(weight: Tensor, inner: int) -> Tensor:
    """[…, inner, n] of a weight in int4, which is packed along n, or along the inner axis where it is transposed; another
    weight as it is."""
    if weight.dtype != torch.int32:
        return weight
    return unpacked_int4(weight, -1 if weight.shape[-2] == inner else -2)


# -- products -------------------------------------------------------------------------------------------------------
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
    """x1 and x2 in int8, or both in int4 (int32)."""
    op = "npu_quant_matmul"
    need_types(op, (torch.int8, torch.int32), x1=x1)
    need_types(op, (x1.dtype,), x2=x2)
    need_types(op, (torch.float32, torch.bfloat16, torch.int64), scale=scale)
    need_types(op, (torch.float32,), offset=offset, pertoken_scale=pertoken_scale)
    not_emulated(op, group_sizes=group_sizes)
    need(scale.dim() < 2 or scale.shape[-2] == 1, op, "a scale for each group of x2's rows is not emulated")
    target = output_dtype or torch.int8
    need(target in (torch.int8, torch.int32, *FLOATS[:2]), op, f"output_dtype {target} is not one of the op's")
    need(offset is None or target == torch.int8, op, "offset is for an output of int8")
    if x1.dtype == torch.int32:
        x1 = unpacked_int4(x1)
        x2 = unpacked_weight(x2, x1.shape[-1])
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
    need(
        round_mode in (0, 1), op, f"round_mode is {round_mode}, and has to be 0 (cut off) or 1 (nearest, half to even)"
    )
    bits = scale.contiguous().view(torch.int32).long()
    if round_mode:
        bits = bits + 0xFFF + ((bits >> 13) & 1)
    packed = (bits & SCALE_BITS) | MARK
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
    """A weight in int8, or in int4 (int32); int8 with quant_scale."""
    op = "npu_weight_quant_batchmatmul"
    need_types(op, FLOATS, x=x, bias=bias)
    need_types(op, (*FLOATS, torch.int64), antiquant_scale=antiquant_scale)
    need_types(op, (*FLOATS, torch.int32), antiquant_offset=antiquant_offset)
    need_types(op, (torch.int8, torch.int32), weight=weight)
    need_types(op, (torch.float32, torch.int64), quant_scale=quant_scale)
    need(quant_offset is None or quant_scale is not None, op, "quant_offset needs quant_scale")
    weight = unpacked_weight(weight, x.shape[-1])
    need(x.shape[-1] == weight.shape[-2], op, f"x {list(x.shape)} and weight {list(weight.shape)} do not fit")
    wide = weight.float()
    if antiquant_offset is not None:
        wide = wide + for_weight(antiquant_offset, weight, antiquant_group_size)
    scale = unpacked(antiquant_scale)[0] if antiquant_scale.dtype == torch.int64 else antiquant_scale
    y = x.float() @ (wide * for_weight(scale, weight, antiquant_group_size))
    y = y if bias is None else y + bias.float()
    if quant_scale is None:
        return y.to(x.dtype)
    factor, zero = unpacked(quant_scale) if quant_scale.dtype == torch.int64 else (quant_scale, None)
    zero = zero if quant_offset is None else quant_offset
    return rounded(y * factor if zero is None else y * factor + zero, torch.int8)


def for_weight(values: Tensor, weight: Tensor, group: int) -> Tensor:
    """One for all, one for a column, or one for each `group` rows of a column."""
    if group == 0 or values.dim() < 2:
        return values.float()
    return values.float().repeat_interleave(group, -2)[..., : weight.shape[-2], :]
