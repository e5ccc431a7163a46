"""Whether tensors are where they were, and as they were: native loops.

watch = AddressWatch(202, addresses, pinned)
watch.same(args)                                 whether the arguments that `pinned` numbers are at their addresses
LayoutWatch(layouts).same(args)                  whether tensors among them have their sizes, strides and types
TensorWatch(tensors).unmoved()                   whether these very tensors are where they were when it was made

PyTorch's own comparison in C++ took 22 µs for the 202 arguments of a BERT on the host of an H200; it is used without LLVM.
Where a tensor begins with its memory, as parameters do, the address is read from it; PyTorch is asked for others, which
takes 45 ns each. In which words of its objects PyTorch has what is read is tried once (`tensor_words`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from airgraph.engine.native.builtin import table_builtin
from airgraph.engine.native.replay_code import HANDLE, native_method
from airgraph.engine.native.tables import words

PLAIN = (torch.Tensor, torch.nn.Parameter)  # whose objects are known
ArgumentLayout = tuple[int, torch.Size, tuple[int, ...], torch.dtype]  # which argument, its sizes, strides and type
Words = tuple[int, int, int, int]


class AddressWatch:
    """`same(args)`: a list of `width` arguments, of which those that `which` numbers are tensors at their `addresses`."""

    same: Callable[[list[Any]], Any]
    table: Any = None  # that native code reads

    def __init__(self, width: int, addresses: Sequence[int], which: Sequence[int]) -> None:
        method = native_method("same")
        if method is None:
            self.same = lambda args: len(args) == width and are_at(args, addresses, which)
            return
        known = tensor_words()
        head = (width, *map(id, PLAIN), len(which), int(known is not None), *(known or [0] * 4))
        rows = [word for i in which for word in (i, addresses[i])]
        self.table = words([*head, *rows])
        self.same = table_builtin(method, self.table)


class LayoutWatch:
    """`same(args)`: the tensors in a list of arguments that `layouts` numbers have their sizes, strides and types."""

    same: Callable[[list[Any]], Any]
    table: Any = None

    def __init__(self, layouts: Sequence[ArgumentLayout]) -> None:
        method = native_method("laid_out")
        if method is None:
            self.same = partial(compare_layouts, layouts)
            return
        places = [words([*shape, *strides]) for _, shape, strides, _ in layouts]
        rows = [
            word
            for (i, shape, _, dtype), place in zip(layouts, places)
            for word in (i, scalar_type(dtype), len(shape), ctypes.addressof(place))
        ]
        self.table = words([len(layouts), *rows])
        self.same = table_builtin(method, self.table, places)


def compare_layouts(layouts: Sequence[ArgumentLayout], args: Sequence[Any]) -> bool:
    return all((args[i].shape, args[i].stride(), args[i].dtype) == tuple(layout) for i, *layout in layouts)


@cache
def scalar_type(dtype: torch.dtype) -> int:
    """The number C++ has for a type."""
    from airgraph.engine.native.libtorch import torch_symbol

    tensor, found = torch.empty(0, dtype=dtype), ctypes.c_int32()
    ask = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(torch_symbol("aoti_torch_get_dtype"))
    ask(id(tensor) + 8 * HANDLE, ctypes.addressof(found))
    return found.value


class TensorWatch:
    """`unmoved()`: whether `tensors` are at the `addresses` they had when this was made. (That of a subclass of Tensor, or
    of one without memory, is -1.)"""

    unmoved: Callable[[], Any]
    table: Any = None

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        which = [i for i, t in enumerate(tensors) if is_plain(t)]
        self.addresses = [-1] * len(tensors)
        for i in which:
            self.addresses[i] = tensors[i].data_ptr()
        method = native_method("unmoved")
        if method is None:
            self.unmoved = partial(same_addresses, tensors, self.addresses, which)
            return
        self.table = unmoved_table([(tensors[i], self.addresses[i]) for i in which])
        self.unmoved = table_builtin(method, self.table, tensors)


def unmoved_table(tensors: Sequence[tuple[torch.Tensor, int]]) -> Any:
    """What `unmoved` reads of tensors and their addresses. (It does not hold them.)"""
    known = tensor_words()
    found = [tensor_row(tensor, address, known) for tensor, address in tensors]
    rows = sorted(found, key=lambda row: row[2] == 0)  # PyTorch is asked for the last ones
    plain = sum(row[2] != 0 for row in rows)
    head = (len(rows), plain, *(known or [0] * 4))
    return words([*head, *(word for row in rows for word in row)])


def is_plain(tensor: Any) -> bool:
    """Whether its address can be looked at."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided


def tensor_row(tensor: torch.Tensor, address: int, known: Words | None) -> Words:
    storage = tensor.untyped_storage()._cdata
    plain = known is not None and tensor.storage_offset() == 0
    if plain:
        _, _, *places = known  # type: ignore[misc]
        memory = words_at(storage, max(places) + 1)
        plain = all(memory[place] == address for place in places)
    return id(tensor), tensor._cdata, storage if plain else 0, address


def are_at(args: Sequence[Any], addresses: Sequence[int], which: Sequence[int]) -> bool:
    try:
        return same_addresses(args, addresses, which)
    except (AttributeError, TypeError, RuntimeError):  # one of them is no tensor
        return False


def compare_addresses(args: Sequence[Any], addresses: Sequence[int], which: Sequence[int]) -> bool:
    return all(args[i].data_ptr() == addresses[i] for i in which)


@cache
def tensor_words() -> Words | None:
    """The words of a tensor of C++ with its storage and its offset there, and those of a storage with the address of its
    memory and with the owner of that: an allocator's own memory is known by its address, memory that two tensors share
    until one of them is written to is not. None where there are no such words."""
    base = torch.empty(64)
    storage = base.untyped_storage()
    views = {start: words_at(base.as_strided((1,), (1,), start)._cdata, 22) for start in (17, 41)}
    first, memory = words_at(base._cdata, 22), words_at(storage._cdata, 6)
    holders = [i for i, word in enumerate(first) if word == storage._cdata]
    offsets = [i for i, word in enumerate(first) if word == 0 and all(view[i] == n for n, view in views.items())]
    addresses = [i for i, word in enumerate(memory) if word == storage.data_ptr()]
    if (len(holders), len(offsets), len(addresses)) != (1, 1, 2):
        return None
    return (*holders, *offsets, *addresses)  # type: ignore[return-value]


def words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


# In PyTorch's CUDA builds.
same_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", compare_addresses)
