"""The native code that reads a model's state from its modules (state_gather.py).

    gathered(table, arguments)      a list of all arguments, or None where something is not as it was
    gather_rows(table, arguments)   whether all is as it was

What is compared comes in an order in which nothing is read of an object before it is known to be alive: a module is given,
or is a value of a dictionary that has not changed; so is the dictionary of its attributes, and those in there.
"""

from __future__ import annotations

from airgraph.engine.native.builtin import METH_FASTCALL
from airgraph.engine.native.dict_watch import tag_at
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.tables import GatherWords, OwnerWords

FUNCTIONS = {"gathered": METH_FASTCALL}
PYTHON = {"_PyObject_GetDictPtr": "ptr (ptr)"}


def source() -> str:
    return attributes() + pairs_hold() + owner_holds() + gather_rows() + fill_list() + gathered()


def attributes() -> str:
    """The dictionary of an object's attributes, or null."""
    f = Function("attributes", "ptr %object", "ptr")
    place = f.op("call ptr @_PyObject_GetDictPtr(ptr %object)")
    return f.text(f"ptr {f.either(f.test('ne', place, 'null', 'ptr'), 'ptr', lambda: f.word(place, 0, 'ptr'), 'null')}")


def pairs_hold() -> str:
    """Whether the values of a row are where they were, although another entry of the dictionary has changed: then it is
    known by its new tag."""
    f = Function("pairs_hold", "ptr %row, ptr %dict", "i1")

    def one(i: str, same: str) -> list[str]:
        pair = f.at(f.row("%row", i, 2), OwnerWords.FIRST, "i64")
        found = f.op(f"call ptr @PyDict_GetItem(ptr %dict, ptr {f.word(pair, 0, 'ptr')})")
        return [f.op(f"and i1 {same}, {f.test('eq', found, f.word(pair, 1, 'ptr'), 'ptr')}")]

    (same,) = f.loop("0", f.word("%row", OwnerWords.PAIRS), 1, one, ("i1", "true"))
    with f.given(same):
        f.set("%row", OwnerWords.TAG, tag_at(f, "%dict"))
    return f.text(f"i1 {same}")


def owner_holds() -> str:
    f = Function("owner_holds", "ptr %row", "i1")
    owner, known = f.word("%row", OwnerWords.OBJECT, "ptr"), f.word("%row", OwnerWords.DICT, "ptr")
    of_object = f.test("ne", owner, "null", "ptr")
    found = f.either(of_object, "ptr", lambda: f.op(f"call ptr @attributes(ptr {owner})"), known)
    f.give(f.test("ne", found, known, "ptr"), "i1 false")
    f.give(f.test("eq", tag_at(f, known), f.word("%row", OwnerWords.TAG)), "i1 true")
    held = f.either(of_object, "i1", lambda: f.op(f"call i1 @pairs_hold(ptr %row, ptr {known})"), "false")
    return f.text(f"i1 {held}")


def gather_rows() -> str:
    """Never where the table was made while something changed: then its rows may name what is gone."""
    f = Function("gather_rows", "ptr %table, ptr %args", "i1")
    f.give(f.test("slt", f.word("%table", GatherWords.WIDTH), 0), "i1 false")
    roots, owners = (f.word("%table", word, "ptr") for word in (GatherWords.ROOTS, GatherWords.OWNERS))

    def root(i: str, same: str) -> list[str]:
        row = f.row(roots, i, 2)
        given = f.word("%args", f.word(row, 0), "ptr")
        return [f.op(f"and i1 {same}, {f.test('eq', given, f.word(row, 1, 'ptr'), 'ptr')}")]

    def owner(i: str, same: str) -> list[str]:
        row = f.row(owners, i, OwnerWords.WORDS)
        return [f.either(same, "i1", lambda: f.op(f"call i1 @owner_holds(ptr {row})"), "false")]

    (same,) = f.loop("0", f.word("%table", GatherWords.ROOT_COUNT), 1, root, ("i1", "true"))
    (same,) = f.loop("0", f.word("%table", GatherWords.OWNER_COUNT), 1, owner, ("i1", same))
    return f.text(f"i1 {same}")


def gathered() -> str:
    """The list is made before anything is looked at: making it may run finalizers, which replace state."""
    f = Function("gathered", "ptr %self, ptr %args, i64 %count", "ptr", exported=True)
    table = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    found = f.op("call ptr @PyList_New(i64 %count)")
    f.give(f.test("eq", found, "null", "ptr"), "ptr null")
    whole = f.test("eq", f.word(table, GatherWords.WIDTH), "%count")
    same = f.either(whole, "i1", lambda: f.op(f"call i1 @gather_rows(ptr {table}, ptr %args)"), "false")
    changed, none = f.op(f"xor i1 {same}, true"), f.word(table, GatherWords.NONE, "ptr")
    with f.given(changed):
        f.invoke("@Py_DecRef", ("ptr", found))
        f.invoke("@Py_IncRef", ("ptr", none))
    f.give(changed, f"ptr {none}")
    f.invoke("@fill_list", ("ptr", found), ("i64", "0"), ("ptr", table), ("ptr", "%args"), ("i64", "%count"))
    return f.text(f"ptr {found}")


def fill_list() -> str:
    """The arguments into a new list from number `start` on, with state in its place where there is a table, whose rows
    hold. Runs no code of Python."""
    f = Function("fill_list", "ptr %list, i64 %start, ptr %table, ptr %args, i64 %count")
    with_state = f.test("ne", "%table", "null", "ptr")
    items = f.either(with_state, "ptr", lambda: f.word("%table", GatherWords.ITEMS, "ptr"), "null")
    with f.each("0", "%count", 1) as loop:
        own = f.either(with_state, "ptr", lambda: f.word(items, loop.i, "ptr"), "null")
        taken = f.test("eq", own, "null", "ptr")
        item = f.either(taken, "ptr", lambda: f.word("%args", loop.i, "ptr"), own)
        f.invoke("@Py_IncRef", ("ptr", item))
        f.op(f"call i32 @PyList_SetItem(ptr %list, i64 {f.add('%start', loop.i)}, ptr {item})")
    return f.text()
