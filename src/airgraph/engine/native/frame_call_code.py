"""The native code of a call of a native program without a frame of Python (frame_call.py).

frame_call(table, arguments)    what `NativeProgram.past` does in Python, in the same order
"""

from __future__ import annotations

from airgraph.engine.native.builtin import METH_FASTCALL
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.short_call_code import NULL, forget
from airgraph.engine.native.tables import FrameCallWords

FUNCTIONS = {"frame_call": METH_FASTCALL}
PYTHON = {"PyObject_CallFunctionObjArgs": "ptr (ptr, ...)"}
TYPE = 1  # the word of an object with its class


def source() -> str:
    return told() + failed() + computed() + frame_call()


def told() -> str:
    """What a callable gives for one argument."""
    f = Function("told", "ptr %called, ptr %given", "ptr")
    given = "ptr %called, ptr %given, ptr null"
    return f.text(f"ptr {f.op(f'call ptr (ptr, ...) @PyObject_CallFunctionObjArgs({given})')}")


def failed() -> str:
    """After an exception: Python lets go of what it made, and the exception stays. (As `FrameRunner.finish`.)"""
    f = Function("failed", "ptr %table")
    f.do("%kind = alloca ptr\n  %value = alloca ptr\n  %trace = alloca ptr")
    error = ("ptr", "%kind"), ("ptr", "%value"), ("ptr", "%trace")
    f.invoke("@PyErr_Fetch", *error)
    done = f.op(f"call ptr @PyObject_CallNoArgs(ptr {f.word('%table', FrameCallWords.FINISH, 'ptr')})")
    with f.given(f.test("ne", done, "null", "ptr")):
        forget(f, done)
    f.invoke("@PyErr_Restore", *(("ptr", f.word(place, 0, "ptr")) for _, place in error))
    return f.text()


def computed() -> str:
    """The results; null where there is an error, or where nothing was done."""
    f = Function("computed", "ptr %table, ptr %args, i64 %count", "ptr")
    state = f.word("%table", FrameCallWords.GATHER, "ptr")
    stateless = f.test("eq", state, "null", "ptr")
    same = f.either(
        f.op(f"xor i1 {stateless}, true"), "i1", lambda: f.op(f"call i1 @gather_rows(ptr {state}, ptr %args)"), "true"
    )
    f.give(f.op(f"xor i1 {same}, true"), NULL)
    given = f.op(f"call ptr @listed(ptr {state}, ptr %args, i64 %count)")
    f.give(f.test("eq", given, "null", "ptr"), NULL)
    result = f.op(f"call ptr @told(ptr {f.word('%table', FrameCallWords.PROGRAM, 'ptr')}, ptr {given})")
    forget(f, given)
    raised = f.test("eq", result, "null", "ptr")
    with f.given(raised):
        f.invoke("@failed", ("ptr", "%table"))
    f.give(raised, NULL)
    several = f.test("eq", f.word(result, TYPE, "ptr"), f.word("%table", FrameCallWords.RESULTS, "ptr"), "ptr")
    f.give(several, f"ptr {result}")
    answer = f.op(f"call ptr @told(ptr {f.word('%table', FrameCallWords.FAILED, 'ptr')}, ptr {result})")
    forget(f, result)
    with f.given(f.test("ne", answer, "null", "ptr")):
        forget(f, answer)
    return f.text(NULL)


def frame_call() -> str:
    f = Function("frame_call", "ptr %self, ptr %args, i64 %count", "ptr", exported=True)
    table = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    ready = f.test("eq", f.word(f.word(table, FrameCallWords.BY_PYTHON, "ptr"), 0), 0)
    ready = f.either(ready, "i1", lambda: f.op(f"call i1 @quiet(ptr {table}, i64 %count)"), "false")
    result = f.either(ready, "ptr", lambda: f.op(f"call ptr @computed(ptr {table}, ptr %args, i64 %count)"), "null")
    has_result = f.test("ne", result, "null", "ptr")
    with f.given(has_result):
        place, writes = (f.word(table, word, "ptr") for word in (FrameCallWords.CALLS, FrameCallWords.WRITES))
        f.set(place, 0, f.add(f.word(place, 0), 1))
        with f.given(f.test("ne", writes, "null", "ptr")):
            f.invoke("@bump_arguments", ("ptr", writes), ("ptr", "%args"))
    f.give(has_result, f"ptr {result}")
    f.give(f.test("ne", f.op("call ptr @PyErr_Occurred()"), "null", "ptr"), NULL)
    return f.text(f"ptr {f.op(f'call ptr @fallback(ptr {table}, ptr %args, i64 %count)')}")
