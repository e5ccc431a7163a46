"""The part of a graph call that is the same for every graph, as LLVM text: one Python→native call does all of it.

    call(program, args: list) → list of results, or an int that says what Python has to put right first

    find a frame whose arguments look like these, or bind one to their sizes ─ take a block of memory ─ make the outputs
    ─ let go of Python's lock ─ run the steps ─ take the lock ─ hand out the results ─ give frame and block back

A *program* holds its frames, a *frame* everything a call needs: what the arguments must look like, where in a block each
intermediate lies, the steps with their sizes. Frames and blocks are taken and given back under Python's lock, so several
threads can call one program: each gets a frame of its own. All are arrays of 64-bit words, which tables.py names; steps.py
runs the steps, and binding.py makes a frame one for other sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from airgraph.engine.native import binding, steps
from airgraph.engine.native.libtorch import ask, checked, delete, last_error, libtorch, missing, symbol, torch_symbol
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.jit import Code, Unit, build
from airgraph.engine.native.llvm.numbers import BAD_NUMBER, ZERO_DIVISOR
from airgraph.engine.native.tables import (
    BAD_INDEX,
    NO_BLOCK,
    NO_FRAME,
    RAISED,
    TORCH_FAILED,
    ZERO_DIVISION,
    BlockWords,
    EntryWords,
    FrameWords,
    LocationWords,
    PoolWords,
    ProgramWords,
    SweepWords,
    TagWords,
    WatchWords,
)
from airgraph.engine.native.write_watch import PAGEMAP_SCAN
from airgraph.errors import EngineError

UNSWEPT, CLEAN, FOUND = range(3)  # what a call knows of its frame's sweeps
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
    "torch_get_num_threads",
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
    "PyObject_CallFunction",
    "PyErr_CheckSignals",
    "PyErr_Clear",
    "PyErr_Occurred",
    "Py_IncRef",
    "Py_DecRef",
)
VERSION = "_ZNK2at10TensorBase8_versionEv"
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
declare i32 @torch_get_num_threads(ptr)
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
declare ptr @PyObject_CallFunction(ptr, ptr, ...)
declare i32 @PyErr_CheckSignals()
declare void @PyErr_Clear()
declare ptr @PyErr_Occurred()
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @wrap(ptr)
declare i64 @version(ptr)
declare i32 @sched_yield()
declare i32 @ioctl(i32, i64, ...)
declare i32 @memcmp(ptr, ptr, i64)
declare i32 @clock_gettime(i32, ptr)
@two_numbers = private unnamed_addr constant [3 x i8] c"LL\\00"
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
"""


def matches() -> str:
    """Whether the arguments are what a frame was made for; their addresses go into its slots. If PyTorch cannot tell what
    an argument is, `failed` is set, and the search is over."""
    f = Function("matches", "ptr %frame, ptr %args, i64 %threads, ptr %failed", "i1")
    f.do("%out = alloca i64")
    f.do("%swept = alloca i64")
    f.set("%swept", 0, str(UNSWEPT))
    f.give(f.test("ne", f.word("%frame", FrameWords.THREADS), "%threads"), "i1 false")
    count, table = f.word("%frame", FrameWords.ARGS), f.word("%frame", FrameWords.ARG_TABLE, "ptr")
    slots = f.word("%frame", FrameWords.SLOTS, "ptr")
    types = [f.word("%frame", FrameWords.TENSOR_TYPE), f.word("%frame", FrameWords.PARAMETER_TYPE)]
    f.give(f.test("ne", f.op("call i64 @PyList_Size(ptr %args)"), count), "i1 false")

    def argument(i: str) -> None:
        row = f.row(table, i, EntryWords.WORDS)
        kind = f.word(row, EntryWords.KIND)
        object = f.op(f"call ptr @PyList_GetItem(ptr %args, i64 {i})")
        given = f.test("ne", object, f.word("%frame", FrameWords.NONE, "ptr"), "ptr")
        token = f.op(f"and i1 {f.test('eq', kind, EntryWords.TOKEN)}, {given}")
        tensor = f.op(f"or i1 {f.test('eq', kind, EntryWords.TENSOR)}, {token}")
        f.when(tensor, lambda: match_tensor(f, row, object, slots, types))
        f.when(f.test("eq", kind, EntryWords.WHOLE), lambda: match_whole(f, row, object))
        f.when(f.test("eq", kind, EntryWords.FLOAT), lambda: take_float(f, row, object, slots))

    f.loop("0", count, 1, argument)
    return f.text("i1 true")


