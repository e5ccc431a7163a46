"""The interpreter of tapes, as LLVM text: through the C ABI that libtorch keeps stable, without Python and its lock.

    torch_call_dispatcher("aten::topk", "", [x, 2, -1, 1, 1])  →  [values, indices]

The ABI takes the arguments of an op as 64-bit words. What does not fit in a word (tensors, lists, strings, optional values)
is an object that the call consumes, so all are constructed again for every call.

Calls run below autograd and autocast. A result stays alive until the graph's call is over. Where a call fails or its result
is not what was planned, Python does the step again: it has the right exception, and what is merely different it converts.
Tapes are arrays of 64-bit words; the classes below name them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from airgraph.engine.native.libtorch import ask, checked, delete, torch_symbol
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.jit import LazyCode, Unit


class ArgWords:
    """An operand. A KIND and what it needs: a number | an operand | operands | characters | memory | memory | a handle."""

    WORD, MAYBE, ITEMS, TEXT, VIEW, LAID, FIXED, REGISTER = range(8)
    KIND, VALUE, COUNT = range(3)
    SLOT, OFFSET, DIM, SIZES, STRIDES, DTYPE, WANTED, MADE = range(1, 9)


class CallWords:
    NAME, OVERLOAD, ARGS, ARG_TABLE, STACK, RETURNS, RETURN_TABLE, BY_AUTOGRAD, WORDS = range(9)


class ReturnWords:
    """KIND: not a tensor (left alone), a tensor, a list of COUNT tensors. REGISTER: the address of the first."""

    KIND, REGISTER, COUNT, WORDS = range(4)
    NUMBER, TENSOR, LIST = range(3)


class ResultWords:
    """From a register to a tensor of the plan. MADE: the address of two handles, as PyTorch made it and contiguous.

    DENSE: it is read contiguous. TYPED: it becomes what DTYPE says. ITEM: bytes of an element.
    """

    REGISTER, MADE, DENSE, SLOT, DTYPE, DIM, SIZES, STRIDES, TYPED, ITEM, WORDS = range(11)


class TapeWords:
    """LENT: memory that calls are given, as (where its address is, an offset in bytes)."""

    CALLS, CALL_TABLE, REGISTERS, REGISTER_TABLE, RESULTS, RESULT_TABLE, LENT, LENT_TABLE, WORDS = range(9)


# -- the interpreter ----------------------------------------------------------------------------------------------------
TORCH = {
    "torch_call_dispatcher": "i32 (ptr, ptr, ptr, i64)",
    "torch_new_list_reserve_size": "i32 (i64, ptr)",
    "torch_list_push_back": "i32 (ptr, i64)",
    "torch_list_size": "i32 (ptr, ptr)",
    "torch_list_get_item": "i32 (ptr, i64, ptr)",
    "torch_delete_list": "i32 (ptr)",
    "torch_new_string_handle": "i32 (ptr, i64, ptr)",
    "aoti_torch_create_tensor_from_blob": "i32 (ptr, i64, ptr, ptr, i64, i32, i32, i32, ptr)",
    "aoti_torch_new_tensor_handle": "i32 (ptr, ptr)",
    "aoti_torch_delete_tensor_object": "i32 (ptr)",
    "aoti_torch_empty_strided": "i32 (i64, ptr, ptr, i32, i32, i32, ptr)",
    "aoti_torch_copy_": "i32 (ptr, ptr, i32)",
    "aoti_torch_is_defined": "i32 (ptr, ptr)",
    "aoti_torch_is_contiguous": "i32 (ptr, ptr)",
    "aoti_torch_get_dtype": "i32 (ptr, ptr)",
    "aoti_torch_get_dim": "i32 (ptr, ptr)",
    "aoti_torch_get_sizes": "i32 (ptr, ptr)",
    "aoti_torch_get_strides": "i32 (ptr, ptr)",
    "aoti_torch_get_data_ptr": "i32 (ptr, ptr)",
    "aoti_torch_get_storage_offset": "i32 (ptr, ptr)",
    "aoti_torch_grad_mode_is_enabled": "zeroext i1 ()",
    "aoti_torch_grad_mode_set_enabled": "void (i1 zeroext)",
}
# Not of the C ABI, which has nothing for it: what torch._C._dispatch_tls_set_dispatch_key_excluded and the like call.
LAYERS = {
    "is_excluded": "_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE",
    "is_included": "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
    "exclude": "_ZN3c104impl29tls_set_dispatch_key_excludedENS_11DispatchKeyEb",
    "include": "_ZN3c104impl29tls_set_dispatch_key_includedENS_11DispatchKeyEb",
}
ABOVE = ("AutogradFunctionality", "ADInplaceOrView", "AutocastCPU")  # layers of the dispatcher that calls go below
# From 2.13 on; before that, what they do inside.
NEW_OPTIONAL, DELETE_OPTIONAL, NEW, FREE = "torch_new_stable_ivalue", "torch_delete_stable_ivalue", "_Znwm", "_ZdlPv"


def value() -> str:
    """An operand as the word that the ABI takes; 1 in `failed` if there is none."""
    f = Function("value", "ptr %node, ptr %failed", "i64")
    f.do("%out = alloca i64")
    kind = f.word("%node", ArgWords.KIND)

    def give(this: int, make: Callable[[], str]) -> None:
        inside, on = f.name("is"), f.name("on")
        f.do(f"br i1 {f.test('eq', kind, this)}, label %{inside}, label %{on}")
        f.label(inside)
        f.do(f"ret i64 {make()}")
        f.label(on)

    give(ArgWords.WORD, lambda: f.word("%node", ArgWords.VALUE))
    give(ArgWords.VIEW, lambda: over_memory(f))
    give(ArgWords.FIXED, lambda: another(f, f.word("%node", ArgWords.VALUE, "ptr")))
    give(ArgWords.REGISTER, lambda: another(f, f.word(f.word("%node", ArgWords.VALUE, "ptr"), 0, "ptr")))
    give(ArgWords.MAYBE, lambda: optional(f))
    give(ArgWords.ITEMS, lambda: items(f))
    give(ArgWords.TEXT, lambda: characters(f))
    return f.text(f"i64 {laid(f)}")


def no_value(f: Function, undo: Callable[[], None] = lambda: None) -> Callable[[], None]:
    def out() -> None:
        undo()
        f.set("%failed", 0, "1")
        f.do("ret i64 0")

    return out


def made(f: Function, call: str, undo: Callable[[], None] = lambda: None) -> str:
    """What a function of the ABI leaves behind its last pointer; where it fails, `value` has none."""
    checked(f, call, no_value(f, undo))
    return f.word("%out", 0)


def inner_value(f: Function, node: str, undo: Callable[[str], None]) -> str:
    """An operand in another one; `undo` where there is none."""
    inner = f.op(f"call i64 @value(ptr {node}, ptr %failed)")
    missing, on = f.name("bad"), f.name("fine")
    f.do(f"br i1 {f.test('eq', f.word('%failed', 0), 0)}, label %{on}, label %{missing}")
    f.label(missing)
    undo(inner)
    f.do("ret i64 0")
    f.label(on)
    return inner


def another(f: Function, handle: str) -> str:
    return made(f, f"@aoti_torch_new_tensor_handle(ptr {handle}, ptr %out)")


def over_memory(f: Function) -> str:
    data = f.at(f.word(f.word("%node", ArgWords.SLOT, "ptr"), 0, "ptr"), f.word("%node", ArgWords.OFFSET), "i8")
    sizes, strides = f.word("%node", ArgWords.SIZES, "ptr"), f.word("%node", ArgWords.STRIDES, "ptr")
    return made(
        f,
        f"@aoti_torch_create_tensor_from_blob(ptr {data}, i64 {f.word('%node', ArgWords.DIM)}, ptr {sizes}, "
        f"ptr {strides}, i64 0, i32 {narrow(f, '%node', ArgWords.DTYPE)}, i32 0, i32 0, ptr %out)",
    )


def optional(f: Function) -> str:
    node = f.word("%node", ArgWords.VALUE, "ptr")
    inner = inner_value(f, node, lambda _: None)
    cell = f.op("call ptr @new_optional()")
    missing, on = f.name("bad"), f.name("fine")
    f.do(f"br i1 {f.test('ne', cell, 'null', 'ptr')}, label %{on}, label %{missing}")
    f.label(missing)
    no_value(f, lambda: discard(f, node, inner))()
    f.label(on)
    f.set(cell, 0, inner)
    return f.op(f"ptrtoint ptr {cell} to i64")


def items(f: Function) -> str:
    table, count = f.word("%node", ArgWords.VALUE, "ptr"), f.word("%node", ArgWords.COUNT)
    handle = made(f, f"@torch_new_list_reserve_size(i64 {count}, ptr %out)")
    target = f.op(f"inttoptr i64 {handle} to ptr")

    def push(i: str) -> None:
        node = f.word(table, i, "ptr")

        def drop() -> None:
            f.invoke("@discard_items", ("ptr", table), ("i64", i), ("ptr", target))

        item = inner_value(f, node, lambda _: drop())

        def undo() -> None:
            discard(f, node, item)
            drop()

        checked(f, f"@torch_list_push_back(ptr {target}, i64 {item})", no_value(f, undo))

    f.loop("0", count, 1, push)
    return handle


def characters(f: Function) -> str:
    text, length = f.word("%node", ArgWords.VALUE, "ptr"), f.word("%node", ArgWords.COUNT)
    return made(f, f"@torch_new_string_handle(ptr {text}, i64 {length}, ptr %out)")


def laid(f: Function) -> str:
    """What PyTorch made before, if it has these strides; else a copy that has, of that or of memory."""
    wanted, sizes = f.word("%node", ArgWords.WANTED, "ptr"), f.word("%node", ArgWords.SIZES, "ptr")
    rank = f.word("%node", ArgWords.DIM)
    cell = f.word("%node", ArgWords.MADE, "ptr")
    present = f.test("ne", cell, "null", "ptr")
    before = f.either(present, "ptr", lambda: f.word(cell, 0, "ptr"), "null")
    is_made = f.test("ne", before, "null", "ptr")

    def strides_match() -> str:
        ask(f, "aoti_torch_get_strides", before, no_value(f))
        strides = f.word("%out", 0, "ptr")

        def one(d: str, so_far: str) -> list[str]:
            equal = f.test("eq", f.word(strides, d), f.word(wanted, d))
            any_stride = f.test("sle", f.word(sizes, d), 1)
            return [f.op(f"and i1 {so_far}, {f.op(f'or i1 {equal}, {any_stride}')}")]

        return f.loop("0", rank, 1, one, ("i1", "true"))[0]

    fits = f.either(is_made, "i1", strides_match, "false")
    inside, on = f.name("is"), f.name("on")
    f.do(f"br i1 {fits}, label %{inside}, label %{on}")
    f.label(inside)
    f.do(f"ret i64 {another(f, before)}")
    f.label(on)
    none = f.op(f"xor i1 {is_made}, true")
    blob = f.either(none, "ptr", lambda: f.op(f"inttoptr i64 {over_memory(f)} to ptr"), "null")
    source = f.choose(is_made, "ptr", before, blob)

    def release_blob() -> None:
        f.when(none, lambda: delete(f, blob))

    copy = made(
        f,
        f"@aoti_torch_empty_strided(i64 {rank}, ptr {sizes}, ptr {wanted}, "
        f"i32 {narrow(f, '%node', ArgWords.DTYPE)}, i32 0, i32 0, ptr %out)",
        release_blob,
    )
    target = f.op(f"inttoptr i64 {copy} to ptr")

    def undo() -> None:
        release_blob()
        delete(f, target)

    checked(f, f"@aoti_torch_copy_(ptr {target}, ptr {source}, i32 0)", no_value(f, undo))
    release_blob()
    return copy


def narrow(f: Function, base: str, index: int) -> str:
    return f.op(f"trunc i64 {f.word(base, index)} to i32")


TENSORS = (ArgWords.VIEW, ArgWords.LAID, ArgWords.FIXED, ArgWords.REGISTER)


def discard(f: Function, node: str, word: str) -> None:
    f.invoke("@discard_value", ("ptr", node), ("i64", word))


def discard_value() -> str:
    """Frees an operand that no call took over. (A string is a few bytes, and is left.)"""
    f = Function("discard_value", "ptr %node, i64 %word")
    kind, target = f.word("%node", ArgWords.KIND), f.op("inttoptr i64 %word to ptr")
    for tensor in TENSORS:
        f.when(f.test("eq", kind, tensor), lambda: delete(f, target))

    def optional() -> None:
        discard(f, f.word("%node", ArgWords.VALUE, "ptr"), f.word(target, 0))
        f.invoke("@free_optional", ("ptr", target))

    def items() -> None:
        table, count = f.word("%node", ArgWords.VALUE, "ptr"), f.word("%node", ArgWords.COUNT)
        f.invoke("@discard_items", ("ptr", table), ("i64", count), ("ptr", target))

    f.when(f.test("eq", kind, ArgWords.MAYBE), optional)
    f.when(f.test("eq", kind, ArgWords.ITEMS), items)
    return f.text()


def discard_items() -> str:
    """The first `count` items of a list, and the list."""
    f = Function("discard_items", "ptr %table, i64 %count, ptr %list")
    f.do("%out = alloca i64")

    def one(i: str) -> None:
        code = f.op(f"call i32 @torch_list_get_item(ptr %list, i64 {i}, ptr %out)")
        node = f.word("%table", i, "ptr")
        f.when(f.test("eq", code, 0, "i32"), lambda: discard(f, node, f.word("%out", 0)))

    f.loop("0", "%count", 1, one)
    delete_list(f, "%list")
    return f.text()


def delete_list(f: Function, handle: str) -> None:
    """Nothing follows from its return code: what cannot be freed is left."""
    f.op(f"call i32 @torch_delete_list(ptr {handle})")


def let_go() -> str:
    """Deletes the handles in `count` words."""
    f = Function("let_go", "ptr %words, i64 %count", exported=True)

    def one(i: str) -> None:
        handle = f.word("%words", i, "ptr")

        def free() -> None:
            delete(f, handle)
            f.set("%words", i, "null", "ptr")

        f.when(f.test("ne", handle, "null", "ptr"), free)

    f.loop("0", "%count", 1, one)
    return f.text()


def calls() -> str:
    """The calls of a tape, one after the other; 1 if one fails."""
    f = Function("calls", "ptr %tape", "i64")
    f.do("%out = alloca i64")
    f.do("%failed = alloca i64")
    f.set("%failed", 0, "0")
    table = f.word("%tape", TapeWords.CALL_TABLE, "ptr")

    def one(i: str) -> None:
        row = f.row(table, i, CallWords.WORDS)
        name, overload, stack = (f.word(row, n, "ptr") for n in (CallWords.NAME, CallWords.OVERLOAD, CallWords.STACK))
        args = f.word(row, CallWords.ARG_TABLE, "ptr")

        def operand(j: str) -> None:
            f.set(stack, j, f.op(f"call i64 @value(ptr {f.word(args, j, 'ptr')}, ptr %failed)"))
            f.when(f.test("ne", f.word("%failed", 0), 0), lambda: unwind(j))

        def unwind(j: str) -> None:
            f.loop("0", j, 1, lambda k: discard(f, f.word(args, k, "ptr"), f.word(stack, k)))
            f.do("ret i64 1")
            f.label(f.name("never"))

        f.loop("0", f.word(row, CallWords.ARGS), 1, operand)
        by_autograd = f.test("ne", f.word(row, CallWords.BY_AUTOGRAD), 0)
        layer = key("AutogradFunctionality")
        included = f.either(
            by_autograd, "i1", lambda: f.op(f"call zeroext i1 @is_included(i16 zeroext {layer})"), "false"
        )
        f.when(by_autograd, lambda: enter(f, layer, "false", "true"))
        code = f.op(f"call i32 @torch_call_dispatcher(ptr {name}, ptr {overload}, ptr {stack}, i64 {torch_version()})")
        f.when(by_autograd, lambda: enter(f, layer, "true", included))
        f.give(f.test("ne", code, 0, "i32"), "i64 1")
        returns = f.word(row, CallWords.RETURN_TABLE, "ptr")
        (bad,) = f.loop(
            "0", f.word(row, CallWords.RETURNS), 1, lambda j, seen: [returned(f, returns, stack, j, seen)], ("i64", "0")
        )
        f.give(f.test("ne", bad, 0), "i64 1")

    f.loop("0", f.word("%tape", TapeWords.CALLS), 1, one)
    return f.text("i64 0")


def enter(f: Function, layer: int, excluded: str, included: str) -> None:
    """Included, because tensors made in inference mode do not ask for it themselves."""
    f.do(f"call void @exclude(i16 zeroext {layer}, i1 zeroext {excluded})")
    f.do(f"call void @include(i16 zeroext {layer}, i1 zeroext {included})")


def returned(f: Function, returns: str, stack: str, j: str, seen: str) -> str:
    row = f.row(returns, j, ReturnWords.WORDS)
    kind, register = f.word(row, ReturnWords.KIND), f.word(row, ReturnWords.REGISTER, "ptr")
    f.when(f.test("eq", kind, ReturnWords.TENSOR), lambda: f.set(register, 0, f.word(stack, j)))

    def unpacked() -> list[str]:
        """A list of another length than planned is left, with what is in it: the step fails then."""
        handle, count = f.word(stack, j, "ptr"), f.word(row, ReturnWords.COUNT)
        f.set("%out", 0, "-1")
        code = f.op(f"call i32 @torch_list_size(ptr {handle}, ptr %out)")
        other = f.op(f"or i1 {f.test('ne', code, 0, 'i32')}, {f.test('ne', f.word('%out', 0), count)}")
        amount = f.choose(other, "i64", "0", count)

        def item(k: str, lost: str) -> list[str]:
            f.set("%out", 0, "0")
            code = f.op(f"call i32 @torch_list_get_item(ptr {handle}, i64 {k}, ptr %out)")
            f.set(register, k, f.word("%out", 0))
            return [f.op(f"or i1 {lost}, {f.test('ne', code, 0, 'i32')}")]

        (bad,) = f.loop("0", amount, 1, item, ("i1", other))
        delete_list(f, handle)
        return [f.op(f"or i64 {seen}, {f.op(f'zext i1 {bad} to i64')}")]

    return f.when(f.test("eq", kind, ReturnWords.LIST), unpacked, ("i64", seen))[0]


def results() -> str:
    """From registers to the plan's tensors; 1 if one of them is not what was planned."""
    f = Function("results", "ptr %tape", "i64")
    f.do("%out = alloca i64")
    f.do("%empty = alloca [2 x i64]")
    f.set("%empty", 0, "0")
    f.set("%empty", 1, "1")
    table = f.word("%tape", TapeWords.RESULT_TABLE, "ptr")

    def fail() -> None:
        f.do("ret i64 1")

    def one(i: str) -> None:
        row = f.row(table, i, ResultWords.WORDS)
        register, pair = f.word(row, ResultWords.REGISTER, "ptr"), f.word(row, ResultWords.MADE, "ptr")
        handle, dtype = f.word(register, 0, "ptr"), narrow(f, row, ResultWords.DTYPE)
        defined = truth(f, "aoti_torch_is_defined", handle, fail)
        f.when(f.op(f"xor i1 {defined}, true"), lambda: nothing(pair, dtype))
        f.when(defined, lambda: something(row, register, pair, handle, dtype))

    def nothing(pair: str, dtype: str) -> None:
        """None, in Python: a tensor without elements stands for it."""
        shape = f"i64 1, ptr %empty, ptr {f.at('%empty', 1, 'i64')}, i32 {dtype}"
        checked(f, f"@aoti_torch_empty_strided({shape}, i32 0, i32 0, ptr %out)", fail)
        f.set(pair, 0, f.word("%out", 0))

    def something(row: str, register: str, pair: str, handle: str, dtype: str) -> None:
        rank, sizes = f.word(row, ResultWords.DIM), f.word(row, ResultWords.SIZES, "ptr")
        ask(f, "aoti_torch_get_dim", handle, fail)
        f.give(f.test("ne", f.word("%out", 0), rank), "i64 1")
        ask(f, "aoti_torch_get_sizes", handle, fail)
        given = f.word("%out", 0, "ptr")
        f.loop("0", rank, 1, lambda d: f.give(f.test("ne", f.word(given, d), f.word(sizes, d)), "i64 1"))
        ask(f, "aoti_torch_get_dtype", handle, fail)
        other = f.test("ne", f.op("load i32, ptr %out"), dtype, "i32")
        f.give(f.op(f"and i1 {other}, {f.test('eq', f.word(row, ResultWords.TYPED), 0)}"), "i64 1")
        borrowed = f.op(f"or i1 {other}, {shares(f, row, handle, fail)}")
        kept = f.either(borrowed, "ptr", lambda: copy(row, handle, rank, sizes, dtype), handle)
        f.set(register, 0, f.choose(borrowed, "ptr", handle, "null"), "ptr")
        f.set(pair, 0, kept, "ptr")
        gaps = f.op(f"xor i1 {truth(f, 'aoti_torch_is_contiguous', kept, fail)}, true")
        dense = f.op(f"and i1 {gaps}, {f.test('ne', f.word(row, ResultWords.DENSE), 0)}")
        copied = f.either(dense, "ptr", lambda: copy(row, kept, rank, sizes, dtype), "null")
        f.set(pair, 1, copied, "ptr")
        ask(f, "aoti_torch_get_data_ptr", f.choose(dense, "ptr", copied, kept), fail)
        f.set(f.word(row, ResultWords.SLOT, "ptr"), 0, f.word("%out", 0))

    def copy(row: str, handle: str, rank: str, sizes: str, dtype: str) -> str:
        """Contiguous, of the planned type."""
        shape = f"i64 {rank}, ptr {sizes}, ptr {f.word(row, ResultWords.STRIDES, 'ptr')}, i32 {dtype}"
        checked(f, f"@aoti_torch_empty_strided({shape}, i32 0, i32 0, ptr %out)", fail)
        made = f.word("%out", 0, "ptr")

        def undo() -> None:
            delete(f, made)
            fail()

        checked(f, f"@aoti_torch_copy_(ptr {made}, ptr {handle}, i32 0)", undo)
        return made

    f.loop("0", f.word("%tape", TapeWords.RESULTS), 1, one)
    return f.text("i64 0")


