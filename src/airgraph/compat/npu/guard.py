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
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from airgraph.errors import CompatError

TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
CLASS = b"N5torch3acc17PythonDeviceGuardE"
HEADER = "include/c10/core/impl/DeviceGuardImplInterface.h"
END = "the end"
WORD = ctypes.sizeof(ctypes.c_void_p)
BEFORE = 2  # words of a table that lie before the place the object points to

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

define i16 @device(i64 %index) alwaysinline {{
  %short = trunc i64 %index to i16
  %high = shl i16 %short, 8
  %device = or i16 %high, {type}
  ret i16 %device
}}

define i64 @index(i16 %device) alwaysinline {{
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
  %device = call i16 @device(i64 %index)
  ret i16 %device
}}

define void @setDevice(ptr %self, i16 %device) {{
  %index = call i64 @index(i16 %device)
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
  %given = call i64 @index(i16 %device)
  %here = call i64 @current()
  %named = icmp sge i64 %given, 0
  %index = select i1 %named, i64 %given, i64 %here
  %full = call i16 @device(i64 %index)
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
OURS = ("type", "deviceCount", "getDevice", "setDevice", "uncheckedSetDevice", "exchangeDevice", "getStream",
        "getDefaultStream", "getNewStream", "exchangeStream")  # fmt: skip


class Guard:
    """PyTorch's guard for the device, answering for `count` devices until `restore()`."""

    def __init__(self, count: int) -> None:
        if sys.platform != "linux":
            raise _refusal("the way it is done is known for Linux")
        self.object = _guard_object()
        self.table_before = _word(self.object)
        places = _places(_virtual_functions())
        _check_table(self.object, self.table_before, places)
        code = _build(count)
        self.current: Callable[[], int] = ctypes.CFUNCTYPE(ctypes.c_int64)(code["current"])
        self.change: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_int64)(code["change"])
        words = places[END] + BEFORE
        self.table = (ctypes.c_void_p * words).from_buffer_copy(
            ctypes.string_at(self.table_before - BEFORE * WORD, words * WORD)
        )
        for name in OURS:
            self.table[places[name] + BEFORE] = code[name]
        _keep_for_ever(self.table)
        self._point_to(ctypes.addressof(self.table) + BEFORE * WORD)
        self._check(count)

    def restore(self) -> None:
        self._point_to(self.table_before)

    def _point_to(self, table: int) -> None:
        ctypes.c_void_p.from_address(self.object).value = table

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
        raise _refusal(str(error)) from error
    found = registry[TYPE]
    if not found:
        raise _refusal("none is registered")
    type_info = _word(_word(found) - WORD)
    name = ctypes.string_at(_word(type_info + WORD))
    if name != CLASS:
        raise _refusal(f"it is of class {name.decode(errors='replace')}")
    return found


def _virtual_functions() -> list[str]:
    """The functions of the interface in the order of PyTorch's header, which is their order in the table."""
    header = Path(torch.__file__).parent / HEADER
    if not header.is_file():
        raise _refusal(f"this PyTorch comes without {HEADER}")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
    begin = re.search(r"\bstruct\s+(?:\w+\s+)?DeviceGuardImplInterface\s*\{", text)
    if begin is None:
        raise _refusal(f"{HEADER} does not declare it")
    body = text[begin.end() : text.index("\n};", begin.end())]
    return re.findall(r"\bvirtual\b[^();]*?(~?\w+)\s*\(", body)


def _places(functions: Sequence[str]) -> dict[str, int]:
    """Where each stands, and where the table ends; a destructor stands there twice."""
    places: dict[str, int] = {}
    place = 0
    for name in functions:
        places[name] = place
        place += 2 if name.startswith("~") else 1
    lacking = [name for name in OURS if name not in places]
    if lacking or len(places) != len(functions):
        raise _refusal(f"{HEADER} has no function {lacking[0]}" if lacking else f"{HEADER} has one of a name twice")
    return {**places, END: place}


def _check_table(guard: int, table: int, places: dict[str, int]) -> None:
    """Every place must be code, what follows must not, and two harmless ones must answer as a guard with one device."""
    code, size = _code(), places[END]
    is_code = [any(_word(table + place * WORD) in part for part in code) for place in range(size + 1)]
    if is_code != [True] * size + [False]:
        raise _refusal(f"its table has not the {size} functions that {HEADER} says")
    count = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(_word(table + places["deviceCount"] * WORD))(guard)
    device = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(_word(table + places["getDevice"] * WORD))(guard)
    if (count, device) != (1, TYPE):
        raise _refusal(f"it answers {count} for the number of devices and {device:#x} for the current one")


def _code() -> list[range]:
    """Where this process has code of PyTorch."""
    lines = [
        line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    parts = [line[0].split("-") for line in lines if "x" in line[1] and "libtorch" in line[-1]]
    return [range(int(begin, 16), int(end, 16)) for begin, end in parts]


def _word(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


# What it gets.


def _build(count: int) -> Any:
    try:
        from airgraph.engine.native.jit import Unit, build, jit
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
    _keep_for_ever(code)
    _keep_for_ever(jit())
    return code


def _keep_for_ever(thing: Any) -> None:
    """PyTorch's threads may outlive Python's objects."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
