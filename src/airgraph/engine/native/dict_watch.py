"""Whether anybody has changed some dictionaries since they were read last: one native loop over their version tags.

CPython 3.10 to 3.12 gives a dictionary a new, globally unique number with every change (PEP 509). 93 tensors of a Llama lie
in about 60 dictionaries, and looking at their numbers takes half a microsecond, where reading the tensors took 20. Whether
this Python keeps such a number where it is looked for is tried once; where it does not (3.13 has none) the entries
themselves are compared.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from airgraph.engine.native.builtin import METH_NOARGS, MethodDef, compiled_method, make_builtin, python_functions
from airgraph.engine.native.llvm.builder import Function

if TYPE_CHECKING:
    from airgraph.engine.native.llvm.jit import Unit

TAG = 3  # the word of a PyDictObject: behind PyObject_HEAD (two words) and the number of entries
WATCHERS = (
    0xFF if sys.version_info[:2] == (3, 12) else 0
)  # bits of it that say who watches the dictionary, Dynamo for one
Row = tuple[Mapping[str, Any], str, Any]  # a dictionary, a key, and what was found there


class DictWatch:
    """`unchanged()` says whether every row still holds. (It may say no where another entry of a dictionary changed.)"""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.owners = list({id(owner): owner for owner, _, _ in rows}.values())  # kept: the table has their addresses
        self.unchanged: Callable[[], Any] = partial(holds, rows)
        self.table: Any = None  # that native code reads
        compare = native_comparison()
        if compare is not None and all(type(owner) in (dict, OrderedDict) for owner in self.owners):
            tags = [word for owner in self.owners for word in (id(owner), tag(owner))]
            table = (ctypes.c_uint64 * (1 + len(tags)))(len(self.owners), *tags)
            if holds(rows):
                self.table, self.unchanged = table, make_builtin(compare, ctypes.addressof(table), table)
            else:  # another thread changed one after it was read and before its tag was
                self.unchanged = bool


def holds(rows: Sequence[Row]) -> bool:
    return all(owner.get(name) is value for owner, name, value in rows)


def tag(owner: Mapping[str, Any]) -> int:
    return ctypes.c_uint64.from_address(id(owner) + 8 * TAG).value & ~WATCHERS


def source() -> str:
    """A builtin whose `self` is the address of a table: 1 if every dictionary has its tag."""
    f = Function("unchanged", "ptr %self, ptr %none", "ptr", exported=True)
    same = same_tags(f, f.op("call ptr @PyLong_AsVoidPtr(ptr %self)"))
    answer = f.op(f"call ptr @PyLong_FromLong(i64 {f.choose(same, 'i64', '1', '0')})")
    return f.text(f"ptr {answer}") + "declare ptr @PyLong_AsVoidPtr(ptr)\ndeclare ptr @PyLong_FromLong(i64)\n"


def tag_at(f: Function, owner: str) -> str:
    """As `tag`."""
    return f.op(f"and i64 {f.word(owner, TAG)}, {~WATCHERS}")


def same_tags(f: Function, table: str) -> str:
    """The table has the number of dictionaries, then an address and a tag for each."""
    rows = f.at(table, 1, "i64")

    def one(i: str, same: str) -> list[str]:
        row = f.row(rows, i, 2)
        return [f.op(f"and i1 {same}, {f.test('eq', tag_at(f, f.word(row, 0, 'ptr')), f.word(row, 1))}")]

    (same,) = f.loop("0", f.word(table, 0), 1, one, ("i1", "true"))
    return same


def unit() -> Unit | None:
    """The loop; None where tags are not what is expected."""
    from airgraph.engine.native.llvm.jit import Unit

    functions = python_functions("PyLong_AsVoidPtr", "PyLong_FromLong") if has_tags() else {}
    return Unit(source, ("unchanged",), functions, name=__name__) if functions and all(functions.values()) else None


@cache
def native_comparison() -> MethodDef | None:
    """None without LLVM."""
    return compiled_method("unchanged", METH_NOARGS, unit)


CHANGES: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda d: d.__setitem__("a", object()),
    lambda d: d.__setitem__("a", object()),
    lambda d: d.update(b=object()),
    lambda d: d.setdefault("c", object()),
    lambda d: d.pop("b"),
    lambda d: d.popitem(),
    lambda d: d.__ior__({"a": object()}),
    lambda d: d.clear(),
)


def has_tags() -> bool:
    """Whether each kind of change gives a dictionary another number, which reading leaves as it is."""
    return tags_tell({}, {}) and tags_tell(OrderedDict(), OrderedDict())


def tags_tell(tried: dict[str, Any], beside: dict[str, Any]) -> bool:
    seen = [tag(tried)]
    for change in CHANGES:
        change(tried)
        list(tried.items()), tried.get("a"), "b" in tried, len(tried), change(beside)
        seen += [tag(tried), tag(beside)]
        if tag(tried) != seen[-2]:
            return False
    return len(set(seen)) == len(seen)
