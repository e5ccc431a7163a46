"""Numbers in eight or four bits with powers of two as scales, one for each 32 of them: the MX formats.

    y, scale = torch_npu.npu_dynamic_mx_quant(x, dst_type=torch_npu.float8_e4m3fn)      32 numbers along an axis
    y, a, b = torch_npu.npu_dynamic_block_mx_quant(x, dst_type=24)                       blocks of 32 × 32
    y, scale = torch_npu.npu_swiglu_mx_quant(x, activate_left=True, dst_type=24)         behind a gate, or a norm
    x = torch_npu.npu_anti_mx_quant(y, scale)                                            the way back

`scale_alg` 0: the exponent of the largest number less that of the type's largest; 1: rounded up, so that nothing is
beyond. Scales are pairs: along the axis there are half as many, an odd one has 2⁻¹²⁷ beside it, and the pairs are the
last axis. Four-bit floats are two in a byte, the first in the low half. HiFloat8 is not emulated, and of the ways to
round only "rint".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu.gated import gated
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

BLOCK = 32
NOTHING = 2.0**-127  # the smallest scale: of zeros, and beside an odd one


class MxFormat(NamedTuple):
    """A target: the torch type that holds it (two to a byte: uint8), the largest number, its exponent."""

    dtype: torch.dtype
    largest: float
    exponent: int


FORMATS = {
    23: MxFormat(torch.float8_e5m2, 57344.0, 15),
    24: MxFormat(torch.float8_e4m3fn, 448.0, 8),
    291: MxFormat(torch.float8_e5m2, 57344.0, 15),
    292: MxFormat(torch.float8_e4m3fn, 448.0, 8),
    296: MxFormat(torch.uint8, 6.0, 2),  # float4_e2m1fn_x2
    297: MxFormat(torch.uint8, 1.75, 0),  # float4_e1m2fn_x2
}
FOUR_BITS = (296, 297)
NUMBERS = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}  # torch's numbers of types


def format_of(
    op: str, dst_type: int, round_mode: str, scale_alg: int = 0, algorithms: tuple[int, ...] = (0, 1)
) -> MxFormat:
    need(dst_type in FORMATS, op, f"dst_type {dst_type} is not emulated, only {', '.join(map(str, FORMATS))}")
    need(round_mode == "rint", op, f"round_mode {round_mode!r} is not emulated, only 'rint'")
    need(scale_alg in algorithms, op, f"scale_alg {scale_alg} is not emulated, only {algorithms}")
    need(scale_alg == 0 or dst_type not in FOUR_BITS, op, "scale_alg 1 is for eight-bit floats")
    return FORMATS[dst_type]


# -- four bits ------------------------------------------------------------------------------------------------------
def codes(x: Tensor, dst_type: int) -> Tensor:
    """The nearest numbers of four bits, half to even: a sign and three bits."""
    size = x.abs().clamp(max=FORMATS[dst_type].largest)
    if dst_type == 297:
        code = torch.round(size * 4)  # 0, ¼, … 1¾
    else:  # 0, ½, 1, 1½, 2, 3, 4, 6
        code = torch.where(size <= 2, torch.round(size * 2), torch.round(size) + 2)
        code = torch.where(size <= 4, code, torch.round(size / 2) + 4)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def packed(code: Tensor) -> Tensor:
    return code[..., 0::2] | (code[..., 1::2] << 4)


def opened(y: Tensor, dst_type: int) -> Tensor:
    code = torch.stack([y & 15, y >> 4], -1).flatten(-2).float()
    size = code % 8
    if dst_type == 297:
        size = size / 4
    else:
        size = torch.where(size <= 4, size / 2, torch.where(size <= 6, size - 2, (size - 4) * 2))
    return torch.where(code >= 8, -size, size)


def narrowed(x: Tensor, dst_type: int) -> Tensor:
    """To the nearest number of the type, and to its largest where x is beyond."""
    target = FORMATS[dst_type]
    if dst_type in FOUR_BITS:
        return packed(codes(x, dst_type))
    return x.clamp(-target.largest, target.largest).to(target.dtype)


# -- scales ---------------------------------------------------------------------------------------------------------
def scale_of(peak: Tensor, target: MxFormat, scale_alg: int) -> Tensor:
    """The power of two for numbers whose largest is `peak`."""
    if scale_alg == 0:
        exponent = torch.frexp(peak)[1] - 1 - target.exponent
    else:
        part, power = torch.frexp(peak / target.largest)
        exponent = torch.where(part == 0.5, power - 1, power)
    return torch.exp2(torch.where(peak == 0, -127, exponent).clamp(-127, 127).float())


def in_blocks(x: Tensor, axis: int, size: int) -> Tensor:
    """[…, n, …] as […, blocks, size, …], with zeros behind."""
    missing = -x.shape[axis] % size
    x = functional.pad(x.movedim(axis, -1), (0, missing)).movedim(-1, axis)
    return x.unflatten(axis, (-1, size))


def spread(scale: Tensor, axis: int, length: int) -> Tensor:
    """One for each number along the axis."""
    return scale.repeat_interleave(BLOCK, axis).narrow(axis, 0, length)


def in_pairs(scale: Tensor, axis: int) -> Tensor:
    """[…, blocks, …] as […, pairs, …, 2], in eight bits."""
    moved = scale.movedim(axis, -1)
    pairs = functional.pad(moved, (0, moved.shape[-1] % 2), value=NOTHING).unflatten(-1, (-1, 2))
    return pairs.movedim(-2, axis % scale.dim()).contiguous().to(torch.float8_e8m0fnu)


def quantised(x: Tensor, dst_type: int, scale_alg: int = 0, axis: int = -1) -> tuple[Tensor, Tensor]:
    """32 numbers along an axis share a scale."""
    axis = axis % x.dim()
    wide = x.float()
    peak = in_blocks(wide.movedim(axis, -1), -1, BLOCK).abs().amax(-1).movedim(-1, axis)
    scale = scale_of(peak, FORMATS[dst_type], scale_alg)
    return narrowed(wide / spread(scale, axis, x.shape[axis]), dst_type), in_pairs(scale, axis)


# -- the ops --------------------------------------------------------------------------------------------------------
@reference(
    "npu_dynamic_mx_quant(Tensor x, *, int axis=-1, str round_mode='rint', int dst_type=296, int block_size=32, "
    "int scale_alg=0) -> (Tensor y, Tensor mxscale)",
    ge="DynamicMxQuant dst_type# -> y mxscale",
)
def npu_dynamic_mx_quant(
    x: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int = 0,
) -> tuple[Tensor, Tensor]:
    op = "npu_dynamic_mx_quant"
    need_types(op, FLOATS, x=x)
    format_of(op, dst_type, round_mode, scale_alg)
    need(block_size == BLOCK, op, f"block_size {block_size} is not emulated, only {BLOCK}")
    return quantised(x, dst_type, scale_alg, axis)


@reference(
    "npu_dynamic_mx_quant_with_dual_axis(Tensor input, *, str round_mode='rint', int dst_type=296, int scale_alg=0, "
    "float dst_type_max=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
    ge="DynamicMxQuantWithDualAxis input:x dst_type# -> y1 mxscale1 y2 mxscale2",
)
def npu_dynamic_mx_quant_with_dual_axis(
    x: Tensor, *, round_mode: str = "rint", dst_type: int = 296, scale_alg: int = 0, dst_type_max: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Along the last axis, and along the one before it."""
    op = "npu_dynamic_mx_quant_with_dual_axis"
    need_types(op, FLOATS[:2], input=x)
    need(x.dim() > 1, op, "input has to have two axes or more")
    need(dst_type_max == 0, op, f"dst_type_max {dst_type_max} is not emulated, only 0")
    format_of(op, dst_type, round_mode, scale_alg)
    return (*quantised(x, dst_type, scale_alg), *quantised(x, dst_type, scale_alg, -2))


