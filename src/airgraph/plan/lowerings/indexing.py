"""Elements read and written by index."""

from __future__ import annotations

from typing import Any

from airgraph.plan.index import expand, same
from airgraph.plan.lowerings.table import INTS, LoweringView, UnsupportedLowering, known, lowers
from airgraph.plan.tensors import Tensor, concat, expand_to, part, reshape, tensor


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


@lowers("StridedSliceAssignV2")
def slice_assign(view: LoweringView) -> Tensor:
    """What lies before, the new part, what lies behind: for a slice along one axis."""
    x, value = view["var"], view["input_value"]
    begins, ends, steps, axes = (known(view, n) for n in ("begin", "end", "strides", "axes"))
    if value.dtype != x.dtype or not all(isinstance(b, tuple) for b in (begins, ends, steps, axes)):
        raise UnsupportedLowering("of another type")
    cuts: list[tuple[int, int, int]] = []
    for begin, end, step, axis in zip(begins, ends, steps, axes):
        axis = axis % len(x.shape)
        size = x.shape[axis]
        if not all(isinstance(n, int) for n in (begin, end, step, size)) or step != 1:
            raise UnsupportedLowering("with symbolic bounds or steps")
        begin, end = (min(max(n + size if n < 0 else n, 0), size) for n in (begin, end))
        if (begin, end) != (0, size):
            cuts.append((axis, begin, end))
    if len(cuts) != 1 or cuts[0][1] >= cuts[0][2]:
        raise UnsupportedLowering("along several axes, or of nothing")
    ((axis, begin, end),) = cuts
    size = x.shape[axis]
    inside = expand_to(value, (*x.shape[:axis], end - begin, *x.shape[axis + 1 :]))
    parts = [part(x, axis, 0, begin), inside, part(x, axis, end, size - end)]
    return concat([p for p in parts if not same(p.shape[axis], 0)], axis)
