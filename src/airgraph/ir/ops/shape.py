"""Ops that move, cut, join or create elements, and the arithmetic of shapes."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import Shape, axes_of, permuted, reshaped
from airgraph.ir.ops.table import REQUIRED, Call, define
from airgraph.ir.types import DataType, Dim, TensorType, dim, numel

INT32, INT64 = DataType.DT_INT32, DataType.DT_INT64


def host(dtype: int, shape: Shape | None) -> list[TensorType]:
    """Sizes live on the host."""
    return [TensorType(DataType(dtype), shape, "CPU")]


def sizes(call: Call) -> list[TensorType]:
    """One number for each dimension of x."""
    shape = call.shape("x")
    return host(call.attr("dtype"), None if shape is None else (len(shape),))


# -- sizes ----------------------------------------------------------------------------------------------------------
def gather_shape(call: Call) -> list[TensorType]:
    x, indices = call.shape("x"), call.shape("indices")
    if x is None or indices is None:
        return call.result(call.dtype("x"), None)
    return call.result(call.dtype("x"), (*indices, *x[1:]))


def gather_known(call: Call) -> object:
    x, index = call.value("x").known, call.numbers("indices")
    if not isinstance(x, tuple) or not isinstance(index, int):
        return None
    if not -len(x) <= index < len(x):
        raise VerifyError(f"Gather takes number {index} of {len(x)}")
    return x[index]


def packed(call: Call) -> list[TensorType]:
    items = call.many("x")
    shape, axis = items[0].type.shape, call.attr("axis")
    if shape is None:
        return call.result(items[0].dtype, None)
    at = axis if axis >= 0 else axis + len(shape) + 1
    return call.result(items[0].dtype, (*shape[:at], len(items), *shape[at:]))


def packed_known(call: Call) -> object:
    numbers = tuple(v.known for v in call.many("x"))
    scalars = all(n is not None and not isinstance(n, tuple) for n in numbers)
    return numbers if scalars and call.attr("axis") == 0 else None


def product(call: Call) -> object:
    numbers = call.value("x").known
    return numel(numbers) if isinstance(numbers, tuple) else None


define("ReduceProdD", "x", lambda call: host(call.dtype("x"), ()), known=product, axes=REQUIRED)
define("Shape", "x", sizes, known=lambda call: call.shape("x"), dtype=INT32)
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


def broadcast_to(call: Call) -> Shape | None:
    new, old = call.numbers("shape"), call.shape("x")
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
    return lambda call: call.result(call.dtype("x"), rule(call))


define("Reshape", "x shape#", shaped(lambda c: reshaped(c.shape("x"), c.numbers("shape"))), axis=0, num_axes=-1)
define("Transpose", "x perm#", shaped(lambda c: permuted(c.shape("x"), c.numbers("perm"))))
define("Unsqueeze", "x", shaped(lambda c: unsqueezed(c.shape("x"), c.attr("axes"))), axes=REQUIRED)
define("ExpandDims", "x axis#", shaped(lambda c: unsqueezed(c.shape("x"), [c.numbers("axis")])))
define("Squeeze", "x", shaped(lambda c: squeezed(c.shape("x"), c.attr("axis"))), axis=())
define("BroadcastTo", "x shape#", shaped(broadcast_to))
define("Expand", "x shape#", shaped(broadcast_to))


# -- parts ----------------------------------------------------------------------------------------------------------
def sliced(call: Call) -> Shape | None:
    """begin:end:stride of each axis, with Python's rules for bounds that are negative or too large."""
    shape = call.shape("x")
    bounds = [call.numbers(n) for n in ("begin", "end", "strides")]
    axes = None if shape is None else axes_of(call.numbers("axes"), len(shape))
    if shape is None or axes is None or not all(isinstance(n, tuple) for n in bounds):
        return None
    result = list(shape)
    for axis, *bound in zip(axes, *bounds):
        if not all(isinstance(number, int) for number in (shape[axis], *bound)):
            return None
        result[axis] = len(range(*slice(*bound).indices(shape[axis])))
    return tuple(result)


def gathered(call: Call) -> Shape | None:
    shape, indices = call.shape("x"), call.shape("indices")
    if shape is None or indices is None:
        return None
    axes = axes_of(call.numbers("axis"), len(shape))
    if axes is None:
        return None
    return (*shape[: axes[0]], *indices, *shape[axes[0] + 1 :])


