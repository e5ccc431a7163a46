"""The native code of a replay that is one launch: what `ReplayProgram.attempt` does in Python, in the same order.

    call(table, arguments)      the results; where anything is not as it has to be, nothing is done, and the fallback is
                                called (None is the answer where there is none)
    replayed(table, arguments)  the part of it under the arena's lock: null where nothing was done, or Python has an error

Nothing is allocated between the questions whether tensors are where they were and the launch: finalizers of Python, which
any allocation may run, could move them.

What is read of the table after Python's lock may have been given up (which a launch does) belongs to the recording, and is
kept until the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable

from airgraph.engine.native.builtin import METH_FASTCALL
from airgraph.engine.native.dict_watch import same_tags
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.tables import (
    ArenaWords,
    DirectCallWords,
    GatherWords,
    LaunchWords,
    RecordingWords,
    ShortCallWords,
)

FUNCTIONS = {"call": METH_FASTCALL}
PYTHON = {
    "PyDict_GetItem": "ptr (ptr, ptr)",
    "PyObject_CallNoArgs": "ptr (ptr)",
    "PyObject_CallObject": "ptr (ptr, ptr)",
    "PyList_AsTuple": "ptr (ptr)",
    "PyTuple_New": "ptr (i64)",
    "PyTuple_SetItem": "i32 (ptr, i64, ptr)",
    "PyErr_Occurred": "ptr ()",
    "PyErr_Fetch": "void (ptr, ptr, ptr)",
    "PyErr_Restore": "void (ptr, ptr, ptr)",
    "Py_IncRef": "void (ptr)",
    "Py_DecRef": "void (ptr)",
}
HANDLE = 2  # the word of a tensor of Python with the tensor of C++
NULL = "ptr null"


def source() -> str:
    return free_rows() + tag_rows() + bump_arguments() + replayed() + under_lock() + fallback() + quiet() + call()


def call() -> str:
    f = Function("call", "ptr %self, ptr %args, i64 %count", "ptr", exported=True)
    table = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    ready = f.test("sgt", f.word(table, ShortCallWords.COUNT), 0)
    ready = f.either(ready, "i1", lambda: f.op(f"call i1 @quiet(ptr {table}, i64 %count)"), "false")
    result = f.either(ready, "ptr", lambda: f.op(f"call ptr @under_lock(ptr {table}, ptr %args)"), "null")
    f.give(f.test("ne", result, "null", "ptr"), f"ptr {result}")
    f.give(f.test("ne", f.op("call ptr @PyErr_Occurred()"), "null", "ptr"), NULL)
    return f.text(f"ptr {f.op(f'call ptr @fallback(ptr {table}, ptr %args, i64 %count)')}")


def quiet() -> str:
    """Whether there are as many arguments as there have to be, and nobody wants to be told about the call."""
    f = Function("quiet", "ptr %table, i64 %count", "i1")
    found = f.test("eq", "%count", f.word("%table", DirectCallWords.WIDTH))
    for owner, key in (
        (DirectCallWords.PROFILER, DirectCallWords.PROFILER_KEY),
        (DirectCallWords.LOG, DirectCallWords.LOG_KEY),
    ):
        found = f.either(found, "i1", lambda: is_false(f, "%table", owner, key), "false")  # noqa: B023  (called at once)
    return f.text(f"i1 {found}")


def is_false(f: Function, table: str, owner: int, key: int) -> str:
    """Whether False is in a dictionary at this key."""
    found = f.op(f"call ptr @PyDict_GetItem(ptr {f.word(table, owner, 'ptr')}, ptr {f.word(table, key, 'ptr')})")
    return f.test("eq", found, f.word(table, DirectCallWords.FALSE, "ptr"), "ptr")


def fallback() -> str:
    f = Function("fallback", "ptr %table, ptr %args, i64 %count", "ptr")
    called, none = (f.word("%table", word, "ptr") for word in (DirectCallWords.FALLBACK, DirectCallWords.NONE))
    with f.given(f.test("eq", called, "null", "ptr")):
        f.invoke("@Py_IncRef", ("ptr", none))
    f.give(f.test("eq", called, "null", "ptr"), f"ptr {none}")
    given = f.op("call ptr @PyTuple_New(i64 %count)")
    f.give(f.test("eq", given, "null", "ptr"), NULL)
    with f.each("0", "%count", 1) as loop:
        item = f.word("%args", loop.i, "ptr")
        f.invoke("@Py_IncRef", ("ptr", item))
        f.op(f"call i32 @PyTuple_SetItem(ptr {given}, i64 {loop.i}, ptr {item})")
    result = f.op(f"call ptr @PyObject_CallObject(ptr {called}, ptr {given})")
    f.invoke("@Py_DecRef", ("ptr", given))
    return f.text(f"ptr {result}")


def under_lock() -> str:
    """`replayed`, and then the lock is given up, also where there is an error."""
    f = Function("under_lock", "ptr %table, ptr %args", "ptr")
    f.do("%kind = alloca ptr\n  %value = alloca ptr\n  %trace = alloca ptr")
    forget(f, done(f, f.word("%table", ShortCallWords.ACQUIRE, "ptr")))
    result = f.op("call ptr @replayed(ptr %table, ptr %args)")
    failed = f.test("eq", result, "null", "ptr")
    error = ("ptr", "%kind"), ("ptr", "%value"), ("ptr", "%trace")
    with f.given(failed):
        f.invoke("@PyErr_Fetch", *error)
    forget(f, done(f, f.word("%table", ShortCallWords.RELEASE, "ptr")))
    with f.given(failed):
        f.invoke("@PyErr_Restore", *(("ptr", f.word(place, 0, "ptr")) for _, place in error))
    return f.text(f"ptr {result}")


def replayed() -> str:
    f = Function("replayed", "ptr %table, ptr %args", "ptr")
    arena = f.word("%table", ShortCallWords.ARENA, "ptr")
    told = done(f, f.word("%table", ShortCallWords.CURRENT, "ptr"))
    stream = f.op(f"ptrtoint ptr {f.op(f'call ptr @PyLong_AsVoidPtr(ptr {told})')} to i64")
    forget(f, told)
    f.give(f.test("ne", f.word(arena, ArenaWords.BUSY), 0), NULL)
    f.give(f.test("ne", f.word(arena, ArenaWords.LAST), stream), NULL)
    captured = f.either(f.test("ne", stream, 0), "i1", lambda: is_captured(f), "false")
    f.give(captured, NULL)
    launches = f.word("%table", ShortCallWords.LAUNCHES, "ptr")

    def first(i: str, found: str) -> list[str]:
        row = f.word(launches, i, "ptr")
        suits = f.either(f.test("eq", found, "null", "ptr"), "i1", lambda: is_ready(f, row), "false")
        return [f.choose(suits, "ptr", row, found)]

    (row,) = f.loop("0", f.word("%table", ShortCallWords.COUNT), 1, first, ("ptr", "null"))
    f.give(f.test("eq", row, "null", "ptr"), NULL)
    f.give(f.op(f"xor i1 {state_stays(f)}, true"), NULL)
    return launched(f, row)


def is_captured(f: Function) -> str:
    """Whether the user captures on the current stream."""
    told = done(f, f.word("%table", ShortCallWords.CAPTURING, "ptr"))
    forget(f, told)  # (it is True or False)
    return f.test("ne", told, f.word("%table", ShortCallWords.FALSE, "ptr"), "ptr")


def is_ready(f: Function, row: str) -> str:
    """Whether arguments are where and as those were that a recording was made for, and nobody holds its results."""
    recording = f.word(row, LaunchWords.RECORDING, "ptr")
    version = f.word(f.word(row, LaunchWords.VERSION, "ptr"), 0)
    found = f.test("eq", f.word(recording, RecordingWords.VERSION), version)
    free = f.word(recording, RecordingWords.FREE, "ptr")
    questions: list[Callable[[], str]] = [
        lambda: asked_of(f, f.word(row, LaunchWords.GATHER, "ptr"), "gather_rows", ", ptr %args"),
        lambda: f.op(f"call i1 @free_rows(ptr {free})"),
        lambda: f.op(f"call i1 @same_rows(ptr {f.word(row, LaunchWords.SAME, 'ptr')}, ptr %args)"),
        lambda: asked_of(f, f.word(row, LaunchWords.LAID_OUT, "ptr"), "laid_out_rows", ", ptr %args"),
        lambda: asked_of(f, f.word(row, LaunchWords.UNMOVED, "ptr"), "unmoved_rows"),
    ]
    for question in questions:
        found = f.either(found, "i1", question, "false")
    return found


def state_stays(f: Function) -> str:
    """Whether a model's state is where it was."""
    same = asked_of(f, f.word("%table", ShortCallWords.TAGS, "ptr"), "tag_rows")
    state = f.word("%table", ShortCallWords.STATE, "ptr")
    return f.either(same, "i1", lambda: asked_of(f, state, "unmoved_rows"), "false")