def match_whole(f: Function, row: str, object: str) -> None:
    value = f.op(f"call i64 @PyLong_AsLongLong(ptr {object})")
    f.when(f.test("eq", value, -1), lambda: no_number(f))
    f.give(f.test("ne", value, f.word(row, EntryWords.VALUE)), "i1 false")


def no_number(f: Function) -> None:
    """What is no number, or too large a one, is not what a frame was made for."""
    pending = f.op("call ptr @PyErr_Occurred()")
    f.invoke("@PyErr_Clear")
    f.give(f.test("ne", pending, "null", "ptr"), "i1 false")


def take_float(f: Function, row: str, object: str, slots: str) -> None:
    value = f.op(f"call double @PyFloat_AsDouble(ptr {object})")
    f.when(f.op(f"fcmp oeq double {value}, -1.0"), lambda: no_number(f))
    f.do(f"store double {value}, ptr {f.word(slots, f.word(row, EntryWords.VALUE), 'ptr')}")


def match_tensor(f: Function, row: str, object: str, slots: str, types: Sequence[str]) -> None:
    """Type, device, element type, sizes, strides and, where it must not move, address; then the address is taken."""

    def give_up() -> None:
        f.set("%failed", 0, "1")
        f.do("ret i1 true")

    def tell(question: str) -> None:
        ask(f, question, handle, give_up)

    type = f.word(object, 1)
    plain, parameter = (f.test("ne", type, t) for t in types)
    f.give(f.op(f"and i1 {plain}, {parameter}"), "i1 false")
    handle = f.at(object, 2, "i64")  # PyObject_HEAD, then the at::Tensor: a handle is its address
    tell("aoti_torch_get_device_type")
    f.give(f.test("ne", f.op("load i32, ptr %out"), 0, "i32"), "i1 false")
    tell("aoti_torch_get_dtype")
    wanted = f.op(f"trunc i64 {f.word(row, EntryWords.DTYPE)} to i32")
    f.give(f.test("ne", f.op("load i32, ptr %out"), wanted, "i32"), "i1 false")
    tell("aoti_torch_get_dim")
    rank = f.word("%out", 0)
    f.give(f.test("ne", rank, f.word(row, EntryWords.DIM)), "i1 false")
    tell("aoti_torch_get_sizes")
    sizes, expected = f.word("%out", 0, "ptr"), f.word(row, EntryWords.SIZES, "ptr")
    f.loop("0", rank, 1, lambda d: f.give(f.test("ne", f.word(sizes, d), f.word(expected, d)), "i1 false"))
    tell("aoti_torch_get_strides")
    strides, wanted = f.word("%out", 0, "ptr"), f.word(row, EntryWords.STRIDES, "ptr")
    f.loop(
        "0", rank, 1, lambda d: f.when(other_stride(f, d, sizes, strides, wanted), lambda: unless_empty(f, sizes, rank))
    )
    tell("aoti_torch_get_data_ptr")
    address, only = f.word("%out", 0), f.word(row, EntryWords.ADDRESS)
    other = f.op(f"and i1 {f.test('ne', only, 0)}, {f.test('ne', only, address)}")
    f.give(other, "i1 false")
    f.set(slots, f.word(row, EntryWords.VALUE), address)
    tag = f.word(row, EntryWords.TAG, "ptr")
    f.when(f.test("ne", tag, "null", "ptr"), lambda: match_tag(f, tag, object, handle))