def concatenated(call: Call) -> list[TensorType]:
    items = call.many("x")
    shapes = [v.type.shape for v in items]
    first = shapes[0]
    axes = None if first is None else axes_of(call.numbers("concat_dim"), len(first))
    if first is None or axes is None or any(s is None for s in shapes):
        return call.result(items[0].dtype, None)
    total: Dim = 0
    for shape in shapes:
        total = total + shape[axes[0]]  # type: ignore[index]
    return call.result(items[0].dtype, (*first[: axes[0]], dim(total), *first[axes[0] + 1 :]))


def split_shapes(call: Call) -> list[TensorType]:
    shape, sizes = call.shape("x"), call.numbers("size_splits")
    axes = None if shape is None else axes_of(call.numbers("split_dim"), len(shape))
    if shape is None or axes is None or not isinstance(sizes, tuple):
        return call.result(call.dtype("x"), None) * call.attr("num_split")
    axis = axes[0]
    rest: Dim = shape[axis]
    for size in sizes:
        rest = rest - (size if size != -1 else 0)
    sizes = [dim(rest) if size == -1 else size for size in sizes]
    return [t for size in sizes for t in call.result(call.dtype("x"), (*shape[:axis], size, *shape[axis + 1 :]))]


def unpacked(call: Call) -> list[TensorType]:
    shape, axis = call.shape("x"), call.attr("axis")
    if shape is None:
        return call.result(call.dtype("x"), None) * call.attr("num")
    (at,) = axes_of(axis, len(shape)) or [0]
    if isinstance(shape[at], int) and shape[at] != call.attr("num"):
        raise VerifyError(f"Unpack of {list(shape)} along axis {axis} gives {shape[at]} values, not {call.attr('num')}")
    return call.result(call.dtype("x"), (*shape[:at], *shape[at + 1 :])) * call.attr("num")


def tiled(call: Call) -> Shape | None:
    shape, times = call.shape("x"), call.numbers("multiples")
    if shape is None or not isinstance(times, tuple):
        return None
    times = (1,) * (len(shape) - len(times)) + times
    padded = (1,) * (len(times) - len(shape)) + shape
    return tuple(dim(d * t) for d, t in zip(padded, times))


def indexed(call: Call) -> list[TensorType]:
    shape = call.shape("index")
    return call.result(call.dtype("x"), shape)


define("StridedSliceV2", "x begin# end# axes# strides#", shaped(sliced), begin_mask=0, end_mask=0)
define("GatherV2", "x indices axis#", shaped(gathered), batch_dims=0)
define("GatherElements", "x index", indexed, dim=0)
# How many elements these find is known only when they have run; FX has a symbol for it, which the engine then learns.
define("NonZero", "x", lambda call: call.result(INT64, None), transpose=False)
define("MaskedSelect", "x mask", shaped(lambda call: None))
define("ConcatV2", "x* concat_dim#", concatenated, N=REQUIRED)
define("SplitV", "x size_splits# split_dim#", split_shapes, outputs="y*", num_split=REQUIRED)
define("Unpack", "x", unpacked, outputs="y*", num=REQUIRED, axis=0)
define("Tile", "x multiples#", shaped(tiled))
define("ReverseV2", "x axis#", shaped(lambda c: c.shape("x")))
define("Tril", "x", shaped(lambda c: c.shape("x")), diagonal=0)
define("Triu", "x", shaped(lambda c: c.shape("x")), diagonal=0)


# -- creation -------------------------------------------------------------------------------------------------------
def filled(call: Call) -> list[TensorType]:
    """One number stands for one dimension."""
    dims = call.numbers("dims")
    if dims is None:
        return [TensorType(call.dtype("value"), None, call.attr("place"))]
    shape = tuple(map(dim, dims if isinstance(dims, tuple) else (dims,)))
    return [TensorType(call.dtype("value"), shape, call.attr("place"))]


def unfilled(call: Call) -> list[TensorType]:
    dims = call.numbers("shape")
    shape = tuple(map(dim, dims)) if isinstance(dims, tuple) else None
    return [TensorType(DataType(call.attr("dtype")), shape, call.attr("place"))]


define("Fill", "dims# value", filled, place="NPU")
# Zeros, asked for (`init`) or not: what runs twice gives the same twice.
define("Empty", "shape#", unfilled, dtype=REQUIRED, init=False, place="NPU")
define("ZerosLike", "x", shaped(lambda c: c.shape("x")))
define("OnesLike", "x", shaped(lambda c: c.shape("x")))
