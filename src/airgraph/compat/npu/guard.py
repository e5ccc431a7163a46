"""More than one device: the answers that PyTorch's C++ code gets when it asks how many there are and which is current.

PyTorch asks a *guard* (`c10::impl::DeviceGuardImplInterface`). That of a backend written in Python answers 1 and 0,
whatever the backend says: autograd then starts one worker, and a backward on npu:1 ends in an assertion; and after
`set_device(1)` the word "npu" means npu:0. There is no way to say otherwise from Python, so the object behind the guard
gets another table of functions: a copy of its own, in which those about devices and streams are ours,

    type, deviceCount                               constants
    getDevice, setDevice, exchangeDevice, …         a number of the thread, behind a key of pthreads
    getStream, getDefaultStream, exchangeStream, …  stream 0 of the device that is asked for

They are machine code, built by LLVM: PyTorch calls them in threads that do not hold Python's lock, and when Python is
gone. Which place of the table is which follows from the order of the declarations in PyTorch's header, which comes with
every PyTorch; before anything is changed, the object must be of the class that is expected, the table must have as many
functions as the header, and the old ones must give the answers of a guard with one device. If anything is otherwise, or
the system is not Linux, this refuses.

With one device nothing of this is done.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from airgraph.compat.npu import tables
from airgraph.errors import CompatError


def thread_pool_after_fork() -> None:
    """In a forked child: PyTorch's thread pool, replaced here, in the only thread there is.

    The first thread that asks for its size replaces it, without a lock. Autograd starts a thread for every device, and
    each asks: with several devices the first backward of such a process ended in "Invalid thread pool!" and SIGABRT.
    """
    torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=thread_pool_after_fork)

TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
CLASS = b"N5torch3acc17PythonDeviceGuardE"
HEADER = "include/c10/core/impl/DeviceGuardImplInterface.h"

# A device is two bytes, its type and its index; a stream is a device in one word and a number in another.
TEXT = """
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)

define i64 @current() {{
  %held = call ptr @pthread_getspecific(i32 {key})
  %index = ptrtoint ptr %held to i64
  ret i64 %index
}}

define void @change(i64 %index) {{
  %exists = icmp ult i64 %index, {count}
  br i1 %exists, label %store, label %done
store:
  %held = inttoptr i64 %index to ptr
  %ok = call i32 @pthread_setspecific(i32 {key}, ptr %held)
  br label %done
done:
  ret void
}}

define internal i16 @device_of(i64 %index) alwaysinline {{
  %short = trunc i64 %index to i16
  %high = shl i16 %short, 8
  %device = or i16 %high, {type}
  ret i16 %device
}}

define internal i64 @index_of(i16 %device) alwaysinline {{
  %high = ashr i16 %device, 8
  %index = sext i16 %high to i64
  ret i64 %index
}}

define i8 @type(ptr %self) {{
  ret i8 {type}
}}

define i8 @deviceCount(ptr %self) {{
  ret i8 {count}
}}

define i16 @getDevice(ptr %self) {{
  %index = call i64 @current()
  %device = call i16 @device_of(i64 %index)
  ret i16 %device
}}

define void @setDevice(ptr %self, i16 %device) {{
  %index = call i64 @index_of(i16 %device)
  call void @change(i64 %index)
  ret void
}}

define void @uncheckedSetDevice(ptr %self, i16 %device) {{
  call void @setDevice(ptr %self, i16 %device)
  ret void
}}

define i16 @exchangeDevice(ptr %self, i16 %device) {{
  %before = call i16 @getDevice(ptr %self)
  call void @setDevice(ptr %self, i16 %device)
  ret i16 %before
}}

define {{ i64, i64 }} @getStream(ptr %self, i16 %device) {{
  %given = call i64 @index_of(i16 %device)
  %here = call i64 @current()
  %named = icmp sge i64 %given, 0
  %index = select i1 %named, i64 %given, i64 %here
  %full = call i16 @device_of(i64 %index)
  %word = zext i16 %full to i64
  %stream = insertvalue {{ i64, i64 }} zeroinitializer, i64 %word, 0
  ret {{ i64, i64 }} %stream
}}

define {{ i64, i64 }} @getDefaultStream(ptr %self, i16 %device) {{
  %stream = call {{ i64, i64 }} @getStream(ptr %self, i16 %device)
  ret {{ i64, i64 }} %stream
}}

define {{ i64, i64 }} @getNewStream(ptr %self, i16 %device, i32 %priority) {{
  %stream = call {{ i64, i64 }} @getStream(ptr %self, i16 %device)
  ret {{ i64, i64 }} %stream
}}