@reference(
    "npu_dynamic_block_mx_quant(Tensor input, *, str round_mode='rint', int dst_type=296, int scale_alg=0, "
    "float dst_type_max=0.0) -> (Tensor, Tensor, Tensor)",
    ge="DynamicBlockMxQuant input:x dst_type# -> y scale1 scale2",
)
def npu_dynamic_block_mx_quant(
    x: Tensor, *, round_mode: str = "rint", dst_type: int = 296, scale_alg: int = 0, dst_type_max: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """A scale for each 32 × 32, given for every row, and for every column."""
    op = "npu_dynamic_block_mx_quant"
    need_types(op, FLOATS[:2], input=x)
    need(x.dim() in (2, 3), op, f"input has {x.dim()} axes, and has to have 2 or 3")
    need(dst_type_max == 0, op, f"dst_type_max {dst_type_max} is not emulated, only 0")
    target = format_of(op, dst_type, round_mode, scale_alg, (0,))
    wide, (rows, columns) = x.float(), x.shape[-2:]
    blocks = in_blocks(in_blocks(wide, -1, BLOCK), -3, BLOCK)  # […, row blocks, 32, column blocks, 32]
    scale = scale_of(blocks.abs().amax((-1, -3)), target, 0)
    of_rows, of_columns = spread(scale, -2, rows), spread(scale, -1, columns)
    y = narrowed(wide / spread(of_rows, -1, columns), dst_type)
    return y, in_pairs(of_rows, -1), in_pairs(of_columns, -2)


@reference(
    "npu_dynamic_dual_level_mx_quant(Tensor input, *, Tensor? smooth_scale=None, str round_mode='rint') "
    "-> (Tensor, Tensor, Tensor)",
    ge="DynamicDualLevelMxQuant input:x -> y level0_scale level1_scale",
)
def npu_dynamic_dual_level_mx_quant(
    x: Tensor, *, smooth_scale: Tensor | None = None, round_mode: str = "rint"
) -> tuple[Tensor, Tensor, Tensor]:
    """512 numbers share a scale in float32, and what is left of them 32 another: to four bits."""
    op = "npu_dynamic_dual_level_mx_quant"
    need_types(op, FLOATS[:2], input=x)
    not_emulated(op, smooth_scale=smooth_scale)
    target = format_of(op, 296, round_mode)
    wide = x.float()
    first = in_blocks(wide, -1, 512).abs().amax(-1) / target.largest
    by = first.masked_fill(first == 0, 1.0).repeat_interleave(512, -1)[..., : x.shape[-1]]
    y, second = quantised((wide / by).to(x.dtype), 296)
    return y, first, second


@reference(
    "npu_grouped_dynamic_mx_quant(Tensor x, Tensor group_index, *, str round_mode='rint', int dst_type=23, "
    "int blocksize=32, int scale_alg=0, float dst_type_max=0.0) -> (Tensor, Tensor)",
    ge="GroupedDynamicMxQuant dst_type# -> y mxscale",
)
def npu_grouped_dynamic_mx_quant(
    x: Tensor,
    group_index: Tensor,
    *,
    round_mode: str = "rint",
    dst_type: int = 23,
    blocksize: int = 32,
    scale_alg: int = 0,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """32 rows of a group share a scale. The scales of group i begin behind as many pairs as 64 rows before it, and i."""
    op = "npu_grouped_dynamic_mx_quant"
    need_types(op, FLOATS[:2], x=x)
    need(x.dim() == 2, op, f"x has {x.dim()} axes, and has to have 2")
    need(blocksize == BLOCK and dst_type_max == 0, op, "other blocks than 32, and dst_type_max, are not emulated")
    target = format_of(op, dst_type, round_mode, scale_alg)
    slot = slots(x.shape[0], group_index, 2 * BLOCK) * 2 + place_in_group(x.shape[0], group_index) // BLOCK % 2
    slot = slot + place_in_group(x.shape[0], group_index) // (2 * BLOCK) * 2
    pairs = x.shape[0] // (2 * BLOCK) + group_index.shape[0]
    wide = x.float()
    peak = peaks(wide.abs(), slot, 2 * pairs)
    scale = scale_of(peak, target, scale_alg)
    y = narrowed(wide / scale[slot], dst_type)
    return y, scale.unflatten(0, (-1, 2)).transpose(1, 2).contiguous().to(torch.float8_e8m0fnu)


@reference(
    "npu_grouped_dynamic_block_quant(Tensor input, Tensor group_list, *, float min_scale=0.0, str round_mode='rint', "
    "int dst_type=291, int row_block_size=1, int col_block_size=128, int group_list_type=0, float dst_type_max=0.0) "
    "-> (Tensor, Tensor)",
    ge="GroupedDynamicBlockQuant input:x group_list dst_type# -> y scale",
)
def npu_grouped_dynamic_block_quant(
    x: Tensor,
    group_list: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 291,
    row_block_size: int = 1,
    col_block_size: int = 128,
    group_list_type: int = 0,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """scale = the largest of a block / the largest of the type, and at most 1 / `min_scale`; rows of two groups are never
    in one block."""
    op = "npu_grouped_dynamic_block_quant"
    need_types(op, FLOATS[:2], input=x)
    need(x.dim() in (2, 3), op, f"input has {x.dim()} axes, and has to have 2 or 3")
    need(group_list_type == 0 and dst_type_max == 0, op, "group_list_type 1 and dst_type_max are not emulated")
    need(dst_type not in FOUR_BITS, op, f"dst_type is {dst_type}, and has to be an eight-bit float")
    target = format_of(op, dst_type, round_mode)
    rows = x.shape[-2]
    slot = slots(rows, group_list, row_block_size) + place_in_group(rows, group_list) // row_block_size
    wide = x.float()
    peak = in_blocks(wide, -1, col_block_size).abs().amax(-1)
    scale = peaks(peak, slot, rows // row_block_size + group_list.shape[0]) / target.largest
    scale = scale.clamp(max=1 / min_scale) if min_scale else scale
    by = scale.index_select(-2, slot).repeat_interleave(col_block_size, -1)[..., : x.shape[-1]]
    return narrowed(wide / by.masked_fill(by == 0, 1.0), dst_type), scale


def peaks(x: Tensor, slot: Tensor, count: int) -> Tensor:
    """The largest of all rows with the same slot, for each of `count`; 0 where there is none."""
    at = slot.unsqueeze(-1).expand(x.shape)
    return x.new_zeros(*x.shape[:-2], count, x.shape[-1]).scatter_reduce(-2, at, x, "amax")


def slots(rows: int, ends: Tensor, block: int) -> Tensor:
    """The first of the blocks that the group of each row has: those of the rows before, and one for each group before."""
    group, begins = groups(rows, ends)
    return begins[group] // block + group


def place_in_group(rows: int, ends: Tensor) -> Tensor:
    group, begins = groups(rows, ends)
    return torch.arange(rows, device=ends.device) - begins[group]


def groups(rows: int, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each row, and where each group begins."""
    ends = ends.long()
    group = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True).clamp(max=ends.shape[0] - 1)
    return group, functional.pad(ends, (1, 0))[:-1]


@reference(
    "npu_anti_mx_quant(Tensor x, Tensor mxscale, *, int axis=-1, int dst_type=15, int src_type=292) -> Tensor",
    ge="AntiMxQuant",
)
def npu_anti_mx_quant(x: Tensor, mxscale: Tensor, *, axis: int = -1, dst_type: int = 15, src_type: int = 292) -> Tensor:
    op = "npu_anti_mx_quant"
    need(dst_type in NUMBERS, op, f"dst_type is {dst_type}, and has to be one of {', '.join(map(str, NUMBERS))}")
    need(src_type in FORMATS, op, f"src_type {src_type} is not emulated, only {', '.join(map(str, FORMATS))}")
    need(x.dtype == FORMATS[src_type].dtype, op, f"x is {x.dtype}, and src_type {src_type}")
    wide = opened(x, src_type) if src_type in FOUR_BITS else x.float()
    axis = axis % x.dim()
    pairs = mxscale if mxscale.dtype == torch.float8_e8m0fnu else mxscale.view(torch.float8_e8m0fnu)
    scale = pairs.float().movedim(-1, axis + 1).flatten(axis, axis + 1)
    return (wide * spread(scale, axis, wide.shape[axis])).to(NUMBERS[dst_type])


@reference(
    "npu_swiglu_mx_quant(Tensor x, *, Tensor? group_index=None, int activate_dim=-1, bool activate_left=False, "
    "int swiglu_mode=0, float clamp_limit=7.0, float glu_alpha=1.702, float glu_bias=1.0, int group_mode=0, "
    "int axis=-1, int dst_type=296, str round_mode='rint', int scale_alg=0, float max_dtype_value=0) -> (Tensor, Tensor)",
    ge="SwigluMxQuant dst_type# -> y mxscale",
)
def npu_swiglu_mx_quant(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    activate_dim: int = -1,
    activate_left: bool = False,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
    group_mode: int = 0,
    axis: int = -1,
    dst_type: int = 296,
    round_mode: str = "rint",
    scale_alg: int = 0,
    max_dtype_value: float = 0,
) -> tuple[Tensor, Tensor]:
    """Rows behind the last group, which hold anything there, are as the others are here."""
    op = "npu_swiglu_mx_quant"
    need_types(op, FLOATS[:2], x=x)
    need(max_dtype_value == 0, op, f"max_dtype_value {max_dtype_value} is not emulated, only 0")
    format_of(op, dst_type, round_mode, scale_alg)
    y = gated(op, x.float(), activate_left, swiglu_mode, (glu_alpha, clamp_limit, glu_bias), activate_dim)
    return quantised(y, dst_type, scale_alg, axis)


_NORM = (
    "Tensor gamma, *, Tensor? beta=None, float epsilon=1e-06, int scale_alg=0, str round_mode='rint', int dst_type=296"
)


@reference(
    f"npu_add_rms_norm_dynamic_mx_quant(Tensor x1, Tensor x2, {_NORM}) -> (Tensor, Tensor, Tensor, Tensor)",
    ge="AddRmsNormDynamicMxQuant dst_type# -> y x mxscale rstd",
)
def npu_add_rms_norm_dynamic_mx_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int = 296,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1 / √(…) is always there, also where the chip leaves it out."""
    op = "npu_add_rms_norm_dynamic_mx_quant"
    need_types(op, FLOATS[:2], x1=x1, x2=x2)
    format_of(op, dst_type, round_mode, scale_alg)
    wide = x1.float() + x2.float()
    y, rstd = normed(wide, gamma, beta, epsilon)
    narrow, scale = quantised(y, dst_type, scale_alg)
    return narrow, wide.to(x1.dtype), scale, rstd


def normed(wide: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The RMS norm, and 1 / √(…)."""
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    y = wide * rstd * gamma.float()
    return y if beta is None else y + beta.float(), rstd


@reference(
    f"npu_rms_norm_dynamic_mx_quant(Tensor x, {_NORM}) -> (Tensor, Tensor, Tensor)",
    ge="RmsNormDynamicMxQuant dst_type# -> y mxscale rstd",
)
def npu_rms_norm_dynamic_mx_quant(
    x: Tensor,
    gamma: Tensor,
    *,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int = 296,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "npu_rms_norm_dynamic_mx_quant"
    need_types(op, FLOATS[:2], x=x)
    format_of(op, dst_type, round_mode, scale_alg)
    y, rstd = normed(x.float(), gamma, beta, epsilon)
    return (*quantised(y, dst_type, scale_alg), rstd)


@reference(
    "npu_quant_max(Tensor x, Tensor scale, *, str round_mode='rint', int dst_dtype=291) -> (Tensor, Tensor)",
    ge="QuantMax dst_dtype:dst_type# -> y amax",
)
def npu_quant_max(x: Tensor, scale: Tensor, *, round_mode: str = "rint", dst_dtype: int = 291) -> tuple[Tensor, Tensor]:
    """x · scale in eight bits, and the largest |x|, for the scale of the next step."""
    op = "npu_quant_max"
    need_types(op, FLOATS, x=x)
    need(dst_dtype not in FOUR_BITS, op, f"dst_dtype is {dst_dtype}, and has to be an eight-bit float")
    format_of(op, dst_dtype, round_mode)
    return narrowed(x.float() * scale.float(), dst_dtype), x.abs().amax().reshape(1)
