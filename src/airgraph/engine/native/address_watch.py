"""Whether tensors among some arguments are where they were: one native loop.

watch = AddressWatch(202, addresses, pinned)
watch.same(args)                                 whether the arguments that `pinned` numbers are at their addresses

PyTorch's own comparison in C++ took 22 µs for the 202 arguments of a BERT on the host of an H200; it is used without LLVM.
Where a tensor begins with its memory, as parameters do, the address is read from it; PyTorch is asked for others, which
takes 45 ns each. In which words of its objects PyTorch has what is read is tried once (`tensor_words`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from airgraph.engine.native.builtin import METH_O, MethodDef, compiled_method, make_builtin, python_functions
from airgraph.engine.native.llvm.builder import Function

if TYPE_CHECKING:
    from airgraph.engine.native.llvm.jit import Unit

TYPE, HANDLE = 1, 2  # words of a tensor of Python: its class, the tensor of C++
WIDTH, TENSOR, PARAMETER, COUNT, KNOWN, STORAGE, OFFSET, DATA, OWNER, ROWS = range(10)  # words of a table
PYTHON = ("PyLong_AsVoidPtr", "PyLong_FromLong", "PyList_Size", "PyList_GetItem")
DECLARES = """
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyLong_FromLong(i64)
declare i64 @PyList_Size(ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
"""


class AddressWatch:
    """`same(args)`: a list of `width` arguments, of which those that `which` numbers are tensors at their `addresses`."""

    same: Callable[[list[Any]], Any]

    def __init__(self, width: int, addresses: Sequence[int], which: Sequence[int]) -> None:
        method = native_comparison()
        if method is None:
            self.same = lambda args: same_addresses(args, addresses, which)
            return
        known = tensor_words()
        head = (
            width,
            id(torch.Tensor),
            id(torch.nn.Parameter),
            len(which),
            int(known is not None),
            *(known or [0] * 4),
        )
        rows = [word for i in which for word in (i, addresses[i])]
        self.table = (ctypes.c_int64 * (len(head) + len(rows)))(*head, *rows)
        self.same = make_builtin(method, ctypes.addressof(self.table))


def compare_addresses(args: Sequence[Any], addresses: Sequence[int], which: Sequence[int]) -> bool:
    return all(args[i].data_ptr() == addresses[i] for i in which)


@cache
def tensor_words() -> tuple[int, int, int, int] | None:
    """The words of a tensor of C++ with its storage and its offset there, and those of a storage with the address of its
    memory and with the owner of that: an allocator's own memory is known by its address, memory that two tensors share
    until one of them is written to is not. None where there are no such words."""
    base = torch.empty(64)
    storage = base.untyped_storage()
    views = {start: words(base.as_strided((1,), (1,), start)._cdata, 22) for start in (17, 41)}
    first, memory = words(base._cdata, 22), words(storage._cdata, 6)
    holders = [i for i, word in enumerate(first) if word == storage._cdata]
    offsets = [i for i, word in enumerate(first) if word == 0 and all(view[i] == n for n, view in views.items())]
    addresses = [i for i, word in enumerate(memory) if word == storage.data_ptr()]
    if (len(holders), len(offsets), len(addresses)) != (1, 1, 2):
        return None
    return (*holders, *offsets, *addresses)  # type: ignore[return-value]


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


# In PyTorch's CUDA builds.
same_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", compare_addresses)


def source() -> str:
    """A builtin whose `self` is the address of a table and whose argument is a list."""
    f = Function("same", "ptr %self, ptr %args", "ptr", exported=True)
    f.do("%out = alloca i64")
    table = f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")
    rows, classes = f.at(table, ROWS, "i64"), [f.word(table, word) for word in (TENSOR, PARAMETER)]
    places = {place: f.word(table, place) for place in (STORAGE, OFFSET, DATA, OWNER)}
    known = f.test("ne", f.word(table, KNOWN), 0)
    whole = f.test("eq", f.op("call i64 @PyList_Size(ptr %args)"), f.word(table, WIDTH))

    def one(i: str, same: str) -> list[str]:
        row = f.row(rows, i, 2)
        found = f.op(f"call ptr @PyList_GetItem(ptr %args, i64 {f.word(row, 0)})")
        own = f.word(found, TYPE)
        is_tensor = f.op(f"or i1 {f.test('eq', own, classes[0])}, {f.test('eq', own, classes[1])}")

        def asked() -> str:
            code = f.op(f"call i32 @aoti_torch_get_data_ptr(ptr {f.at(found, HANDLE, 'i64')}, ptr %out)")
            fine = f.test("eq", code, 0, "i32")
            return f.op(f"and i1 {fine}, {f.test('eq', f.word('%out', 0), f.word(row, 1))}")

        def at_address() -> str:
            tensor = f.word(found, HANDLE, "ptr")
            storage = f.word(tensor, places[STORAGE], "ptr")

            def read() -> list[str]:
                data = f.word(storage, places[DATA])
                own = f.test("eq", f.word(storage, places[OWNER]), data)
                return [data, f.op(f"and i1 {own}, {f.test('eq', f.word(tensor, places[OFFSET]), 0)}")]

            there = f.op(f"and i1 {known}, {f.test('ne', storage, 'null', 'ptr')}")
            data, plain = f.when(there, read, ("i64", "0"), ("i1", "false"))
            return f.either(f.op(f"xor i1 {plain}, true"), "i1", asked, f.test("eq", data, f.word(row, 1)))

        return [f.op(f"and i1 {same}, {f.either(is_tensor, 'i1', at_address, 'false')}")]

    count = f.choose(whole, "i64", f.word(table, COUNT), "0")
    (same,) = f.loop("0", count, 1, one, ("i1", whole))
    answer = f.op(f"call ptr @PyLong_FromLong(i64 {f.choose(same, 'i64', '1', '0')})")
    return f.text(f"ptr {answer}") + DECLARES


@cache
def unit() -> Unit | None:
    """The loop; None where tensors have another layout."""
    from airgraph.engine.native.libtorch import torch_symbol
    from airgraph.engine.native.llvm.jit import Unit
    from airgraph.engine.native.runtime import check_tensors

    try:
        check_tensors()
        imports = {**python_functions(*PYTHON), "aoti_torch_get_data_ptr": torch_symbol("aoti_torch_get_data_ptr")}
    except (OSError, RuntimeError):
        return None
    return Unit(source, ("same",), imports, name=__name__) if all(imports.values()) else None


@cache
def native_comparison() -> MethodDef | None:
    """None without LLVM."""
    return compiled_method("same", METH_O, unit)


def watch_objects() -> dict[str, bytes]:
    """The object code by its digest, for files that carry all that a start needs; empty without LLVM."""
    from airgraph.engine.native.llvm.jit import object_code

    found = unit()
    return {} if found is None or native_comparison() is None else {found.key().digest: object_code(found)}


def watch_digest() -> str | None:
    """Of the key of that object code."""
    found = unit()
    return None if found is None else found.key().digest
