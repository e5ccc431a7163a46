"""Pooling: PyTorch's own ops."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.engine.meanings.layouts import empty_as, on_dense
from airgraph.engine.meanings.table import Meaning


def max_pool(call: Any) -> Meaning:
    return lambda x, ksize, strides, pads, dilation, ceil_mode: call(x, ksize, strides, pads, dilation, ceil_mode)


def max_pool_gradient(call: Any) -> Meaning:
    return lambda x, grad, argmax, ksize, strides, pads, dilation, ceil_mode: call(
        grad, x, ksize, strides, pads, dilation, ceil_mode, argmax
    )


def average(call: Any) -> Meaning:
    """divisor_override 0: the size of the window."""
    return lambda *inputs, ksize, strides, pads, ceil_mode, exclusive, divisor_override: call(
        *inputs, ksize, strides, pads, ceil_mode, not exclusive, divisor_override or None
    )


def average_gradient(call: Any) -> Meaning:
    """Of the input only the shape matters."""
    return average(lambda shape, grad, *rest: call(grad, empty_as(grad, shape), *rest))


def adaptive_gradient(call: Any) -> Meaning:
    return lambda grad, shape: call(grad, empty_as(grad, shape))


aten = torch.ops.aten
POOLING: dict[str, Meaning] = {
    "MaxPoolWithArgmaxV1": max_pool(aten.max_pool2d_with_indices),
    "MaxPoolGradWithArgmaxV1": max_pool_gradient(aten.max_pool2d_with_indices_backward),
    "MaxPool3DWithArgmaxV2": max_pool(aten.max_pool3d_with_indices),
    "MaxPool3DGradWithArgmax": max_pool_gradient(aten.max_pool3d_with_indices_backward),
    "AvgPoolV2": average(aten.avg_pool2d),
    "AvgPoolV2Grad": average_gradient(aten.avg_pool2d_backward),
    "AvgPool3D": average(aten.avg_pool3d),
    "AvgPool3DGrad": average_gradient(aten.avg_pool3d_backward),
    "AdaptiveAvgPool2d": aten._adaptive_avg_pool2d.default,
    "AdaptiveAvgPool2dGrad": adaptive_gradient(aten._adaptive_avg_pool2d_backward),
    "AdaptiveAvgPool3d": aten._adaptive_avg_pool3d.default,
    "AdaptiveAvgPool3dGrad": adaptive_gradient(aten._adaptive_avg_pool3d_backward),
    "AdaptiveMaxPool2d": aten.adaptive_max_pool2d.default,
    "AdaptiveMaxPool2dGrad": aten.adaptive_max_pool2d_backward.default,
    "AdaptiveMaxPool3d": aten.adaptive_max_pool3d.default,
    "AdaptiveMaxPool3dGrad": aten.adaptive_max_pool3d_backward.default,
}
POOLING = {name: on_dense(meaning) for name, meaning in POOLING.items()}
