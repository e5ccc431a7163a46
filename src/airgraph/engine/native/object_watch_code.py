"""The native code of object_watch.py: whether objects still are as they were read.

check(watcher, given)       True, or what Python says of the root that is given
outside(objects, object)    whether it is none of them
"""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.engine.native.builtin import METH_O
from airgraph.engine.native.dict_watch import tag_at
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.replay_code import HANDLE
from airgraph.engine.native.tables import ObjectWatchWords, OutsideWords, WatchedWords, WatcherWords

FUNCTIONS = {"check": METH_O, "outside": METH_O}
AHEAD = 12  # rows: what they read is fetched so early, since a call of the model leaves little of it in the caches
LINE = 64  # bytes
SIDE = 4  # words of a tensor that are compared at once
PYTHON = {
    "PyLong_AsVoidPtr": "ptr (ptr)",
    "PyDict_GetItem": "ptr (ptr, ptr)",
    "PyObject_CallOneArg": "ptr (ptr, ptr)",
    "Py_IncRef": "void (ptr)",
}


def source(tensor: Sequence[int], autograd: int, gradient: Sequence[int]) -> str:
    parts = tensor_holds(tensor, autograd, gradient) + entries_hold() + dict_holds() + rows_hold() + check() + outside()
    declared = (f"declare {kind.partition(' ')[0]} @{name}{kind.partition(' ')[2]}\n" for name, kind in PYTHON.items())
    parts += f"declare i64 @llvm.vector.reduce.or.v{SIDE}i64(<{SIDE} x i64>)\n"
    return parts + "".join(declared) + "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"


