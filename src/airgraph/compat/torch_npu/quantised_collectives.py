"""Collectives of numbers in few bits, and products of such numbers with a collective before or after them.

    y = torch_npu.npu_quant_all_reduce(q, scales, group, ranks)                        Σ q · scale over the ranks
    y, whole, _ = torch_npu.npu_all_gather_quant_mm(q, w, group, ranks, x1_scale=s, x2_scale=t, y_dtype=torch.float16)
    y, _ = torch_npu.npu_quant_mm_reduce_scatter(q, w, group, ranks, x1_scale=s, x2_scale=t, y_dtype=torch.float16)
    y, rows = torch_npu.npu_all_to_all_quant_matmul(x, w, group, ranks, x2_scale=t)    x to eight bits behind the exchange
    y, _, _ = torch_npu.npu_alltoallv_quant_gmm(q, w, s, t, group, ranks, sent, received, 5, gmm_x_quant_mode=6, …)

Scales are of a whole tensor, of rows and columns, of blocks of 128 × 128, or pairs of powers of two for each 32 numbers
along k; their shapes and types say which. Numbers are int8, eight-bit floats, or four-bit floats (two in a byte). Not
emulated: HiFloat8, and quantised communication behind a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu.between_devices import exchanged, gathered, product, summed_part
from airgraph.compat.torch_npu.expert_parallel import from_experts, to_experts
from airgraph.compat.torch_npu.mx_quantisation import FORMATS, FOUR_BITS, NUMBERS, narrowed, opened
from airgraph.compat.torch_npu.quantisation import unpacked
from airgraph.compat.torch_npu.quantised_products import EIGHT_BITS, along
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

BLOCK = 128


# -- numbers and their scales ---------------------------------------------------------------------------------------
def widened(op: str, name: str, x: Tensor, kind: int | None, axis: int = -1) -> Tensor:
    """In float32. `kind` is torch_npu's number of a type that torch has no name for; four-bit ones lie along `axis`."""
    if kind in FOUR_BITS:
        need_types(op, (torch.uint8,), **{name: x})
        assert kind is not None
        return opened(x.movedim(axis, -1), kind).movedim(-1, axis)
    need(
        kind in (None, 23, 24, 291, 292), op, f"{name}_dtype {kind} is not emulated, only those of four and eight bits"
    )
    need_types(op, (torch.int8, *EIGHT_BITS), **{name: x})
    return x.float()


def in_blocks(x: Tensor, scale: Tensor) -> bool:
    """Whether scales change along k, and so are no factor of the product."""
    return scale.dim() == 3 or (scale.dim() == 2 and x.dtype in EIGHT_BITS)


def for_rows(scale: Tensor, rows: int, k: int) -> Tensor:
    """Scales of blocks of x1, one for each number of [rows, k]."""
    if scale.shape == (rows, k):
        return scale
    if scale.dim() == 3:
        return along(scale, 1, k)
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]


def for_columns(scale: Tensor, k: int, columns: int) -> Tensor:
    """Scales of blocks of x2, one for each number of [k, columns]."""
    if scale.dim() == 3:
        return along(scale, 0, k)
    return scale.repeat_interleave(BLOCK, 0)[:k].repeat_interleave(BLOCK, 1)[:, :columns]


def factor(scale: Tensor | None, shape: tuple[int, int]) -> Tensor | float:
    if scale is None:
        return 1.0
    return (unpacked(scale)[0] if scale.dtype == torch.int64 else scale.float()).reshape(shape)


def scaled_product(
    op: str,
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    kinds: tuple[int | None, int | None],
    bias_is_scaled: bool,
) -> Tensor:
    """(x1 · x2 + bias) · scales, or x1 · x2 · scales + bias, in float32; plain halves without scales as they are."""
    s1, s2 = scales
    if x1.dtype in FLOATS and s1 is None and s2 is None:
        return product(op, x1, x2, bias)
    a, b = widened(op, "x1", x1, kinds[0]), widened(op, "x2", x2, kinds[1], 0)
    offset = 0.0 if bias is None else bias.float()
    if s1 is not None and s2 is not None and in_blocks(x1, s1):
        return (a * for_rows(s1, *a.shape)) @ (b * for_columns(s2, *b.shape)) + offset
    need(s1 is not None or s2 is not None, op, "x1_scale or x2_scale has to be given")
    scale = factor(s1, (-1, 1)) * factor(s2, (1, -1))
    sums = (a.double() @ b.double()).float()  # exact
    return (sums + offset) * scale if bias_is_scaled else sums * scale + offset


