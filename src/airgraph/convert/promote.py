"""Type promotion. GE ops do not promote: a converter casts its inputs to what PyTorch would compute in."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.registry import UnsupportedConversion
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType
from airgraph.torch_types import GE_TYPES, TORCH_TYPES

Operand = Any  # Value | int | float | bool | complex


def to(x: Operand, dtype: DataType) -> Value:
    """`x` as a value of that type: a number becomes a constant, a value of another type is cast."""
    if not isinstance(x, Value):
        return ge.Const(x, dtype=int(dtype))
    return x if x.dtype == dtype else ge.Cast(x, dst_type=int(dtype))


def promoted(*operands: Operand, dtype: DataType) -> list[Value]:
    real(*operands)
    return [to(x, dtype) for x in operands]


def common_type(*operands: Operand) -> DataType:
    """The type PyTorch computes in, by its own rules for tensors, scalars-in-tensors and numbers."""
    real(*operands)
    return GE_TYPES[torch.result_type(*map(_stand_in, operands))]


def _stand_in(x: Operand) -> Any:
    """A tensor of the same type and kind of rank, or the number itself. A symbolic number stands for its Python type."""
    if not isinstance(x, Value):
        return x
    if is_symbol(x):
        return {DataType.DT_INT64: 1, DataType.DT_DOUBLE: 1.0, DataType.DT_BOOL: True}[x.dtype]
    return torch.empty((1,) * min(x.rank, 1), dtype=TORCH_TYPES[x.dtype], device="meta")


def is_symbol(x: Value) -> bool:
    """A number of the host, as opposed to a tensor."""
    return x.type.place == "CPU" and x.type.is_scalar and x.known is not None


def real(*operands: Operand) -> None:
    """Complex values and types without a GE number are left to PyTorch."""
    for x in operands:
        if isinstance(x, complex) or (isinstance(x, Value) and (x.dtype.is_complex or x.dtype not in TORCH_TYPES)):
            raise UnsupportedConversion("complex and special element types are left to PyTorch")
