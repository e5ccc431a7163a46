"""Builtin functions of machine code keep all that they run on."""

from __future__ import annotations

import ctypes
import gc
import weakref

from airgraph.engine.native.builtin import METH_O, compiled_method, make_builtin, python_functions
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.jit import Unit


def same_object():
    f = Function("same_object", "ptr %self, ptr %given", "ptr", exported=True)
    f.invoke("@Py_IncRef", ("ptr", "%given"))
    text = f.text("ptr %given") + "declare void @Py_IncRef(ptr)\n"
    return Unit(text, ("same_object",), python_functions("Py_IncRef"))


def test_a_builtin_keeps_its_method():
    """A cache of methods may let go of one: when two threads ask for it first, it keeps the second."""
    method = compiled_method("same_object", METH_O, same_object)
    assert method is not None
    table = (ctypes.c_uint64 * 1)(0)
    function = make_builtin(method, ctypes.addressof(table), table)
    gone = weakref.ref(method)
    del method
    gc.collect()
    given = object()
    assert gone() is not None and function(given) is given
    del function
    gc.collect()
    assert gone() is None
