"""Typed attribute values for `ge.custom_op`: `ge.attr.Float(0.5)`, `ge.attr.ListInt([1, 2])`.

GE tells an int attribute from a float one by its type, not by its value, so a plain `1` would be ambiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airgraph.ir.types import DataType as _DataType


class Attr:
    """One value and the GE type it is written with."""

    ge_kind = ""
    check: Callable[[Any], Any]

    def __init__(self, value: Any) -> None:
        try:
            self.value = self.check(value)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"ge.attr.{type(self).__name__} cannot hold {value!r}") from error

    def __repr__(self) -> str:
        return f"ge.attr.{type(self).__name__}({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self.value

    def __hash__(self) -> int:
        return hash((type(self), repr(self.value)))


def exactly(*types: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(value)
        return value

    return check


def number(value: Any) -> float:
    return float(exactly(int, float)(value))


def many(check: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda value: [check(v) for v in exactly(list, tuple)(value)]


def dtype(value: Any) -> int:
    return int(_DataType(value))


def kind(name: str, ge_kind: str, check: Callable[[Any], Any]) -> type[Attr]:
    return type(
        name, (Attr,), {"ge_kind": ge_kind, "check": staticmethod(check), "__doc__": f"A `{ge_kind}` attribute."}
    )


Int = kind("Int", "i", exactly(int))
Float = kind("Float", "f", number)
Bool = kind("Bool", "b", exactly(bool))
Str = kind("Str", "s", exactly(str))
DataType = kind("DataType", "dt", dtype)
ListInt = kind("ListInt", "list.i", many(exactly(int)))
ListFloat = kind("ListFloat", "list.f", many(number))
ListBool = kind("ListBool", "list.b", many(exactly(bool)))
ListStr = kind("ListStr", "list.s", many(exactly(str)))
ListDataType = kind("ListDataType", "list.dt", many(dtype))
ListListInt = kind("ListListInt", "list_list_int", many(many(exactly(int))))
ListListFloat = kind("ListListFloat", "list_list_float", many(many(number)))
KINDS = {
    c.__name__: c
    for c in (
        Int,
        Float,
        Bool,
        Str,
        DataType,
        ListInt,
        ListFloat,
        ListBool,
        ListStr,
        ListDataType,
        ListListInt,
        ListListFloat,
    )
}


def of(value: Any) -> Attr:
    """The attribute a plain value is: `Int(2)` for 2, `ListFloat([0.5])` for [0.5]; an empty list holds ints."""
    if isinstance(value, Attr):
        return value
    for name in ("Bool", "Int", "Float", "Str", "ListInt", "ListBool", "ListFloat", "ListStr", "ListListInt"):
        try:
            return KINDS[name](value)
        except AssertionError:
            continue
    raise AssertionError(f"{value!r} is not an attribute of a GE op")
