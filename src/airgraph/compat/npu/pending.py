"""Errors that are on their way while C++ asks what the device is.

PyTorch's guard for a backend in Python is asked for its type, in Python, whenever C++ puts a stream back. Autograd does
that in a destructor, also while an error raised in a backward pass unwinds the stack, and an error raised by Python (by
the fake tensors that a backward graph is traced with, for instance) is then still pending. Python cannot be called with
an error pending: the call fails, and a destructor that fails ends the process. On a GPU the guard is C++, and the user
sees the error.

So the guard takes the pending error away before it answers, and the engine, whose call then fails without one, raises it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.autograd import Variable

_PRIVATE_USE = torch._C._autograd.DeviceType.PrivateUse1

# Errors that were taken away, until the engine raises them.
_taken: list[BaseException] = []

# `PyErr_Fetch(&type, &value, &traceback)`, with its arguments made beforehand: nothing may fail while an error is pending.
_slots = (ctypes.c_void_p * 3)()
_into_slots = tuple(ctypes.byref(_slots, place * ctypes.sizeof(ctypes.c_void_p)) for place in range(3))
_fetch = ctypes.PyDLL(None).PyErr_Fetch
_fetch.restype = None
_drop = ctypes.PyDLL(None).Py_DecRef
_drop.restype, _drop.argtypes = None, [ctypes.c_void_p]


class PendingErrorGuard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        _fetch(*_into_slots)
        if _slots[0]:
            _taken.append(_error([_owned(place) for place in range(3)]))
        return _PRIVATE_USE


def _owned(place: int) -> Any:
    """The object in a slot, which held a reference of its own."""
    address = _slots[place]
    if not address:
        return None
    found = ctypes.cast(address, ctypes.py_object).value
    _drop(address)
    return found


def _error(parts: list[Any]) -> BaseException:
    """The exception. Before Python 3.12 it may not have been made yet, and there are only its type and its argument."""
    kind, value, traceback = parts
    if not isinstance(value, BaseException):
        value = kind(*value) if isinstance(value, tuple) else kind() if value is None else kind(value)
    return value.with_traceback(traceback)


class _Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd's engine, which raises the error of the backward pass, also where the guard has taken it away."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:  # "returned NULL without setting an exception"
            if not _taken:
                raise
            error = _taken[-1]
            _taken.clear()
            raise error from None


_original: Any = None


def install() -> None:
    global _original
    if _original is None:
        _original = Variable._execution_engine
        Variable._execution_engine = _Engine()


def uninstall() -> None:
    global _original
    if _original is not None:
        Variable._execution_engine = _original
        _original = None
