"""Picking by index tensors, and writing a part of a tensor: the result is a new value, whatever GE's names say."""

from __future__ import annotations

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import broadcast, broadcast_shapes, like
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import TensorType


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
