"""libtorch's stable C ABI: its functions by address, and calls of them from native code whose return codes are checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from airgraph.engine.native.llvm.builder import Function


# -- from native code ---------------------------------------------------------------------------------------------------
def ask(f: Function, function: str, handle: str, failed: Callable[[], None]) -> None:
    checked(f, f"@{function}(ptr {handle}, ptr %out)", failed)


def checked(f: Function, call: str, failed: Callable[[], None]) -> None:
    """A function of libtorch's C ABI; `failed` ends in a return or a branch."""
    code, inside, on = f.op(f"call i32 {call}"), f.name("bad"), f.name("fine")
    f.do(f"br i1 {f.test('eq', code, 0, 'i32')}, label %{on}, label %{inside}")
    f.label(inside)
    failed()
    f.label(on)


def delete(f: Function, handle: str) -> None:
    """Nothing follows from its return code: what cannot be freed is left."""
    f.op(f"call i32 @aoti_torch_delete_tensor_object(ptr {handle})")


# -- from Python --------------------------------------------------------------------------------------------------------
def torch_symbol(name: str) -> int:
    """The address of a function in libtorch."""
    return symbol(ctypes.CDLL(None), name) or symbol(libtorch(), name) or missing(name)


def symbol(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def missing(name: str) -> int:
    raise OSError(f"this PyTorch ({torch.__version__}) has no {name}")


@cache
def libtorch() -> ctypes.CDLL:
    return ctypes.CDLL(torch._C.__file__)  # libtorch_python and libtorch_cpu are its dependencies


def last_error() -> str:
    """What the function of the ABI that failed last in this thread has to say. (PyTorch before 2.13 keeps it to itself.)"""
    try:
        what = ctypes.CFUNCTYPE(ctypes.c_char_p)(torch_symbol("torch_exception_get_what_without_backtrace"))
    except OSError:
        return "no reason given"
    return (what() or b"no reason given").decode(errors="replace")
