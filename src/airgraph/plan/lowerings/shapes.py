"""Views, slices, joins, rolls and triangles: the same elements in other places."""

from __future__ import annotations

from airgraph.ir.types import Dim
from airgraph.plan.index import count, expand, same, same_shape
from airgraph.plan.lowerings.formulas import choose, zero
from airgraph.plan.lowerings.table import BOOL, LoweringView, UnsupportedLowering, first, known, lowers
from airgraph.plan.tensors import Tensor, concat, cut, expand_to, iota, part, permute, point, reshape, tensor


@lowers("Reshape", "Unsqueeze", "Squeeze", "ExpandDims")
def reshaped(view: LoweringView) -> Tensor:
    return reshape(first(view), view.result_shape)


@lowers("Transpose")
def transposed(view: LoweringView) -> Tensor:
    perm = known(view, "perm")
    return permute(first(view), [p % len(perm) for p in perm])


@lowers("BroadcastTo", "Expand")
def broadcast_to(view: LoweringView) -> Tensor:
    return expand_to(first(view), view.result_shape)


@lowers("StridedSliceV2")
def strided_slice(view: LoweringView) -> Tensor:
    x = view["x"]
    starts: list[Dim] = [0] * len(x.shape)
    steps: list[Dim] = [1] * len(x.shape)
    bounds = [known(view, n) for n in ("begin", "axes", "strides")]
    if view.attr("begin_mask") or view.attr("end_mask") or not all(isinstance(b, tuple) for b in bounds):
        raise UnsupportedLowering("bounds that are left open")
    for begin, axis, step in zip(*bounds):
        axis = axis % len(x.shape)
        size = x.shape[axis]
        if not isinstance(step, int) or not isinstance(begin, int) or step < 1:
            raise UnsupportedLowering("symbolic bounds")
        if not isinstance(size, int):
            if begin < 0:
                raise UnsupportedLowering("bounds from a symbolic end")
        else:
            begin = min(begin + size if begin < 0 else begin, size)
        starts[axis], steps[axis] = max(begin, 0), step
    return cut(x, view.result_shape, starts, steps)


@lowers("SplitV")
def split(view: LoweringView) -> list[Tensor]:
    x, axis = view["x"], known(view, "split_dim")
    axis = (axis[0] if isinstance(axis, tuple) else axis) % len(x.shape)
    start: Dim = 0
    parts: list[Tensor] = []
    for v in view.node.outputs:
        assert v.type.shape is not None
        parts.append(part(x, axis, start, v.type.shape[axis]))
        start = expand(start + v.type.shape[axis])
    return parts


@lowers("Unpack")
def unpack(view: LoweringView) -> list[Tensor]:
    x, axis = view["x"], view.attr("axis") % len(view["x"].shape)
    return [reshape(part(x, axis, i, 1), v.type.shape or ()) for i, v in enumerate(view.node.outputs)]


@lowers("Pack")
def pack(view: LoweringView) -> Tensor:
    parts, axis = view.many("x"), view.attr("axis")
    axis = axis % (len(parts[0].shape) + 1)
    return concat([reshape(p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in parts], axis)


@lowers("ConcatV2")
def concatenate(view: LoweringView) -> Tensor:
    axis, parts = known(view, "concat_dim"), view.many("x")
    axis = (axis[0] if isinstance(axis, tuple) else axis) % len(view.result_shape)
    parts = [p for p in parts if not (len(p.shape) == 1 and same(p.shape[0], 0) and len(view.result_shape) > 1)]
    parts = [p for p in parts if not same(p.shape[axis], 0)] or parts[:1]
    return concat(parts, axis) if len(parts) > 1 else parts[0]


@lowers("Tile")
def tile(view: LoweringView) -> Tensor:
    x, times = view["x"], known(view, "multiples")
    rank = max(len(x.shape), len(times))
    old = (1,) * (rank - len(x.shape)) + x.shape
    new = (1,) * (rank - len(times)) + tuple(times)
    pairs = [d for o, t in zip(old, new) for d in (t, o)]
    spread = expand_to(reshape(x, [d for o in old for d in (1, o)]), pairs)
    return reshape(spread, view.result_shape)


@lowers("ReverseV2")
def reverse(view: LoweringView) -> Tensor:
    axes = known(view, "axis")
    axes = axes if isinstance(axes, tuple) else (axes,)
    if not view.result_shape:
        return view["x"]
    return tensor(
        "reverse", (view["x"],), view.result_shape, view.result_dtype, tuple(a % len(view.result_shape) for a in axes)
    )


@lowers("Roll")
def roll(view: LoweringView) -> Tensor:
    x, shifts, dims = view["x"], list(view.attr("shifts")), list(view.attr("dims"))
    shape = x.shape
    if not dims:
        x, dims = reshape(x, (count(shape),)), [0]
    for shift, axis in zip(shifts, dims):
        axis, size = axis % max(len(x.shape), 1), x.shape[axis] if x.shape else 1
        if not isinstance(size, int) or not isinstance(shift, int):
            raise UnsupportedLowering("of a symbolic size")
        shift = shift % size if size else 0
        if shift:
            x = concat([part(x, axis, size - shift, shift), part(x, axis, 0, size - shift)], axis)
    return x if same_shape(x.shape, shape) else reshape(x, shape)


@lowers("Tril", "Triu")
def triangle(view: LoweringView) -> Tensor:
    x, k = view["x"], view.attr("diagonal")
    rank = len(view.result_shape)
    rows, columns = iota(view.result_shape, rank - 2, k, 1), iota(view.result_shape, rank - 1, 0, 1)
    keep = point("le" if view.node.op == "Tril" else "ge", (columns, rows), BOOL)
    return choose(keep, x, zero(x.dtype))
