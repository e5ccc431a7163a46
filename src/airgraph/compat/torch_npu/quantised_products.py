"""Products of numbers in few bits, with what makes them few or brings them back, in one op.

    y = torch_npu.npu_quant_matmul_dequant(x, weight, scale)                 x to int8 by row, a product, and back
    y = torch_npu.npu_quant_conv2d(x, weight, scale, [1, 1], [0, 0], [1, 1])  int8 · int8, scaled by channel
    y = torch_npu.npu_transpose_quant_batchmatmul(a, b, torch.float16, x1_scale=s, x2_scale=t, perm_x1=[1, 0, 2])
    torch_npu.npu_add_quant_matmul_(total, a, b, t, x1_scale=s)              total += a · b, scaled
    q, scale = torch_npu.npu_rotate_quant(x, rotation)                       blocks of x times a matrix, then by row
    y = torch_npu.npu_batch_gather_matmul(y, x, b, indices, a)               y + x · a · b, for each row its own (LoRA)

HiFloat8 is not emulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu.mx_quantisation import BLOCK, NUMBERS, groups, quantised
from airgraph.compat.torch_npu.quantisation import packed_int4, products, rounded, unpacked
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


# -- int8, and back -------------------------------------------------------------------------------------------------
_DEQUANT = (
    "*, Tensor? bias=None, Tensor? x_scale=None, Tensor? x_offset=None, Tensor? smooth_scale=None, "
    "str? quant_mode='pertoken') -> Tensor"
)


@reference(
    f"npu_quant_matmul_dequant(Tensor x, Tensor quantized_weight, Tensor weight_scale, {_DEQUANT}",
    ge="QuantMatmulDequant quant_mode:x_quant_mode",
)
def npu_quant_matmul_dequant(
    x: Tensor,
    quantized_weight: Tensor,
    weight_scale: Tensor,
    *,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_offset: Tensor | None = None,
    smooth_scale: Tensor | None = None,
    quant_mode: str | None = "pertoken",
) -> Tensor:
    """The weight is [n, k]."""
    op = "npu_quant_matmul_dequant"
    need(quantized_weight.dim() == 2, op, f"the weight has {quantized_weight.dim()} axes, and has to have 2")
    q, scale = by_row(op, x, x_scale, smooth_scale, quant_mode, quantized_weight, bias, x_offset)
    return (products(q, quantized_weight.t()).float() * weight_scale.float() * scale).to(x.dtype)


@reference(
    "npu_quant_grouped_matmul_dequant(Tensor x, Tensor quantized_weight, Tensor weight_scale, Tensor group_list, "
    f"{_DEQUANT}",
    ge="QuantGroupedMatmulDequant quant_mode:x_quant_mode",
)
def npu_quant_grouped_matmul_dequant(
    x: Tensor,
    quantized_weight: Tensor,
    weight_scale: Tensor,
    group_list: Tensor,
    *,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_offset: Tensor | None = None,
    smooth_scale: Tensor | None = None,
    quant_mode: str | None = "pertoken",
) -> Tensor:
    """Weights [groups, n, k]; `group_list` says where each group of rows ends. Rows behind the last are zeros."""
    op = "npu_quant_grouped_matmul_dequant"
    need(quantized_weight.dim() == 3, op, f"the weight has {quantized_weight.dim()} axes, and has to have 3")
    group, _ = groups(x.shape[0], group_list)
    if smooth_scale is not None and smooth_scale.dim() == 2:
        smooth_scale = smooth_scale[group]
    q, scale = by_row(op, x, x_scale, smooth_scale, quant_mode, quantized_weight, bias, x_offset)
    each = torch.stack([products(q, w.t()).float() * s.float() for w, s in zip(quantized_weight, weight_scale)])
    rows = torch.arange(x.shape[0], device=x.device)
    y = each[group, rows] * scale
    return y.masked_fill((rows >= group_list[-1]).unsqueeze(-1), 0.0).to(x.dtype)


def by_row(
    op: str,
    x: Tensor,
    x_scale: Tensor | None,
    smooth: Tensor | None,
    mode: str | None,
    weight: Tensor,
    bias: Tensor | None,
    offset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """x in int8, and the scale of each row: found, or given for all."""
    need_types(op, (torch.float16,), x=x)
    need_types(op, (torch.int8,), quantized_weight=weight)
    not_emulated(op, bias=bias, x_offset=offset)
    need(mode in ("pertoken", "pertensor"), op, f"quant_mode is {mode!r}, and has to be 'pertoken' or 'pertensor'")
    wide = x.float() if smooth is None else x.float() * smooth.float()
    if mode == "pertensor":
        need(x_scale is not None, op, "quant_mode 'pertensor' needs x_scale")
        assert x_scale is not None
        scale = x_scale.float().reshape(1, 1)
    else:
        scale = wide.abs().amax(-1, keepdim=True) / 127 if x_scale is None else x_scale.float().reshape(-1, 1)
    return rounded(wide / scale.masked_fill(scale == 0, 1.0), torch.int8), scale


@reference(
    "npu_quant_conv2d(Tensor input, Tensor weight, Tensor scale, int[2] strides=1, int[2] pads=0, int[2] dilations=1, "
    "int groups=1, int offset_x=0, str round_mode='rint', ScalarType? output_dtype=None, Tensor? bias=None, "
    "Tensor? offset=None) -> Tensor",
    ge="QuantConv2D input:x weight:filter scale bias offset output_dtype:dtype",
)
def npu_quant_conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    strides: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
    offset_x: int = 0,
    round_mode: str = "rint",
    output_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """A scale for each channel, in float32 or packed by npu_trans_quant_param; a bias in int32 is part of the sums."""
    op = "npu_quant_conv2d"
    need_types(op, (torch.int8,), input=x, weight=weight)
    need_types(op, (torch.int32,), bias=bias)
    not_emulated(op, offset=offset)
    need(round_mode == "rint" and offset_x == 0, op, "offset_x and other ways to round than 'rint' are not emulated")
    target = output_dtype or torch.float16
    need(target in FLOATS[:2], op, f"output_dtype is {target}, and has to be float16 or bfloat16")
    sums = functional.conv2d(x.double(), weight.double(), None, strides, pads, dilations, groups)
    sums = sums if bias is None else sums + bias.double().view(-1, 1, 1)
    factor = unpacked(scale)[0] if scale.dtype == torch.int64 else scale.float()
    return (sums.float() * factor.reshape(-1, 1, 1)).to(target)


# -- eight-bit floats -----------------------------------------------------------------------------------------------
@reference(
    "npu_transpose_quant_batchmatmul(Tensor x1, Tensor x2, int dtype, *, Tensor? bias=None, Tensor? x1_scale=None, "
    "Tensor? x2_scale=None, int[]? group_sizes=None, int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, "
    "int? batch_split_factor=1, int? x1_dtype=None, int? x2_dtype=None) -> Tensor",
    ge="TransposeQuantBatchMatMul",
)
def npu_transpose_quant_batchmatmul(
    x1: Tensor,
    x2: Tensor,
    dtype: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
) -> Tensor:
    """[m, batch, n]. Scales: one for each row and each column, or pairs of powers of two for each 32 along k."""
    op = "npu_transpose_quant_batchmatmul"
    need_types(op, EIGHT_BITS, x1=x1, x2=x2)
    not_emulated(op, bias=bias)
    need(x1.dim() == x2.dim() == 3, op, "x1 and x2 have to have three axes")
    need([*(perm_x1 or (1, 0, 2))] == [1, 0, 2], op, f"perm_x1 is {perm_x1}, and has to be [1, 0, 2]")
    need([*(perm_y or (1, 0, 2))] == [1, 0, 2], op, f"perm_y is {perm_y}, and has to be [1, 0, 2]")
    need(batch_split_factor in (None, 1), op, f"batch_split_factor is {batch_split_factor}, and has to be 1")
    need(dtype in NUMBERS, op, f"dtype is {dtype}, and has to be torch.float16 or torch.bfloat16")
    transposed = [*(perm_x2 or (0, 1, 2))] == [0, 2, 1]
    a, b = x1.float().transpose(0, 1), x2.float().transpose(1, 2) if transposed else x2.float()
    if x1_scale is not None and x1_scale.dim() == 4 and x2_scale is not None:
        a = a * along(x1_scale, -2, a.shape[-1]).transpose(0, 1)
        b = b * (along(x2_scale, -2, b.shape[1]).transpose(1, 2) if transposed else along(x2_scale, -3, b.shape[1]))
        y = a @ b
    else:
        y = a @ b
        y = y if x2_scale is None else y * x2_scale.float()
        y = y if x1_scale is None else y * x1_scale.float().reshape(1, -1, 1)
    return y.transpose(0, 1).to(NUMBERS[dtype]).contiguous()


def along(pairs: Tensor, axis: int, length: int) -> Tensor:
    """[…, pairs, …, 2] of powers of two, one for each number along the axis."""
    typed = pairs if pairs.dtype == torch.float8_e8m0fnu else pairs.view(torch.float8_e8m0fnu)
    axis = axis % pairs.dim()
    scale = typed.float().movedim(-1, axis + 1).flatten(axis, axis + 1)
    return scale.repeat_interleave(BLOCK, axis).narrow(axis, 0, length)


_ADDED = (
    "*, Tensor? x1_scale=None{more}, int[]? group_sizes=None, int? x1_dtype=None, int? x2_dtype=None, "
    "int? x1_scale_dtype=None, int? x2_scale_dtype=None) -> Tensor(a!)"
)


@reference(
    "npu_add_quant_matmul_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, " + _ADDED.format(more=""),
    ge="QuantBatchMatmulInplaceAdd x1 x2 x2_scale self:y x1_scale -> y",
)
def npu_add_quant_matmul_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    *,
    x1_scale: Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
) -> Tensor:
    """x1 [m, k], x2 [k, n]; their scales are pairs for each 32 along k."""
    op = "npu_add_quant_matmul_"
    check_added(op, self, x1, x2, x1_scale, x1_dtype, x2_dtype)
    assert x1_scale is not None
    a = x1.float() * along(x1_scale, 1, x1.shape[1])
    return self.add_(a @ (x2.float() * along(x2_scale, 0, x2.shape[0])))


@reference(
    "npu_add_quant_gmm_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, Tensor group_list, "
    + _ADDED.format(more=", int? group_list_type=0"),
    ge="QuantGroupedMatmulInplaceAdd x1 x2 x2_scale group_list self:y x1_scale -> y",
)
def npu_add_quant_gmm_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    group_list: Tensor,
    *,
    x1_scale: Tensor | None = None,
    group_list_type: int | None = 0,
    group_sizes: Sequence[int] | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
) -> Tensor:
    """Groups along k: `self` is [groups, m, n], x1 [m, k], x2 [k, n]. The scales of group i begin behind as many pairs as
    64 numbers before it, and i."""
    op = "npu_add_quant_gmm_"
    check_added(op, self, x1, x2, x1_scale, x1_dtype, x2_dtype)
    assert x1_scale is not None
    ends = group_list.long().cumsum(0) if group_list_type else group_list.long()
    length = x1.shape[1]
    group, begins = groups(length, ends)
    rows = torch.arange(length, device=x1.device)
    place = rows - begins[group]
    slot = (begins[group] // (2 * BLOCK) + group) * 2 + place // BLOCK
    a = x1.float() * flat(x1_scale, 1)[:, slot]
    b = x2.float() * flat(x2_scale, 0)[slot]
    mine = (group == torch.arange(self.shape[0], device=x1.device).unsqueeze(-1)) & (rows < ends[-1])
    return self.add_(torch.einsum("mk,gk,kn->gmn", a, mine.float(), b))


def flat(pairs: Tensor, axis: int) -> Tensor:
    typed = pairs if pairs.dtype == torch.float8_e8m0fnu else pairs.view(torch.float8_e8m0fnu)
    return typed.float().movedim(-1, axis + 1).flatten(axis, axis + 1)


def check_added(
    op: str, y: Tensor, x1: Tensor, x2: Tensor, scale: Tensor | None, x1_dtype: int | None, x2_dtype: int | None
) -> None:
    need_types(op, (torch.float32,), self=y)
    need_types(op, EIGHT_BITS, x1=x1, x2=x2)
    not_emulated(op, x1_dtype=x1_dtype, x2_dtype=x2_dtype)
    need(scale is not None and scale.dim() == 3, op, "x1_scale has to be given, as pairs")


# -- a matrix before the quantisation -------------------------------------------------------------------------------
@reference(
    "npu_rotate_quant(Tensor x, Tensor rotation, *, float alpha=0.0, ScalarType? dst_dtype=None) -> (Tensor, Tensor)",
    ge="RotateQuant rotation:rot dst_dtype:dst_type -> y scale",
)
def npu_rotate_quant(
    x: Tensor, rotation: Tensor, *, alpha: float = 0.0, dst_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Each k numbers of a row times the matrix [k, k], rounded to the type of x; then `npu_dynamic_quant`."""
    op = "npu_rotate_quant"
    need_types(op, FLOATS[:2], x=x, rotation=rotation)
    need(alpha == 0, op, f"alpha {alpha} is not emulated, only 0")
    need(dst_dtype in (None, torch.int8, torch.qint8), op, f"dst_dtype {dst_dtype} is not emulated, only torch.int8")
    size = rotation.shape[0]
    need(x.shape[-1] % size == 0, op, f"{size} does not divide {x.shape[-1]}")
    blocks = x.float().unflatten(-1, (-1, size))
    rotated = (blocks @ rotation.float()).flatten(-2).to(x.dtype).float()
    scale = rotated.abs().amax(-1) / 127
    return rounded(rotated / scale.masked_fill(scale == 0, 1.0).unsqueeze(-1), torch.int8), scale


