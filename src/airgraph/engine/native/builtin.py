"""Builtin functions of Python's out of machine code: calling one costs 50 ns, where ctypes takes a microsecond."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from airgraph.engine.native.libtorch import symbol

METH_NOARGS, METH_O = 4, 8  # how many arguments the function takes: none or one


class MethodDef(ctypes.Structure):
    """CPython's PyMethodDef. It has to live as long as the functions made of it."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def compiled_method(
    name: str, flags: int, source: Callable[[], str], imports: Callable[[], Mapping[str, int]]
) -> MethodDef | None:
    """The method of this name in the LLVM text of `source`; `imports` has the addresses of what the text declares, 0 for a
    function that is missing. None without LLVM, or where something is not there."""
    try:
        from airgraph.engine.native.llvm.jit import Unit, build

        found = dict(imports())
        if not all(found.values()):
            return None
        code = build([Unit(source(), (name,), found)])
    except (ImportError, OSError, RuntimeError):  # engine/native/__init__.py warns of it
        return None
    method = MethodDef(name.encode(), code[name], flags, None)
    method.code = code  # kept as long as the method
    return method


def python_functions(*names: str) -> dict[str, int]:
    return {name: symbol(ctypes.pythonapi, name) for name in names}


def make_builtin(method: MethodDef, address: int) -> Callable[..., Any]:
    """A builtin function; the machine code gets `address` as its `self`, an int of Python's."""
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return new(ctypes.addressof(method), address, None)
