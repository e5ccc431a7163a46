"""The native code of replays: one unit of LLVM, with what address_watch.py, replay_tensors.py,
state_gather.py and short_call.py call.

    native_method("unmoved")            what builtin.py makes a builtin function of; None without LLVM

Each is a builtin function whose `self` is the address of a table of words. The function behind it, whose docstring
describes the table, is called by short_call_code.py as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from airgraph.engine.native import frame_call_code, short_call_code, state_gather_code
from airgraph.engine.native.builtin import METH_NOARGS, METH_O, MethodDef, compiled_method, python_functions
from airgraph.engine.native.libtorch import checked, delete
from airgraph.engine.native.llvm.builder import Function

if TYPE_CHECKING:
    from airgraph.engine.native.llvm.jit import Unit

FUNCTIONS = (
    {"same": METH_O, "laid_out": METH_O, "unmoved": METH_NOARGS, "bump": METH_NOARGS, "make": METH_NOARGS}
    | state_gather_code.FUNCTIONS
    | short_call_code.FUNCTIONS
    | frame_call_code.FUNCTIONS
)
PARTS = (state_gather_code, short_call_code, frame_call_code)
TYPE, HANDLE = 1, 2  # words of a tensor of Python: its class, the tensor of C++
ITEMS = 3  # the word of a list of Python with the address of its items
WIDTH, TENSOR, PARAMETER, COUNT, KNOWN, STORAGE, OFFSET, DATA, OWNER, ROWS = range(10)  # words of the table of `same`
HEAD = 6  # words of the table of `unmoved` in front of its rows
PYTHON = (
    {
        "PyLong_AsVoidPtr": "ptr (ptr)",
        "PyLong_FromLong": "ptr (i64)",
        "PyList_Size": "i64 (ptr)",
        "PyList_New": "ptr (i64)",
        "PyList_SetItem": "i32 (ptr, i64, ptr)",
        "PyErr_NoMemory": "ptr ()",
    }
    | state_gather_code.PYTHON
    | short_call_code.PYTHON
    | frame_call_code.PYTHON
)
TORCH = {
    "aoti_torch_get_data_ptr": "i32 (ptr, ptr)",
    "aoti_torch_get_dtype": "i32 (ptr, ptr)",
    "aoti_torch_get_dim": "i32 (ptr, ptr)",
    "aoti_torch_get_sizes": "i32 (ptr, ptr)",
    "aoti_torch_get_strides": "i32 (ptr, ptr)",
    "aoti_torch__reinterpret_tensor": "i32 (ptr, i64, ptr, ptr, i64, ptr)",
    "aoti_torch_delete_tensor_object": "i32 (ptr)",
}
OTHERS = {  # under names of ours: of memcmp LLVM may make a bcmp, which is not imported
    "wrap": "ptr (ptr)",
    "bump_version": "void (ptr)",
    "is_inference": "i1 (ptr)",
    "compare_bytes": "i32 (ptr, ptr, i64)",
}
BUMP = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"
IS_INFERENCE = "_ZN2at6native12is_inferenceERKNS_6TensorE"


def source() -> str:
    rows = (same_rows(), laid_out_rows(), unmoved_rows(), bump_rows(), new_tensor(), make_rows())
    builtins = (same_source(), laid_out_source(), unmoved_source(), bump_source(), make_source())
    return "".join((*rows, *builtins, *(part.source() for part in PARTS))) + "".join(
        declared(name, kind) for name, kind in (PYTHON | TORCH | OTHERS).items()
    )


def declared(name: str, kind: str) -> str:
    result, _, arguments = kind.partition(" ")
    return f"declare {result} @{name}{arguments}\n"


def same_rows() -> str:
    """Of arguments: the table has their number, the classes Tensor and Parameter, the number of rows, whether there are
    `tensor_words`, those, and rows: which argument, its address."""
    f = Function("same_rows", "ptr %table, ptr %items", "i1")
    f.do("%out = alloca i64")
    rows, classes = f.at("%table", ROWS, "i64"), [f.word("%table", word) for word in (TENSOR, PARAMETER)]
    places = {place: f.word("%table", place) for place in (STORAGE, OFFSET, DATA, OWNER)}
    known = f.test("ne", f.word("%table", KNOWN), 0)

    def one(i: str, same: str) -> list[str]:
        row = f.row(rows, i, 2)
        found = f.word("%items", f.word(row, 0), "ptr")
        own = f.word(found, TYPE)
        is_tensor = f.op(f"or i1 {f.test('eq', own, classes[0])}, {f.test('eq', own, classes[1])}")

        def at_address() -> str:
            tensor = f.word(found, HANDLE, "ptr")
            storage = f.word(tensor, places[STORAGE], "ptr")

            def read() -> list[str]:
                data = f.word(storage, places[DATA])
                own = f.test("eq", f.word(storage, places[OWNER]), data)
                return [data, f.op(f"and i1 {own}, {f.test('eq', f.word(tensor, places[OFFSET]), 0)}")]

            there = f.op(f"and i1 {known}, {f.test('ne', storage, 'null', 'ptr')}")
            data, plain = f.when(there, read, ("i64", "0"), ("i1", "false"))
            there = f.test("eq", data, f.word(row, 1))
            return f.either(f.op(f"xor i1 {plain}, true"), "i1", lambda: asked(f, found, f.word(row, 1)), there)

        return [f.op(f"and i1 {same}, {f.either(is_tensor, 'i1', at_address, 'false')}")]

    (same,) = f.loop("0", f.word("%table", COUNT), 1, one, ("i1", "true"))
    return f.text(f"i1 {same}")


def same_source() -> str:
    f, table = builtin("same")
    whole = f.test("eq", f.op("call i64 @PyList_Size(ptr %args)"), f.word(table, WIDTH))
    same = f.either(whole, "i1", lambda: f.op(f"call i1 @same_rows(ptr {table}, ptr {items(f)})"), "false")
    return f.text(f"ptr {answer(f, same)}")


def laid_out_rows() -> str:
    """Of arguments that are tensors: the table has the number of rows, and rows: which argument, its type, its rank, and
    where its sizes and strides are."""
    f = Function("laid_out_rows", "ptr %table, ptr %items", "i1")
    f.do("%out = alloca i64")
    rows = f.at("%table", 1, "i64")

    def one(i: str, same: str) -> list[str]:
        row = f.row(rows, i, 4)
        found = handle(f, f.word("%items", f.word(row, 0), "ptr"))
        rank, sizes = f.word(row, 2), f.word(row, 3, "ptr")
        length = f.mul(rank, 8)

        def told(what: str, kind: str = "i64") -> str:
            f.op(f"call i32 @aoti_torch_get_{what}(ptr {found}, ptr %out)")
            return f.op(f"load {kind}, ptr %out")

        def equal(what: str, wanted: str) -> str:
            order = f.op(f"call i32 @compare_bytes(ptr {told(what, 'ptr')}, ptr {wanted}, i64 {length})")
            return f.test("eq", order, 0, "i32")

        of_type = f.test("eq", f.op(f"sext i32 {told('dtype', 'i32')} to i64"), f.word(row, 1))
        alike = f.op(f"and i1 {of_type}, {f.test('eq', told('dim'), rank)}")
        sized = f.either(alike, "i1", lambda: equal("sizes", sizes), "false")
        laid = f.either(sized, "i1", lambda: equal("strides", f.at(sizes, rank, "i64")), "false")
        return [f.op(f"and i1 {same}, {laid}")]

    (same,) = f.loop("0", f.word("%table", 0), 1, one, ("i1", "true"))
    return f.text(f"i1 {same}")


def laid_out_source() -> str:
    f, table = builtin("laid_out")
    same = f.op(f"call i1 @laid_out_rows(ptr {table}, ptr {items(f)})")
    return f.text(f"ptr {answer(f, same)}")


def unmoved_rows() -> str:
    """Of tensors that are known before: the table has the number of rows, that of rows with a storage, `tensor_words`, and
    rows: a tensor of Python, that of C++, its storage (PyTorch is asked where there is none), its address. Nothing is read
    of a tensor or storage of C++ before it is known to be that of the object in front of it."""
    f = Function("unmoved_rows", "ptr %table", "i1")
    f.do("%out = alloca i64")
    rows = f.at("%table", HEAD, "i64")
    count, plain, in_storage, in_offset, in_data, in_owner = (f.word("%table", word) for word in range(HEAD))

    def itself(i: str, read: Callable[[str, str], str]) -> str:
        row = f.row(rows, i, 4)
        found, tensor = f.word(row, 0, "ptr"), f.word(row, 1, "ptr")
        return f.either(
            f.test("eq", f.word(found, HANDLE, "ptr"), tensor, "ptr"), "i1", lambda: read(row, tensor), "false"
        )

    def in_its_storage(row: str, tensor: str) -> str:
        storage, address = f.word(row, 2, "ptr"), f.word(row, 3)

        def in_memory() -> str:
            own = f.test("eq", f.word(storage, in_owner), address)
            return f.op(f"and i1 {own}, {f.test('eq', f.word(storage, in_data), address)}")

        first = f.test("eq", f.word(tensor, in_offset), 0)
        there = f.op(f"and i1 {first}, {f.test('eq', f.word(tensor, in_storage, 'ptr'), storage, 'ptr')}")
        return f.either(there, "i1", in_memory, "false")

    def at_address(row: str, tensor: str) -> str:
        return asked(f, f.word(row, 0, "ptr"), f.word(row, 3))

    def one(read: Callable[[str, str], str]) -> Callable[[str, str], list[str]]:
        return lambda i, same: [f.op(f"and i1 {same}, {itself(i, read)}")]

    (same,) = f.loop("0", plain, 1, one(in_its_storage), ("i1", "true"))
    (same,) = f.loop(plain, count, 1, one(at_address), ("i1", same))
    return f.text(f"i1 {same}")


def unmoved_source() -> str:
    f, table = builtin("unmoved")
    same = f.op(f"call i1 @unmoved_rows(ptr {table})")
    return f.text(f"ptr {answer(f, same)}")


def bump_rows() -> str:
    """The table has the number of tensors, and the tensors of Python."""
    f = Function("bump_rows", "ptr %table")
    tensors = f.at("%table", 1, "i64")
    count = f.word("%table", 0)
    f.loop("0", count, 1, lambda i: f.invoke("@bump_version", ("ptr", handle(f, f.word(tensors, i, "ptr")))))
    return f.text()


def bump_source() -> str:
    f, table = builtin("bump")
    f.invoke("@bump_rows", ("ptr", table))
    return f.text(f"ptr {answer(f, 'true')}")


def new_tensor() -> str:
    """On the memory of another one. The row has a tensor of Python, its rank, and where its sizes and strides are."""
    f = Function("new_tensor", "ptr %row", "ptr")
    f.do("%out = alloca ptr")
    template, rank, sizes = handle(f, f.word("%row", 0, "ptr")), f.word("%row", 1), f.word("%row", 2, "ptr")
    places = f"ptr {sizes}, ptr {f.at(sizes, rank, 'i64')}, i64 0, ptr %out"
    call = f"@aoti_torch__reinterpret_tensor(ptr {template}, i64 {rank}, {places})"
    checked(f, call, lambda: f.do(f"ret ptr {f.op('call ptr @PyErr_NoMemory()')}"))
    made = f.word("%out", 0, "ptr")
    tensor = f.op(f"call ptr @wrap(ptr {made})")
    delete(f, made)
    return f.text(f"ptr {tensor}")


def make_rows() -> str:
    """A list of new tensors; the table has their number, and a row for each."""
    f = Function("make_rows", "ptr %table", "ptr")
    rows, count = f.at("%table", 1, "i64"), f.word("%table", 0)
    results = f.op(f"call ptr @PyList_New(i64 {count})")
    f.give(f.test("eq", results, "null", "ptr"), "ptr null")

    def one(i: str, whole: str) -> list[str]:
        tensor = f.op(f"call ptr @new_tensor(ptr {f.row(rows, i, 3)})")
        f.op(f"call i32 @PyList_SetItem(ptr {results}, i64 {i}, ptr {tensor})")
        return [f.op(f"and i1 {whole}, {f.test('ne', tensor, 'null', 'ptr')}")]

    (whole,) = f.loop("0", count, 1, one, ("i1", "true"))
    f.give(whole, f"ptr {results}")
    f.invoke("@Py_DecRef", ("ptr", results))
    return f.text("ptr null")


def make_source() -> str:
    f, table = builtin("make")
    results = f.op(f"call ptr @make_rows(ptr {table})")
    return f.text(f"ptr {results}")


def builtin(name: str) -> tuple[Function, str]:
    """A function that Python calls, and its table."""
    f = Function(name, "ptr %self, ptr %args", "ptr", exported=True)
    return f, f.op("call ptr @PyLong_AsVoidPtr(ptr %self)")


def items(f: Function) -> str:
    """Those of a list of Python."""
    return f.word("%args", ITEMS, "ptr")


def asked(f: Function, found: str, address: str) -> str:
    """Whether PyTorch says that a tensor of Python is at the address."""
    code = f.op(f"call i32 @aoti_torch_get_data_ptr(ptr {handle(f, found)}, ptr %out)")
    return f.op(f"and i1 {f.test('eq', code, 0, 'i32')}, {f.test('eq', f.word('%out', 0), address)}")


def handle(f: Function, found: str) -> str:
    return f.at(found, HANDLE, "i64")


def answer(f: Function, condition: str) -> str:
    return f.op(f"call ptr @PyLong_FromLong(i64 {f.choose(condition, 'i64', '1', '0')})")


@cache
def unit() -> Unit | None:
    """None where tensors have another layout, or this PyTorch has none of these functions."""
    from airgraph.engine.native.libtorch import torch_symbol
    from airgraph.engine.native.llvm.jit import Unit
    from airgraph.engine.native.runtime import WRAP, check_tensors

    try:
        check_tensors()
        check_lists()
        imports = python_functions(*PYTHON) | {name: torch_symbol(name) for name in TORCH}
        imports |= {"wrap": torch_symbol(WRAP), "compare_bytes": torch_symbol("memcmp")}
    except (OSError, RuntimeError):
        return None
    imports["bump_version"] = bump_function() or imports["wrap"]  # (never called where there is none)
    imports["is_inference"] = inference_function() or imports["wrap"]
    return Unit(source, tuple(FUNCTIONS), imports, name=__name__) if all(imports.values()) else None


def bump_function() -> int:
    """Gives a tensor the next version; 0: this PyTorch has none, and Python does it."""
    from airgraph.engine.native.libtorch import libtorch, symbol

    return symbol(libtorch(), BUMP)


def inference_function() -> int:
    """Whether a tensor is one of inference mode, which has no version; 0: this PyTorch has none."""
    from airgraph.engine.native.libtorch import libtorch, symbol

    return symbol(libtorch(), IS_INFERENCE)


def check_lists() -> None:
    """The address of a list's items is taken to be its word `ITEMS`."""
    tried = [object()]
    row = ctypes.c_size_t.from_address(id(tried) + 8 * ITEMS).value
    if ctypes.c_size_t.from_address(row).value != id(tried[0]):
        raise OSError("lists of this Python have another layout")


@cache
def native_method(name: str) -> MethodDef | None:
    """One of `FUNCTIONS`; None without LLVM."""
    return compiled_method(name, FUNCTIONS[name], unit)


def replay_objects() -> dict[str, bytes]:
    """The object code by its digest, for files that carry all that a start needs; empty without LLVM."""
    from airgraph.engine.native.llvm.jit import object_code

    found = unit()
    return {} if found is None or native_method("same") is None else {found.key().digest: object_code(found)}


def replay_digest() -> str | None:
    """Of the key of that object code."""
    found = unit()
    return None if found is None else found.key().digest