@reference(
    "npu_kronecker_quant(Tensor x, Tensor kronecker_p1, Tensor kronecker_p2, float? clip_ratio=None, "
    "int? dst_dtype=None, float? dst_type_max=None) -> (Tensor, Tensor)",
    ge="FlatQuant dst_dtype# -> out quant_scale",
)
def npu_kronecker_quant(
    x: Tensor,
    kronecker_p1: Tensor,
    kronecker_p2: Tensor,
    clip_ratio: float | None = None,
    dst_dtype: int | None = None,
    dst_type_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """p1 · x · p2, in int4 with a scale for each matrix, eight to an int32; or in four-bit floats, 32 to a scale."""
    op = "npu_kronecker_quant"
    need_types(op, FLOATS[:2], x=x, kronecker_p1=kronecker_p1, kronecker_p2=kronecker_p2)
    need(x.dim() == 3, op, f"x has {x.dim()} axes, and has to have 3")
    need(not dst_type_max, op, f"dst_type_max {dst_type_max} is not emulated")
    y = kronecker_p1.float() @ (x.float() @ kronecker_p2.float())
    if dst_dtype is not None:
        need(dst_dtype == 296, op, f"dst_dtype {dst_dtype} is not emulated, only torch_npu.float4_e2m1fn_x2")
        return quantised(y.flatten(1), 296)
    scale = y.abs().amax((1, 2)) / (7 / (1.0 if clip_ratio is None else clip_ratio))
    return packed_int4(torch.round(y / scale.masked_fill(scale == 0, 1.0).view(-1, 1, 1)).clamp(-8, 7)), scale


@reference(
    "npu_batch_gather_matmul(Tensor self, Tensor x, Tensor weight_b, Tensor indices, Tensor? weight_a=None, "
    "int layer_idx=0, float scale=0.001, int y_offset=0, int y_slice_size=-1) -> Tensor",
    ge="AddLora self:y x weight_b:weightB indices weight_a:weightA",
)
def npu_batch_gather_matmul(
    y: Tensor,
    x: Tensor,
    weight_b: Tensor,
    indices: Tensor,
    weight_a: Tensor | None = None,
    layer_idx: int = 0,
    scale: float = 0.001,
    y_offset: int = 0,
    y_slice_size: int = -1,
) -> Tensor:
    """Weights [adapters, layers, out, in]: row i by adapter `indices[i]`, into columns of y; one behind the last: none."""
    op = "npu_batch_gather_matmul"
    need_types(op, (torch.float16,), self=y, x=x, weight_a=weight_a, weight_b=weight_b)
    need(y.dim() == x.dim() == 2 and weight_b.dim() == 4, op, "self and x have to have two axes, and weight_b four")
    width = y.shape[1] if y_slice_size == -1 else y_slice_size
    need(width == weight_b.shape[2], op, f"y_slice_size is {width}, and weight_b has {weight_b.shape[2]} columns")
    inside = x.float().unsqueeze(-1)
    for weight in (weight_a, weight_b):
        if weight is not None:
            layer = functional.pad(weight[:, layer_idx].float(), (0, 0, 0, 0, 0, 1))
            inside = layer[indices.long()] @ inside
    added = inside.squeeze(-1) * scale
    return (y.float() + functional.pad(added, (y_offset, y.shape[1] - y_offset - width))).to(y.dtype)
