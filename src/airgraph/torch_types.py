"""Types of PyTorch's: element types and those of the IR, and symbolic numbers."""

from __future__ import annotations

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
