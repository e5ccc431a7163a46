"""Elements read and written by index or by mask; embeddings. The result is a new value, whatever GE's names say."""

from __future__ import annotations

from airgraph.errors import VerifyError
from airgraph.ir.ops.joint import each, sized
from airgraph.ir.ops.rules import Shape, axes_of, broadcast, broadcast_shapes, like, shaped
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType


def picked(view: NodeView) -> list[TensorType]:
    """The broadcast shape of the indices takes the place of the axes they stand at, or comes first if these are apart."""
    shape, mask = view.shape("x"), view.attr("indices_mask")
    indices = broadcast_shapes([v.type.shape for v in view.values("indices")])
    at = [i for i, here in enumerate(mask) if here]
    if len(at) != len(view.values("indices")):
        raise VerifyError(f"IndexByTensor has {len(view.values('indices'))} indices for the mask {list(mask)}")
    if shape is None or indices is None:
        return view.result(view.dtype("x"), None)
    rest = [d for i, d in enumerate(shape) if i not in at]
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    return view.result(view.dtype("x"), (*rest[:first], *indices, *rest[first:]))


define("IndexByTensor", "x indices*", picked, indices_mask=REQUIRED)
# `indexed_sizes` is 1 where there is an index and 0 where the whole axis is meant.
define("IndexPutV2", "x value indexed_sizes# indexed_strides# indices*", like("x"), outputs="x", accumulate=False)
define("InplaceIndexAdd", "var indices updates alpha?", like("var"), outputs="var", axis=REQUIRED)
define("InplaceUpdate", "x indices v", like("x"))
define("IndexFill", "x indices value", like("x"), dim=REQUIRED)
define("ScatterElements", "data indices updates", like("data"), axis=0, reduction="none")
define("StridedSliceAssignV2", "var input_value begin# end# strides# axes#", like("var"), outputs="var")
define("MaskedScatter", "x mask updates", broadcast("x", "mask"))


def gathered(view: NodeView) -> Shape | None:
    shape, indices = view.shape("x"), view.shape("indices")
    if shape is None or indices is None:
        return None
    axes = axes_of(view.numbers("axis"), len(shape))
    if axes is None:
        return None
    return (*shape[: axes[0]], *indices, *shape[axes[0] + 1 :])


def indexed(view: NodeView) -> list[TensorType]:
    shape = view.shape("index")
    return view.result(view.dtype("x"), shape)


define("GatherV2", "x indices axis#", shaped(gathered), batch_dims=0)
define("GatherElements", "x index", indexed, dim=0)
# How many elements these find is known only when they have run; FX has a symbol for it, which the engine then learns.
define("NonZero", "x", lambda view: view.result(DataType.DT_INT64, None), transpose=False)
define("MaskedSelect", "x mask", shaped(lambda view: None))
define("EmbeddingDenseGrad", "grad indices num_weights#", sized("grad"), padding_idx=-1, scale_grad_by_freq=False)
define(
    "EmbeddingBag",
    "weight indices offsets per_sample_weights?",
    each(sized("weight"), *[sized("offsets")] * 3),
    outputs="y offset2bag bag_size max_indices",
    mode=REQUIRED,
    scale_grad_by_freq=False,
    sparse=False,
    include_last_offset=False,
    padding_idx=-1,
    forward_only=False,
)
