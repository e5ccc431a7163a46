"""Samples for `declare_supported`: `Support(F32(2, 2), F16(2, 1), alpha=2)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """A tensor of one type and shape, with values in a range if one is given."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    value_range: tuple[float, float] | None = None

    def make(self) -> torch.Tensor:
        low, high = self.value_range or (-1, 1)
        if self.dtype.is_floating_point:
            return torch.empty(self.shape, dtype=torch.float64).uniform_(low, high).to(self.dtype)
        return torch.randint(int(low), int(high) + 1, self.shape).to(self.dtype)


def of(dtype: torch.dtype) -> Any:
    return lambda *shape, value_range=None: Sample(dtype, tuple(shape), value_range)


F32, F16, BF16, F64 = of(torch.float32), of(torch.float16), of(torch.bfloat16), of(torch.float64)
I8, I16, I32, I64 = of(torch.int8), of(torch.int16), of(torch.int32), of(torch.int64)
U8, BOOL, C64 = of(torch.uint8), of(torch.bool), of(torch.complex64)


def T(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor with these very values."""
    return torch.tensor(value, dtype=dtype)


class Support:
    """One call the converter covers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        parts = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"Support({', '.join(parts)})"


__all__ = ["BF16", "BOOL", "C64", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "Sample", "Support", "T"]