def match_tag(f: Function, tag: str, object: str, handle: str) -> None:
    """Memory that was not written to since, or the same tensor object: then a few of its elements tell of writes that
    PyTorch did not count."""
    watch = f.word(tag, TagWords.WATCH, "ptr")
    watched = f.test("ne", watch, "null", "ptr")
    f.when(watched, lambda: match_watch(f, watch, f.word(tag, TagWords.VERSION), f.word(tag, TagWords.SWEPT)))
    f.when(f.op(f"xor i1 {watched}, true"), lambda: match_object(f, tag, object, handle))


def match_watch(f: Function, watch: str, generation: str, swept: str) -> None:
    """As WriteWatch.unwritten. The first tensor of the call that belongs to a sweep makes the sweeps of the frame; where
    these find a page, which may be somebody else's, each tensor is asked for by itself."""
    f.give(f.test("ne", f.word(f.word(watch, WatchWords.GENERATION, "ptr"), 0), generation), "i1 false")
    member = f.test("ne", swept, 0)
    first = f.op(f"and i1 {member}, {f.test('eq', f.word('%swept', 0), UNSWEPT)}")
    f.when(first, lambda: f.set("%swept", 0, f.op("call i64 @sweep(ptr %frame)")))
    clean = f.op(f"and i1 {member}, {f.test('eq', f.word('%swept', 0), CLEAN)}")

    def by_itself() -> None:
        found = scan(f, f.word(watch, WatchWords.FILE), f.word(watch, WatchWords.SCAN, "ptr"))
        f.give(f.test("ne", found, 0, "i32"), "i1 false")

    f.when(f.op(f"xor i1 {clean}, true"), by_itself)
    for i in range(2):
        at, copy, count = (f.word(watch, WatchWords.ENDS + 3 * i + j) for j in range(3))
        places = ", ".join(f"ptr {f.op(f'inttoptr i64 {place} to ptr')}" for place in (at, copy))
        f.give(f.test("ne", f.op(f"call i32 @memcmp({places}, i64 {count})"), 0, "i32"), "i1 false")


def scan(f: Function, file: str, argument: str) -> str:
    """0: no page is as the argument says."""
    given = f"i32 {f.op(f'trunc i64 {file} to i32')}, i64 {PAGEMAP_SCAN}, ptr {argument}"
    return f.op(f"call i32 (i32, i64, ...) @ioctl({given})")


def sweep() -> str:
    """CLEAN, or FOUND where one of a frame's sweeps finds a page (write_watch.sweeps)."""
    f = Function("sweep", "ptr %frame", "i64")
    table = f.word("%frame", FrameWords.SWEEP_TABLE, "ptr")

    def one(i: str) -> None:
        row = f.row(table, i, SweepWords.WORDS)
        found = scan(f, f.word(row, SweepWords.FILE), f.word(row, SweepWords.SCAN, "ptr"))
        f.give(f.test("ne", found, 0, "i32"), f"i64 {FOUND}")

    f.loop("0", f.word("%frame", FrameWords.SWEEPS), 1, one)
    return f.text(f"i64 {CLEAN}")


def match_object(f: Function, tag: str, object: str, handle: str) -> None:
    f.give(f.test("ne", object, f.word(tag, TagWords.OBJECT, "ptr"), "ptr"), "i1 false")
    version = f.op(f"call i64 @version(ptr {handle})")
    f.give(f.test("ne", version, f.word(tag, TagWords.VERSION)), "i1 false")
    samples, content = f.word(tag, TagWords.SAMPLE_TABLE, "ptr"), f.word("%out", 0, "ptr")

    def sample(i: str) -> None:
        pair = f.row(samples, i, 2)
        now = f.op(f"load i32, ptr {f.at(content, f.word(pair, 0), 'i8')}")
        f.give(f.test("ne", now, f.op(f"trunc i64 {f.word(pair, 1)} to i32"), "i32"), "i1 false")

    f.loop("0", f.word(tag, TagWords.SAMPLES), 1, sample)


def other_stride(f: Function, d: str, sizes: str, strides: str, wanted: str) -> str:
    """(The stride of a dimension of size 1 means nothing.)"""
    other = f.test("ne", f.word(strides, d), f.word(wanted, d))
    return f.op(f"and i1 {other}, {f.test('sgt', f.word(sizes, d), 1)}")


