"""Builtin functions of Python's out of machine code: calling one costs 50 ns, where ctypes takes a microsecond."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from airgraph.engine.native.libtorch import symbol

if TYPE_CHECKING:
    from airgraph.engine.native.llvm.jit import Unit

METH_NOARGS, METH_O, METH_FASTCALL = 4, 8, 128  # how many arguments the function takes: none, one, or any number


class MethodDef(ctypes.Structure):
    """CPython's PyMethodDef. It lives as long as the functions made of it, which keep it: two threads that ask for the same
    one at the same time make two, of which a cache keeps one."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def compiled_method(name: str, flags: int, unit: Callable[[], Unit | None]) -> MethodDef | None:
    """The method of this name in a unit; None without LLVM, or without a unit: where something is not there."""
    try:
        from airgraph.engine.native.llvm.jit import build

        found = unit()
        if found is None:
            return None
        code = build([found])
    except (ImportError, OSError, RuntimeError):  # engine/native/__init__.py warns of it
        return None
    method = MethodDef(name.encode(), code[name], flags, None)
    method.code = code  # kept as long as the method
    return method


def python_functions(*names: str) -> dict[str, int]:
    return {name: symbol(ctypes.pythonapi, name) for name in names}


class KeptAddress(int):
    """An address, and what has to live as long as it."""

    kept: Any


def make_builtin(method: MethodDef, address: int, kept: Any = None) -> Callable[..., Any]:
    """A builtin function; the machine code gets `address` as its `self`, an int of Python's. What is there lives as long as
    the function where it is `kept`."""
    own = KeptAddress(address)
    own.kept = (method, kept)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    return new(ctypes.addressof(method), own, "airgraph")


def table_builtin(method: MethodDef, table: ctypes.Array[ctypes.c_int64], *kept: Any) -> Callable[..., Any]:
    """A builtin function whose machine code reads a table of words. It keeps that, and what the words refer to."""
    return make_builtin(method, ctypes.addressof(table), (table, *kept))