def shares(f: Function, row: str, handle: str, fail: Callable[[], None]) -> str:
    """Whether a result lies in memory that the call was given. (Not every op that returns a view says so.)"""
    ask(f, "aoti_torch_get_storage_offset", handle, fail)
    offset = f.mul(f.word("%out", 0), f.word(row, ResultWords.ITEM))
    ask(f, "aoti_torch_get_data_ptr", handle, fail)
    start, table = f.sub(f.word("%out", 0), offset), f.word("%tape", TapeWords.LENT_TABLE, "ptr")

    def one(i: str, found: str) -> list[str]:
        lent = f.row(table, i, 2)
        memory = f.add(f.word(f.word(lent, 0, "ptr"), 0), f.word(lent, 1))
        return [f.op(f"or i1 {found}, {f.test('eq', memory, start)}")]

    return f.loop("0", f.word("%tape", TapeWords.LENT), 1, one, ("i1", "false"))[0]


def truth(f: Function, question: str, handle: str, fail: Callable[[], None]) -> str:
    f.set("%out", 0, "0")
    ask(f, question, handle, fail)
    return f.op(f"trunc i8 {f.op('load i8, ptr %out')} to i1")


def dispatch() -> str:
    """A step. Below the layers `ABOVE` and without gradients, all as before afterwards; 1 if Python has to do it again."""
    f = Function("dispatch", "ptr %tape", "i64", exported=True)
    keys = [key(name) for name in ABOVE]
    before = [f.op(f"call zeroext i1 @is_excluded(i16 zeroext {layer})") for layer in keys]
    gradients = f.op("call zeroext i1 @aoti_torch_grad_mode_is_enabled()")
    f.do("call void @aoti_torch_grad_mode_set_enabled(i1 zeroext false)")
    for layer in keys:
        f.do(f"call void @exclude(i16 zeroext {layer}, i1 zeroext true)")
    failed = f.op("call i64 @calls(ptr %tape)")
    fine = f.test("eq", failed, 0)
    status = f.either(fine, "i64", lambda: f.op("call i64 @results(ptr %tape)"), "1")
    for layer, old in zip(keys, before):
        f.do(f"call void @exclude(i16 zeroext {layer}, i1 zeroext {old})")
    f.do(f"call void @aoti_torch_grad_mode_set_enabled(i1 zeroext {gradients})")
    registers, count = f.word("%tape", TapeWords.REGISTER_TABLE, "ptr"), f.word("%tape", TapeWords.REGISTERS)
    f.invoke("@let_go", ("ptr", registers), ("i64", count))
    f.when(f.test("ne", status, 0), lambda: undo(f))
    return f.text(f"i64 {status}")


