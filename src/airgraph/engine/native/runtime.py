"""The part of a graph call that is the same for every graph, as LLVM text: one Python→native call does all of it.

    call(program, args: list) → list of results, or an int that says what Python has to put right first

    find a frame whose arguments look like these ─ take a block of memory ─ make the outputs ─ let go of Python's lock
    ─ run the steps ─ take the lock ─ hand out the results ─ give frame and block back

A *program* holds its frames, a *frame* everything that follows from one set of sizes: what the arguments must look like,
where in a block each intermediate lies, the steps with their sizes. Frames and blocks are taken and given back under
Python's lock, so several threads can call one program: each gets a frame of its own. All are arrays of 64-bit words; the
classes below name them.

Steps between two library calls are one parallel region, with a barrier where a step reads what another thread wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from airgraph.engine.native.llvm.jit import Code, Unit, build
from airgraph.engine.native.llvm.text import Native


class Program:
    FRAMES, POOL, WORDS = 0, 1, 2


class Block:
    NEXT, BASE, SIZE, WORDS = 0, 1, 2, 3


class Frame:
    NEXT, BASE, ARGS, ARG_TABLE, OUTS, OUT_TABLE, SLOTS, PLACED, PLACE_TABLE, NEED, STEPS, STEP_TABLE = range(12)
    NUMBER, THREADS, ERRORS, ERROR_TABLE, OBJECTS, LIST, CALLBACK, TENSOR_TYPE, PARAMETER_TYPE = range(12, 21)
    DISPATCH, LET_GO, MADE, MADE_TABLE, SCRATCH, LENT, LENT_TABLE, WORDS = range(21, 29)


class Entry:
    """One argument or output. KIND: NOTHING to do, a TENSOR, a WHOLE number (VALUE), a FLOAT (for the slot VALUE)."""

    KIND, DTYPE, DIM, SIZES, STRIDES, VALUE, ADDRESS, WORDS = range(8)  # ADDRESS: the only one it may have, or 0
    NOTHING, TENSOR, WHOLE, FLOAT = range(4)


class Step:
    """CALL: a step of native code, or a call of PyTorch by PYTHON or through its DISPATCHER (with a TAPE: dispatch.py)."""

    CALL, FUNCTION, ARGS, SIZES, JOBS, UNIT, ALONE, END, SYNC, TAPE, RELEASE, WORDS = range(12)
    NATIVE, PYTHON, DISPATCHER = range(3)


class Release:
    """What is let go before a call of PyTorch: so many ARGUMENTS, then so many RESULTS, from FIRST on."""

    ARGUMENTS, RESULTS, NONE, FIRST = range(4)


# What `call` gives back in place of results.
NO_FRAME, NO_BLOCK, FAILED, BAD_INDEX = 1, 2, 3, 4

TORCH = (
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_data_ptr",
    "aoti_torch_empty_strided",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_new_tensor_handle",
    "torch_parallel_for",
)
PYTHON = (
    "PyList_Size",
    "PyList_GetItem",
    "PyList_New",
    "PyList_SetItem",
    "PyLong_FromLong",
    "PyLong_AsVoidPtr",
    "PyLong_AsLongLong",
    "PyFloat_AsDouble",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "Py_IncRef",
    "Py_DecRef",
)
WRAP = "_Z16THPVariable_WrapON2at10TensorBaseE"
DECLARES = """
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_device_type(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @aoti_torch_new_tensor_handle(ptr, ptr)
declare i32 @torch_parallel_for(i64, i64, i64, ptr, ptr)
declare i64 @PyList_Size(ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare ptr @PyList_New(i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyLong_FromLong(i64)
declare ptr @PyLong_AsVoidPtr(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @wrap(ptr)
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
"""
SPINS = 4096  # turns of waiting at a barrier before the processor is offered to somebody else


def barrier() -> str:
    """All of `n` threads come here for the k-th time before one goes on: a counter that only grows."""
    f = Native("barrier", "ptr %counter, i64 %target")
    f.do("%old = atomicrmw add ptr %counter, i64 1 acq_rel")
    f.do("br label %wait")
    f.label("wait")
    f.do("%turn = phi i64 [ 0, %entry ], [ %next, %again ]")
    f.do("%now = load atomic i64, ptr %counter acquire, align 8")
    f.do("%there = icmp sge i64 %now, %target")
    f.do("br i1 %there, label %out, label %again")
    f.label("again")
    f.do("%next = add i64 %turn, 1")
    long = f.test("eq", f.op(f"and i64 %next, {SPINS - 1}"), 0)
    f.do(f"br i1 {long}, label %rest, label %wait2")
    f.label("rest")
    f.op("call i32 @sched_yield()")
    f.do("br label %wait2")
    f.label("wait2")
    f.do("br label %wait")
    f.label("out")
    text = f.text()
    return text.replace("[ %next, %again ]", "[ %next, %wait2 ]")


def worker() -> str:
    """One thread's share of steps [first, last). The context: frame, first, last, threads, counter."""
    f = Native("worker", "i64 %from, i64 %to, ptr %context")
    frame, first, last = f.word("%context", 0, "ptr"), f.word("%context", 1), f.word("%context", 2)
    planned = f.word("%context", 3)
    whole = f.test("sge", f.sub("%to", "%from"), planned)  # PyTorch gave all shares to this thread
    threads = f.choose(whole, "i64", "1", planned)
    me = f.choose(whole, "i64", "0", "%from")
    table, base = f.word(frame, Frame.STEP_TABLE, "ptr"), f.word(frame, Frame.BASE, "ptr")
    scratch = f.at(base, f.mul(me, f.word(frame, Frame.SCRATCH)), "i8")
    counter = f.at("%context", 4, "i64")
    several = f.test("sgt", threads, 1)

    def step(i: str, target: str) -> list[str]:
        row = f.row(table, i, Step.WORDS)
        jobs, unit = f.word(row, Step.JOBS), f.word(row, Step.UNIT)
        alone = f.test("ne", f.word(row, Step.ALONE), 0)
        share = f.mul(f.ceil(f.ceil(jobs, threads), unit), unit)
        share = f.choose(alone, "i64", jobs, share)
        begin = f.mul(me, share)
        end = f.min(f.add(begin, share), jobs)
        works = f.test("slt", begin, end)
        function, args, sizes = (f.word(row, n, "ptr") for n in (Step.FUNCTION, Step.ARGS, Step.SIZES))
        f.when(
            works, lambda: f.do(f"call void {function}(ptr {args}, ptr {sizes}, i64 {begin}, i64 {end}, ptr {scratch})")
        )
        due = f.op(f"and i1 {several}, {f.test('ne', f.word(row, Step.SYNC), 0)}")
        return f.when(due, lambda: [wait(f, counter, target, threads)], ("i64", target))

    f.loop(first, last, 1, step, ("i64", threads))
    return f.text()


def wait(f: Native, counter: str, target: str, threads: str) -> str:
    f.invoke("@barrier", ("ptr", counter), ("i64", target))
    return f.add(target, threads)


def run() -> str:
    """All steps of a frame: calls of the library alone, what lies between two of them in one parallel region."""
    f = Native("run", "ptr %frame", "i64", exported=True)
    f.do("%context = alloca [6 x i64]")
    f.set("%context", 0, "%frame", "ptr")
    count, table = f.word("%frame", Frame.STEPS), f.word("%frame", Frame.STEP_TABLE, "ptr")
    threads = f.word("%frame", Frame.THREADS)
    callback, number = f.word("%frame", Frame.CALLBACK, "ptr"), f.word("%frame", Frame.NUMBER)
    f.do("br label %next")
    before = f.block
    f.label("next")
    hole = len(f.lines)
    f.do(f"%more = icmp slt i64 %i, {count}")
    f.do("br i1 %more, label %go, label %end")
    f.label("go")
    row = f.row(table, "%i", Step.WORDS)
    after = f.word(row, Step.END)
    used_up = f.word(row, Step.RELEASE, "ptr")
    f.when(f.test("ne", used_up, "null", "ptr"), lambda: f.invoke("@release", ("ptr", "%frame"), ("ptr", used_up)))
    how = f.word(row, Step.CALL)
    f.do(f"switch i64 {how}, label %region [ i64 {Step.PYTHON}, label %call  i64 {Step.DISPATCHER}, label %dispatch ]")
    f.label("dispatch")
    again = f.op(f"call i64 {f.word('%frame', Frame.DISPATCH, 'ptr')}(ptr {f.word(row, Step.TAPE, 'ptr')})")
    f.do(f"br i1 {f.test('eq', again, 0)}, label %latch, label %call")
    f.label("call")
    failed = f.op(f"call i64 {callback}(i64 {number}, i64 %i)")
    f.give(f.test("ne", failed, 0), f"i64 {failed}")
    f.do("br label %latch")
    f.label("region")
    f.set("%context", 1, "%i")
    f.set("%context", 2, after)
    f.set("%context", 4, "0")
    wide = f.op(f"call i1 @wide(ptr {table}, i64 %i, i64 {after})")
    both = f.op(f"and i1 {wide}, {f.test('sgt', threads, 1)}")
    f.do(f"br i1 {both}, label %many, label %one")
    f.label("many")
    f.set("%context", 3, threads)
    f.op(f"call i32 @torch_parallel_for(i64 0, i64 {threads}, i64 1, ptr @worker, ptr %context)")
    f.do("br label %latch")
    f.label("one")
    f.set("%context", 3, "1")
    f.invoke("@worker", ("i64", "0"), ("i64", "1"), ("ptr", "%context"))
    f.do("br label %latch")
    f.label("latch")
    f.do("br label %next")
    f.lines[hole:hole] = [f"  %i = phi i64 [ 0, %{before} ], [ {after}, %latch ]"]
    f.label("end")
    return f.text("i64 0")


def release() -> str:
    """Lets go of arguments and of results of earlier calls that nothing reads any more (saved tensors, in a backward)."""
    f = Native("release", "ptr %frame, ptr %words")
    arguments, results = f.word("%words", Release.ARGUMENTS), f.word("%words", Release.RESULTS)

    def drop(i: str) -> None:
        none = f.word("%words", Release.NONE, "ptr")
        f.invoke("@Py_IncRef", ("ptr", none))
        index, given = f.word("%words", f.add(i, Release.FIRST)), f.word("%frame", Frame.LIST, "ptr")
        f.op(f"call i32 @PyList_SetItem(ptr {given}, i64 {index}, ptr {none})")

    def locked() -> None:
        state = f.op("call i32 @PyGILState_Ensure()")
        f.loop("0", arguments, 1, drop)
        f.invoke("@PyGILState_Release", ("i32", state))

    def forget(i: str) -> None:
        handles = f.word("%words", f.add(f.add(i, Release.FIRST), arguments), "ptr")
        f.invoke(f.word("%frame", Frame.LET_GO, "ptr"), ("ptr", handles), ("i64", "2"))

    f.when(f.test("ne", arguments, 0), locked)
    f.loop("0", results, 1, forget)
    return f.text()


def wide() -> str:
    """Whether one of these steps is worth more than one thread."""
    f = Native("wide", "ptr %table, i64 %first, i64 %last", "i1")
    (found,) = f.loop(
        "%first",
        "%last",
        1,
        lambda i, seen: [f.op(f"or i1 {seen}, {f.test('eq', f.word(f.row('%table', i, Step.WORDS), Step.ALONE), 0)}")],
        ("i1", "false"),
    )
    return f.text(f"i1 {found}")


def matches() -> str:
    """Whether the arguments are what a frame was made for; their addresses go into its slots."""
    f = Native("matches", "ptr %frame, ptr %args", "i1")
    f.do("%out = alloca i64")
    count, table = f.word("%frame", Frame.ARGS), f.word("%frame", Frame.ARG_TABLE, "ptr")
    slots = f.word("%frame", Frame.SLOTS, "ptr")
    plain, parameter = f.word("%frame", Frame.TENSOR_TYPE), f.word("%frame", Frame.PARAMETER_TYPE)
    f.give(f.test("ne", f.op("call i64 @PyList_Size(ptr %args)"), count), "i1 false")

    def argument(i: str) -> None:
        row = f.row(table, i, Entry.WORDS)
        kind = f.word(row, Entry.KIND)
        object = f.op(f"call ptr @PyList_GetItem(ptr %args, i64 {i})")
        f.when(f.test("eq", kind, Entry.TENSOR), lambda: tensor(row, object))
        f.when(
            f.test("eq", kind, Entry.WHOLE),
            lambda: f.give(
                f.test("ne", f.op(f"call i64 @PyLong_AsLongLong(ptr {object})"), f.word(row, Entry.VALUE)), "i1 false"
            ),
        )
        f.when(f.test("eq", kind, Entry.FLOAT), lambda: real(row, object))

    def real(row: str, object: str) -> None:
        value = f.op(f"call double @PyFloat_AsDouble(ptr {object})")
        f.do(f"store double {value}, ptr {f.word(slots, f.word(row, Entry.VALUE), 'ptr')}")

    def tensor(row: str, object: str) -> None:
        type = f.word(object, 1)
        other = f.op(f"and i1 {f.test('ne', type, plain)}, {f.test('ne', type, parameter)}")
        f.give(other, "i1 false")
        handle = f.at(object, 2, "i64")  # PyObject_HEAD, then the at::Tensor: a handle is its address
        ask(f, "aoti_torch_get_device_type", handle)
        f.give(f.test("ne", f.op("load i32, ptr %out"), 0, "i32"), "i1 false")
        ask(f, "aoti_torch_get_dtype", handle)
        wanted = f.op(f"trunc i64 {f.word(row, Entry.DTYPE)} to i32")
        f.give(f.test("ne", f.op("load i32, ptr %out"), wanted, "i32"), "i1 false")
        ask(f, "aoti_torch_get_dim", handle)
        rank = f.word("%out", 0)
        f.give(f.test("ne", rank, f.word(row, Entry.DIM)), "i1 false")
        for what, index in (("sizes", Entry.SIZES), ("strides", Entry.STRIDES)):
            ask(f, f"aoti_torch_get_{what}", handle)
            given, expected = f.word("%out", 0, "ptr"), f.word(row, index, "ptr")
            f.loop("0", rank, 1, lambda d, g=given, e=expected: f.give(differs(f, g, e, d), "i1 false"))
        ask(f, "aoti_torch_get_data_ptr", handle)
        address, only = f.word("%out", 0), f.word(row, Entry.ADDRESS)
        other = f.op(f"and i1 {f.test('ne', only, 0)}, {f.test('ne', only, address)}")
        f.give(other, "i1 false")
        f.set(slots, f.word(row, Entry.VALUE), address)

    f.loop("0", count, 1, argument)
    return f.text("i1 true")


def differs(f: Native, given: str, expected: str, d: str) -> str:
    """A negative number stands for "any" (the stride of a dimension of size 1)."""
    wanted = f.word(expected, d)
    other = f.test("ne", f.word(given, d), wanted)
    return f.op(f"and i1 {other}, {f.test('sge', wanted, 0)}")


def ask(f: Native, function: str, handle: str) -> None:
    f.op(f"call i32 @{function}(ptr {handle}, ptr %out)")


def code(f: Native, number: int) -> str:
    """An int for Python, as the result of the function."""
    return f"ptr {f.op(f'call ptr @PyLong_FromLong(i64 {number})')}"


def take_first(f: Native, head: str, good: Callable[[str], str]) -> str:
    """The first entry of a list that is good, taken out of it; null if there is none. An entry begins with the next one's
    address, and so does the head."""
    f.do("br label %next")
    f.label("next")
    f.do(f"%link = phi ptr [ {head}, %entry ], [ %one, %on ]")
    f.do("%one = load ptr, ptr %link")
    f.do("%end = icmp eq ptr %one, null")
    f.do("br i1 %end, label %none, label %try")
    f.label("none")
    f.do("ret ptr null")
    f.label("try")
    f.do(f"br i1 {good('%one')}, label %take, label %on")
    f.label("on")
    f.do("br label %next")
    f.label("take")
    f.do("%rest = load ptr, ptr %one")
    f.do("store ptr %rest, ptr %link")
    return f.text("ptr %one")


def find() -> str:
    """The first frame that fits the arguments, taken out of the program's list; null if there is none."""
    f = Native("find", "ptr %program, ptr %args", "ptr")
    return take_first(f, "%program", lambda frame: f.op(f"call i1 @matches(ptr {frame}, ptr %args)"))


def take_block() -> str:
    """The first block that is large enough, taken out of the pool; null if there is none."""
    f = Native("take_block", "ptr %pool, i64 %need", "ptr")
    return take_first(f, "%pool", lambda block: f.test("sge", f.word(block, Block.SIZE), "%need"))


def call() -> str:
    """The function Python calls: METH_O, `self` is the address of the program."""
    f = Native("call", "ptr %self, ptr %args", "ptr", exported=True)
    f.do("%out = alloca i64")
    program = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    frame = f.op(f"call ptr @find(ptr {program}, ptr %args)")
    missing = f.test("eq", frame, "null", "ptr")
    inside, on = f.name("then"), f.name("on")
    f.do(f"br i1 {missing}, label %{inside}, label %{on}")
    f.label(inside)
    f.do(f"ret {code(f, NO_FRAME)}")
    f.label(on)
    pool = f.word(program, Program.POOL, "ptr")
    block = f.op(f"call ptr @take_block(ptr {pool}, i64 {f.word(frame, Frame.NEED)})")
    empty = f.test("eq", block, "null", "ptr")
    inside, on = f.name("then"), f.name("on")
    f.do(f"br i1 {empty}, label %{inside}, label %{on}")
    f.label(inside)
    give_back(f, frame, program, Frame.NEXT)
    f.do(f"ret {code(f, NO_BLOCK)}")
    f.label(on)
    bind(f, frame, block)
    outputs(f, frame)
    f.set(frame, Frame.LIST, "%args", "ptr")
    errors = f.word(frame, Frame.ERROR_TABLE, "ptr")
    amount = f.word(frame, Frame.ERRORS)
    f.loop("0", amount, 1, lambda i: f.set(f.word(errors, i, "ptr"), 0, "0"))
    state = f.op("call ptr @PyEval_SaveThread()")
    status = f.op(f"call i64 @run(ptr {frame})")
    f.invoke("@PyEval_RestoreThread", ("ptr", state))
    (bad,) = f.loop(
        "0", amount, 1, lambda i, seen: [f.op(f"or i64 {seen}, {f.word(f.word(errors, i, 'ptr'), 0)}")], ("i64", "0")
    )
    results = handed_out(f, frame)
    made, let_go = f.word(frame, Frame.MADE), f.word(frame, Frame.LET_GO, "ptr")
    f.when(
        f.test("ne", made, 0), lambda: f.invoke(let_go, ("ptr", f.word(frame, Frame.MADE_TABLE, "ptr")), ("i64", made))
    )
    give_back(f, frame, program, Frame.NEXT)
    give_back(f, block, pool, Block.NEXT)
    for condition, number in ((f.test("ne", status, 0), FAILED), (f.test("ne", bad, 0), BAD_INDEX)):
        inside, on = f.name("then"), f.name("on")
        f.do(f"br i1 {condition}, label %{inside}, label %{on}")
        f.label(inside)
        f.invoke("@Py_DecRef", ("ptr", results))
        f.do(f"ret {code(f, number)}")
        f.label(on)
    return f.text(f"ptr {results}")


def give_back(f: Native, what: str, list: str, link: int) -> None:
    f.set(what, link, f.word(list, 0, "ptr"), "ptr")
    f.set(list, 0, what, "ptr")


def bind(f: Native, frame: str, block: str) -> None:
    """Every intermediate gets its address in this block, unless the last call was in the same one."""
    base = f.word(block, Block.BASE, "ptr")
    f.do("br label %bind")
    f.label("bind")
    moved = f.test("ne", f.word(frame, Frame.BASE, "ptr"), base, "ptr")

    def place() -> None:
        f.set(frame, Frame.BASE, base, "ptr")
        table, slots = f.word(frame, Frame.PLACE_TABLE, "ptr"), f.word(frame, Frame.SLOTS, "ptr")

        def one(i: str) -> None:
            row = f.row(table, i, 2)
            f.set(slots, f.word(row, 0), f.at(base, f.word(row, 1), "i8"), "ptr")

        f.loop("0", f.word(frame, Frame.PLACED), 1, one)

    f.when(moved, place)


def outputs(f: Native, frame: str) -> None:
    """New memory for every output; its handle waits in the slot behind its own. Intermediates that are read before an
    output is written lie in its memory."""
    table, slots = f.word(frame, Frame.OUT_TABLE, "ptr"), f.word(frame, Frame.SLOTS, "ptr")

    def one(i: str) -> None:
        row = f.row(table, i, Entry.WORDS)

        def fresh() -> None:
            dtype = f.op(f"trunc i64 {f.word(row, Entry.DTYPE)} to i32")
            sizes, strides = (f.word(row, n, "ptr") for n in (Entry.SIZES, Entry.STRIDES))
            rank = f.word(row, Entry.DIM)
            f.op(
                f"call i32 @aoti_torch_empty_strided(i64 {rank}, ptr {sizes}, ptr {strides}, i32 {dtype}, "
                "i32 0, i32 0, ptr %out)"
            )
            handle = f.word("%out", 0, "ptr")
            slot = f.word(row, Entry.VALUE)
            f.set(slots, f.add(slot, 1), handle, "ptr")
            ask(f, "aoti_torch_get_data_ptr", handle)
            f.set(slots, slot, f.word("%out", 0))

        f.when(f.test("eq", f.word(row, Entry.KIND), Entry.TENSOR), fresh)

    f.loop("0", f.word(frame, Frame.OUTS), 1, one)
    lent = f.word(frame, Frame.LENT_TABLE, "ptr")

    def lend(i: str) -> None:
        row = f.row(lent, i, 3)
        f.set(slots, f.word(row, 0), f.add(f.word(slots, f.word(row, 1)), f.word(row, 2)))

    f.loop("0", f.word(frame, Frame.LENT), 1, lend)


def handed_out(f: Native, frame: str) -> str:
    """The outputs as a list of tensors; those that PyTorch made have a handle, or are in the frame's own list."""
    table, slots = f.word(frame, Frame.OUT_TABLE, "ptr"), f.word(frame, Frame.SLOTS, "ptr")
    count, objects = f.word(frame, Frame.OUTS), f.word(frame, Frame.OBJECTS, "ptr")
    results = f.op(f"call ptr @PyList_New(i64 {count})")

    def one(i: str) -> None:
        row = f.row(table, i, Entry.WORDS)
        fresh = f.test("eq", f.word(row, Entry.KIND), Entry.TENSOR)
        called = f.op(f"xor i1 {fresh}, true")
        cell = f.word(row, Entry.STRIDES, "ptr")
        made = f.either(called, "ptr", lambda: f.word(cell, 0, "ptr"), "null")
        has_handle = f.test("ne", made, "null", "ptr")

        def wrapped(handle: str) -> None:
            object = f.op(f"call ptr @wrap(ptr {handle})")
            f.op(f"call i32 @aoti_torch_delete_tensor_object(ptr {handle})")
            f.op(f"call i32 @PyList_SetItem(ptr {results}, i64 {i}, ptr {object})")

        def again() -> None:
            f.op(f"call i32 @aoti_torch_new_tensor_handle(ptr {made}, ptr %out)")
            wrapped(f.word("%out", 0, "ptr"))

        def found() -> None:
            object = f.op(f"call ptr @PyList_GetItem(ptr {objects}, i64 {f.word(row, Entry.VALUE)})")
            f.invoke("@Py_IncRef", ("ptr", object))
            f.op(f"call i32 @PyList_SetItem(ptr {results}, i64 {i}, ptr {object})")

        f.when(fresh, lambda: wrapped(f.word(slots, f.add(f.word(row, Entry.VALUE), 1), "ptr")))
        f.when(has_handle, again)
        f.when(f.op(f"and i1 {called}, {f.op(f'xor i1 {has_handle}, true')}"), found)

    f.loop("0", count, 1, one)
    return results


def source() -> str:
    parts = [DECLARES, barrier(), worker(), release(), wide(), run(), matches(), find(), take_block(), call()]
    return "\n".join(parts)


# -- loading it ---------------------------------------------------------------------------------------------------------
def torch_symbol(name: str) -> int:
    """The address of a function in libtorch."""
    return address(ctypes.CDLL(None), name) or address(libtorch(), name) or missing(name)


def address(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def missing(name: str) -> int:
    raise OSError(f"this PyTorch ({torch.__version__}) has no {name}")


@cache
def libtorch() -> ctypes.CDLL:
    return ctypes.CDLL(torch._C.__file__)  # libtorch_python and libtorch_cpu are its dependencies


def check_tensors() -> None:
    """Native code takes a tensor's handle to lie right behind the head of its Python object."""
    tensor = torch.empty(0)
    if ctypes.c_size_t.from_address(id(tensor) + 16).value != tensor._cdata:
        raise OSError(f"tensors of this PyTorch ({torch.__version__}) have another layout")


@cache
def entry() -> Code:
    check_tensors()
    imports = {name: torch_symbol(name) for name in TORCH}
    imports |= {name: address(ctypes.pythonapi, name) or missing(name) for name in PYTHON}
    imports["wrap"] = torch_symbol(WRAP)
    return build([Unit(source(), ("call", "run"), imports)])
