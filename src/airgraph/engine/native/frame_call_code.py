"""The native code of a call of a native program without a frame of Python (frame_call.py).

frame_call(table, arguments)    what `NativeProgram.past` does in Python, in the same order
"""

from __future__ import annotations

from airgraph.engine.native.builtin import METH_FASTCALL
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.short_call_code import NULL, as_tuple, asked_of, forget
from airgraph.engine.native.tables import FrameCallWords

FUNCTIONS = {"frame_call": METH_FASTCALL}
PYTHON = {"PyObject_CallFunctionObjArgs": "ptr (ptr, ...)", "PyList_GetItem": "ptr (ptr, i64)"}
TYPE, ITEMS = 1, 3  # the words of an object with its class, and of a list with the address of what is in it


def source() -> str:
    return told() + failed() + in_front() + state_holds() + all_arguments() + computed() + in_form() + frame_call()


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


def in_front() -> str:
    """The number of tensors in front of the arguments."""
    f = Function("in_front", "ptr %table", "i64")
    front = f.word("%table", FrameCallWords.FRONT, "ptr")
    return f.text(f"i64 {f.either(f.test('ne', front, 'null', 'ptr'), 'i64', lambda: f.word(front, 0), '0')}")


def state_holds() -> str:
    """Whether state is where the table says, and is as much as `first` says."""
    f = Function("state_holds", "ptr %table, ptr %args, i64 %count, i64 %first", "i1")
    gather, tags = (f.word("%table", word, "ptr") for word in (FrameCallWords.GATHER, FrameCallWords.TAGS))
    known = f.test("eq", f.word("%table", FrameCallWords.WIDTH), "%count")
    same = f.op(f"and i1 {known}, {f.test('eq', f.op('call i64 @in_front(ptr %table)'), '%first')}")
    same = f.either(same, "i1", lambda: asked_of(f, gather, "gather_rows", ", ptr %args"), "false")
    return f.text(f"i1 {f.either(same, 'i1', lambda: asked_of(f, tags, 'tag_rows'), 'false')}")


def all_arguments() -> str:
    """The program's arguments as a list; null where state has to be looked for again, or there is an error.

    The list is made before anything is looked at: making it may run finalizers, which replace state, or calls that write
    another table. Behind that no code of Python runs until the list holds all arguments."""
    f = Function("all_arguments", "ptr %table, ptr %args, i64 %count", "ptr")
    first = f.op("call i64 @in_front(ptr %table)")
    found = f.op(f"call ptr @PyList_New(i64 {f.add(first, '%count')})")
    f.give(f.test("eq", found, "null", "ptr"), NULL)
    given = f"ptr %table, ptr %args, i64 %count, i64 {first}"
    changed = f.op(f"xor i1 {f.op(f'call i1 @state_holds({given})')}, true")
    with f.given(changed):
        forget(f, found)
    f.give(changed, NULL)
    front, gather = (f.word("%table", word, "ptr") for word in (FrameCallWords.FRONT, FrameCallWords.GATHER))
    for start, table, items, count in (("0", "null", f.at(front, 1, "i64"), first), (first, gather, "%args", "%count")):
        f.invoke("@fill_list", ("ptr", found), ("i64", start), ("ptr", table), ("ptr", items), ("i64", count))
    return f.text(f"ptr {found}")


def computed() -> str:
    """The results; null where there is an error, or where nothing was done."""
    f = Function("computed", "ptr %table, ptr %args, i64 %count", "ptr")
    given = f.op("call ptr @all_arguments(ptr %table, ptr %args, i64 %count)")
    f.give(f.test("eq", given, "null", "ptr"), NULL)
    result = f.op(f"call ptr @told(ptr {f.word('%table', FrameCallWords.PROGRAM, 'ptr')}, ptr {given})")
    done = f.either(f.test("ne", result, "null", "ptr"), "i1", lambda: is_list(f, result), "false")
    writes = f.word("%table", FrameCallWords.WRITES, "ptr")
    with f.given(f.op(f"and i1 {done}, {f.test('ne', writes, 'null', 'ptr')}")):
        f.invoke("@bump_arguments", ("ptr", writes), ("ptr", f.word(given, ITEMS, "ptr")), ("ptr", "null"))
    forget(f, given)
    f.give(done, f"ptr {result}")
    raised = f.test("eq", result, "null", "ptr")
    with f.given(raised):
        f.invoke("@failed", ("ptr", "%table"))
    f.give(raised, NULL)
    answer = f.op(f"call ptr @told(ptr {f.word('%table', FrameCallWords.FAILED, 'ptr')}, ptr {result})")
    forget(f, result)
    with f.given(f.test("ne", answer, "null", "ptr")):
        forget(f, answer)
    return f.text(NULL)


def is_list(f: Function, result: str) -> str:
    return f.test("eq", f.word(result, TYPE, "ptr"), f.word("%table", FrameCallWords.RESULTS, "ptr"), "ptr")


def in_form() -> str:
    """The list of results as the caller wants it."""
    f = Function("in_form", "ptr %table, ptr %results", "ptr")
    form = f.word("%table", FrameCallWords.FORM)
    row, single = (f.test("eq", form, wanted) for wanted in (FrameCallWords.TUPLE, FrameCallWords.SINGLE))
    f.give(row, f"ptr {f.either(row, 'ptr', lambda: as_tuple(f, '%results'), 'null')}")

    def only() -> str:
        found = f.op("call ptr @PyList_GetItem(ptr %results, i64 0)")
        f.invoke("@Py_IncRef", ("ptr", found))
        forget(f, "%results")
        return found

    return f.text(f"ptr {f.either(single, 'ptr', only, '%results')}")


def given_as(f: Function, table: str, results: str) -> str:
    return f.op(f"call ptr @in_form(ptr {table}, ptr {results})")


def frame_call() -> str:
    f = Function("frame_call", "ptr %self, ptr %args, i64 %count", "ptr", exported=True)
    table = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    ready = f.test("eq", f.word(f.word(table, FrameCallWords.BY_PYTHON, "ptr"), 0), 0)
    ready = f.either(ready, "i1", lambda: f.op(f"call i1 @quiet(ptr {table}, i64 %count)"), "false")
    result = f.either(ready, "ptr", lambda: f.op(f"call ptr @computed(ptr {table}, ptr %args, i64 %count)"), "null")
    has_result = f.test("ne", result, "null", "ptr")
    with f.given(has_result):
        place = f.word(table, FrameCallWords.CALLS, "ptr")
        f.set(place, 0, f.add(f.word(place, 0), 1))
    f.give(has_result, f"ptr {f.either(has_result, 'ptr', lambda: given_as(f, table, result), 'null')}")
    f.give(f.test("ne", f.op("call ptr @PyErr_Occurred()"), "null", "ptr"), NULL)
    return f.text(f"ptr {f.op(f'call ptr @fallback(ptr {table}, ptr %args, i64 %count)')}")