define {{ i64, i64 }} @exchangeStream(ptr %self, i64 %word, i64 %number) {{
  %device = trunc i64 %word to i16
  %stream = call {{ i64, i64 }} @getStream(ptr %self, i16 %device)
  ret {{ i64, i64 }} %stream
}}
"""
OURS = (
    "type",
    "deviceCount",
    "getDevice",
    "setDevice",
    "uncheckedSetDevice",
    "exchangeDevice",
    "getStream",
    "getDefaultStream",
    "getNewStream",
    "exchangeStream",
)


class DeviceCountGuard:
    """PyTorch's guard for the device, answering for `count` devices until `restore()`."""

    def __init__(self, count: int) -> None:
        if sys.platform != "linux":
            raise _refusal("the way it is done is known for Linux")
        try:
            found = _guard_object()
            places = tables.places(_virtual_functions(), OURS, HEADER)
            _check_table(found, places)
        except tables.UnsupportedLayout as error:
            raise _refusal(str(error)) from error
        code = _build(count)
        self.current: Callable[[], int] = ctypes.CFUNCTYPE(ctypes.c_int64)(code["current"])
        self.change: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_int64)(code["change"])
        self.exchanged = tables.Exchanged(found, places[tables.END], {places[name]: code[name] for name in OURS})
        self._check(count)

    def restore(self) -> None:
        self.exchanged.restore()

    def _check(self, count: int) -> None:
        """PyTorch itself, asked through its own functions, must see it."""
        answers = []
        for index in (count - 1, 0):
            torch._C._accelerator_setDeviceIndex(index)
            answers.append((torch._C._accelerator_getDeviceIndex(), self.current()))
        if answers != [(count - 1, count - 1), (0, 0)]:
            self.restore()
            raise _refusal(f"after set_device({count - 1}) and set_device(0) it answers {answers}")


def _refusal(reason: str) -> CompatError:
    return CompatError(
        f"PyTorch's device guard cannot be taught more than one npu here: {reason}",
        where={"pytorch": torch.__version__, "platform": sys.platform},
        hint="AIRGRAPH_NPU_DEVICES=1, which needs none of this",
    )


# What PyTorch has.


def _guard_object() -> int:
    """The address of the registered guard, if it is the one for backends written in Python."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        registry = (ctypes.c_void_p * (TYPE + 1)).in_dll(library, REGISTRY)
    except (OSError, ValueError) as error:
        raise tables.UnsupportedLayout(str(error)) from error
    found = registry[TYPE]
    if not found:
        raise tables.UnsupportedLayout("none is registered")
    if tables.class_of(found) != CLASS:
        raise tables.UnsupportedLayout(f"it is of class {tables.class_of(found).decode(errors='replace')}")
    return found


def _virtual_functions() -> list[str]:
    return tables.virtual_functions(HEADER, "DeviceGuardImplInterface")


def _check_table(guard: int, places: Mapping[str, int]) -> None:
    """Every place must be code, what follows must not, and two harmless ones must answer as a guard with one device."""
    table, size = tables.word(guard), places[tables.END]
    if tables.are_code(table, size + 1) != [True] * size + [False]:
        raise tables.UnsupportedLayout(f"its table has not the {size} functions that {HEADER} says")
    count, device = (_ask(guard, table, places[name]) for name in ("deviceCount", "getDevice"))
    if (count & 0xFF, device & 0xFFFF) != (1, TYPE):
        raise tables.UnsupportedLayout(
            f"it answers {count:#x} for the number of devices and {device:#x} for the current one"
        )


def _ask(guard: int, table: int, place: int) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)(tables.word(table + place * tables.WORD))
    return function(guard)


# What it gets.


def _build(count: int) -> Any:
    try:
        from airgraph.engine.native.llvm.compiler import jit
        from airgraph.engine.native.llvm.jit import Unit, build
    except ImportError as error:
        raise _refusal(f"it needs llvmlite ({error})") from error
    process = ctypes.CDLL(None)
    key = ctypes.c_uint()
    if process.pthread_key_create(ctypes.byref(key), None):
        raise _refusal("the process has no room for another thread-local number")
    text = TEXT.format(count=count, type=TYPE, key=key.value)
    imports = {
        name: ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0
        for name in ("pthread_getspecific", "pthread_setspecific")
    }
    code = build([Unit(text, exports=("current", "change", *OURS), imports=imports)])
    tables.keep_for_ever(code)
    tables.keep_for_ever(jit())
    return code
