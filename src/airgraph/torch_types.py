"""Types of PyTorch's: element types and those of the IR, symbolic numbers, and how tensors are described to people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from airgraph.ir.types import DataType

GE_TYPES: dict[torch.dtype, DataType] = {
    torch.float32: DataType.DT_FLOAT,
    torch.float16: DataType.DT_FLOAT16,
    torch.bfloat16: DataType.DT_BF16,
    torch.float64: DataType.DT_DOUBLE,
    torch.int8: DataType.DT_INT8,
    torch.int16: DataType.DT_INT16,
    torch.int32: DataType.DT_INT32,
    torch.int64: DataType.DT_INT64,
    torch.uint8: DataType.DT_UINT8,
    torch.uint16: DataType.DT_UINT16,
    torch.uint32: DataType.DT_UINT32,
    torch.uint64: DataType.DT_UINT64,
    torch.bool: DataType.DT_BOOL,
    torch.complex32: DataType.DT_COMPLEX32,
    torch.complex64: DataType.DT_COMPLEX64,
    torch.complex128: DataType.DT_COMPLEX128,
    torch.qint8: DataType.DT_QINT8,
    torch.quint8: DataType.DT_QUINT8,
    torch.qint32: DataType.DT_QINT32,
    torch.float8_e5m2: DataType.DT_FLOAT8_E5M2,
    torch.float8_e4m3fn: DataType.DT_FLOAT8_E4M3FN,
    torch.float8_e8m0fnu: DataType.DT_FLOAT8_E8M0,
}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
TORCH_TYPES = {ge_type: dtype for dtype, ge_type in GE_TYPES.items()}


def as_tensor(value: Any) -> Any:
    """Numbers are tensors inside the engine; a float of Python is a double."""
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def tensor_text(dtype: torch.dtype, shape: Sequence[Any]) -> str:
    """`float32[3, s0]`"""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def weights_text(tensors: Iterable[torch.Tensor]) -> str:
    """`4 parameters and buffers of 1.2 kB`"""
    sizes = [t.numel() * t.element_size() for t in tensors]
    return f"{len(sizes)} parameters and buffers of {readable_size(sum(sizes))}"


def readable_size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
