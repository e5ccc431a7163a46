"""Convolutions and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import constant, emitted, sized
from airgraph.convert.promote import real
from airgraph.convert.registry import TensorSpec, UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten


@converts(aten.convolution.default)
def convolution(
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation,
    bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""
    numbers = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    attrs = {name: constant(name, value) for name, value in {**numbers, "groups": groups}.items()}
    sizes = meta_outputs.symsize
    open_sizes = not all(isinstance(n, int) for n in sizes)
    if not 3 <= weight.rank <= 5 or input.rank != weight.rank or (transposed and open_sizes):
        return emitted("Convolution", [input, weight, bias], {**attrs, "transposed": transposed}, meta_outputs)
    real(input, weight, bias)
    if len({v.dtype for v in (input, weight, bias) if v is not None}) > 1:
        raise UnsupportedConversion("a mixture of element types")
    full, line = spatial(attrs, weight.rank - 2), weight.rank == 3
    x, filter = (raised(v) if line else v for v in (input, weight))
    kind = f"Conv{max(weight.rank - 2, 2)}D"
    if transposed:
        extra = [0] * (x.rank - weight.rank) + spread(attrs["output_padding"], weight.rank - 2)
        full["output_padding"] = [0, 0, *extra]
        room = [*sizes[:2], 1, *sizes[2:]] if line else list(sizes)
        y = getattr(ge, f"{kind}Transpose")(room, x, filter, bias, **full)
    else:
        y = getattr(ge, kind)(x, filter, bias, **full)
    return ge.Squeeze(sized(y, [*sizes[:2], 1, *sizes[2:]]), axis=[2]) if line else y


def spatial(attrs: dict[str, Any], dims: int) -> dict[str, Any]:
    """The attributes for all dimensions, as GE has them; a line is an image of one row."""
    strides, pads, dilations = (spread(attrs[name], dims) for name in ("stride", "padding", "dilation"))
    if dims == 1:
        strides, pads, dilations = [1, *strides], [0, *pads], [1, *dilations]
    return {
        "strides": [1, 1, *strides],
        "pads": [p for pad in pads for p in (pad, pad)],
        "dilations": [1, 1, *dilations],
        "groups": attrs["groups"],
    }


def raised(x: Value) -> Value:
    return ge.Unsqueeze(x, axes=[2])


def spread(numbers: list[int], dims: int) -> list[int]:
    """One number stands for all dimensions."""
    return numbers * dims if len(numbers) == 1 else numbers


@converts(aten.convolution_backward.default)
def convolution_backward(
    grad_output: Value,
    input: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    output_mask: list[bool],
    *,
    meta_outputs: list[TensorSpec],
) -> list[Value | None]:
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride,
    SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask)
    -> (Tensor, Tensor, Tensor)"""
    numbers = {
        "bias_sizes": bias_sizes,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "transposed": transposed,
        "output_padding": output_padding,
        "groups": groups,
        "output_mask": output_mask,
    }
    attrs = {name: constant(name, value) for name, value in numbers.items()}
    values = [grad_output, input, weight]
    wanted = [meta is not None for meta in meta_outputs]
    if transposed or wanted[2] or not 3 <= weight.rank <= 5 or input.rank != weight.rank:
        # PyTorch sums up the gradient of the bias while it computes that of the weights: another order, other digits.
        return emitted("ConvolutionBackward", values, attrs, meta_outputs)
    real(*values)
    if len({v.dtype for v in values}) > 1:
        raise UnsupportedConversion("a mixture of element types")
    full, line = spatial(attrs, weight.rank - 2), weight.rank == 3
    dy, x, filter = (raised(v) if line else v for v in values)
    kind = f"Conv{max(weight.rank - 2, 2)}DBackprop"
    dx = getattr(ge, f"{kind}Input")(ge.Shape(x, dtype=9), filter, dy, **full) if wanted[0] else None
    dw = getattr(ge, f"{kind}Filter")(x, ge.Shape(filter, dtype=9), dy, **full) if wanted[1] else None
    if line:
        dx, dw = (v and ge.Squeeze(sized(v, like.type.shape or ()), axis=[2]) for v, like in ((dx, x), (dw, filter)))
    return [dx, dw, None]
