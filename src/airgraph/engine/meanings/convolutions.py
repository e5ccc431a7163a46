"""Convolutions: PyTorch's own ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.layouts import empty_as, on_dense
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
    return gradient(0, dy, empty_as(dy, size), filter, **attrs)


def filter_gradient(x: Tensor, size: Ints, dy: Tensor, **attrs: Any) -> Tensor:
    return gradient(1, dy, x, empty_as(dy, size), **attrs)


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
}
CONVOLUTIONS = {name: on_dense(meaning) for name, meaning in CONVOLUTIONS.items()}
