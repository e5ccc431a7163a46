"""Elements read and written by index or by mask; embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.direct import bound, constant, direct, emitted, word_of
from airgraph.convert.families.attention import Outputs
from airgraph.convert.promote import real, to
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType, Dim, TensorType

aten = torch.ops.aten


@converts(aten.select.int)
def select(self: Value, dim: int, index: Any) -> Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    size = self.type.shape[dim] if self.type.shape else None
    if not isinstance(index, int) or not isinstance(size, int):
        raise UnsupportedConversion("a symbolic index or size")
    return ge.GatherV2(self, ge.Const(index % size, dtype=9), dim % self.rank)


@converts(aten.embedding.default)
def embedding(
    weight: Value, indices: Value, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, …) -> Tensor"""
    return ge.GatherV2(weight, indices, 0)


@converts(aten.index_select.default)
def index_select(self: Value, dim: int, index: Value) -> Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if self.rank == 0 or index.rank != 1:
        raise UnsupportedConversion("a scalar")
    return ge.GatherV2(self, index, dim % self.rank)


@converts(aten.gather.default)
def gather(self: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    if self.rank == 0 or index.rank != self.rank:
        raise UnsupportedConversion("a scalar")
    return ge.GatherElements(self, index, dim=dim)


@converts(aten.nonzero.default)
def nonzero(self: Value) -> Value:
    """nonzero(Tensor self) -> Tensor"""
    real(self)
    return ge.NonZero(self)


@converts(aten.masked_select.default)
def masked_select(self: Value, mask: Value) -> Value:
    """masked_select(Tensor self, Tensor mask) -> Tensor"""
    real(self)
    return ge.MaskedSelect(self, to(mask, DataType.DT_BOOL))


direct(
    aten.embedding_dense_backward.default,
    "EmbeddingDenseGrad",
    "grad=grad_output indices num_weights padding_idx scale_grad_by_freq",
)


def embedding_bag(target: Any, forward_only: bool) -> Any:
    names = ("scale_grad_by_freq", "sparse", "include_last_offset", "padding_idx")

    def convert(*args: Any, meta_outputs: list[TensorSpec], **kwargs: Any) -> Outputs:
        given = bound(target, args, kwargs)
        attrs = {name: constant(name, given[name]) for name in names}
        mode = word_of("sum", "mean", "max")(constant("mode", given["mode"]))
        if mode == "sum" and given["weight"].dtype == DataType.DT_BF16:
            raise UnsupportedConversion("PyTorch records other sizes than its kernel gives for bags of bfloat16")
        inputs = [given[name] for name in ("weight", "indices", "offsets", "per_sample_weights")]
        return emitted("EmbeddingBag", inputs, {**attrs, "mode": mode, "forward_only": forward_only}, meta_outputs)

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    return convert


REGISTRY.register(aten._embedding_bag.default, embedding_bag(aten._embedding_bag.default, False))
REGISTRY.register(
    aten._embedding_bag_forward_only.default, embedding_bag(aten._embedding_bag_forward_only.default, True)
)
INDEX_TYPES = (DataType.DT_INT32, DataType.DT_INT64)
END = 2**63 - 1
INT64 = int(DataType.DT_INT64)
REDUCTIONS = {"add": "add", "multiply": "mul"}
REDUCTIONS_OF_TWO = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def mask_of(indices: Sequence[Value | None]) -> list[int]:
    return [0 if i is None else 1 for i in indices]


def given(indices: Sequence[Value | None], *types: DataType) -> list[Value]:
    found = [i for i in indices if i is not None]
    if not found or any(i.dtype not in types for i in found):
        raise UnsupportedConversion("a mask among the indices: the result's size is only known when run")
    return found


@converts(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self: Value, indices: Sequence[Value | None]) -> Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    real(self)
    return ge.IndexByTensor(self, given(indices, *INDEX_TYPES), indices_mask=mask_of(indices))


@converts(aten.take.default)
def take(self: Value, index: Value) -> Value:
    """take(Tensor self, Tensor index) -> Tensor"""
    real(self)
    return ge.IndexByTensor(ge.Reshape(self, [-1]), [index], indices_mask=[1])


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    real(self, values)
    found = given(indices, *INDEX_TYPES, DataType.DT_BOOL)
    return ge.IndexPutV2(self, values, mask_of(indices), [], found, accumulate=accumulate)


@converts(aten.put.default)
def put(self: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor"""
    real(self, source)
    flat, size = ge.Reshape(self, [-1]), int(DataType.DT_INT64)
    values = ge.Reshape(source, ge.Shape(index, dtype=size))
    return ge.Reshape(ge.IndexPutV2(flat, values, [1], [], [index], accumulate=accumulate), ge.Shape(self, dtype=size))


@converts(aten.index_add.default)
def index_add(self: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    if self.rank == 0 or index.rank > 1 or source.rank != self.rank:
        raise UnsupportedConversion("a scalar")
    axis = dim % self.rank
    real(self, source, alpha)
    index = ge.Unsqueeze(index, axes=[0]) if index.rank == 0 else index
    sizes, count = ge.Shape(self, dtype=INT64), ge.Gather(ge.Shape(index, dtype=INT64), 0)
    room = [count if i == axis else ge.Gather(sizes, i) for i in range(self.rank)]
    source = ge.BroadcastTo(source, ge.Pack(room, N=self.rank))
    factor = None if isinstance(alpha, int | float) and alpha == 1 else to(alpha, self.dtype)
    return ge.InplaceIndexAdd(ge.TensorMove(self), index, source, factor, axis=axis)


@converts(aten.index_copy.default)
def index_copy(self: Value, dim: int, index: Value, source: Value) -> Value:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    axis = axis_of(self, dim, index)
    real(self, source)
    if axis == 0:
        return ge.InplaceUpdate(self, index, source)
    swap = list(range(self.rank))
    swap[0], swap[axis] = axis, 0
    rows = ge.InplaceUpdate(ge.Transpose(self, swap), index, ge.Transpose(source, swap))
    return ge.Transpose(rows, swap)


@converts(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: Value, dim: int, index: Value, value: Any) -> Value:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    axis = axis_of(self, dim, index)
    real(self, value)
    return ge.IndexFill(self, index, to(value, self.dtype), dim=axis)


def axis_of(x: Value, dim: int, index: Value) -> int:
    if x.rank == 0 or index.rank != 1:
        raise UnsupportedConversion("a scalar")
    return dim % x.rank


@converts(aten.scatter.src, aten.scatter.reduce)
def scatter(self: Value, dim: int, index: Value, src: Value, *, reduce: str | None = None) -> Value:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    real(self, src)
    return ge.ScatterElements(self, index, src, axis=dim, reduction=REDUCTIONS[reduce] if reduce else "none")


@converts(aten.scatter_add.default)
def scatter_add(self: Value, dim: int, index: Value, src: Value) -> Value:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return scatter(self, dim, index, src, reduce="add")


@converts(aten.scatter.value, aten.scatter.value_reduce)
def scatter_value(
    self: Value, dim: int, index: Value, value: Any, *, reduce: str | None = None, meta_outputs: TensorSpec
) -> Value:
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    real(self, value)
    sizes = ge.Shape(index, dtype=int(DataType.DT_INT64))
    values = ge.Fill(sizes, to(value, self.dtype), place=meta_outputs.place)
    return scatter(self, dim, index, values, reduce=reduce)


@converts(aten.scatter_reduce.two)
def scatter_reduce(self: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True) -> Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, …) -> Tensor"""
    real(self, src)
    if reduce not in REDUCTIONS_OF_TWO or not include_self:
        raise UnsupportedConversion("ScatterElements knows no mean, and takes what is there into account")
    return ge.ScatterElements(self, index, src, axis=dim, reduction=REDUCTIONS_OF_TWO[reduce])


@converts(aten.masked_scatter.default)
def masked_scatter(self: Value, mask: Value, source: Value) -> Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    real(self, source)
    return ge.MaskedScatter(self, mask, source)


def bounds(start: Any, end: Any, size: Any) -> tuple[int, int] | None:
    """start:end as Python counts it; None where that depends on what is only known when run."""
    start, end = 0 if start is None else start, END if end is None else end
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    if isinstance(size, int):
        start, end, _ = slice(start, end).indices(size)
    if start < 0 or end < 0:
        return None
    return start, max(start, end)


def steps(x: Value, part: Value, axis: int, start: Any, end: Any, step: Any) -> Value:
    """The places along one axis of x that start:end:step names, for every element of the part."""
    size = ge.Gather(ge.Shape(x, dtype=INT64), axis)
    limit = size if end is None else ge.Minimum(size, to(from_the_end(end, size), DataType.DT_INT64))
    first = from_the_end(0 if start is None else start, size)
    places = ge.Range(first, limit, step, dtype=INT64, place=part.type.place)
    places.type = TensorType(DataType.DT_INT64, (part.type.shape or ())[axis : axis + 1], part.type.place)
    others = [i for i in range(x.rank) if i != axis]
    return ge.Expand(ge.Unsqueeze(places, axes=others), ge.Shape(part, dtype=INT64)) if others else places


def from_the_end(n: Any, size: Value) -> Any:
    """A place before the start is the start."""
    return ge.Maximum(ge.Add(size, n), to(0, DataType.DT_INT64)) if isinstance(n, int) and n < 0 else n


@converts(aten.slice_scatter.default)
def slice_scatter(self: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""
    real(self, src)
    axis, part = dim % self.rank, to(src, self.dtype)
    within = bounds(start, end, sizes_of(self)[axis])
    if (within or (None,))[0] == 0 and end in (None, END) and step == 1:
        return ge.Identity(part)
    if within is None or not isinstance(step, int) or step != 1:
        return ge.ScatterElements(self, steps(self, part, axis, start, end, step), part, axis=axis)
    before, after = within
    first, last = (ge.StridedSliceV2(self, [a], [b], [axis], [1]) for a, b in ((0, before), (after, END)))
    return ge.ConcatV2([first, part, last], axis, N=3)


@converts(aten.slice_backward.default)
def slice_backward(
    grad_output: Value, input_sizes: Any, dim: int, start: Any, end: Any, step: Any, *, meta_outputs: TensorSpec
) -> Value:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""
    real(grad_output)
    axis = dim % meta_outputs.rank
    within = bounds(start, end, meta_outputs.symsize[axis])
    fixed = within is not None and not isinstance(input_sizes, Value)
    if not fixed or not isinstance(step, int) or step != 1:
        zeros = ge.Fill(input_sizes, to(0, meta_outputs.dtype), place=meta_outputs.place)
        return ge.ScatterElements(zeros, steps(zeros, grad_output, axis, start, end, step), grad_output, axis=axis)
    assert within is not None
    lengths = (within[0], input_sizes[axis] - within[1])
    before, after = ([*input_sizes[:axis], length, *input_sizes[axis + 1 :]] for length in lengths)
    first, last = (ge.Fill(n, to(0, meta_outputs.dtype), place=meta_outputs.place) for n in (before, after))
    return ge.ConcatV2([first, grad_output, last], axis, N=3)


def place_of_one(x: Value, part: Value, axis: int, index: Any) -> Value:
    """The same index for every element of the part."""
    size = sizes_of(x)[axis]
    if not isinstance(index, int):
        raise UnsupportedConversion("a symbolic index")
    if index < 0 and not isinstance(size, int):
        number = ge.Add(ge.Gather(ge.Shape(x, dtype=INT64), axis), index)
    else:
        number = ge.constant(index + size if index < 0 else index, DataType.DT_INT64, place=part.type.place)
    return ge.BroadcastTo(number, ge.Shape(part, dtype=INT64))


def sizes_of(x: Value) -> tuple[Dim, ...]:
    if not x.type.shape:
        raise UnsupportedConversion("a scalar, or sizes that are not known")
    return x.type.shape


@converts(aten.select_scatter.default)
def select_scatter(self: Value, src: Value, dim: int, index: Any) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    real(self, src)
    axis = dim % self.rank
    part = ge.ExpandDims(to(src, self.dtype), axis)
    return ge.ScatterElements(self, place_of_one(self, part, axis, index), part, axis=axis)


@converts(aten.select_backward.default)
def select_backward(grad_output: Value, input_sizes: Any, dim: int, index: Any, *, meta_outputs: TensorSpec) -> Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    real(grad_output)
    zeros = ge.Empty(input_sizes, dtype=int(meta_outputs.dtype), init=True, place=meta_outputs.place)
    return select_scatter(zeros, grad_output, dim, index)
