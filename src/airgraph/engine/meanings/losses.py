"""Losses: PyTorch's own ops."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.engine.meanings.layouts import on_dense
from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def loss(call: Any) -> Meaning:
    """Of prediction and label, with a number for the reduction."""
    return lambda x, y, reduction, **attrs: call(x, y, reduction=REDUCTIONS[reduction], **attrs)


def gradient(call: Any) -> Meaning:
    return lambda x, y, grad, reduction, **attrs: call(grad, x, y, reduction=REDUCTIONS[reduction], **attrs)


def smooth_l1(call: Any) -> Meaning:
    """GE calls beta sigma."""
    return lambda *inputs, sigma, **attrs: call(*inputs, beta=sigma, **attrs)


def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int) -> Any:
    call = aten.nll_loss2d_forward if x.ndim == 4 else aten.nll_loss_forward
    return call(x, target, weight, REDUCTIONS[reduction], ignore_index)


def nll_loss_gradient(
    x: Tensor,
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total_weight: Tensor,
    reduction: str,
    ignore_index: int,
) -> Tensor:
    call = aten.nll_loss2d_backward if x.ndim == 4 else aten.nll_loss_backward
    return call(grad, x, target, weight, REDUCTIONS[reduction], ignore_index, total_weight)


LOSSES: dict[str, Meaning] = {
    "MseLoss": loss(aten.mse_loss),
    "MseLossGrad": gradient(aten.mse_loss_backward),
    "SmoothL1LossV2": smooth_l1(loss(aten.smooth_l1_loss)),
    "SmoothL1LossGradV2": smooth_l1(gradient(aten.smooth_l1_loss_backward)),
    "HuberLoss": loss(aten.huber_loss),
    "HuberLossGrad": gradient(aten.huber_loss_backward),
    "SoftMarginLoss": loss(aten.soft_margin_loss),
    "SoftMarginLossGrad": gradient(aten.soft_margin_loss_backward),
    "BinaryCrossEntropy": lambda x, y, weight, reduction: aten.binary_cross_entropy(
        x, y, weight, REDUCTIONS[reduction]
    ),
    "BinaryCrossEntropyGrad": lambda x, y, grad, weight, reduction: aten.binary_cross_entropy_backward(
        grad, x, y, weight, REDUCTIONS[reduction]
    ),
    "SigmoidCrossEntropyWithLogitsV2": lambda x, y, weight, pos_weight, reduction: (
        aten.binary_cross_entropy_with_logits(x, y, weight, pos_weight, REDUCTIONS[reduction])
    ),
    "NLLLoss": on_dense(nll_loss, Tensor.contiguous),
    "NLLLossGrad": on_dense(nll_loss_gradient, Tensor.contiguous),
}
