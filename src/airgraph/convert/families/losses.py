"""Losses and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import constant, direct, emitted, word_of
from airgraph.convert.promote import to
from airgraph.convert.registry import TensorSpec, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
PAIR = "predict=self label=target reduction"
PAIR_GRAD = f"{PAIR} dout=grad_output"
NLL = "x=self target weight reduction ignore_index"
NLL_GRAD = f"{NLL} y_grad=grad_output total_weight"
ROWS = {
    aten.mse_loss.default: ("MseLoss", PAIR),
    aten.mse_loss_backward.default: ("MseLossGrad", PAIR_GRAD),
    aten.smooth_l1_loss.default: ("SmoothL1LossV2", f"{PAIR} sigma=beta"),
    aten.smooth_l1_loss_backward.default: ("SmoothL1LossGradV2", f"{PAIR_GRAD} sigma=beta"),
    aten.huber_loss.default: ("HuberLoss", f"{PAIR} delta"),
    aten.huber_loss_backward.default: ("HuberLossGrad", f"{PAIR_GRAD} delta"),
    aten.soft_margin_loss.default: ("SoftMarginLoss", "input_x=self input_y=target reduction"),
    aten.soft_margin_loss_backward.default: ("SoftMarginLossGrad", PAIR_GRAD),
    aten.binary_cross_entropy.default: ("BinaryCrossEntropy", "x=self y=target weight reduction"),
    aten.binary_cross_entropy_backward.default: (
        "BinaryCrossEntropyGrad",
        "grad_output x=self y=target weight reduction",
    ),
    aten.binary_cross_entropy_with_logits.default: (
        "SigmoidCrossEntropyWithLogitsV2",
        "predict=self target weight pos_weight reduction",
    ),
    aten.nll_loss_forward.default: ("NLLLoss", NLL),
    aten.nll_loss2d_forward.default: ("NLLLoss", NLL),
    aten.nll_loss2d_backward.default: ("NLLLossGrad", NLL_GRAD),
}
REDUCTIONS = word_of("none", "mean", "sum")
for target, row in ROWS.items():
    direct(target, *row, reduction=REDUCTIONS)


@converts(aten.nll_loss_backward.default)
def nll_loss_backward(
    grad_output: Value,
    self: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: Any,
    total_weight: Value,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    """nll_loss_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction,
    SymInt ignore_index, Tensor total_weight) -> Tensor"""
    attrs = {"reduction": REDUCTIONS(reduction), "ignore_index": constant("ignore_index", ignore_index)}
    weights = ones_for_classes(self) if weight is None else weight
    return emitted("NLLLossGrad", [self, grad_output, target, weights, total_weight], attrs, meta_outputs)


def ones_for_classes(x: Value) -> Value:
    last = x.rank - 1
    count = ge.GatherV2(ge.Shape(x, dtype=int(DataType.DT_INT64)), ge.Const(last, dtype=int(DataType.DT_INT64)), 0)
    count.known = (x.type.shape or ())[last]
    return ge.Fill(count, to(1.0, x.dtype), place=x.type.place)