def asked_of(f: Function, table: str, rows: str, more: str = "") -> str:
    """True where there is no table."""
    there = f.test("ne", table, "null", "ptr")
    return f.either(there, "i1", lambda: f.op(f"call i1 @{rows}(ptr {table}{more})"), "true")


def launched(f: Function, row: str) -> str:
    """Versions go up before the launch, since the state may be another one behind it. The arena is busy until there are
    results: nobody holds their memory before, and a finalizer may call the same program."""
    kept, recording = f.word(row, LaunchWords.KEPT, "ptr"), f.word(row, LaunchWords.RECORDING, "ptr")
    made, form = f.word(row, LaunchWords.MAKE, "ptr"), f.word("%table", DirectCallWords.FORM)
    arena = f.word("%table", ShortCallWords.ARENA, "ptr")
    f.invoke("@Py_IncRef", ("ptr", kept))
    f.set(arena, ArenaWords.BUSY, "1")
    given = (("ptr", "%args"), ("ptr", f.word(row, LaunchWords.GATHER, "ptr")))
    for word, rows, more in (
        (ShortCallWords.STATE_WRITES, "@bump_rows", ()),
        (ShortCallWords.WRITES, "@bump_arguments", given),
    ):
        writes = f.word("%table", word, "ptr")
        with f.given(f.test("ne", writes, "null", "ptr")):
            f.invoke(rows, ("ptr", writes), *more)
    launch, arguments = (f.word(row, word, "ptr") for word in (LaunchWords.LAUNCH, LaunchWords.ARGUMENTS))
    told = f.op(f"call ptr @PyObject_CallObject(ptr {launch}, ptr {arguments})")

    def result() -> str:
        forget(f, told)
        tick = f.word("%table", ShortCallWords.TICK, "ptr")
        for place in (f.word("%table", ShortCallWords.CALLS, "ptr"), tick):
            f.set(place, 0, f.add(f.word(place, 0), 1))
        f.set(recording, RecordingWords.HITS, f.add(f.word(recording, RecordingWords.HITS), 1))
        f.set(recording, RecordingWords.USED, f.word(tick, 0))
        return new_results(f, made, form)

    found = f.either(f.test("ne", told, "null", "ptr"), "ptr", result, "null")
    f.set(arena, ArenaWords.BUSY, "0")
    f.invoke("@Py_DecRef", ("ptr", kept))
    return f.text(f"ptr {found}")


