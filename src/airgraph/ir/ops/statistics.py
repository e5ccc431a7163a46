"""Variances, norms, sums of a special kind."""

from __future__ import annotations

from airgraph.ir.ops.rules import MaybeShape, axes_of, reduced, reduction
from airgraph.ir.ops.table import NodeView, define
from airgraph.ir.types import TensorType


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
