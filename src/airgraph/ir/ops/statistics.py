"""Variances, norms, sums of a special kind."""

from __future__ import annotations

from airgraph.ir.ops.rules import MaybeShape, axes_of, reduced, reduction
from airgraph.ir.ops.table import Call, define
from airgraph.ir.types import TensorType


def over(call: Call, axes: str) -> MaybeShape:
    """x without the axes an attribute names; none named means all."""
    shape = call.shape("x")
    named = None if shape is None else axes_of(tuple(call.attr(axes)), len(shape))
    return reduced(shape, named or range(len(shape or ())), call.attr("keepdim"))


def variance(call: Call) -> list[TensorType]:
    shape = over(call, "dim")
    mean = shape if call.attr("is_mean_out") else (0,)
    return [*call.result(call.dtype("x"), shape), *call.result(call.dtype("x"), mean)]


def norm(call: Call) -> list[TensorType]:
    return call.result(call.dtype("x"), over(call, "axes"))


# Without `is_mean_out` the second output is empty.
define("ReduceVar", "x", variance, outputs="var mean", dim=(), correction=1, keepdim=False, is_mean_out=True)
define("ReduceStdV2", "x", variance, outputs="std mean", dim=(), correction=1, keepdim=False, is_mean_out=True)
# The mean comes with it, as large as x.
define(
    "ReduceStdWithMean",
    "x mean",
    lambda call: call.result(call.dtype("x"), over(call, "dim")),
    dim=(),
    correction=1,
    keepdim=False,
)
define("LpNormV2", "x", norm, p=2.0, axes=(), keepdim=False, epsilon=1e-12)
# log(sum(exp(x))) as it stands: the converter takes the maximum out first.
define("ReduceLogSumExp", "x axes#", reduction(), keep_dims=False)
define("ReduceNansum", "x axes#", reduction(), keep_dims=False)
