"""Steps that torch.profiler sees by name.

    with named_steps(executable):       only while a profiler listens
        executable.call(...)

For every kernel of a program there is a function that tells PyTorch when the kernel starts and ends. Meanwhile it stands
in the place of the kernel in the tables of the frames. Without a profiler nothing of this exists, and a call costs what it
always does. PyTorch listens in the calling thread only: the time is that of this thread's share of the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from airgraph.engine.native.libtorch import libtorch, symbol
from airgraph.engine.native.llvm.jit import Code, Unit, build
from airgraph.engine.native.tables import StepWords

START, END = "aoti_record_function_start", "aoti_record_function_end"
PREFIX = "airgraph::"
_made: WeakKeyDictionary[Any, tuple[list[int], Code | None, list[Any]]] = WeakKeyDictionary()


@contextmanager
def named_steps(executable: Any) -> Iterator[None]:
    """Meanwhile the kernels of an executable report to the profiler; PyTorch's own ops do so by themselves."""
    if not (symbol(libtorch(), START) and symbol(libtorch(), END)):  # PyTorch before 2.9
        yield
        return
    if executable not in _made:
        _made[executable] = wrappers(executable.titles, executable.functions)
    functions, _, _ = _made[executable]
    kernels = list(executable.functions)
    try:
        put(executable, functions)
        yield
    finally:
        put(executable, kernels)


def put(executable: Any, functions: Sequence[int]) -> None:
    """Into the frames there are, and into those that are made from now on."""
    for i, function in enumerate(functions):
        if function:
            executable.functions[i] = function
            for frame in list(executable.frames):
                frame.step_table[i * StepWords.WORDS + StepWords.FUNCTION] = function


def wrappers(titles: Sequence[str], kernels: Sequence[int]) -> tuple[list[int], Code | None, list[Any]]:
    """(a function for each kernel, 0 for those without a title and calls of PyTorch; the code; the names it points to)"""
    numbers = [i for i, (title, kernel) in enumerate(zip(titles, kernels)) if title and kernel]
    if not numbers:
        return [0] * len(kernels), None, []
    held = [ctypes.create_string_buffer((PREFIX + title).encode()) for title in titles]
    text = "\n".join(
        [
            f"declare i32 @{START}(ptr, ptr, ptr, i64, ptr)",
            f"declare i32 @{END}(ptr)",
            *(wrapper(i, kernels[i], ctypes.addressof(held[i])) for i in numbers),
        ]
    )
    imports = {name: symbol(libtorch(), name) for name in (START, END)}
    code = build([Unit(text, tuple(f"step_{i}" for i in numbers), imports)])
    return [code[f"step_{i}"] if i in numbers else 0 for i in range(len(kernels))], code, held


def wrapper(number: int, function: int, name: int) -> str:
    given = "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch"
    return f"""
define void @step_{number}({given}) {{
  %place = alloca ptr
  store ptr null, ptr %place
  %name = inttoptr i64 {name} to ptr
  %kernel = inttoptr i64 {function} to ptr
  %begun = call i32 @{START}(ptr %name, ptr null, ptr null, i64 0, ptr %place)
  call void %kernel({given})
  %record = load ptr, ptr %place
  %listened = icmp ne ptr %record, null
  br i1 %listened, label %finish, label %done
finish:
  %ended = call i32 @{END}(ptr %record)
  br label %done
done:
  ret void
}}"""
