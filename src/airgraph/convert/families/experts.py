"""Mixtures of experts: grouped products, and the histogram that counts the rows of each group."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.registry import UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
REAL = (DataType.DT_FLOAT, DataType.DT_DOUBLE)


@converts("transformers.grouped_mm_fallback.default")
def grouped_mm_fallback(input: Value, weight: Value, offs: Value) -> Value:
    """grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor

    What transformers calls while a model is compiled that is not bfloat16; aten._grouped_mm is only traced for that type.
    """
    if input.dtype not in REAL or weight.dtype != input.dtype:
        raise UnsupportedConversion("in half precision PyTorch rounds once, after the sum")
    return ge.GroupedMatmul([input], [weight], [], [], [], [], [], offs, None)


@converts(aten.histc.default)
def histc(self: Value, bins: Any = 100, min: Any = 0, max: Any = 0) -> Value:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor"""
    numbers = all(isinstance(n, int | float) for n in (bins, min, max))
    if not numbers or self.dtype not in REAL or not -torch.inf < min < max < torch.inf or bins < 1:
        raise UnsupportedConversion("only a histogram of floats between constant bounds is one of GE's")
    return ge.Histogram(self, bins=bins, min=float(min), max=float(max))