def new_results(f: Function, made: str, form: str) -> str:
    single = f.test("eq", form, DirectCallWords.SINGLE)
    several = f.op(f"xor i1 {single}, true")
    one = f.either(single, "ptr", lambda: f.op(f"call ptr @new_tensor(ptr {f.at(made, 1, 'i64')})"), "null")
    found = f.either(several, "ptr", lambda: f.op(f"call ptr @make_rows(ptr {made})"), one)

    row = f.op(f"and i1 {f.test('eq', form, DirectCallWords.TUPLE)}, {f.test('ne', found, 'null', 'ptr')}")
    return f.either(row, "ptr", lambda: as_tuple(f, found), found)


def as_tuple(f: Function, results: str) -> str:
    found = f.op(f"call ptr @PyList_AsTuple(ptr {results})")
    forget(f, results)
    return found


# -- tables -------------------------------------------------------------------------------------------------------------
def free_rows() -> str:
    """The table has the number of rows, and rows: where a count of references (32 bits) is, and what it should be."""
    f = Function("free_rows", "ptr %table", "i1")
    rows = f.at("%table", 1, "i64")

    def one(i: str, same: str) -> list[str]:
        row = f.row(rows, i, 2)
        place = f.word(row, 0, "ptr")
        count = f.op(f"zext i32 {f.op(f'load i32, ptr {place}, align 4')} to i64")
        return [f.op(f"and i1 {same}, {f.test('eq', count, f.word(row, 1))}")]

    (same,) = f.loop("0", f.word("%table", 0), 1, one, ("i1", "true"))
    return f.text(f"i1 {same}")


def tag_rows() -> str:
    """The table is that of dict_watch.py."""
    f = Function("tag_rows", "ptr %table", "i1")
    return f.text(f"i1 {same_tags(f, '%table')}")


def bump_arguments() -> str:
    """The table has the number of arguments that are written to, and their numbers; `gather` (GatherWords, or null) those
    that are read from modules."""
    f = Function("bump_arguments", "ptr %table, ptr %args, ptr %gather")
    read = f.test("ne", "%gather", "null", "ptr")
    items = f.either(read, "ptr", lambda: f.word("%gather", GatherWords.ITEMS, "ptr"), "%args")
    with f.each("0", f.word("%table", 0), 1) as loop:
        number = f.word(f.at("%table", 1, "i64"), loop.i)
        own = f.word(items, number, "ptr")
        given = f.either(f.test("eq", own, "null", "ptr"), "ptr", lambda: f.word("%args", number, "ptr"), own)
        tensor = f.at(given, HANDLE, "i64")
        counts = f.op(f"xor i1 {f.op(f'call i1 @is_inference(ptr {tensor})')}, true")
        with f.given(counts):
            f.invoke("@bump_version", ("ptr", tensor))
    return f.text()


# -- objects of Python --------------------------------------------------------------------------------------------------
def done(f: Function, method: str) -> str:
    """What a call of it gives; out of the function where that is an error."""
    told = f.op(f"call ptr @PyObject_CallNoArgs(ptr {method})")
    f.give(f.test("eq", told, "null", "ptr"), NULL)
    return told


def forget(f: Function, found: str) -> None:
    f.invoke("@Py_DecRef", ("ptr", found))
