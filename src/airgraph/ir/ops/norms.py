"""Normalisations over layers, groups and batches. Gradients come for what `output_mask` asks for; the rest is empty."""

from __future__ import annotations

from airgraph.ir.ops.joint import HALVES, each, first_given, sized, statistics, wide
from airgraph.ir.ops.rules import like
from airgraph.ir.ops.table import REQUIRED, NodeView, TypeRule, define
from airgraph.ir.types import DataType, TensorType

ALL = (True, True, True)


def deviations(name: str) -> TypeRule:
    """One number for each row of an input."""

    def rule(view: NodeView) -> list[TensorType]:
        shape = view.shape(name)
        dtype = DataType.DT_FLOAT if view.dtype(name) in HALVES else view.dtype(name)
        return view.result(dtype, None if shape is None else (*shape[:-1], 1))

    return rule


define(
    "LayerNormV4",
    "x normalized_shape# gamma? beta?",
    each(like(), statistics(), statistics()),
    outputs="y mean rstd",
    epsilon=1e-5,
)
define(
    "LayerNormGradV3",
    "dy x rstd mean gamma? beta? normalized_shape#",
    each(like("x"), first_given("gamma", "x"), first_given("beta", "gamma", "x")),
    outputs="pd_x pd_gamma pd_beta",
    output_mask=ALL,
)
# gamma · x / √(mean(x²) + epsilon) over the last axis: in float32 up to the product with gamma, which is in x's own type.
define("RmsNorm", "x gamma", each(like(), deviations("x")), outputs="y rstd", epsilon=1e-6)
# The same of x1 + x2, and that sum.
define("AddRmsNorm", "x1 x2 gamma", each(like("x1"), deviations("x1"), like("x1")), outputs="y rstd x", epsilon=1e-6)
# Statistics of groups have the input's type on every device.
define(
    "GroupNormV2",
    "x gamma? beta?",
    each(like(), sized(), sized()),
    outputs="y mean rstd",
    num_groups=REQUIRED,
    eps=1e-5,
)
# The variance of halves is in float32: so small an ε as 1e-8 is 0 in float16.
define(
    "GroupNorm",
    "x gamma? beta?",
    each(like(), sized(), wide()),
    outputs="y mean variance",
    num_groups=REQUIRED,
    eps=1e-5,
)
define(
    "GroupNormGrad",
    "dy mean rstd x gamma?",
    each(like("x"), first_given("gamma", "x"), first_given("gamma", "x")),
    outputs="dx dgamma dbeta",
    num_groups=REQUIRED,
    output_mask=ALL,
)
define(
    "BatchNormV3",
    "x weight? bias? running_mean? running_var?",
    each(like(), first_given("running_mean", "x"), first_given("running_var", "x"), statistics(), statistics()),
    outputs="y running_mean running_var save_mean save_rstd",
    epsilon=1e-5,
    momentum=0.1,
    is_training=True,
)
define("BNInfer", "x scale? offset? mean variance", like(), epsilon=1e-5)
# The parts of a batch norm over several processes. They talk to each other in between.
define(
    "SyncBatchNormBackwardReduce",
    "grad_output x mean invstd weight?",
    each(sized("mean"), sized("mean"), first_given("weight", "mean"), first_given("weight", "mean")),
    outputs="sum_dy sum_dy_xmu grad_weight grad_bias",
    input_g=True,
    weight_g=True,
    bias_g=True,
)
# From mean on the numbers of the channels, each as often as x has elements of the channel.
define(
    "SyncBatchNormBackwardElemt", "grad_output save_input mean invstd weight mean_dy mean_dy_xmu", like("save_input")
)
define(
    "BatchNormGradV3",
    "dy x weight? running_mean? running_var? save_mean? save_rstd?",
    each(sized("x"), first_given("weight", "x"), first_given("weight", "x")),
    outputs="dx dweight dbias",
    is_training=True,
    epsilon=1e-5,
    output_mask=ALL,
)