def unless_empty(f: Function, sizes: str, rank: str) -> None:
    (elements,) = f.loop("0", rank, 1, lambda d, n: [f.min(n, f.word(sizes, d))], ("i64", "1"))
    f.give(f.test("ne", elements, 0), "i1 false")


def take_first(f: Function, head: str, good: Callable[[str], str]) -> str:
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
    f = Function("find", "ptr %program, ptr %args, i64 %threads, ptr %failed", "ptr")
    given = "ptr %args, i64 %threads"
    return take_first(f, "%program", lambda frame: f.op(f"call i1 @matches(ptr {frame}, {given}, ptr %failed)"))


def find_bound() -> str:
    """The first frame that fits when it is bound to the sizes of the arguments."""
    f = Function("find_bound", "ptr %program, ptr %args, i64 %threads, ptr %failed", "ptr")
    given = "ptr %args, i64 %threads"

    def good(frame: str) -> str:
        bound = f.op(f"call i1 @bind(ptr {frame}, {given})")
        return f.either(bound, "i1", lambda: f.op(f"call i1 @matches(ptr {frame}, {given}, ptr %failed)"), "false")

    return take_first(f, "%program", good)


def take() -> str:
    """For Python: the first frame of a program's list, taken out of it, or null. In one go: another thread may call."""
    f = Function("take", "ptr %program", "ptr", exported=True)
    return take_first(f, "%program", lambda frame: "true")


def put() -> str:
    """For Python: a frame into a program's list."""
    f = Function("put", "ptr %program, ptr %frame", exported=True)
    give_back(f, "%frame", "%program", FrameWords.NEXT)
    return f.text()


def take_block() -> str:
    """The first block that is large enough, taken out of the pool; null if there is none."""
    f = Function("take_block", "ptr %pool, i64 %need", "ptr")
    return take_first(f, "%pool", lambda block: f.test("sge", f.word(block, BlockWords.SIZE), "%need"))


def call() -> str:
    """The function Python calls: METH_O, `self` is the address of the program."""
    f = Function("call", "ptr %self, ptr %args", "ptr", exported=True)
    f.do("%out = alloca i64")
    f.do("%failed = alloca i64")
    f.set("%failed", 0, "0")
    program = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    pool = f.word(program, ProgramWords.POOL, "ptr")
    f.set("%out", 0, "0")
    code = f.op("call i32 @torch_get_num_threads(ptr %out)")
    known = f.choose(f.test("eq", code, 0, "i32"), "i64", f.word("%out", 0), "1")
    threads = f.min(f.max(known, 1), f.word(pool, PoolWords.THREADS))
    given = f"ptr {program}, ptr %args, i64 {threads}, ptr %failed"
    ready = f.op(f"call ptr @find({given})")
    other = f.test("eq", ready, "null", "ptr")
    frame = f.either(other, "ptr", lambda: f.op(f"call ptr @find_bound({given})"), ready)
    returns(f, f.test("eq", frame, "null", "ptr"), NO_FRAME)
    returns(
        f, f.test("ne", f.word("%failed", 0), 0), TORCH_FAILED, lambda: give_back(f, frame, program, FrameWords.NEXT)
    )
    block = f.op(f"call ptr @take_block(ptr {pool}, i64 {f.word(frame, FrameWords.NEED)})")
    returns(f, f.test("eq", block, "null", "ptr"), NO_BLOCK, lambda: give_back(f, frame, program, FrameWords.NEXT))
    f.set(frame, FrameWords.BASE, f.word(block, BlockWords.BASE, "ptr"), "ptr")
    bare = outputs(f, frame)
    status = f.either(f.test("eq", bare, 0), "i64", lambda: run_steps(f, frame), str(TORCH_FAILED))
    results = f.either(f.test("eq", status, 0), "ptr", lambda: handed_out(f, frame), "null")
    drop_outputs(f, frame)
    made, let_go = f.word(frame, FrameWords.MADE), f.word(frame, FrameWords.LET_GO, "ptr")
    f.when(
        f.test("ne", made, 0),
        lambda: f.invoke(let_go, ("ptr", f.word(frame, FrameWords.MADE_TABLE, "ptr")), ("i64", made)),
    )
    give_back(f, frame, program, FrameWords.NEXT)
    give_back(f, block, pool, BlockWords.NEXT)
    f.give(f.test("eq", status, RAISED), "ptr null")
    for error in (BAD_INDEX, ZERO_DIVISION):
        returns(f, f.test("eq", status, error), error)
    unfinished = f.op(f"or i1 {f.test('ne', status, 0)}, {f.test('ne', f.word('%failed', 0), 0)}")
    returns(f, unfinished, TORCH_FAILED, lambda: f.invoke("@Py_DecRef", ("ptr", results)))
    return f.text(f"ptr {results}")


