"""Objects of PyTorch's C++ classes, and the tables their virtual functions are called through.

    an object  →  table  →  [… what class it is, function 0, function 1, …]

An object whose class has functions that a backend written in Python cannot answer may be given another table, a copy of
its own with other functions in it (`guard`). The order of a table is that of the declarations in PyTorch's
header, which comes with every PyTorch (the C++ ABI of Linux on x86-64 and arm64).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from airgraph.errors import Unsupported

WORD = ctypes.sizeof(ctypes.c_void_p)
BEFORE = 2  # words of a table that lie before the place the object points to
END = "the end"


class UnsupportedLayout(Unsupported):
    """Something is not as it is expected to be; nothing has been changed."""


def word(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def class_of(thing: int) -> bytes:
    """The name of an object's class, as the compiler writes it."""
    type_info = word(word(thing) - WORD)
    return ctypes.string_at(word(type_info + WORD))


def virtual_functions(header: str, name: str) -> list[str]:
    """The virtual functions of a struct in the order of PyTorch's header."""
    file = Path(torch.__file__).parent / header
    if not file.is_file():
        raise UnsupportedLayout(f"this PyTorch comes without {header}")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    begin = re.search(rf"\bstruct\s+(?:\w+\s+)?{name}\s*\{{", text)
    if begin is None:
        raise UnsupportedLayout(f"{header} does not declare it")
    body = text[begin.end() : text.index("\n};", begin.end())]
    return re.findall(r"\bvirtual\b[^();]*?(~?\w+)\s*\(", body)


def places(functions: Sequence[str], needed: Sequence[str], header: str) -> dict[str, int]:
    """Where each stands, and where the table ends; a destructor stands there twice."""
    found: dict[str, int] = {}
    place = 0
    for name in functions:
        found[name] = place
        place += 2 if name.startswith("~") else 1
    lacking = [name for name in needed if name not in found]
    if lacking or len(found) != len(functions):
        raise UnsupportedLayout(
            f"{header} has no function {lacking[0]}" if lacking else f"{header} has one of a name twice"
        )
    return {**found, END: place}


def are_code(table: int, size: int) -> list[bool]:
    """For each place of a table, whether it has an address of PyTorch's code."""
    lines = [
        line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    parts = [line[0].split("-") for line in lines if "x" in line[1] and "libtorch" in line[-1]]
    code = [range(int(begin, 16), int(end, 16)) for begin, end in parts]
    return [any(word(table + place * WORD) in part for part in code) for place in range(size)]


class Exchanged:
    """An object with another table, of `size` functions of which those at some places are others, until `restore()`."""

    def __init__(self, thing: int, size: int, others: Mapping[int, int]) -> None:
        self.object = thing
        self.before = word(thing)
        words = size + BEFORE
        copied = ctypes.string_at(self.before - BEFORE * WORD, words * WORD)
        table = (ctypes.c_void_p * words).from_buffer_copy(copied)
        for place, address in others.items():
            table[place + BEFORE] = address
        keep_for_ever(table)
        self._point_to(ctypes.addressof(table) + BEFORE * WORD)

    def restore(self) -> None:
        self._point_to(self.before)

    def _point_to(self, table: int) -> None:
        ctypes.c_void_p.from_address(self.object).value = table


def keep_for_ever(thing: Any) -> None:
    """PyTorch's threads may outlive Python's objects."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
