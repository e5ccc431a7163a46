"""LLVM text in, machine code out.

    code = build([Unit("define void @f(ptr %x) {...}", exports=("f",))])
    code["f"]                                        → the address of f, as long as `code` lives

Units are compiled side by side, one thread for each core (compiler.py). Object code comes from the compilation cache where
it can; for a unit with a name not even its text is written then, since that follows from airgraph's sources.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from airgraph.disk_cache import Key, open_cache
from airgraph.engine.native.llvm import loader
from airgraph.engine.native.llvm.machine import machine
from airgraph.locks import Depth, Inside, held_at_fork
from airgraph.source_hash import source_hash

_names = itertools.count()
_importing = held_at_fork(threading.Lock(), Depth.IMPORTING)
_building = held_at_fork(Inside(), Depth.KERNELS)  # the code of a unit
OBJECT_BYTES = 16 << 20  # of object files that are kept
NAMED: dict[str, Unit] = {}  # units with a name that this process uses


@dataclass(frozen=True)
class Unit:
    """One LLVM module: its text, the functions that are taken from it, and the addresses of those it only declares. A text
    that depends on nothing but our sources and the machine is a function, and has a `name`."""

    text: str | Callable[[], str]
    exports: tuple[str, ...]
    imports: Mapping[str, int] = field(default_factory=dict)
    name: str = ""

    def source(self) -> str:
        return self.text if isinstance(self.text, str) else self.text()

    def key(self) -> Key:
        """Under which its object code is in the compilation cache."""
        if self.name:
            return Key(module=self.name, sources=source_hash(), **machine())
        return Key(text=self.source(), **machine())

    def is_cached(self) -> bool:
        """Whether an earlier process compiled it."""
        return open_cache().has("object", self.key())


class Code:
    """Loaded machine code; unloaded when the last reference to it is gone."""

    def __init__(self, trackers: Sequence[Any]) -> None:
        self.trackers = trackers

    def __getitem__(self, name: str) -> int:
        for tracker in self.trackers:
            try:
                return int(tracker[name])
            except KeyError:
                continue
        raise KeyError(name)


class LazyCode:
    """The code of a unit, compiled at most once in a process: by a worker after `begin`, or by whoever needs it first."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.lock = unit, threading.Lock()
        self.built: Code | None = None

    def code(self) -> Code:
        with _building.one_more(), self.lock:
            if self.built is None:
                self.built = build([self.unit])
            return self.built

    def begin(self) -> None:
        if self.built is None and not self.lock.locked():
            workers().submit(self.code)

    def __getitem__(self, name: str) -> int:
        return self.code()[name]


def build(units: Sequence[Unit]) -> Code:
    objects = [object_code(units[0])] if len(units) == 1 else list(workers().map(object_code, units))
    return Code([load(code, unit.imports, unit.exports) for unit, code in zip(units, objects)])


def load(code: bytes, imports: Mapping[str, int], exports: Sequence[str]) -> Any:
    """By our own loader, or by LLVM's linker where that does not know the kind of object."""
    try:
        return loader.load(code, imports, exports)
    except loader.LoadError:
        return compiler().linked(code, imports, exports, f"airgraph_{next(_names)}")


def object_code(unit: Unit) -> bytes:
    key = unit.key()
    digest = bytes.fromhex(key.digest)
    if unit.name:
        NAMED[unit.name] = unit
    found = OBJECTS.get(digest)
    if found is None:
        found = open_cache().made("object", key, lambda: compiler().compiled(unit.source(), unit.exports))
        OBJECTS.put(digest, found)
    return found


def compiler() -> ModuleType:
    """LLVM is imported by the first thread that compiles something."""
    with _importing:
        from airgraph.engine.native.llvm import compiler
    return compiler


def named_objects() -> dict[str, bytes]:
    """The object code of all units with a name that this process uses, by digest; what is gone is compiled again."""
    return {unit.key().digest: object_code(unit) for unit in list(NAMED.values())}


def known_object(digest: str) -> bytes | None:
    """Object code that this process or an earlier one compiled, by the digest of its key."""
    return OBJECTS.get(bytes.fromhex(digest)) or open_cache().get("object", Key.known(digest))


class ObjectCache:
    """Object files by the digest of their key, so that equal modules are compiled once; LRU eviction by bytes."""

    def __init__(self) -> None:
        self.files: dict[bytes, bytes] = {}
        self.bytes = 0
        self.lock = held_at_fork(threading.Lock(), Depth.LLVM)

    def get(self, key: bytes) -> bytes | None:
        with self.lock:
            found = self.files.pop(key, None)
            if found is not None:
                self.files[key] = found
            return found

    def put(self, key: bytes, file: bytes) -> None:
        with self.lock:
            self.bytes += len(file) - len(self.files.pop(key, b""))
            self.files[key] = file
            while self.bytes > OBJECT_BYTES and len(self.files) > 1:
                self.bytes -= len(self.files.pop(next(iter(self.files))))


OBJECTS = ObjectCache()


@cache
def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="airgraph-llvm")


os.register_at_fork(after_in_child=workers.cache_clear)