def span(places: Sequence[int]) -> tuple[int, int]:
    """The first word that is read, and how many are from there on: whole vectors, which end with the last of `places`."""
    end = max(places) + 1
    count = -(-(end - min(places)) // SIDE) * SIDE
    return max(end - count, 0), count


def tensor_holds(tensor: Sequence[int], autograd: int, gradient: Sequence[int]) -> str:
    """Whether the tensor of Python has the same one of C++, and that the same words, and its autograd data, too."""
    f = Function("tensor_holds", "ptr %row", "i1")
    impl, known = f.word("%row", WatchedWords.IMPL, "ptr"), f.word("%row", WatchedWords.KNOWN, "ptr")
    f.give(f.test("ne", f.word(f.word("%row", WatchedWords.OBJECT, "ptr"), HANDLE, "ptr"), impl, "ptr"), "i1 false")
    kind, unlike = f"<{SIDE} x i64>", "zeroinitializer"
    first, count = span(tensor)
    for start in range(0, count, SIDE):
        now, then = (
            f.op(f"load {kind}, ptr {f.at(of, at, 'i64')}, align 8")
            for of, at in ((impl, first + start), (known, start))
        )
        counts = ", ".join(f"i64 {-(first + start + i in tensor)}" for i in range(SIDE))
        other = f.op(f"and {kind} {f.op(f'xor {kind} {now}, {then}')}, <{counts}>")
        unlike = f.op(f"or {kind} {unlike}, {other}")
    f.give(f.test("ne", f.op(f"call i64 @llvm.vector.reduce.or.v{SIDE}i64({kind} {unlike})"), 0), "i1 false")
    data, others = f.word(impl, autograd, "ptr"), "0"
    f.give(f.test("eq", data, "null", "ptr"), "i1 true")
    for i, place in enumerate(gradient):
        other = f.op(f"xor i64 {f.word(data, place)}, {f.word(known, count + i)}")
        others = f.op(f"or i64 {others}, {other}")
    return f.text(f"i1 {f.test('eq', others, 0)}")


def dict_holds() -> str:
    """A dictionary with another tag counts as the same if its entries are, and is known by that tag then."""
    f = Function("dict_holds", "ptr %row", "i1")
    place, known = f.word("%row", WatchedWords.PLACE, "ptr"), f.word("%row", WatchedWords.DICT, "ptr")
    of_object = f.test("ne", place, "null", "ptr")
    found = f.either(of_object, "ptr", lambda: f.word(place, 0, "ptr"), known)
    f.give(f.test("ne", found, known, "ptr"), "i1 false")
    f.give(f.test("eq", known, "null", "ptr"), "i1 true")
    now = tag_at(f, known)
    f.give(f.test("eq", now, f.word("%row", WatchedWords.TAG)), "i1 true")
    return f.text(f"i1 {f.op('call i1 @entries_hold(ptr %row)')}")


def entries_hold() -> str:
    f = Function("entries_hold", "ptr %row", "i1")
    known = f.word("%row", WatchedWords.DICT, "ptr")
    entries = f.word("%row", WatchedWords.ENTRIES, "ptr")
    count = f.word(entries, 0)
    f.give(f.test("slt", count, 0), "i1 false")

    def one(i: str, same: str) -> list[str]:
        pair = f.at(f.row(entries, i, 2), 1, "i64")
        value = f.op(f"call ptr @PyDict_GetItem(ptr {known}, ptr {f.word(pair, 0, 'ptr')})")
        return [f.op(f"and i1 {same}, {f.test('eq', value, f.word(pair, 1, 'ptr'), 'ptr')}")]

    (same,) = f.loop("0", count, 1, one, ("i1", "true"))
    with f.given(same):
        f.set("%row", WatchedWords.TAG, tag_at(f, known))
    return f.text(f"i1 {same}")


def fetch(f: Function, row: str) -> None:
    """Into the caches. (What is no address does no harm.)"""
    f.prefetch(f.word(row, WatchedWords.NEAR, "ptr"), 0, "i8")
    far, large = f.word(row, WatchedWords.FAR, "ptr"), f.test("eq", f.word(row, WatchedWords.KIND), WatchedWords.TENSOR)
    apart = f.choose(large, "i64", str(LINE), "0")
    for line in range(3):
        f.prefetch(far, f.mul(apart, line), "i8")


def rows_hold() -> str:
    f = Function("rows_hold", "ptr %watch", "i1")
    rows = f.word("%watch", ObjectWatchWords.ROWS, "ptr")

    def holds(row: str) -> str:
        kind = f.word(row, WatchedWords.KIND)
        word = f.test("eq", kind, WatchedWords.WORD)

        def same_word() -> str:
            now = f.op(
                f"and i64 {f.word(f.word(row, WatchedWords.ADDRESS, 'ptr'), 0)}, {f.word(row, WatchedWords.MASK)}"
            )
            return f.test("eq", now, f.word(row, WatchedWords.EXPECTED))

        def other() -> str:
            tensor = f.test("eq", kind, WatchedWords.TENSOR)
            as_tensor = f.either(tensor, "i1", lambda: f.op(f"call i1 @tensor_holds(ptr {row})"), "false")
            as_dict = f.op(f"xor i1 {tensor}, true")
            return f.either(as_dict, "i1", lambda: f.op(f"call i1 @dict_holds(ptr {row})"), as_tensor)

        as_word = f.either(word, "i1", same_word, "false")
        return f.either(f.op(f"xor i1 {word}, true"), "i1", other, as_word)

    def one(i: str, same: str) -> list[str]:
        row = f.row(rows, i, WatchedWords.WORDS)
        fetch(f, f.at(row, AHEAD * WatchedWords.WORDS, "i64"))
        return [f.either(same, "i1", lambda: holds(row), "false")]

    (same,) = f.loop("0", f.word("%watch", ObjectWatchWords.COUNT), 1, one, ("i1", "true"))
    return f.text(f"i1 {same}")


def check() -> str:
    f = Function("check", "ptr %self, ptr %given", "ptr", exported=True)
    watcher = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    watch, name = f.word(watcher, WatcherWords.WATCH, "ptr"), f.word(watcher, WatcherWords.NAME, "ptr")
    named = f.test("ne", name, "null", "ptr")
    root = f.either(named, "ptr", lambda: f.op(f"call ptr @PyDict_GetItem(ptr %given, ptr {name})"), "%given")

    def of_root() -> str:
        same = f.test("eq", f.word(watch, ObjectWatchWords.ROOT, "ptr"), root, "ptr")
        return f.either(same, "i1", lambda: f.op(f"call i1 @rows_hold(ptr {watch})"), "false")

    holds = f.either(f.test("ne", watch, "null", "ptr"), "i1", of_root, "false")
    with f.given(holds):
        f.set(watcher, WatcherWords.HITS, f.add(f.word(watcher, WatcherWords.HITS), 1))
    look = f.word(watcher, WatcherWords.LOOK, "ptr")
    found = f.choose(holds, "ptr", *(f.word(watcher, word, "ptr") for word in (WatcherWords.TRUE, WatcherWords.FALSE)))
    alone = f.op(f"or i1 {f.test('eq', look, 'null', 'ptr')}, {f.test('eq', root, 'null', 'ptr')}")
    known = f.op(f"or i1 {holds}, {alone}")
    with f.given(known):
        f.invoke("@Py_IncRef", ("ptr", found))
    f.give(known, f"ptr {found}")
    answer = f.op(f"call ptr @PyObject_CallOneArg(ptr {look}, ptr {root})")
    return f.text(f"ptr {answer}")


def outside() -> str:
    f = Function("outside", "ptr %self, ptr %object", "ptr", exported=True)
    table = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    places, address = f.word(table, OutsideWords.PLACES, "ptr"), f.op("ptrtoint ptr %object to i64")

    def one(i: str, among: str) -> list[str]:
        return [f.op(f"or i1 {among}, {f.test('eq', f.word(places, i), address)}")]

    (among,) = f.loop("0", f.word(table, OutsideWords.COUNT), 1, one, ("i1", "false"))
    truth, falsity = (f.word(table, word, "ptr") for word in (OutsideWords.TRUE, OutsideWords.FALSE))
    found = f.choose(among, "ptr", falsity, truth)
    f.invoke("@Py_IncRef", ("ptr", found))
    return f.text(f"ptr {found}")
