"""Elements picked by numbers."""

from __future__ import annotations

from typing import Any

from airgraph.plan.index import expand
from airgraph.plan.lowerings.core import INTS, LoweringView, UnsupportedLowering, known, lowers
from airgraph.plan.tensors import Tensor, part, reshape, tensor


@lowers("GatherV2")
def gather(view: LoweringView) -> Tensor:
    x, indices, axis = view["x"], view["indices"], known(view, "axis")
    axis = (axis[0] if isinstance(axis, tuple) else axis) % len(x.shape)
    if view.attr("batch_dims") or indices.dtype not in INTS:
        raise UnsupportedLowering("with batch dimensions")
    if indices.op == "const" and not indices.shape:  # one of them: a view
        at = int(indices.attrs)
        size = x.shape[axis]
        if at < 0:
            at = expand(size + at)
        return reshape(part(x, axis, at, 1), view.result_shape)
    how: list[Any] = [i if i < axis else i - 1 + len(indices.shape) for i in range(len(x.shape))]
    how[axis] = ("at", 0, False, axis, len(indices.shape))
    return tensor("gather", (x, indices), view.result_shape, x.dtype, tuple(how))


@lowers("GatherElements")
def gather_elements(view: LoweringView) -> Tensor:
    x, index, axis = view["x"], view["index"], view.attr("dim")
    if not x.shape or index.dtype not in INTS:
        raise UnsupportedLowering("of a scalar")
    axis = axis % len(x.shape)
    how: list[Any] = list(range(len(x.shape)))
    how[axis] = ("at", 0, False, 0, len(x.shape))
    return tensor("gather", (x, index), view.result_shape, x.dtype, tuple(how))


@lowers("IndexByTensor")
def index_by_tensor(view: LoweringView) -> Tensor:
    x, indices, mask = view["x"], view.many("indices"), list(view.attr("indices_mask"))
    mask += [0] * (len(x.shape) - len(mask))
    at = [i for i, here in enumerate(mask) if here]
    if any(i.dtype not in INTS for i in indices):
        raise UnsupportedLowering("by a mask")
    rank = max(len(i.shape) for i in indices)
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    how: list[Any] = []
    rest = iter([*range(first), *range(first + rank, len(view.result_shape))])
    for axis in range(len(x.shape)):
        how.append(("at", at.index(axis), True, first, rank) if axis in at else next(rest))
    return tensor("gather", (x, *indices), view.result_shape, x.dtype, tuple(how))
