"""Python numbers for the inputs that engines get as numbers, with all their digits: slots marked `#`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airgraph.convert.registry import UnsupportedConversion
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

KINDS = {bool: DataType.DT_BOOL, int: DataType.DT_INT64, float: DataType.DT_DOUBLE}


def number(x: Any) -> Value | int:
    """A whole number is a literal, a symbolic one a value already."""
    if isinstance(x, Value) or type(x) is int:
        return x
    return ge.Const(x, dtype=int(kind_of([x])))


def numbers(xs: Any) -> Value | list[int]:
    """A list of numbers of one kind."""
    if isinstance(xs, Value):
        raise UnsupportedConversion("symbolic numbers in a list")
    kind = kind_of(xs)
    return list(xs) if kind == DataType.DT_INT64 else ge.Const(list(xs), dtype=int(kind))


def kind_of(xs: Sequence[Any]) -> DataType:
    kinds = {KINDS.get(type(x)) for x in xs}
    if len(kinds) != 1 or None in kinds:
        raise UnsupportedConversion("numbers of several kinds, or complex")
    (kind,) = kinds
    assert kind is not None
    return kind