def result_type(op: str, x: Tensor, number: int | None, usual: torch.dtype | None = None) -> torch.dtype:
    if number is None:
        usual = x.dtype if x.dtype in FLOATS else usual
        need(usual is not None, op, "y_dtype has to be given")
        assert usual is not None
        return usual
    need(number in NUMBERS, op, f"y_dtype {number} is none of torch.float16, torch.bfloat16 and torch.float32")
    return NUMBERS[number]


def check(op: str, **named: Any) -> None:
    """Arguments that have one value only, in the originals as well."""
    for name, value in named.items():
        known = f"{name} is {value!r}, and is not one of the op's in any version"
        need(value in (None, 0, "sum"), op, known, hint="leave it out")


# -- reductions -----------------------------------------------------------------------------------------------------
_REDUCED = (
    "(Tensor x, Tensor scales, str hcom_name, int world_size, str reduce_op='sum', int? output_dtype=None, "
    "int? x_dtype=None, int? scales_dtype=None) -> Tensor"
)


def of_groups(op: str, x: Tensor, scales: Tensor, x_dtype: int | None) -> Tensor:
    """x · scales: one for each 128 numbers of a row in float32, or powers of two in pairs for each 32."""
    wide = widened(op, "x", x, x_dtype)
    if scales.dtype == torch.float32:
        return wide * scales.repeat_interleave(BLOCK, -1)[..., : wide.shape[-1]]
    return wide * along(scales, -2, wide.shape[-1])


