"""Ops that move numbers about: private formats of the chip, casts, transposes, scattered writes.

    torch_npu.npu_format_cast(weight, 29)                       a copy: here every tensor lies as PyTorch has it
    torch_npu.npu_confusion_transpose(x, [0, 2, 1, 3], (b, s, n, d), False)     reshape, then transpose
    torch_npu.npu_scatter_nd_update_(cache, indices, updates)   cache[indices[..., 0], indices[..., 1], …] = updates
    torch_npu.scatter_update_(cache, places, updates, -2)       cache[i, …, places[i] + t, :] = updates[i, …, t, :]
    torch_npu.npu_prefetch(weight, after, 1 << 20)              nothing: there is no cache to fill

They are opened in a compiled graph: it has PyTorch's own ops, which are converted and fused as those are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import need, need_types, reference

ND = 2  # as in torchair.ge.Format


@reference("npu_format_cast(Tensor self, int acl_format) -> Tensor", opened=True)
def npu_format_cast(x: Tensor, acl_format: int) -> Tensor:
    return x.clone()


@reference("npu_format_cast_(Tensor(a!) self, int acl_format) -> Tensor(a!)", opened=True)
def npu_format_cast_(x: Tensor, acl_format: int) -> Tensor:
    return x


def get_npu_format(self: Tensor) -> int:
    """The number of a tensor's memory format: always ND, PyTorch's own."""
    return ND


@reference("npu_dtype_cast(Tensor self, ScalarType dtype) -> Tensor", opened=True)
def npu_dtype_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


@reference("npu_transpose(Tensor self, int[] perm, bool require_contiguous=True) -> Tensor", opened=True)
def npu_transpose(x: Tensor, perm: Sequence[int], require_contiguous: bool = True) -> Tensor:
    check_order("npu_transpose", x.dim(), perm)
    return x.permute(*perm).clone(memory_format=torch.contiguous_format)


@reference(
    "npu_confusion_transpose(Tensor self, int[] perm, SymInt[] shape, bool transpose_first) -> Tensor", opened=True
)
def npu_confusion_transpose(x: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    check_order("npu_confusion_transpose", x.dim() if transpose_first else len(shape), perm)
    result = x.permute(*perm).reshape(*shape) if transpose_first else x.reshape(*shape).permute(*perm)
    return result.clone(memory_format=torch.contiguous_format)


def check_order(op: str, axes: int, perm: Sequence[int]) -> None:
    need(sorted(perm) == [*range(axes)], op, f"perm {[*perm]} is not a permutation of {axes} axes")


@reference("npu_scatter_nd_update(Tensor self, Tensor indices, Tensor updates) -> Tensor", opened=True)
def npu_scatter_nd_update(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    check_scatter("npu_scatter_nd_update", x, indices, updates)
    return x.index_put(indices.long().unbind(-1), updates)


@reference("npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)", opened=True)
def npu_scatter_nd_update_(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    check_scatter("npu_scatter_nd_update_", x, indices, updates)
    return x.index_put_(indices.long().unbind(-1), updates)


def check_scatter(op: str, x: Tensor, indices: Tensor, updates: Tensor) -> None:
    need_types(op, (torch.int32, torch.int64), indices=indices)
    depth = indices.shape[-1]
    need(depth <= x.dim(), op, f"indices {list(indices.shape)} are deeper than self {list(x.shape)}")
    need(x.dtype == updates.dtype, op, f"updates are {updates.dtype}, and self {x.dtype}")
    need(
        updates.shape == indices.shape[:-1] + x.shape[depth:],
        op,
        f"updates {list(updates.shape)} do not fit indices {list(indices.shape)} into self {list(x.shape)}",
    )


@reference("scatter_update(Tensor data, Tensor indices, Tensor updates, int axis) -> Tensor", opened=True)
def scatter_update(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return scatter_update_(data.clone(), indices, updates, axis)


@reference("scatter_update_(Tensor(a!) data, Tensor indices, Tensor updates, int axis) -> Tensor(a!)", opened=True)
def scatter_update_(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Row i of `updates` goes into row i of `data`, along the axis from place indices[i] on."""
    check_update("scatter_update_", data, indices, updates, axis)
    row = torch.arange(updates.shape[0], device=data.device).unsqueeze(1)
    place = indices.long().unsqueeze(1) + torch.arange(updates.shape[axis], device=data.device)
    data.movedim(axis, 1).index_put_((row, place), updates.movedim(axis, 1))
    return data


