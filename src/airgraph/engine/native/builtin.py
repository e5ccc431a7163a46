"""Builtin functions of Python's out of machine code: calling one costs 50 ns, where ctypes takes a microsecond."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

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
