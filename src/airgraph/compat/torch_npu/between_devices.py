"""Products with a collective before or after them, in one op.

    name = group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    y = torch_npu.npu_mm_all_reduce_base(x, w, name)                    the sum of all ranks' x · w
    y, whole = torch_npu.npu_all_gather_base_mm(x, w, name, ranks)      all ranks' rows · w
    y = torch_npu.npu_mm_reduce_scatter_base(x, w, name, ranks)         this rank's rows of the sum

A graph has one node for each, which runs the product and the collective. Their quantised arguments are not emulated; the
quantised ops are in quantised_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

collectives = torch.ops._c10d_functional


# -- collectives ----------------------------------------------------------------------------------------------------
def gathered(x: Tensor, ranks: int, group: str) -> Tensor:
    """Of all ranks, one after another."""
    return as_bytes(x, lambda t: collectives.all_gather_into_tensor(t, ranks, group))


def exchanged(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Rows for each rank, and those from each."""
    return as_bytes(x, lambda t: collectives.all_to_all_single(t, list(received), list(sent), group))


def summed(x: Tensor, group: str) -> Tensor:
    total: Tensor = collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
    return total


def summed_part(op: str, x: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's rows of the sum."""
    need(x.shape[0] % ranks == 0, op, f"{x.shape[0]} rows are not parts for {ranks} ranks")
    part: Tensor = collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))
    return part


def as_bytes(x: Tensor, moved: Callable[[Tensor], Tensor]) -> Tensor:
    """gloo has no eight-bit floats; who moves them need not know."""
    x = x.contiguous()
    small = x.is_floating_point() and x.element_size() == 1
    y: Tensor = collectives.wait_tensor(moved(x.view(torch.uint8) if small else x))
    return y.view(x.dtype) if small else y


# -- the ops --------------------------------------------------------------------------------------------------------
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
    ge="MatmulAllReduce x1 x2 bias x3 antiquant_scale antiquant_offset dequant_scale pertoken_scale comm_quant_scale_1 "
    "comm_quant_scale_2 hcom:group",
    collective=True,
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
    """Each rank's bias and x3 are part of the sum."""
    op = "npu_mm_all_reduce_base"
    not_emulated(op, **quantised)
    y = product(op, x1, x2, bias, reduce_op)
    return summed(y if x3 is None else y + x3, hcom)


@reference(
    "npu_all_gather_base_mm(Tensor self, Tensor x2, str hcom, int world_size, *, Tensor? bias=None, "
    "Tensor? x1_scale=None, Tensor? x2_scale=None, int gather_index=0, bool gather_output=True, int comm_turn=0, "
    "ScalarType? output_dtype=None, str? comm_mode=None) -> (Tensor, Tensor)",
    ge="AllGatherMatmul self:x1 x2 bias x1_scale x2_scale hcom:group world_size:rank_size gather_output:is_gather_out "
    "-> y gather_out",
    collective=True,
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
    whole = gathered(x, world_size, hcom)
    y = product(op, whole, x2, bias)
    return y, whole if gather_output else whole.new_empty(0)


@reference(
    "npu_mm_reduce_scatter_base(Tensor self, Tensor x2, str hcom, int world_size, *, str reduce_op='sum', "
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int comm_turn=0, ScalarType? output_dtype=None, "
    "str? comm_mode=None) -> Tensor",
    ge="MatmulReduceScatter self:x1 x2 bias x1_scale x2_scale hcom:group world_size:rank_size",
    collective=True,
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
    return summed_part(op, product(op, x, x2, bias, reduce_op), world_size, hcom)
