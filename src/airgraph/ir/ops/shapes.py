"""Views, slices, joins, windows, diagonals and rolls: the same elements in other places; the arithmetic of shapes."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import MaybeShape, Shape, axes_of, like, permuted, reshaped, shaped
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, Dim, TensorType, dim, numel

INT32, INT64 = DataType.DT_INT32, DataType.DT_INT64


def host(dtype: int, shape: Shape | None) -> list[TensorType]:
    """Sizes live on the host."""
    return [TensorType(DataType(dtype), shape, "CPU")]


def sizes(view: NodeView) -> list[TensorType]:
    """One number for each dimension of x."""
    shape = view.shape("x")
    return host(view.attr("dtype"), None if shape is None else (len(shape),))


# -- sizes ----------------------------------------------------------------------------------------------------------
def gather_shape(view: NodeView) -> list[TensorType]:
    x, indices = view.shape("x"), view.shape("indices")
    if x is None or indices is None:
        return view.result(view.dtype("x"), None)
    return view.result(view.dtype("x"), (*indices, *x[1:]))


def gather_known(view: NodeView) -> object:
    x, index = view.value("x").known, view.numbers("indices")
    if not isinstance(x, tuple) or not isinstance(index, int):
        return None
    if not -len(x) <= index < len(x):
        raise VerifyError(f"Gather takes number {index} of {len(x)}")
    return x[index]


def packed(view: NodeView) -> list[TensorType]:
    items = view.values("x")
    shape, axis = items[0].type.shape, view.attr("axis")
    if shape is None:
        return view.result(items[0].dtype, None)
    at = axis if axis >= 0 else axis + len(shape) + 1
    return view.result(items[0].dtype, (*shape[:at], len(items), *shape[at:]))


def packed_known(view: NodeView) -> object:
    numbers = tuple(v.known for v in view.values("x"))
    scalars = all(n is not None and not isinstance(n, tuple) for n in numbers)
    return numbers if scalars and view.attr("axis") == 0 else None


def product(view: NodeView) -> object:
    numbers = view.value("x").known
    return numel(numbers) if isinstance(numbers, tuple) else None


define("ReduceProdD", "x", lambda view: host(view.dtype("x"), ()), known=product, axes=REQUIRED)
define("Shape", "x", sizes, known=lambda view: view.shape("x"), dtype=INT32)
define("Gather", "x indices#", gather_shape, known=gather_known, validate_indices=True)
define("Pack", "x*", packed, known=packed_known, N=REQUIRED, axis=0)


# -- views ----------------------------------------------------------------------------------------------------------
def unsqueezed(shape: Shape | None, axes: Sequence[int]) -> Shape | None:
    if shape is None:
        return None
    rank = len(shape) + len(axes)
    at = {a + rank if a < 0 else a for a in axes}
    rest = iter(shape)
    return tuple(1 if i in at else next(rest) for i in range(rank))


def squeezed(shape: Shape | None, axes: Sequence[int]) -> Shape | None:
    if shape is None:
        return None
    at = {a + len(shape) if a < 0 else a for a in axes} or {i for i, d in enumerate(shape) if d == 1}
    return tuple(d for i, d in enumerate(shape) if i not in at)


def broadcast_to(view: NodeView) -> Shape | None:
    new, old = view.numbers("shape"), view.shape("x")
    if not isinstance(new, tuple) or old is None:
        return None
    pad = (1,) * (len(new) - len(old)) + old
    result = tuple(o if n == -1 else dim(n) for n, o in zip(new, pad))
    if len(pad) != len(new) or any(
        o not in (1, n) and isinstance(o, int) and isinstance(n, int) for o, n in zip(pad, result)
    ):
        raise VerifyError(f"{list(old)} does not broadcast to {list(new)}")
    return result


define("Reshape", "x shape#", shaped(lambda c: reshaped(c.shape("x"), c.numbers("shape"))), axis=0, num_axes=-1)
define("Transpose", "x perm#", shaped(lambda c: permuted(c.shape("x"), c.numbers("perm"))))
define("Unsqueeze", "x", shaped(lambda c: unsqueezed(c.shape("x"), c.attr("axes"))), axes=REQUIRED)
define("ExpandDims", "x axis#", shaped(lambda c: unsqueezed(c.shape("x"), [c.numbers("axis")])))
define("Squeeze", "x", shaped(lambda c: squeezed(c.shape("x"), c.attr("axis"))), axis=())
define("BroadcastTo", "x shape#", shaped(broadcast_to))
define("Expand", "x shape#", shaped(broadcast_to))


# -- parts ----------------------------------------------------------------------------------------------------------
def sliced(view: NodeView) -> Shape | None:
    """begin:end:stride of each axis, with Python's rules for bounds that are negative or too large."""
    shape = view.shape("x")
    bounds = [view.numbers(n) for n in ("begin", "end", "strides")]
    axes = None if shape is None else axes_of(view.numbers("axes"), len(shape))
    if shape is None or axes is None or not all(isinstance(n, tuple) for n in bounds):
        return None
    result = list(shape)
    for axis, *bound in zip(axes, *bounds):
        if not all(isinstance(number, int) for number in (shape[axis], *bound)):
            return None
        result[axis] = len(range(*slice(*bound).indices(shape[axis])))
    return tuple(result)


