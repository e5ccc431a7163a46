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

from airgraph.engine.native.code import NativeStep
from airgraph.engine.native.libtorch import libtorch, symbol
from airgraph.engine.native.llvm.jit import Code, Unit, build
from airgraph.engine.native.tables import StepWords
from airgraph.plan.origins import title
from airgraph.plan.steps import CallStep, Plan

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
        _made[executable] = wrappers(executable.plan, executable.steps)
    functions, _, _ = _made[executable]
    kernels = [step.function for step in executable.steps]
    try:
        put(executable, functions)
        yield
    finally:
        put(executable, kernels)


def put(executable: Any, functions: Sequence[int]) -> None:
    """Into the frames there are, and into those that are made from now on."""
    for i, (step, function) in enumerate(zip(executable.steps, functions)):
        if function:
            step.function = function
            for frame in list(executable.frames):
                frame.step_table[i * StepWords.WORDS + StepWords.FUNCTION] = function


def names(plan: Plan, steps: Sequence[NativeStep]) -> list[str]:
    """Of every step; two that do the same for the same module have the same name."""
    return [PREFIX + title(plan, step.origin) for step in steps]


def wrappers(plan: Plan, steps: Sequence[NativeStep]) -> tuple[list[int], Code | None, list[Any]]:
    """(a function for each kernel, 0 for a call of PyTorch; the code; the names, which it points to)"""
    kernels = [i for i, step in enumerate(steps) if not isinstance(step.origin, CallStep)]
    if not kernels:
        return [0] * len(steps), None, []
    held = [ctypes.create_string_buffer(name.encode()) for name in names(plan, steps)]
    text = "\n".join(
        [
            f"declare i32 @{START}(ptr, ptr, ptr, i64, ptr)",
            f"declare i32 @{END}(ptr)",
            *(wrapper(i, steps[i].function, ctypes.addressof(held[i])) for i in kernels),
        ]
    )
    imports = {name: symbol(libtorch(), name) for name in (START, END)}
    code = build([Unit(text, tuple(f"step_{i}" for i in kernels), imports)])
    return [code[f"step_{i}"] if i in kernels else 0 for i in range(len(steps))], code, held


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