@reference(
    "npu_quant_scatter_(Tensor(a!) self, Tensor indices, Tensor updates, Tensor quant_scales, "
    "Tensor? quant_zero_points=None, int axis=-2, int quant_axis=-1, str reduce='update', int? dst_type=None, "
    "str? round_mode='rint') -> Tensor(a!)",
    ge="QuantUpdateScatter self:var indices updates quant_scales quant_zero_points -> var",
)
def npu_quant_scatter_(
    self: Tensor,
    indices: Tensor,
    updates: Tensor,
    quant_scales: Tensor,
    quant_zero_points: Tensor | None = None,
    axis: int = -2,
    quant_axis: int = -1,
    reduce: str = "update",
    dst_type: int | None = None,
    round_mode: str | None = "rint",
) -> Tensor:
    """round(updates / scales + zeros) into their places, as `scatter_update_`; or each into the row that the first number
    of its pair of indices names."""
    op = "npu_quant_scatter"
    need_types(op, (torch.int8,), self=self)
    need_types(op, (torch.int32, torch.int64), indices=indices)
    need(quant_axis in (-1, updates.dim() - 1), op, f"quant_axis is {quant_axis}, and has to be the last")
    need(reduce == "update", op, f"reduce is {reduce!r}, and has to be 'update'")
    need(dst_type in (None, 1) and round_mode in (None, "rint"), op, "other types than int8 are not emulated")
    wide = updates.float() / quant_scales.float()
    wide = wide if quant_zero_points is None else wide + quant_zero_points.float()
    code = torch.round(wide).clamp(-128, 127).to(torch.int8)
    if indices.dim() == 1:
        row, place = torch.arange(updates.shape[0], device=self.device), indices.long()
    else:
        row, place = indices.long().unbind(-1)
    places = place.unsqueeze(1) + torch.arange(updates.shape[axis], device=self.device)
    self.movedim(axis, 1).index_put_((row.unsqueeze(1), places), code.movedim(axis, 1))
    return self


@reference(
    "npu_scatter_list(Tensor[] self, Tensor indices, Tensor updates, Tensor? mask=None, str reduce='update', "
    "int axis=-2) -> Tensor[]",
    opened=True,
)
def npu_scatter_list(
    data: list[Tensor],
    indices: Tensor,
    updates: Tensor,
    mask: Tensor | None = None,
    reduce: str = "update",
    axis: int = -2,
) -> list[Tensor]:
    """Row i of `updates` goes into a copy of tensor i, along the axis from place indices[i] on, where the mask is not 0."""
    op = "npu_scatter_list"
    need(reduce == "update", op, f"reduce is {reduce!r}, and has to be 'update'")
    need(len(data) == updates.shape[0], op, f"{updates.shape[0]} rows of updates for {len(data)} tensors")
    found = []
    for i, (tensor, update) in enumerate(zip(data, updates.unbind(0))):
        places = indices.view(-1)[i].long() + torch.arange(update.shape[axis], device=tensor.device)
        new = tensor.index_copy(axis, places, update.to(tensor.dtype))
        found.append(new if mask is None else torch.where(mask.view(-1)[i] != 0, new, tensor))
    return found


def check_update(op: str, data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> None:
    need_types(op, (torch.int32, torch.int64), indices=indices)
    need(
        indices.dim() == 1, op, f"indices with {indices.dim()} axes are not emulated, only with 1: a place for each row"
    )
    need(data.dtype == updates.dtype, op, f"updates are {updates.dtype}, and data {data.dtype}")
    behind = -data.dim() <= axis < data.dim() and axis % data.dim() != 0
    need(
        behind,
        op,
        f"axis is {axis}, and has to be one of data {list(data.shape)} behind the first, which counts the rows",
    )
    alike = all(a == b for i, (a, b) in enumerate(zip(data.shape, updates.shape)) if i not in (0, axis % data.dim()))
    fits = data.dim() == updates.dim() and alike and updates.shape[0] == indices.shape[0] <= data.shape[0]
    need(fits, op, f"updates {list(updates.shape)} do not fit {indices.shape[0]} places in data {list(data.shape)}")


@reference("npu_prefetch(Tensor self, Tensor? dependency, int max_size, int offset=0) -> ()", opened=True)
def npu_prefetch(x: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    need(max_size > 0, "npu_prefetch", f"max_size is {max_size}, and has to be above zero")
    need(offset >= 0, "npu_prefetch", f"offset is {offset}, and has to be zero or more")
