"""Convolutions and poolings: PyTorch's own ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.layouts import on_dense
from airgraph.engine.meanings.norms import or_empty
from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten
Ints = Sequence[int]


def convolution(
    x: Tensor,
    filter: Tensor,
    bias: Tensor | None,
    strides: Ints,
    pads: Ints,
    dilations: Ints,
    groups: int,
    data_format: str,
) -> Tensor:
    none = [0] * (len(pads) // 2)
    return aten.convolution(x, filter, bias, strides[2:], pads[::2], dilations[2:], False, none, groups)


def transposed(
    size: Ints,
    x: Tensor,
    filter: Tensor,
    bias: Tensor | None,
    strides: Ints,
    pads: Ints,
    dilations: Ints,
    groups: int,
    data_format: str,
    output_padding: Ints,
) -> Tensor:
    return aten.convolution(x, filter, bias, strides[2:], pads[::2], dilations[2:], True, output_padding[2:], groups)


def input_gradient(size: Ints, filter: Tensor, dy: Tensor, **attrs: Any) -> Tensor:
    return gradient(0, dy, dy.new_empty(size), filter, **attrs)


def filter_gradient(x: Tensor, size: Ints, dy: Tensor, **attrs: Any) -> Tensor:
    return gradient(1, dy, x, dy.new_empty(size), **attrs)


def gradient(
    which: int,
    dy: Tensor,
    x: Tensor,
    filter: Tensor,
    *,
    strides: Ints,
    pads: Ints,
    dilations: Ints,
    groups: int,
    data_format: str,
) -> Tensor:
    """Of the argument that is looked for only the size matters."""
    none, mask = [0] * (len(pads) // 2), [i == which for i in range(3)]
    return aten.convolution_backward(
        dy, x, filter, None, strides[2:], pads[::2], dilations[2:], False, none, groups, mask
    )[which]


def any_convolution(x: Tensor, filter: Tensor, bias: Tensor | None, **attrs: Any) -> Tensor:
    return aten.convolution(x, filter, bias, **attrs)


def convolution_gradient(dy: Tensor, x: Tensor, filter: Tensor, **attrs: Any) -> list[Tensor]:
    return or_empty(aten.convolution_backward(dy, x, filter, **attrs), dy)


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
    return average(lambda shape, grad, *rest: call(grad, grad.new_empty(shape), *rest))


def adaptive_gradient(call: Any) -> Meaning:
    return lambda grad, shape: call(grad, grad.new_empty(shape))


CONVOLUTIONS: dict[str, Meaning] = {
    "Conv2D": convolution,
    "Conv3D": convolution,
    "Conv2DTranspose": transposed,
    "Conv3DTranspose": transposed,
    "Conv2DBackpropInput": input_gradient,
    "Conv3DBackpropInput": input_gradient,
    "Conv2DBackpropFilter": filter_gradient,
    "Conv3DBackpropFilter": filter_gradient,
    "Convolution": any_convolution,
    "ConvolutionBackward": convolution_gradient,
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
CONVOLUTIONS = {name: on_dense(meaning) for name, meaning in CONVOLUTIONS.items()}