def concatenated(view: NodeView) -> list[TensorType]:
    items = view.values("x")
    shapes = [v.type.shape for v in items]
    first = shapes[0]
    axes = None if first is None else axes_of(view.numbers("concat_dim"), len(first))
    if first is None or axes is None or any(s is None for s in shapes):
        return view.result(items[0].dtype, None)
    total: Dim = 0
    for shape in shapes:
        total = total + shape[axes[0]]  # type: ignore[index]
    return view.result(items[0].dtype, (*first[: axes[0]], dim(total), *first[axes[0] + 1 :]))


def split_shapes(view: NodeView) -> list[TensorType]:
    shape, sizes = view.shape("x"), view.numbers("size_splits")
    axes = None if shape is None else axes_of(view.numbers("split_dim"), len(shape))
    if shape is None or axes is None or not isinstance(sizes, tuple):
        return view.result(view.dtype("x"), None) * view.attr("num_split")
    axis = axes[0]
    rest: Dim = shape[axis]
    for size in sizes:
        rest = rest - (size if size != -1 else 0)
    sizes = [dim(rest) if size == -1 else size for size in sizes]
    return [t for size in sizes for t in view.result(view.dtype("x"), (*shape[:axis], size, *shape[axis + 1 :]))]


def unpacked(view: NodeView) -> list[TensorType]:
    shape, axis = view.shape("x"), view.attr("axis")
    if shape is None:
        return view.result(view.dtype("x"), None) * view.attr("num")
    (at,) = axes_of(axis, len(shape)) or [0]
    if isinstance(shape[at], int) and shape[at] != view.attr("num"):
        raise VerifyError(f"Unpack of {list(shape)} along axis {axis} gives {shape[at]} values, not {view.attr('num')}")
    return view.result(view.dtype("x"), (*shape[:at], *shape[at + 1 :])) * view.attr("num")


def tiled(view: NodeView) -> Shape | None:
    shape, times = view.shape("x"), view.numbers("multiples")
    if shape is None or not isinstance(times, tuple):
        return None
    times = (1,) * (len(shape) - len(times)) + times
    padded = (1,) * (len(times) - len(shape)) + shape
    return tuple(dim(d * t) for d, t in zip(padded, times))


define("StridedSliceV2", "x begin# end# axes# strides#", shaped(sliced), begin_mask=0, end_mask=0)
define("ConcatV2", "x* concat_dim#", concatenated, N=REQUIRED)
define("SplitV", "x size_splits# split_dim#", split_shapes, outputs="y*", num_split=REQUIRED)
define("Unpack", "x", unpacked, outputs="y*", num=REQUIRED, axis=0)
define("Tile", "x multiples#", shaped(tiled))
define("ReverseV2", "x axis#", shaped(lambda c: c.shape("x")))
define("Tril", "x", shaped(lambda c: c.shape("x")), diagonal=0)
define("Triu", "x", shaped(lambda c: c.shape("x")), diagonal=0)


def windows(view: NodeView) -> list[TensorType]:
    size = view.numbers("size")
    return view.result(view.dtype("x"), tuple(map(dim, size)) if isinstance(size, tuple) else None)


def diagonal(view: NodeView) -> MaybeShape:
    shape, k = view.shape("input"), view.numbers("k")
    if shape is None or not all(isinstance(n, int) for n in (*shape[-2:], k)):
        return None
    rows, columns = shape[-2:]
    return (*shape[:-2], max(0, min(rows + min(k, 0), columns - max(k, 0))))


def embedded(view: NodeView) -> MaybeShape:
    shape, k = view.shape("diagonal"), view.numbers("k")
    if shape is None or not isinstance(k, int):
        return None
    side = dim(shape[-1] + abs(k))
    return (*shape[:-1], side, side)


# AsStrided counts in a contiguous x, as all values of a graph are.
define("AsStrided", "x size# stride# storage_offset#", windows)
define(
    "ViewCopy",
    "dst dst_size# dst_stride# dst_storage_offset# src src_size# src_stride# src_storage_offset#",
    like("dst"),
)
define(
    "MatrixDiagPartV2",
    "input k# padding_value",
    lambda view: view.result(view.dtype("input"), diagonal(view)),
    outputs="diagonal",
)
define(
    "MatrixDiagV2",
    "diagonal k# num_rows# num_cols# padding_value",
    lambda view: view.result(view.dtype("diagonal"), embedded(view)),
    outputs="output",
)
define("MatrixSetDiagV2", "input diagonal k#", like("input"), outputs="output")
define("Trace", "x", lambda view: view.result(view.dtype("x"), ()))
define("Roll", "x", like(), shifts=REQUIRED, dims=())
