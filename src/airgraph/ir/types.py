"""Element types, shapes and places, numbered and named as Ascend's graph engine (GE) does.

A dimension is an int or a sympy expression; both compare by value, so `shape == shape` is exact equality.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

Dim = Any  # int | sympy.Expr: sympy ships no types
Place = Literal["CPU", "NPU"]


class DataType(IntEnum):
    """The `dtype=` numbers of dumps. (The numbers inside protobuf descriptors are others: see `proto.py`.)"""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_DUAL_SUB_INT8 = 14
    DT_DUAL_SUB_UINT8 = 15
    DT_COMPLEX64 = 16
    DT_COMPLEX128 = 17
    DT_QINT8 = 18
    DT_QINT16 = 19
    DT_QINT32 = 20
    DT_QUINT8 = 21
    DT_QUINT16 = 22
    DT_RESOURCE = 23
    DT_STRING_REF = 24
    DT_DUAL = 25
    DT_VARIANT = 26
    DT_BF16 = 27
    DT_UNDEFINED = 28
    DT_INT4 = 29
    DT_UINT1 = 30
    DT_INT2 = 31
    DT_UINT2 = 32
    DT_COMPLEX32 = 33
    DT_HIFLOAT8 = 34
    DT_FLOAT8_E5M2 = 35
    DT_FLOAT8_E4M3FN = 36
    DT_FLOAT8_E8M0 = 37
    DT_FLOAT6_E3M2 = 38
    DT_FLOAT6_E2M3 = 39
    DT_FLOAT4_E2M1 = 40
    DT_FLOAT4_E1M2 = 41
    DT_MAX = 42

    @property
    def is_float(self) -> bool:
        return self in FLOATS

    @property
    def is_int(self) -> bool:
        return self in INTS

    @property
    def is_complex(self) -> bool:
        return self in COMPLEX


class Format(IntEnum):
    FORMAT_UNDEFINED = -1
    FORMAT_NCHW = 0
    FORMAT_NHWC = 1
    FORMAT_ND = 2
    FORMAT_NC1HWC0 = 3
    FORMAT_FRACTAL_Z = 4
    FORMAT_NC1HWC0_C04 = 12
    FORMAT_HWCN = 16
    FORMAT_NDHWC = 27
    FORMAT_FRACTAL_NZ = 29
    FORMAT_NCDHW = 30
    FORMAT_NDC1HWC0 = 32
    FORMAT_FRACTAL_Z_3D = 33
    FORMAT_NC = 35
    FORMAT_NCL = 47
    FORMAT_FRACTAL_NZ_C0_16 = 50
    FORMAT_FRACTAL_NZ_C0_2 = 52
    FORMAT_FRACTAL_NZ_C0_4 = 53
    FORMAT_FRACTAL_NZ_C0_8 = 54


FLOATS = frozenset(
    {
        DataType.DT_FLOAT,
        DataType.DT_FLOAT16,
        DataType.DT_BF16,
        DataType.DT_DOUBLE,
        DataType.DT_HIFLOAT8,
        DataType.DT_FLOAT8_E5M2,
        DataType.DT_FLOAT8_E4M3FN,
        DataType.DT_FLOAT8_E8M0,
    }
)
INTS = frozenset(
    {
        DataType.DT_INT8,
        DataType.DT_INT16,
        DataType.DT_INT32,
        DataType.DT_INT64,
        DataType.DT_UINT8,
        DataType.DT_UINT16,
        DataType.DT_UINT32,
        DataType.DT_UINT64,
    }
)
COMPLEX = frozenset({DataType.DT_COMPLEX32, DataType.DT_COMPLEX64, DataType.DT_COMPLEX128})


@dataclass(frozen=True)
class TensorType:
    """What is known of a value: element type, shape (None: not even the rank is known) and place."""

    dtype: DataType
    shape: tuple[Dim, ...] | None
    place: Place = "NPU"

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def is_static(self) -> bool:
        return self.shape is not None and all(isinstance(d, int) for d in self.shape)

    @property
    def is_scalar(self) -> bool:
        return self.shape == ()

    def printed_shape(self) -> list[int]:
        """As dumps write it: -1 for a symbolic dimension, [-2] for an unknown rank."""
        if self.shape is None:
            return [-2]
        return [d if isinstance(d, int) else -1 for d in self.shape]

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ", ".join(map(str, self.shape))
        return f"{self.dtype.name[3:].lower()}[{dims}]@{self.place}"


UNKNOWN = TensorType(DataType.DT_UNDEFINED, None)


def dim(value: Any) -> Dim:
    """An int where the expression is one: sympy.Integer(3) and 3 are different dictionary keys."""
    if isinstance(value, bool | int):
        return int(value)
    return int(value) if getattr(value, "is_Integer", False) else value


def numel(shape: Iterable[Dim]) -> Dim:
    total: Dim = 1
    for d in shape:
        total = total * d
    return dim(total)


def is_number(value: Any) -> bool:
    """An int, float or bool, as opposed to an expression or a tuple."""
    return isinstance(value, int | float | complex)
