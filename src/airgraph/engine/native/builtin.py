"""Builtin functions of Python's out of machine code: calling one costs 50 ns, where ctypes takes a microsecond."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airgraph.engine.native.llvm.jit import Unit

METH_NOARGS, METH_O = 4, 8  # how many arguments the function takes: none or one


class MethodDef(ctypes.Structure):
    """CPython's PyMethodDef. It has to live as long as the functions made of it."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def make_builtin(method: MethodDef, address: int) -> Callable[..., Any]:
    """A builtin function; the machine code gets `address` as its `self`, an int of Python's."""
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return new(ctypes.addressof(method), address, None)


def builtin_of(unit: Callable[[], Unit | None], name: bytes, flags: int) -> MethodDef | None:
    """The function of that name in a unit, compiled; None where there is no unit, or no LLVM."""
    from airgraph.engine.native.llvm.jit import build

    try:
        found = unit()
        code = None if found is None else build([found])
    except (ImportError, OSError, RuntimeError):  # engine/native/__init__.py warns of it
        return None
    if code is None:
        return None
    method = MethodDef(name, code[name.decode()], flags, None)
    method.code = code  # its machine code lives as long as it does
    return method
