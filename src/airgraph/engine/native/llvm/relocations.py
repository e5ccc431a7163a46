"""What a relocation of LLVM's object code writes, for each architecture that loader.py knows.

An architecture has a *table* behind the code with an entry for each symbol outside of the object: its address, and on Arm
before that two instructions that go there, since a call reaches 128 MiB and libraries may lie farther away.
"""

from __future__ import annotations

import platform
import struct
import sys
from mmap import mmap
from typing import NamedTuple, Protocol

from airgraph.errors import Unsupported


class LoadError(Unsupported):
    """Not an object that the loader knows."""


class Addresses(NamedTuple):
    """Of a relocation: the one to be changed, its target's, the table's, and that of the entry in it (0:
    there is none)."""

    at: int
    target: int
    table: int
    entry: int


class Architecture(Protocol):
    name: str
    number: int  # in the head of an ELF file
    entry_size: int

    def has_entry(self, kind: int, outside: bool) -> bool:
        """Whether a relocation of this kind goes through the table; `outside`: to a symbol that is not in the object."""

    def entry(self, address: int) -> bytes: ...

    def write(self, memory: mmap, at: int, kind: int, addresses: Addresses) -> None: ...


class X86:
    """Position-independent code in the large code model: R_X86_64_64, PC64, GOTOFF64, GOT64, GOTPC64."""

    name, number, entry_size = "x86-64", 62, 8
    ADDRESS, RELATIVE, FROM_TABLE, ENTRY, TO_TABLE = 1, 24, 25, 27, 29

    def has_entry(self, kind: int, outside: bool) -> bool:
        return kind == self.ENTRY

    def entry(self, address: int) -> bytes:
        return struct.pack("<Q", address)

    def write(self, memory: mmap, at: int, kind: int, addresses: Addresses) -> None:
        struct.pack_into("<q", memory, at, self.value(kind, addresses))

    def value(self, kind: int, addresses: Addresses) -> int:
        match kind:
            case self.ADDRESS:
                return addresses.target
            case self.RELATIVE | self.TO_TABLE:
                return addresses.target - addresses.at
            case self.FROM_TABLE:
                return addresses.target - addresses.table
            case self.ENTRY:
                return addresses.entry - addresses.table
        raise LoadError(f"a relocation of type {kind}")


class Arm:
    """The small code model: R_AARCH64_ABS64, CALL26, JUMP26, ADR_PREL_PG_HI21, ADD and LDST8 to LDST128_ABS_LO12_NC,
    ADR_GOT_PAGE and LD64_GOT_LO12_NC."""

    name, number, entry_size = "AArch64", 183, 16
    ADDRESS, JUMP, CALL, PAGE, ENTRY_PAGE, ENTRY_REST = 257, 282, 283, 275, 311, 312
    REST = {
        277: 0,
        278: 0,
        284: 1,
        285: 2,
        286: 3,
        299: 4,
    }  # the lower 12 bits of an address → by how many bits shifted
    VIA = struct.pack("<II", 0x58000050, 0xD61F0200)  # ldr x16, .+8; br x16

    def has_entry(self, kind: int, outside: bool) -> bool:
        return kind in (self.ENTRY_PAGE, self.ENTRY_REST) or (kind in (self.CALL, self.JUMP) and outside)

    def entry(self, address: int) -> bytes:
        return self.VIA + struct.pack("<Q", address)

    def write(self, memory: mmap, at: int, kind: int, addresses: Addresses) -> None:
        if kind == self.ADDRESS:
            struct.pack_into("<Q", memory, at, addresses.target)
        else:
            (instruction,) = struct.unpack_from("<I", memory, at)
            struct.pack_into("<I", memory, at, instruction | self.operand(kind, addresses))

    def operand(self, kind: int, addresses: Addresses) -> int:
        held = addresses.entry + len(self.VIA)  # where an entry has its address
        if kind in (self.CALL, self.JUMP):
            distance = (addresses.entry or addresses.target) - addresses.at
            if not -(1 << 27) <= distance < 1 << 27:
                raise LoadError(f"a call over {distance} bytes")
            return distance >> 2 & 0x3FFFFFF
        if kind in (self.PAGE, self.ENTRY_PAGE):
            pages = ((addresses.target if kind == self.PAGE else held) >> 12) - (addresses.at >> 12)
            return (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
        if kind == self.ENTRY_REST:
            return (held & 0xFFF) >> 3 << 10
        if kind in self.REST:
            return (addresses.target & 0xFFF) >> self.REST[kind] << 10
        raise LoadError(f"a relocation of type {kind}")


ARCHITECTURES: dict[str, Architecture] = {"x86_64": X86(), "aarch64": Arm()}


def this_architecture() -> Architecture:
    found = ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
    if found is None:
        raise LoadError("neither x86-64 nor AArch64 Linux")
    return found
