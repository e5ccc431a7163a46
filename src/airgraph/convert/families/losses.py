"""Losses and their gradients."""

from __future__ import annotations

import torch

from airgraph.convert.direct import direct, word_of

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
    aten.nll_loss_backward.default: ("NLLLossGrad", NLL_GRAD),
    aten.nll_loss2d_forward.default: ("NLLLoss", NLL),
    aten.nll_loss2d_backward.default: ("NLLLossGrad", NLL_GRAD),
}
for target, row in ROWS.items():
    direct(target, *row, reduction=word_of("none", "mean", "sum"))
