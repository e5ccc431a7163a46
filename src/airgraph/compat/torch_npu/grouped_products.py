"""`npu_grouped_matmul`: rows in groups, each with a weight of its own; in floats, in int8, or in int4 packed into int32.

    (y,) = torch_npu.npu_grouped_matmul([x], [weights], group_list=ends, split_item=3, group_type=0)
    ys = torch_npu.npu_grouped_matmul([x], [w1, w2], group_list=[2, 6])                  a tensor for each weight
    (y,) = torch_npu.npu_grouped_matmul([x], [weights], scale=[s], per_token_scale=[t], group_list=counts, split_item=3,
                                        group_type=0, group_list_type=1, output_dtype=torch.bfloat16)
    (dw,) = torch_npu.npu_grouped_matmul([x.t()], [dy], group_list=ends, split_item=3, group_type=2)

Every weight is multiplied with every row, and the rows of its group are taken: sizes that only the device knows stay
there, as a graph needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu.quantisation import (
    for_weight,
    products,
    rounded,
    unpacked,
    unpacked_int4,
    unpacked_weight,
)
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

_GROUPED = (
    "Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
    "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
    "{group_list}, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type={group_type}, int? group_list_type=0, "
    "int? act_type=0, int[]? tuning_config=None, ScalarType? output_dtype=None) -> Tensor[]"
)
WHOLE = (torch.int8, torch.int32)  # int32: int4, eight in each
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    1: functional.relu,
    2: lambda y: functional.gelu(y, approximate="tanh"),
    4: lambda y: y * torch.sigmoid(1.702 * y),
    5: functional.silu,
}


class Expert(NamedTuple):
    """A weight with what goes with it: `scale` for two operands in few bits, `antiquant` (scale, offset) for one."""

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
    need(not act_type or act_type in ACTIVATIONS, op, f"act_type is {act_type}, and has to be 0, 1, 2, 4 or 5")
    need(not act_type or per_token_scale is not None, op, "act_type is for products with per_token_scale")
    need(group_type in (None, -1, 0, 2), op, f"group_type {group_type} is not emulated, only -1, 0 and 2")
    need(group_list_type in (None, 0, 1, 2), op, f"group_list_type is {group_list_type}, and has to be 0, 1 or 2")
    check_quantised(op, x, weight, scale, per_token_scale, antiquant_scale, output_dtype)
    need(antiquant_offset is None or antiquant_scale is not None, op, "antiquant_offset needs antiquant_scale")
    target = output_dtype or x[0].dtype
    if group_type == 2:
        need(len(x) == len(weight) == 1 and group_list is not None, op, "group_type 2 is for one x, one weight, groups")
        need(bias is None and x[0].dtype in FLOATS, op, "group_type 2 is for floats without bias")
        return [along_k(x[0], weight[0], ends_of(group_list, group_list_type, x[0])).to(target)]
    lists = (bias, scale, antiquant_scale, antiquant_offset)
    experts = [Expert(w, b, s, (a, o)) for w, b, s, a, o in zip(*(apart(given, weight) for given in (weight, *lists)))]
    by_row = [None] * len(x) if per_token_scale is None else per_token_scale
    end = ACTIVATIONS[act_type] if act_type else None
    if group_list is not None and len(x) == 1 and split_item in (2, 3):
        y = of_groups(x[0], experts, by_row[0], expert_of_rows(group_list, group_list_type, x[0]))
        return [as_output(y, end, target)]
    if group_list is not None and len(x) == 1:
        need(not isinstance(group_list, Tensor), op, f"split_item {split_item} needs numbers for group_list")
        sizes = [b - a for a, b in itertools.pairwise([0, *group_list])]
        x, by_row = x[0].split(sizes), [None] * len(sizes) if by_row[0] is None else by_row[0].split(sizes)
    need(len(x) == len(experts), op, f"{len(x)} x and {len(experts)} weights need group_list to be told apart")
    ys = [as_output(product(*each), end, target) for each in zip(x, experts, by_row)]
    return [torch.cat(ys)] if split_item in (2, 3) else ys


def check_quantised(
    op: str,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    scale: Sequence[Tensor] | None,
    by_row: Sequence[Tensor] | None,
    antiquant: Sequence[Tensor] | None,
    output_dtype: torch.dtype | None,
) -> None:
    """Two operands in few bits have scales, a float and such a weight the others, and floats none."""
    for t in (*x, *weight):
        need_types(op, (*FLOATS, *WHOLE), x_or_weight=t)
    exact, stored = x[0].dtype in WHOLE, weight[0].dtype in WHOLE
    need(stored or not exact, op, f"x is {x[0].dtype}, and weight {weight[0].dtype}")
    need(x[0].dtype != torch.int32 or weight[0].dtype == torch.int32, op, "x in int4 needs a weight in int4")
    need(exact or (scale is None and by_row is None), op, "scale and per_token_scale are for x in int8 or int4")
    need(
        (antiquant is not None) == (stored and not exact),
        op,
        "antiquant_scale is for a weight in int8 or int4 and x that is not",
    )
    if exact:
        need(
            output_dtype in (None, *FLOATS[:2], *WHOLE), op, "x in int8 or int4 gives float16, bfloat16, int32 or int8"
        )
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
    """In int32 where there is no scale, and in float32 else."""
    bias, scale, (antiquant, offset) = expert[1:]
    in_four_bits = expert.weight.dtype == torch.int32
    x = unpacked_int4(x) if x.dtype == torch.int32 else x
    weight = unpacked_weight(expert.weight, x.shape[-1])
    if x.dtype != torch.int8:
        y = x.float() @ (weight.float() if antiquant is None else opened_weight(weight, antiquant, offset))
        return y if bias is None else y + bias.float()
    rows = 1.0 if by_row is None else by_row.float().unsqueeze(-1)
    if scale is not None and in_four_bits:
        wide = opened_weight(weight, unpacked(scale)[0] if scale.dtype == torch.int64 else scale, None)
        # The chip takes int8 apart into two int4, the lower one less 8; `bias` is what that leaves out.
        y = x.float() @ wide if bias is None else (x.float() - 8) @ wide + bias.float()
        return y * rows
    sums = products(x, weight)
    if bias is not None and bias.dtype == torch.int32:
        sums, bias = sums + bias, None
    if scale is None:
        return sums
    factor, zero = unpacked(scale) if scale.dtype == torch.int64 else (scale.float(), 0.0)
    y = sums.float() * factor * rows + zero
    return y if bias is None else y + bias.float()


def as_output(y: Tensor, activation: Callable[[Tensor], Tensor] | None, target: torch.dtype) -> Tensor:
    y = y if activation is None else activation(y)
    return rounded(y, torch.int8) if target == torch.int8 else y.to(target)


def opened_weight(weight: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """(weight + offset) · scale, for a column or for each group of its rows."""
    group = weight.shape[-2] // scale.shape[-2] if scale.dim() > 1 else 0
    wide = weight.float() if offset is None else weight.float() + for_weight(offset, weight, group)
    return wide * for_weight(scale, weight, group)


def ends_of(group_list: Tensor | Sequence[int] | None, kind: int | None, x: Tensor) -> Tensor:
    """Where each group ends; `group_list` says that, or how many rows it has (kind 1)."""
    if not isinstance(group_list, Tensor):
        group_list = torch.cat([torch.full((1,), n, device=x.device) for n in group_list or ()])
    return group_list.long().cumsum(0) if kind == 1 else group_list.long()


def expert_of_rows(group_list: Tensor | Sequence[int], kind: int | None, x: Tensor) -> Tensor:
    """The expert of each row, none's for rows behind the last group. Kind 2: pairs of an expert and its rows."""
    names = None
    if kind == 2:
        assert isinstance(group_list, Tensor)
        names, group_list, kind = group_list[:, 0].long(), group_list[:, 1], 1
    ends = ends_of(group_list, kind, x)
    place = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    return place if names is None else functional.pad(names, (0, 1), value=-1)[place]


def of_groups(x: Tensor, experts: Sequence[Expert], by_row: Tensor | None, expert: Tensor) -> Tensor:
    """Each row by its expert; zeros for rows of none."""
    y: Tensor | int = 0
    for i, one in enumerate(experts):
        y = torch.where((expert == i).unsqueeze(-1), product(x, one, by_row), y)
    assert isinstance(y, Tensor)
    return y


def along_k(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Columns of x by rows of weight, a product for each group of them: [groups, m, n]."""
    group = torch.searchsorted(ends, torch.arange(x.shape[1], device=x.device), right=True)
    wide, rows = x.float(), weight.float()
    return torch.stack([(wide * (group == i)) @ rows for i in range(ends.shape[0])])


for _name, _groups, _kind in (("", "Tensor? group_list=None", "None"), (".List", "int[]? group_list=None", "-1")):
    reference(f"npu_grouped_matmul{_name}({_GROUPED.format(group_list=_groups, group_type=_kind)}")(grouped_matmul)