def returns(f: Function, condition: str, number: int, first: Callable[[], None] = lambda: None) -> None:
    """Where the condition holds, out of the function with an int for Python."""
    inside, on = f.name("then"), f.name("on")
    f.do(f"br i1 {condition}, label %{inside}, label %{on}")
    f.label(inside)
    first()
    f.do(f"ret ptr {f.op(f'call ptr @PyLong_FromLong(i64 {number})')}")
    f.label(on)


def run_steps(f: Function, frame: str) -> str:
    """The steps, without Python's lock: 0, or what `call` says in place of results."""
    f.set(frame, FrameWords.LIST, "%args", "ptr")
    errors = f.word(frame, FrameWords.ERROR_TABLE, "ptr")
    amount = f.word(frame, FrameWords.ERRORS)
    f.loop("0", amount, 1, lambda i: f.set(f.word(errors, i, "ptr"), 0, "0"))
    state = f.op("call ptr @PyEval_SaveThread()")
    status = f.op(f"call i64 @run(ptr {frame})")
    f.invoke("@PyEval_RestoreThread", ("ptr", state))
    (bad,) = f.loop(
        "0", amount, 1, lambda i, seen: [f.op(f"or i64 {seen}, {f.word(f.word(errors, i, 'ptr'), 0)}")], ("i64", "0")
    )
    found = f.choose(f.bit(bad, ZERO_DIVISOR), "i64", str(ZERO_DIVISION), "0")
    found = f.choose(f.bit(bad, BAD_NUMBER), "i64", str(BAD_INDEX), found)
    return f.choose(f.test("ne", status, 0), "i64", status, found)


def give_back(f: Function, what: str, list: str, link: int) -> None:
    f.set(what, link, f.word(list, 0, "ptr"), "ptr")
    f.set(list, 0, what, "ptr")


def outputs(f: Function, frame: str) -> str:
    """New memory for every output; its handle waits in the slot behind its own. Intermediates lie in the block, or in an
    output that is written later. Gives 1 if PyTorch has no memory, else 0."""
    table, slots = f.word(frame, FrameWords.OUT_TABLE, "ptr"), f.word(frame, FrameWords.SLOTS, "ptr")

    def one(i: str, bare: str) -> list[str]:
        row = f.row(table, i, EntryWords.WORDS)
        fresh = f.test("eq", f.word(row, EntryWords.KIND), EntryWords.TENSOR)
        return f.when(fresh, lambda: [new_output(f, row, slots, bare)], ("i64", bare))

    (bare,) = f.loop("0", f.word(frame, FrameWords.OUTS), 1, one, ("i64", "0"))
    place_intermediates(f, frame)
    return bare


def place_intermediates(f: Function, frame: str) -> None:
    """The addresses of intermediates, when the block and the outputs have theirs."""
    table, slots = f.word(frame, FrameWords.PLACE_TABLE, "ptr"), f.word(frame, FrameWords.SLOTS, "ptr")
    scratch = f.mul(f.word(frame, FrameWords.THREADS), f.word(frame, FrameWords.SCRATCH))
    block = f.add(f.word(frame, FrameWords.BASE), scratch)

    def place(i: str) -> None:
        row = f.row(table, i, LocationWords.WORDS)
        home = f.word(row, LocationWords.HOME)
        start = f.choose(f.test("eq", home, 0), "i64", block, f.word(slots, home))
        f.set(slots, f.word(row, LocationWords.SLOT), f.add(start, f.word(row, LocationWords.OFFSET)))

    f.loop("0", f.word(frame, FrameWords.PLACED), 1, place)


