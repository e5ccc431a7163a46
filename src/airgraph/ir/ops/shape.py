"""Ops that move, cut, join or create elements, and the arithmetic of shapes."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import Shape, axes_of, permuted, reshaped
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


def shaped(rule):  # type: ignore[no-untyped-def]
    """A type rule that keeps x's element type and changes its shape."""
    return lambda view: view.result(view.dtype("x"), rule(view))


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


def gathered(view: NodeView) -> Shape | None:
    shape, indices = view.shape("x"), view.shape("indices")
    if shape is None or indices is None:
        return None
    axes = axes_of(view.numbers("axis"), len(shape))
    if axes is None:
        return None
    return (*shape[: axes[0]], *indices, *shape[axes[0] + 1 :])


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


def indexed(view: NodeView) -> list[TensorType]:
    shape = view.shape("index")
    return view.result(view.dtype("x"), shape)


define("StridedSliceV2", "x begin# end# axes# strides#", shaped(sliced), begin_mask=0, end_mask=0)
define("GatherV2", "x indices axis#", shaped(gathered), batch_dims=0)
define("GatherElements", "x index", indexed, dim=0)
# How many elements these find is known only when they have run; FX has a symbol for it, which the engine then learns.
define("NonZero", "x", lambda view: view.result(INT64, None), transpose=False)
define("MaskedSelect", "x mask", shaped(lambda view: None))
define("ConcatV2", "x* concat_dim#", concatenated, N=REQUIRED)
define("SplitV", "x size_splits# split_dim#", split_shapes, outputs="y*", num_split=REQUIRED)
define("Unpack", "x", unpacked, outputs="y*", num=REQUIRED, axis=0)
define("Tile", "x multiples#", shaped(tiled))
define("ReverseV2", "x axis#", shaped(lambda c: c.shape("x")))
define("Tril", "x", shaped(lambda c: c.shape("x")), diagonal=0)
define("Triu", "x", shaped(lambda c: c.shape("x")), diagonal=0)


# -- creation -------------------------------------------------------------------------------------------------------
def filled(view: NodeView) -> list[TensorType]:
    """One number stands for one dimension."""
    dims = view.numbers("dims")
    if dims is None:
        return [TensorType(view.dtype("value"), None, view.attr("place"))]
    shape = tuple(map(dim, dims if isinstance(dims, tuple) else (dims,)))
    return [TensorType(view.dtype("value"), shape, view.attr("place"))]


def unfilled(view: NodeView) -> list[TensorType]:
    dims = view.numbers("shape")
    shape = tuple(map(dim, dims)) if isinstance(dims, tuple) else None
    return [TensorType(DataType(view.attr("dtype")), shape, view.attr("place"))]


define("Fill", "dims# value", filled, place="NPU")
# Zeros, asked for (`init`) or not: what runs twice gives the same twice.
define("Empty", "shape#", unfilled, dtype=REQUIRED, init=False, place="NPU")
define("ZerosLike", "x", shaped(lambda c: c.shape("x")))
define("OnesLike", "x", shaped(lambda c: c.shape("x")))
