"""Matrix products, reductions and normalisations."""

from __future__ import annotations

from airgraph.ir.ops.rules import like, matmul, reduction
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType

BOOL = DataType.DT_BOOL


def mean_as(view: NodeView) -> list[TensorType]:
    return list(reduction(DataType(view.attr("dtype")))(view))


define(
    "MatMul", "x1 x2 bias?", matmul("x1", "x2", "transpose_x1", "transpose_x2"), transpose_x1=False, transpose_x2=False
)
define(
    "MatMulV2",
    "x1 x2 bias? offset_w?",
    matmul("x1", "x2", "transpose_x1", "transpose_x2"),
    transpose_x1=False,
    transpose_x2=False,
    offset_x=0,
)
define("BatchMatMul", "x1 x2", matmul("x1", "x2", "adj_x1", "adj_x2"), adj_x1=False, adj_x2=False)

for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
    define(name, "x axes#", reduction(), keep_dims=False)
define("ReduceMeanWithCast", "x axes#", mean_as, keep_dims=False, dtype=REQUIRED)
for name in ("ReduceAll", "ReduceAny"):
    define(name, "x axes#", reduction(BOOL), keep_dims=False)

define("SoftmaxV2", "x", like(), axes=(-1,), half_to_float=False)
define("LogSoftmaxV2", "logits", like("logits"), axes=(-1,))
define("SoftmaxGrad", "softmax grad_softmax", like("softmax"), axes=(-1,))
define("LogSoftmaxGrad", "grad x", like("grad"), axis=(-1,))