def undo(f: Function) -> None:
    table = f.word("%tape", TapeWords.RESULT_TABLE, "ptr")
    f.loop(
        "0",
        f.word("%tape", TapeWords.RESULTS),
        1,
        lambda i: f.invoke(
            "@let_go", ("ptr", f.word(f.row(table, i, ResultWords.WORDS), ResultWords.MADE, "ptr")), ("i64", "2")
        ),
    )


def new_optional(known: bool) -> str:
    """A word on the heap, which the call takes over; null if there is none."""
    f = Function("new_optional", "", "ptr")
    if not known:
        return f.text(f"ptr {f.op('call ptr @new(i64 8)')}")
    f.do("%out = alloca i64")
    checked(f, f"@{NEW_OPTIONAL}(ptr %out)", lambda: f.do("ret ptr null"))
    return f.text(f"ptr {f.word('%out', 0, 'ptr')}")


def free_optional(known: bool) -> str:
    f = Function("free_optional", "ptr %cell")
    if known:
        f.op(f"call i32 @{DELETE_OPTIONAL}(ptr %cell)")
    else:
        f.invoke("@free_word", ("ptr", "%cell"))
    return f.text()


def key(layer: str) -> int:
    return int(getattr(torch._C.DispatchKey, layer))


def has(name: str) -> bool:
    try:
        return bool(torch_symbol(name))
    except OSError:
        return False


