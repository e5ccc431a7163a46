"""Losses and their gradients. `reduction` is "none", "mean" or "sum"."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.ir.ops.joint import each, sized
from airgraph.ir.ops.rules import broadcast, broadcast_shapes, like
from airgraph.ir.ops.table import NodeView, TypeRule, define
from airgraph.ir.types import TensorType


def loss(*names: str) -> TypeRule:
    """A number, or with reduction="none" one for each element."""

    def rule(view: NodeView) -> Sequence[TensorType]:
        shapes = [view.shape(name) for name in names if view.has(name)]
        return view.result(view.dtype(names[0]), broadcast_shapes(shapes) if view.attr("reduction") == "none" else ())

    return rule


define("MseLoss", "predict label", loss("predict", "label"), reduction="mean")
define("MseLossGrad", "predict label dout", broadcast("predict", "label", "dout"), reduction="mean")
define("SmoothL1LossV2", "predict label", loss("predict", "label"), sigma=1.0, reduction="mean")
define("SmoothL1LossGradV2", "predict label dout", broadcast("predict", "label", "dout"), sigma=1.0, reduction="mean")
define("HuberLoss", "predict label", loss("predict", "label"), delta=1.0, reduction="mean")
define("HuberLossGrad", "predict label dout", broadcast("predict", "label", "dout"), delta=1.0, reduction="mean")
define("SoftMarginLoss", "input_x input_y", loss("input_x", "input_y"), reduction="mean")
define("SoftMarginLossGrad", "predict label dout", broadcast("predict", "label", "dout"), reduction="mean")
define("BinaryCrossEntropy", "x y weight?", loss("x", "y"), reduction="mean")
define("BinaryCrossEntropyGrad", "x y grad_output weight?", like("x"), reduction="mean")
define(
    "SigmoidCrossEntropyWithLogitsV2",
    "predict target weight? pos_weight?",
    loss("predict", "target", "weight", "pos_weight"),
    reduction="mean",
)
define(
    "NLLLoss", "x target weight?", each(sized(), sized()), outputs="y total_weight", reduction="mean", ignore_index=-100
)
define("NLLLossGrad", "x y_grad target weight? total_weight", like("x"), reduction="mean", ignore_index=-100)
