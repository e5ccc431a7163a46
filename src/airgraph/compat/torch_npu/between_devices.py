"""Products with a collective before or after them, in one op.

    name = group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    y = torch_npu.npu_mm_all_reduce_base(x, w, name)                    the sum of all ranks' x · w
    y, whole = torch_npu.npu_all_gather_base_mm(x, w, name, ranks)      all ranks' rows · w
    y = torch_npu.npu_mm_reduce_scatter_base(x, w, name, ranks)         this rank's rows of the sum

They are opened in a compiled graph: it has the product and the collective. Quantised arguments are not emulated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

collectives = torch.ops._c10d_functional


def product(op: str, x1: Tensor, x2: Tensor, bias: Tensor | None, reduce_op: str = "sum") -> Tensor:
    need_types(op, FLOATS, x1=x1, x2=x2, bias=bias)
    need(reduce_op == "sum", op, f"reduce_op {reduce_op!r} is not one of the op's, only 'sum'")
    y = x1 @ x2
    return y if bias is None else y + bias


@reference(
    "npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None, "
    "Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None, "
    "int antiquant_group_size=0, int comm_turn=0) -> Tensor",
    opened=True,
)
def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x3: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    **quantised: Tensor | None,
) -> Tensor:
    """Each rank's bias is part of the sum; `x3` is added behind it."""
    op = "npu_mm_all_reduce_base"
    not_emulated(op, **quantised)
    y = collectives.all_reduce(product(op, x1, x2, bias, reduce_op), "sum", hcom)
    y = collectives.wait_tensor(y)
    return y if x3 is None else y + x3


@reference(
    "npu_all_gather_base_mm(Tensor self, Tensor x2, str hcom, int world_size, *, Tensor? bias=None, "
    "Tensor? x1_scale=None, Tensor? x2_scale=None, int gather_index=0, bool gather_output=True, int comm_turn=0, "
    "ScalarType? output_dtype=None, str? comm_mode=None) -> (Tensor, Tensor)",
    opened=True,
)
def npu_all_gather_base_mm(
    x: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    op = "npu_all_gather_base_mm"
    not_emulated(op, x1_scale=x1_scale, x2_scale=x2_scale, output_dtype=output_dtype)
    need(gather_index == 0, op, f"gather_index {gather_index} is not emulated, only 0")
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), world_size, hcom))
    y = product(op, whole, x2, bias)
    return y, whole if gather_output else whole.new_empty(0)


@reference(
    "npu_mm_reduce_scatter_base(Tensor self, Tensor x2, str hcom, int world_size, *, str reduce_op='sum', "
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int comm_turn=0, ScalarType? output_dtype=None, "
    "str? comm_mode=None) -> Tensor",
    opened=True,
)
def npu_mm_reduce_scatter_base(
    x: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> Tensor:
    op = "npu_mm_reduce_scatter_base"
    not_emulated(op, x1_scale=x1_scale, x2_scale=x2_scale, output_dtype=output_dtype)
    y = product(op, x, x2, bias, reduce_op)
    need(y.shape[0] % world_size == 0, op, f"{y.shape[0]} rows are not parts for {world_size} ranks")
    part: Tensor = collectives.wait_tensor(collectives.reduce_scatter_tensor(y, "sum", world_size, hcom))
    return part
