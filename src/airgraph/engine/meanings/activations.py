"""Activations: PyTorch's own ops. Attributes that bear ATen's names are handed on as they are."""

from __future__ import annotations

import torch

from airgraph.engine.meanings.table import Meaning

aten = torch.ops.aten
ACTIVATIONS: dict[str, Meaning] = {
    "Elu": aten.elu.default,
    "EluGradV2": lambda grads, x, alpha, scale, input_scale, is_result: aten.elu_backward(
        grads, alpha, scale, input_scale, is_result, x
    ),
    "CeluV2": aten.celu.default,
    "GLU": aten.glu.default,
    "GLUGrad": aten.glu_backward.default,
    "HardSwish": aten.hardswish.default,
    "HardSwishGrad": aten.hardswish_backward.default,
    "HardSigmoid": aten.hardsigmoid.default,
    "HardSigmoidGrad": aten.hardsigmoid_backward.default,
    "HardtanhGrad": lambda x, grad, min_val, max_val: aten.hardtanh_backward(grad, x, min_val, max_val),
    "Mish": aten.mish.default,
    "MishGrad": aten.mish_backward.default,
    "LogSigmoid": aten.log_sigmoid_forward.default,
    "LogSigmoidGrad": aten.log_sigmoid_backward.default,
    "PRelu": aten._prelu_kernel.default,
    "PReluGrad": aten._prelu_kernel_backward.default,
    "LeakyReluGrad": aten.leaky_relu_backward.default,
    "SiluGrad": aten.silu_backward.default,
    "SoftplusV2": aten.softplus.default,
    "SoftplusV2Grad": aten.softplus_backward.default,
    "SoftShrinkGrad": aten.softshrink_backward.default,
    "HardShrinkGrad": aten.hardshrink_backward.default,
    "ThresholdV2": lambda x, threshold, value: aten.threshold(x, threshold.item(), value.item()),
    "Swish": lambda x, scale: torch.nn.functional.silu(x),
    "Gelu": lambda x, approximate: torch.nn.functional.gelu(x, approximate=approximate),
    "LeakyRelu": lambda x, negative_slope: torch.nn.functional.leaky_relu(x, negative_slope),
    "ReluGrad": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0),
    "ThresholdGradV2D": lambda g, x, threshold: torch.ops.aten.threshold_backward(g, x, threshold),
    "SigmoidGrad": lambda y, dy: torch.ops.aten.sigmoid_backward(dy, y),
    "TanhGrad": lambda y, dy: torch.ops.aten.tanh_backward(dy, y),
    "GeluGrad": lambda dy, x, y, approximate: torch.ops.aten.gelu_backward(dy, x, approximate=approximate),
}
