"""Object code into memory: a loader for the objects that LLVM writes for x86-64 and AArch64 Linux.

    loaded = load(code, imports={"torch_parallel_for": 0x7f…}, exports=("run",))
    loaded["run"]                                    → its address, as long as `loaded` lives

LLVM's own linker takes longer than anything else in a process whose object code is in the cache, and importing LLVM comes
on top; this takes a millisecond or two for each object. It knows the relocations of the code models that compiler.py
chooses (relocations.py) and refuses everything else (`LoadError`): then LLVM's linker does it. Code and constants are in
one mapping, which is read-only when it is executable.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from airgraph.engine.native.llvm.relocations import Addresses, LoadError, this_architecture

HEAD = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
RELOCATABLE = 1
SYMBOLS, RELOCATIONS, NOTHING, PLAIN_RELOCATIONS = 2, 4, 8, 9  # types of sections
WRITABLE, LOADED, THREAD_LOCAL = 1, 2, 0x400  # flags of sections
ABSOLUTE = 0xFFF1
TABLE = "_GLOBAL_OFFSET_TABLE_"


class Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class Relocation(NamedTuple):
    """`at`: a place in the mapping."""

    at: int
    kind: int
    symbol: int
    addend: int


@dataclass
class LoadedObject:
    """Machine code in memory; unmapped with its last reference."""

    memory: mmap.mmap
    addresses: dict[str, int]

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


def load(code: bytes, imports: Mapping[str, int], exports: Sequence[str]) -> LoadedObject:
    try:
        return Object(code).load(imports, exports)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise LoadError(f"a broken object: {error}") from error


class Object:
    """One relocatable file in the ELF format."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        head = HEAD.unpack_from(code)
        self.machine = this_architecture()
        if head[0][:6] != b"\x7fELF\x02\x01" or head[1:3] != (RELOCATABLE, self.machine.number):
            raise LoadError(f"no relocatable object for {self.machine.name}")
        start, size, count = head[6], head[11], head[12]
        self.sections = [Section(*SECTION.unpack_from(code, start + i * size)) for i in range(count)]
        self.places: dict[int, int] = {}  # section → where it lies in the mapping
        self.size = 0
        for i, section in enumerate(self.sections):
            if section.flags & LOADED and section.size:
                self.place(i, section)
        self.table = -(-self.size // 8) * 8  # of addresses outside
        self.entries: dict[int, int] = {}  # symbol → where its entry lies in the mapping

    def place(self, number: int, section: Section) -> None:
        if section.flags & (WRITABLE | THREAD_LOCAL) or section.type == NOTHING:
            raise LoadError("an object with variables")
        alignment = max(section.alignment, 1)
        if alignment > mmap.PAGESIZE:
            raise LoadError(f"a section aligned to {alignment}")
        self.places[number] = -(-self.size // alignment) * alignment
        self.size = self.places[number] + section.size

    def load(self, imports: Mapping[str, int], exports: Sequence[str]) -> LoadedObject:
        symbols = self.symbols()
        relocations = list(self.relocations())
        for _, kind, symbol, _ in relocations:
            if self.machine.has_entry(kind, outside=symbols[symbol][1] == 0):
                self.entries.setdefault(symbol, self.table + self.machine.entry_size * len(self.entries))
        # Private: the kernel makes one map of neighbours, and a process may have 65,530.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(self.table + self.machine.entry_size * len(self.entries), 1), private)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        addresses = {i: self.address(base, *symbol, imports) for i, symbol in enumerate(symbols) if i}
        self.fill(memory, base, addresses, relocations)
        make_executable(base, len(memory))
        named = {name: addresses[i] for i, (name, section, _) in enumerate(symbols) if name and section}
        missing = [name for name in exports if name not in named]
        if missing:
            raise LoadError(f"no function {missing[0]}")
        return LoadedObject(memory, {name: named[name] for name in exports})

    def fill(
        self, memory: mmap.mmap, base: int, addresses: Mapping[int, int], relocations: Sequence[Relocation]
    ) -> None:
        for number, start in self.places.items():
            section = self.sections[number]
            memory[start : start + section.size] = self.code[section.offset : section.offset + section.size]
        for symbol, start in self.entries.items():
            entry = self.machine.entry(addresses[symbol])
            memory[start : start + len(entry)] = entry
        for at, kind, symbol, addend in relocations:
            entry_at = base + self.entries[symbol] + addend if symbol in self.entries else 0
            found = Addresses(base + at, addresses[symbol] + addend, base + self.table, entry_at)
            self.machine.write(memory, at, kind, found)

    # -- symbols ------------------------------------------------------------------------------------------------------
    def symbols(self) -> list[tuple[str, int, int]]:
        """(name, section, offset in it); section 0: it is somewhere else."""
        table = next((s for s in self.sections if s.type == SYMBOLS), None)
        if table is None:
            raise LoadError("an object without symbols")
        names = self.sections[table.link].offset
        rows = (SYMBOL.unpack_from(self.code, table.offset + at) for at in range(0, table.size, SYMBOL.size))
        return [(self.text(names + row[0]), row[3], row[4]) for row in rows]

    def text(self, start: int) -> str:
        end = self.code.find(b"\0", start)
        return self.code[start:end].decode()

    def address(self, base: int, name: str, section: int, offset: int, imports: Mapping[str, int]) -> int:
        if section in self.places:
            return base + self.places[section] + offset
        if section == ABSOLUTE:
            return offset
        if section or not name:  # of a section that is not loaded: nothing refers to it
            return 0
        if name == TABLE:
            return base + self.table
        found = imports.get(name) or outside(name)
        if not found:
            raise LoadError(f"nobody has {name}")
        return found

    # -- relocations --------------------------------------------------------------------------------------------------
    def relocations(self) -> Iterator[Relocation]:
        for section in self.sections:
            if section.type == PLAIN_RELOCATIONS and section.info in self.places:
                raise LoadError("relocations without addends")
            if section.type != RELOCATIONS or section.info not in self.places:
                continue
            start = self.places[section.info]
            for at in range(section.offset, section.offset + section.size, RELOCATION.size):
                offset, info, addend = RELOCATION.unpack_from(self.code, at)
                yield Relocation(start + offset, info & 0xFFFFFFFF, info >> 32, addend)


@cache
def process() -> Any:
    return ctypes.CDLL(None)


def outside(name: str) -> int:
    """The address of a function of the C library, say; 0 if the process has none of this name."""
    try:
        return ctypes.cast(getattr(process(), name), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def make_executable(address: int, size: int) -> None:
    """…, and no longer writable. Arm's caches of instructions do not see what was written until they are told."""
    done = process().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC)
    if done:
        raise LoadError("this system lets no memory become executable")
    if platform.machine() == "aarch64":
        ctypes.CDLL("libgcc_s.so.1")["__clear_cache"](ctypes.c_void_p(address), ctypes.c_void_p(address + size))