@cache
def torch_version() -> int:
    """As the ABI writes it: the calls here are made for the PyTorch that runs."""
    function = ctypes.CFUNCTYPE(ctypes.c_uint64)(torch_symbol("aoti_torch_abi_version"))
    return int(function())


def source(known: bool) -> str:
    declares = [f"declare {kind.replace('(', f'@{name}(', 1)}" for name, kind in TORCH.items()]
    declares += [f"declare zeroext i1 @is_{what}d(i16 zeroext)" for what in ("exclude", "include")]
    declares += [f"declare void @{what}(i16 zeroext, i1 zeroext)" for what in ("exclude", "include")]
    declares += ["declare i64 @llvm.smin.i64(i64, i64)", "declare i64 @llvm.smax.i64(i64, i64)"]
    if known:
        declares += [f"declare i32 @{name}(ptr)" for name in (NEW_OPTIONAL, DELETE_OPTIONAL)]
    else:
        declares += ["declare ptr @new(i64)", "declare void @free_word(ptr)"]
    optional = [new_optional(known), free_optional(known), discard_value(), discard_items()]
    return "\n".join([*declares, "", *optional, value(), let_go(), calls(), results(), dispatch()])


@cache
def code() -> LazyCode | str:
    """The interpreter, or why there is none: a PyTorch without one of these functions."""
    known = has(NEW_OPTIONAL)
    try:
        imports = {name: torch_symbol(name) for name in TORCH}
        imports |= {name: torch_symbol(symbol) for name, symbol in LAYERS.items()}
        if known:
            imports |= {name: torch_symbol(name) for name in (NEW_OPTIONAL, DELETE_OPTIONAL)}
        else:
            imports |= {"new": torch_symbol(NEW), "free_word": torch_symbol(FREE)}
    except OSError as error:
        return str(error)
    name = f"{__name__} {known} {torch_version()}"
    return LazyCode(Unit(lambda: source(known), ("dispatch", "let_go"), imports, name=name))