def new_output(f: Function, row: str, slots: str, bare: str) -> str:
    """1 if it cannot be had, and where one before it could not: then its handle is null."""
    dtype = f.op(f"trunc i64 {f.word(row, EntryWords.DTYPE)} to i32")
    sizes, strides = (f.word(row, n, "ptr") for n in (EntryWords.SIZES, EntryWords.STRIDES))
    slot, on = f.word(row, EntryWords.VALUE), f.name("made")
    behind = f.add(slot, 1)
    f.set(slots, behind, "null", "ptr")
    begin, make, tell, bad = f.block, f.name("make"), f.name("tell"), f.name("bare")
    f.do(f"br i1 {f.test('eq', bare, 0)}, label %{make}, label %{on}")
    f.label(make)
    shape = f"i64 {f.word(row, EntryWords.DIM)}, ptr {sizes}, ptr {strides}, i32 {dtype}"
    checked(f, f"@aoti_torch_empty_strided({shape}, i32 0, i32 0, ptr %out)", lambda: f.do(f"br label %{bad}"))
    handle = f.word("%out", 0, "ptr")
    f.set(slots, behind, handle, "ptr")
    f.do(f"br label %{tell}")
    f.label(tell)
    ask(f, "aoti_torch_get_data_ptr", handle, lambda: f.do(f"br label %{bad}"))
    f.set(slots, slot, f.word("%out", 0))
    end = f.block
    f.do(f"br label %{on}")
    f.label(bad)
    f.do(f"br label %{on}")
    f.label(on)
    return f.op(f"phi i64 [ {bare}, %{begin} ], [ 0, %{end} ], [ 1, %{bad} ]")


def drop_outputs(f: Function, frame: str) -> None:
    """Those that were not handed out."""
    table, slots = f.word(frame, FrameWords.OUT_TABLE, "ptr"), f.word(frame, FrameWords.SLOTS, "ptr")

    def one(i: str) -> None:
        row = f.row(table, i, EntryWords.WORDS)
        f.when(f.test("eq", f.word(row, EntryWords.KIND), EntryWords.TENSOR), lambda: held(row))

    def held(row: str) -> None:
        handle = f.word(slots, f.add(f.word(row, EntryWords.VALUE), 1), "ptr")
        f.when(f.test("ne", handle, "null", "ptr"), lambda: delete(f, handle))

    f.loop("0", f.word(frame, FrameWords.OUTS), 1, one)