@reference(
    f"npu_quant_all_reduce{_REDUCED}", ge="QuantAllReduce hcom_name:group output_dtype# -> output", collective=True
)
def npu_quant_all_reduce(
    x: Tensor,
    scales: Tensor,
    hcom_name: str,
    world_size: int,
    reduce_op: str = "sum",
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Tensor:
    op = "npu_quant_all_reduce"
    check(op, reduce_op=reduce_op)
    whole, of_all = gathered(x, world_size, hcom_name), gathered(scales, world_size, hcom_name)
    wide = of_groups(op, whole, of_all, x_dtype)
    return wide.view(world_size, -1, *wide.shape[1:]).sum(0).to(result_type(op, x, output_dtype, torch.bfloat16))


@reference(
    f"npu_quant_reduce_scatter{_REDUCED}",
    ge="QuantReduceScatter hcom_name:group output_dtype# -> output",
    collective=True,
)
def npu_quant_reduce_scatter(
    x: Tensor,
    scales: Tensor,
    hcom_name: str,
    world_size: int,
    reduce_op: str = "sum",
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Tensor:
    op = "npu_quant_reduce_scatter"
    check(op, reduce_op=reduce_op)
    part = summed_part(op, of_groups(op, x, scales, x_dtype), world_size, hcom_name)
    return part.to(result_type(op, x, output_dtype, torch.bfloat16))


# -- products with a gather or a sum --------------------------------------------------------------------------------
_SCALED = (
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, Tensor? quant_scale=None, int block_size=0, "
)
_KINDS = (
    "int[]? group_sizes=None, bool amax_output=False, int? y_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
    "int? x1_scale_dtype=None, int? x2_scale_dtype=None, str? comm_mode=None"
)


@reference(
    f"npu_all_gather_quant_mm(Tensor self, Tensor x2, str hcom, int world_size, *, {_SCALED}int gather_index=0, "
    f"bool gather_output=True, int comm_turn=0, {_KINDS}) -> (Tensor, Tensor, Tensor)",
    ge="AllGatherMatmulV2 self:x1 x2 bias x1_scale x2_scale quant_scale hcom:group world_size:rank_size "
    "gather_output:is_gather_out amax_output:is_amax_out y_dtype# -> y gather_out amax_out",
    collective=True,
)
def npu_all_gather_quant_mm(
    x: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    quant_scale: Tensor | None = None,
    block_size: int = 0,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    group_sizes: Sequence[int] | None = None,
    amax_output: bool = False,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of rows and blocks are gathered with the rows; one of the whole tensor is this rank's."""
    op = "npu_all_gather_quant_mm"
    not_emulated(op, quant_scale=quant_scale)
    check(op, block_size=block_size, gather_index=gather_index, comm_turn=comm_turn, amax_output=amax_output)
    whole = gathered(x, world_size, hcom)
    if x1_scale is not None and x1_scale.dim() > 1:
        # Blocks of 128 rows end with a rank's rows, so that each row gets its own scale first.
        every = for_rows(x1_scale, *x.shape) if x1_scale.dim() == 2 and in_blocks(x, x1_scale) else x1_scale
        x1_scale = gathered(every, world_size, hcom)
    y = scaled_product(op, whole, x2, bias, (x1_scale, x2_scale), (x1_dtype, x2_dtype), bias_is_scaled=True)
    none = whole.new_empty(0, dtype=torch.float32)
    return y.to(result_type(op, x, y_dtype)), whole if gather_output else whole.new_empty(0), none


@reference(
    f"npu_quant_mm_reduce_scatter(Tensor self, Tensor x2, str hcom, int world_size, *, str reduce_op='sum', {_SCALED}"
    f"int comm_turn=0, {_KINDS}) -> (Tensor, Tensor)",
    ge="MatmulReduceScatterV2 self:x1 x2 bias x1_scale x2_scale quant_scale hcom:group world_size:rank_size "
    "amax_output:is_amax_out y_dtype# -> y amax_out",
    collective=True,
)
def npu_quant_mm_reduce_scatter(
    x: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    quant_scale: Tensor | None = None,
    block_size: int = 0,
    comm_turn: int = 0,
    group_sizes: Sequence[int] | None = None,
    amax_output: bool = False,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    op = "npu_quant_mm_reduce_scatter"
    not_emulated(op, quant_scale=quant_scale)
    check(op, reduce_op=reduce_op, block_size=block_size, comm_turn=comm_turn, amax_output=amax_output)
    y = scaled_product(op, x, x2, bias, (x1_scale, x2_scale), (x1_dtype, x2_dtype), bias_is_scaled=False)
    part = summed_part(op, y.to(result_type(op, x, y_dtype)), world_size, hcom)
    return part, part.new_empty(0, dtype=torch.float32)


# -- products with an exchange --------------------------------------------------------------------------------------
def beside(op: str, x: Tensor, ranks: int, group: str) -> Tensor:
    """Rows of all ranks for this one, side by side: [m, …] to [m / ranks, ranks, …]."""
    need(x.shape[0] % ranks == 0, op, f"{x.shape[0]} rows are not parts for {ranks} ranks")
    rows = x.shape[0] // ranks
    got = exchanged(x, [rows] * ranks, [rows] * ranks, group)
    return got.view(ranks, rows, *x.shape[1:]).transpose(0, 1).contiguous()


def columns_to_ranks(op: str, y: Tensor, ranks: int, group: str) -> Tensor:
    """Columns for each rank; those from all ranks, one below the other."""
    need(y.shape[1] % ranks == 0, op, f"{y.shape[1]} columns are not parts for {ranks} ranks")
    parts = y.view(y.shape[0], ranks, -1).transpose(0, 1).reshape(ranks * y.shape[0], -1)
    return exchanged(parts, [y.shape[0]] * ranks, [y.shape[0]] * ranks, group)


def axes(op: str, given: Sequence[int] | None, only: list[int]) -> None:
    need([*(given or only)] == only, op, f"all2all_axes is {given}, and has to be {only}")


_OF_EXCHANGE = (
    "int[]? all2all_axes=None, int? comm_quant_dtype=None, {more}int? x1_dtype=None, int? x2_dtype=None, "
    "int? x1_scale_dtype=None, int? x2_scale_dtype=None, int? output_scale_dtype=None, int? comm_scale_dtype=None, "
    "int? y_dtype=None"
)
_OPERANDS = (
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, Tensor? common_scale=None, "
    "Tensor? x1_offset=None, Tensor? x2_offset=None, int? x1_quant_mode={}, int? x2_quant_mode={}, "
    "int? common_quant_mode=None, int[]? group_sizes=None, "
)


@reference(
    f"npu_all_to_all_quant_matmul(Tensor x1, Tensor x2, str hcom, int world_size, *, bool all2all_out_flag=True, "
    f"{_OPERANDS.format(None, None)}{_OF_EXCHANGE.format(more='int? x1_quant_dtype=None, ')}, str? comm_mode=None) "
    "-> (Tensor, Tensor)",
    ge="AlltoAllMatmul x1 x2 bias x1_scale x2_scale common_scale:comm_scale x1_offset x2_offset hcom:group "
    "y_dtype# -> y all2all_out",
    collective=True,
)
def npu_all_to_all_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    all2all_out_flag: bool = True,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    x1_quant_mode: int | None = None,
    x2_quant_mode: int | None = None,
    all2all_axes: Sequence[int] | None = None,
    x1_quant_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    y_dtype: int | None = None,
    **reserved: Any,
) -> tuple[Tensor, Tensor]:
    """Modes 7 and 2, the usual ones: rows to eight bits behind the exchange, each with a scale of its own. 6 and 6: pairs
    of powers of two, which are exchanged, too. Without x2_scale the plain product (`npu_all_to_all_matmul`)."""
    op = "npu_all_to_all_quant_matmul"
    others = ("common_scale", "x1_offset", "x2_offset", "comm_quant_dtype")
    not_emulated(op, **{name: reserved.get(name) for name in others})
    axes(op, all2all_axes, [-2, -1])
    got = beside(op, x1, world_size, hcom)
    rows = got.flatten(1)
    kinds = (x1_dtype, x2_dtype)
    if x2_scale is None:
        y = product(op, rows, x2, bias).to(result_type(op, x1, y_dtype))
    elif x1_quant_mode == 6:
        need(x2_quant_mode == 6 and x1_scale is not None, op, "mode 6 is for both, and needs x1_scale")
        assert x1_scale is not None
        pairs = beside(op, x1_scale, world_size, hcom).flatten(1, 2)
        y = scaled_product(op, rows, x2, bias, (pairs, x2_scale), kinds, bias_is_scaled=False)
    else:
        need(x1_quant_mode in (None, 7) and x2_quant_mode in (None, 2), op, "quant modes are 7 and 2, or 6 and 6")
        need_types(op, FLOATS[:2], x1=x1)
        narrow, scale = by_row(rows, x1_quant_dtype or 24)
        y = scaled_product(op, narrow, x2, bias, (scale, x2_scale), (None, x2_dtype), bias_is_scaled=True)
    if x2_scale is not None:
        y = y.to(result_type(op, x2, y_dtype, torch.float32))
    return y, rows if all2all_out_flag else rows.new_empty(0)


def by_row(x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """To eight-bit floats, each row by its own scale."""
    scale = x.float().abs().amax(-1) / FORMATS[kind].largest
    return narrowed(x.float() / scale.masked_fill(scale == 0, 1.0).unsqueeze(-1), kind), scale


@reference(
    "npu_all_to_all_matmul(Tensor x1, Tensor x2, str hcom, int world_size, Tensor? bias=None, int[]? all2all_axes=None, "
    "bool all2all_out_flag=True, str? comm_mode=None) -> (Tensor, Tensor)",
    ge="AlltoAllMatmul hcom:group",
    collective=True,
)
def npu_all_to_all_matmul(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None = None,
    all2all_axes: Sequence[int] | None = None,
    all2all_out_flag: bool = True,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of all ranks for this one, side by side, times x2."""
    op = "npu_all_to_all_matmul"
    need_types(op, FLOATS, x1=x1, x2=x2)
    axes(op, all2all_axes, [-2, -1])
    rows = beside(op, x1, world_size, hcom).flatten(1)
    return product(op, rows, x2, bias).to(x1.dtype), rows if all2all_out_flag else rows.new_empty(0)


@reference(
    f"npu_quant_matmul_all_to_all(Tensor x1, Tensor x2, str hcom, int world_size, {_OPERANDS.format(3, 2)}"
    f"{_OF_EXCHANGE.format(more='')}) -> Tensor",
    ge="MatmulAlltoAll x1 x2 bias x1_scale x2_scale common_scale:comm_scale x1_offset x2_offset hcom:group y_dtype#",
    collective=True,
)
def npu_quant_matmul_all_to_all(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    common_scale: Tensor | None = None,
    x1_offset: Tensor | None = None,
    x2_offset: Tensor | None = None,
    x1_quant_mode: int | None = 3,
    x2_quant_mode: int | None = 2,
    common_quant_mode: int | None = None,
    group_sizes: Sequence[int] | None = None,
    all2all_axes: Sequence[int] | None = None,
    comm_quant_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
    output_scale_dtype: int | None = None,
    comm_scale_dtype: int | None = None,
    y_dtype: int | None = None,
) -> Tensor:
    """Modes 3 and 2: a scale for each row and each column; the bias is scaled with eight-bit floats, and not with int8.
    6 and 6: pairs of powers of two. Without scales the plain product (`npu_matmul_all_to_all`)."""
    op = "npu_quant_matmul_all_to_all"
    not_emulated(op, common_scale=common_scale, x1_offset=x1_offset, x2_offset=x2_offset)
    not_emulated(op, comm_quant_dtype=comm_quant_dtype)
    check(op, common_quant_mode=common_quant_mode)
    axes(op, all2all_axes, [-1, -2])
    need((x1_quant_mode, x2_quant_mode) in ((3, 2), (6, 6)), op, "quant modes are 3 and 2, or 6 and 6")
    scaled = x1.dtype in EIGHT_BITS
    y = scaled_product(op, x1, x2, bias, (x1_scale, x2_scale), (x1_dtype, x2_dtype), bias_is_scaled=scaled)
    return columns_to_ranks(op, y.to(result_type(op, x1, y_dtype, torch.float32)), world_size, hcom)


@reference(
    "npu_matmul_all_to_all(Tensor x1, Tensor x2, str hcom, int world_size, Tensor? bias=None, int[]? all2all_axes=None) "
    "-> Tensor",
    ge="MatmulAlltoAll hcom:group",
    collective=True,
)
def npu_matmul_all_to_all(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None = None,
    all2all_axes: Sequence[int] | None = None,
) -> Tensor:
    op = "npu_matmul_all_to_all"
    need_types(op, FLOATS, x1=x1, x2=x2)
    axes(op, all2all_axes, [-1, -2])
    return columns_to_ranks(op, product(op, x1, x2, bias).to(x1.dtype), world_size, hcom)


# -- experts --------------------------------------------------------------------------------------------------------
_EXPERTS = (
    "(Tensor gmm_x, Tensor gmm_weight, Tensor gmm_x_scale, Tensor gmm_weight_scale, str hcom, int ep_world_size, "
    "int[] send_counts, int[] recv_counts, int gmm_y_dtype, *, Tensor? send_counts_tensor=None, "
    "Tensor? recv_counts_tensor=None, Tensor? mm_x=None, Tensor? mm_weight=None, Tensor? mm_x_scale=None, "
    "Tensor? mm_weight_scale=None, {scale}int? gmm_x_quant_mode=None, int? gmm_weight_quant_mode=None, "
    "int? mm_x_quant_mode=None, int? mm_weight_quant_mode=None, {flag}int[]? group_size=None, int? gmm_x_dtype=None, "
    "int? gmm_weight_dtype=None, int? gmm_x_scale_dtype=None, int? gmm_weight_scale_dtype=None, int? mm_x_dtype=None, "
    "int? mm_weight_dtype=None, int? mm_x_scale_dtype=None, int? mm_weight_scale_dtype=None, {kind}int? mm_y_dtype=None, "
    "str? comm_mode=None)"
)
_GMM = "gmm_x gmm_weight gmm_x_scale gmm_weight_scale send_counts_tensor recv_counts_tensor mm_x mm_weight mm_x_scale "
_GMM += "mm_weight_scale{} hcom:group gmm_y_dtype:y_dtype# mm_y_dtype:mm_dtype# "


def operands(
    op: str, x: Tensor, weight: Tensor, scales: tuple[Tensor | None, Tensor | None], modes: Any, kinds: Any
) -> tuple[Tensor, Tensor]:
    """Rows and weights, with their scales, in float32. Modes: 1 a scale for the whole, 6 pairs of powers of two."""
    mode = modes[0] or 1
    need(mode == (modes[1] or 1) and mode in (1, 6), op, f"quant modes are {modes}, and have to be 1 and 1, or 6 and 6")
    s, t = scales
    need(s is not None and t is not None, op, "rows and weights need scales")
    assert s is not None and t is not None
    a, b = widened(op, "gmm_x", x, kinds[0]), widened(op, "gmm_weight", weight, kinds[1], -2)
    if mode == 1:
        return a * s.float(), b * t.float()
    return a * along(s, 1, a.shape[1]), b * along(t, -3, b.shape[-2])


def beside_experts(op: str, like: Tensor, named: dict[str, Any]) -> Tensor:
    """The product of the shared experts; nothing where there are none."""
    x, weight = named.get("mm_x"), named.get("mm_weight")
    if x is None or weight is None:
        return like.new_empty(0)
    scales = named.get("mm_x_scale"), named.get("mm_weight_scale")
    modes = named.get("mm_x_quant_mode"), named.get("mm_weight_quant_mode")
    a, b = operands(op, x, weight, scales, modes, (named.get("mm_x_dtype"), named.get("mm_weight_dtype")))
    return (a @ b).to(result_type(op, like, named.get("mm_y_dtype"), torch.float16))


def of_experts(
    op: str, x: Tensor, weight: Tensor, s: Tensor, t: Tensor, named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    others = ("send_counts_tensor", "recv_counts_tensor", "comm_quant_scale", "comm_quant_dtype")
    not_emulated(op, **{name: named.get(name) for name in others})
    not_emulated(op, comm_quant_mode=named.get("comm_quant_mode") or None)
    modes = named.get("gmm_x_quant_mode"), named.get("gmm_weight_quant_mode")
    return operands(op, x, weight, (s, t), modes, (named.get("gmm_x_dtype"), named.get("gmm_weight_dtype")))


@reference(
    f"npu_alltoallv_quant_gmm{_EXPERTS.format(scale='', flag='bool permute_out_flag=False, ', kind='')} "
    "-> (Tensor, Tensor, Tensor)",
    ge=f"AlltoAllvQuantGroupedMatMul {_GMM.format('')}-> gmm_y mm_y permute_out",
    collective=True,
)
def npu_alltoallv_quant_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor,
    gmm_weight_scale: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    gmm_y_dtype: int,
    *,
    permute_out_flag: bool = False,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "npu_alltoallv_quant_gmm"
    rows, weights = of_experts(op, gmm_x, gmm_weight, gmm_x_scale, gmm_weight_scale, named)
    counts = ep_world_size, gmm_weight.shape[0], send_counts, recv_counts, hcom
    parts = to_experts(op, rows, *counts)
    y = torch.cat([part @ weights[e] for e, part in enumerate(parts)]).to(result_type(op, gmm_x, gmm_y_dtype))
    permuted = torch.cat(to_experts(op, gmm_x, *counts)) if permute_out_flag else gmm_x.new_empty(0)
    return y, beside_experts(op, gmm_x, named), permuted


@reference(
    "npu_quant_gmm_alltoallv"
    + _EXPERTS.format(
        scale="Tensor? comm_quant_scale=None, ", flag="int? comm_quant_mode=None, ", kind="int? comm_quant_dtype=None, "
    )
    + " -> (Tensor, Tensor)",
    ge=f"QuantGroupedMatMulAlltoAllv {_GMM.format(' comm_quant_scale')}-> y mm_y",
    collective=True,
)
def npu_quant_gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor,
    gmm_weight_scale: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    gmm_y_dtype: int,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    op = "npu_quant_gmm_alltoallv"
    rows, weights = of_experts(op, gmm_x, gmm_weight, gmm_x_scale, gmm_weight_scale, named)
    y = from_experts(op, rows, weights, ep_world_size, send_counts, recv_counts, hcom)
    return y.to(result_type(op, gmm_x, gmm_y_dtype)), beside_experts(op, gmm_x, named)
