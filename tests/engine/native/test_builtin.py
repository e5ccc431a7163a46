"""Builtin functions of machine code keep all that they run on."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest

from airgraph.engine.native.builtin import METH_NOARGS, compiled_method, make_builtin
from airgraph.engine.native.dict_watch import has_tags, unit

pytestmark = pytest.mark.skipif(not has_tags(), reason="dictionaries of this Python have no tags")


def test_a_builtin_keeps_its_method():
    """A cache of methods may let go of one: when two threads ask for it first, it keeps the second."""
    method = compiled_method("unchanged", METH_NOARGS, unit)
    assert method is not None
    table = (ctypes.c_uint64 * 1)(0)
    function = make_builtin(method, ctypes.addressof(table), table)
    gone = weakref.ref(method)
    del method
    gc.collect()
    assert gone() is not None and function() == 1
    del function
    gc.collect()
    assert gone() is None