def handed_out(f: Function, frame: str) -> str:
    """The outputs as a list of tensors; those that PyTorch made have a handle, or are in the frame's own list."""
    table, slots = f.word(frame, FrameWords.OUT_TABLE, "ptr"), f.word(frame, FrameWords.SLOTS, "ptr")
    count, objects = f.word(frame, FrameWords.OUTS), f.word(frame, FrameWords.OBJECTS, "ptr")
    results = f.op(f"call ptr @PyList_New(i64 {count})")

    def one(i: str) -> None:
        row = f.row(table, i, EntryWords.WORDS)
        kind = f.word(row, EntryWords.KIND)
        fresh, called = (f.test("eq", kind, k) for k in (EntryWords.TENSOR, EntryWords.NOTHING))
        cell = f.word(row, EntryWords.STRIDES, "ptr")
        made = f.either(called, "ptr", lambda: f.word(cell, 0, "ptr"), "null")
        has_handle = f.test("ne", made, "null", "ptr")

        def wrapped(handle: str) -> None:
            object = f.op(f"call ptr @wrap(ptr {handle})")
            delete(f, handle)
            f.op(f"call i32 @PyList_SetItem(ptr {results}, i64 {i}, ptr {object})")

        def own() -> None:
            behind = f.add(f.word(row, EntryWords.VALUE), 1)
            wrapped(f.word(slots, behind, "ptr"))
            f.set(slots, behind, "null", "ptr")

        def again() -> None:
            """(To wrap is to move, and calls of PyTorch may still need theirs.)"""
            code = f.op(f"call i32 @aoti_torch_new_tensor_handle(ptr {made}, ptr %out)")
            fine = f.test("eq", code, 0, "i32")
            f.when(fine, lambda: wrapped(f.word("%out", 0, "ptr")))
            f.when(f.op(f"xor i1 {fine}, true"), lambda: f.set("%failed", 0, "1"))

        def found() -> None:
            object = f.op(f"call ptr @PyList_GetItem(ptr {objects}, i64 {f.word(row, EntryWords.VALUE)})")
            f.invoke("@Py_IncRef", ("ptr", object))
            f.op(f"call i32 @PyList_SetItem(ptr {results}, i64 {i}, ptr {object})")

        def number() -> None:
            object = f.op(f"call ptr @PyLong_FromLong(i64 {f.word(row, EntryWords.VALUE)})")
            f.op(f"call i32 @PyList_SetItem(ptr {results}, i64 {i}, ptr {object})")

        f.when(fresh, own)
        f.when(f.test("eq", kind, EntryWords.NUMBER), number)
        f.when(has_handle, again)
        f.when(f.op(f"and i1 {called}, {f.op(f'xor i1 {has_handle}, true')}"), found)

    present = f.test("ne", results, "null", "ptr")
    f.loop("0", f.choose(present, "i64", count, "0"), 1, one)
    return results


def source() -> str:
    own = [sweep(), matches(), find(), find_bound(), take(), put(), take_block(), call()]
    return "\n".join([DECLARES, steps.source(), binding.source(), *own])


# -- loading it ---------------------------------------------------------------------------------------------------------
def check_tensors() -> None:
    """Function code takes a tensor's handle to lie right behind the head of its Python object."""
    tensor = torch.empty(0)
    if ctypes.c_size_t.from_address(id(tensor) + 16).value != tensor._cdata:
        raise OSError(f"tensors of this PyTorch ({torch.__version__}) have another layout")


def version_function() -> int:
    """Of a tensor's version counter; 0: this PyTorch has none, and only weights that never change are packed."""
    return symbol(libtorch(), VERSION)


@cache
def entry() -> Code:
    check_tensors()
    imports = {name: torch_symbol(name) for name in TORCH}
    imports |= {name: symbol(ctypes.pythonapi, name) or missing(name) for name in PYTHON}
    imports["wrap"] = torch_symbol(WRAP)
    imports["version"] = version_function() or imports["wrap"]  # (only called where a frame has tags)
    return build([Unit(source, ("call", "run", "write", "take", "put"), imports, name=__name__)])


# -- for Python -----------------------------------------------------------------------------------------------------------
@cache
def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """One of these functions; Python's lock is held meanwhile."""
    return ctypes.PYFUNCTYPE(result, *arguments)(entry()[name])


def write(frame: int) -> None:
    """The words of a frame that depend on sizes."""
    function("write", None, ctypes.c_void_p)(frame)


def take_frame(program: int) -> int:
    """The first frame that waits, taken out of the program's list; 0 if there is none."""
    return function("take", ctypes.c_void_p, ctypes.c_void_p)(program) or 0


def put_frame(program: int, frame: int) -> None:
    function("put", None, ctypes.c_void_p, ctypes.c_void_p)(program, frame)


def wrapped(handle: int) -> torch.Tensor:
    """A tensor that native code holds by its handle, as one of Python's. (To wrap is to move: hence a second handle.)"""
    again = ctypes.c_void_p()
    torch_c = libtorch()
    if torch_c.aoti_torch_new_tensor_handle(ctypes.c_void_p(handle), ctypes.byref(again)):
        raise EngineError(last_error())
    wrap = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(torch_symbol(WRAP))
    tensor: torch.Tensor = wrap(again)
    torch_c.aoti_torch_delete_tensor_object(again)
    return tensor
