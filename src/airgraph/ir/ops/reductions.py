"""Reductions over axes: sums, extremes, means, variances, norms, histograms; softmax and its gradients."""

from __future__ import annotations

from airgraph.ir.ops.rules import MaybeShape, axes_of, like, reduced, reduction
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType

BOOL = DataType.DT_BOOL


def mean_as(view: NodeView) -> list[TensorType]:
    return list(reduction(DataType(view.attr("dtype")))(view))


for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
    define(name, "x axes#", reduction(), keep_dims=False)
define("ReduceMeanWithCast", "x axes#", mean_as, keep_dims=False, dtype=REQUIRED)
for name in ("ReduceAll", "ReduceAny"):
    define(name, "x axes#", reduction(BOOL), keep_dims=False)
define("SoftmaxV2", "x", like(), axes=(-1,), half_to_float=False)
define("LogSoftmaxV2", "logits", like("logits"), axes=(-1,))
define("SoftmaxGrad", "softmax grad_softmax", like("softmax"), axes=(-1,))
define("LogSoftmaxGrad", "grad x", like("grad"), axis=(-1,))
# How many elements lie in each of `bins` equal parts of [min, max]; those outside are not counted.
define("Histogram", "x", lambda view: view.result(view.dtype("x"), (view.attr("bins"),)), bins=100, min=0.0, max=0.0)


def over(view: NodeView, axes: str) -> MaybeShape:
    """x without the axes an attribute names; none named means all."""
    shape = view.shape("x")
    named = None if shape is None else axes_of(tuple(view.attr(axes)), len(shape))
    return reduced(shape, named or range(len(shape or ())), view.attr("keepdim"))


def variance(view: NodeView) -> list[TensorType]:
    shape = over(view, "dim")
    mean = shape if view.attr("is_mean_out") else (0,)
    return [*view.result(view.dtype("x"), shape), *view.result(view.dtype("x"), mean)]


def norm(view: NodeView) -> list[TensorType]:
    return view.result(view.dtype("x"), over(view, "axes"))


# Without `is_mean_out` the second output is empty.
define("ReduceVar", "x", variance, outputs="var mean", dim=(), correction=1, keepdim=False, is_mean_out=True)
define("ReduceStdV2", "x", variance, outputs="std mean", dim=(), correction=1, keepdim=False, is_mean_out=True)
# The mean comes with it, as large as x.
define(
    "ReduceStdWithMean",
    "x mean",
    lambda view: view.result(view.dtype("x"), over(view, "dim")),
    dim=(),
    correction=1,
    keepdim=False,
)
define("LpNormV2", "x", norm, p=2.0, axes=(), keepdim=False, epsilon=1e-12)
# log(sum(exp(x))) as it stands: the converter takes the maximum out first.
define("ReduceLogSumExp", "x axes#", reduction(), keep_dims=False)
define("ReduceNansum", "x axes#", reduction(), keep_dims=False)
