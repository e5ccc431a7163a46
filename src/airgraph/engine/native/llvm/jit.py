"""LLVM text in, machine code out.

    code = build([Unit("define void @f(ptr %x) {...}", exports=("f",))])
    code["f"]                                        → the address of f, as long as `code` lives

Units are compiled side by side, one thread for each core. llvmlite holds one lock around every call into LLVM, although
LLVM needs none while each thread has a context of its own; the two calls that take long go around that lock. A fork waits
until no thread is inside LLVM, and the child starts threads of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite.binding import ffi

from airgraph.config import KNOBS
from airgraph.disk_cache import Key, open_cache
from airgraph.locks import Depth, held_at_fork

PASSES = ("always_inliner", "sroa", "instruction_combine", "new_gvn", "simplify_cfg")
SETTINGS = {"opt": 2, "reloc": "pic", "jit": True}  # of a target machine
_names = itertools.count()
_local = threading.local()
OBJECT_BYTES = 16 << 20  # of object files that are kept


@dataclass(frozen=True)
class Unit:
    """One LLVM module: its text, the functions to be found in it, and the addresses of those it only declares."""

    text: str
    exports: tuple[str, ...]
    imports: Mapping[str, int] = field(default_factory=dict)


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


def build(units: Sequence[Unit]) -> Code:
    objects = (
        [object_code(units[0].text)] if len(units) == 1 else list(workers().map(object_code, (u.text for u in units)))
    )
    return Code([load(unit, code) for unit, code in zip(units, objects)])


def load(unit: Unit, code: bytes) -> Any:
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for name, address in unit.imports.items():
        builder.import_symbol(name, address)
    for name in unit.exports:
        builder.export_symbol(name)
    return builder.link(jit(), f"airgraph_{next(_names)}")


def object_code(text: str) -> bytes:
    key = hashlib.sha256(text.encode()).digest()
    found = OBJECTS.get(key)
    if found is None:
        found = open_cache().made("object", Key(text=text, **target()), lambda: compiled(text))
        OBJECTS.put(key, found)
    return found


class ObjectCache:
    """Object files by the digest of their text, so that equal modules are compiled once; LRU eviction by bytes."""

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


def compiled(text: str) -> bytes:
    machine, module = optimised(text)
    return emit(machine, module, use_object=True)


@cache
def target() -> dict[str, str]:
    """Everything but its text that the object code of a module depends on."""
    return {
        "triple": llvm.get_default_triple(),
        "cpu": llvm.get_host_cpu_name(),
        "features": llvm.get_host_cpu_features().flatten(),
        "llvmlite": llvmlite.__version__,
        "llvm": ".".join(map(str, llvm.llvm_version_info)),
        "passes": f"{' '.join(PASSES)}, {SETTINGS}",
    }


def assembly(text: str) -> str:
    """The machine instructions of a module, for people and for tests."""
    return emit(*optimised(text), use_object=False).decode()


def optimised(text: str) -> tuple[Any, Any]:
    """What loop code profits from, and no more: loops come vectorised, LLVM's O2 would only cost time."""
    machine = thread_machine()
    module = llvm.parse_assembly(text, context=llvm.create_context())
    if KNOBS["AIRGRAPH_VERIFY"].on():
        module.verify()
    module.data_layout, module.triple = str(machine.target_data), machine.triple
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    manager = llvm.create_new_module_pass_manager()
    for name in PASSES:
        getattr(manager, f"add_{name}_pass")()
    with inside_llvm():
        unlocked("LLVMPY_RunNewModulePassManager")(manager, module, builder)
    return machine, module


def emit(machine: Any, module: Any, use_object: bool) -> bytes:
    with ffi.OutputString() as error:
        with inside_llvm():
            buffer = unlocked("LLVMPY_TargetMachineEmitToMemory")(machine, module, int(use_object), error)
        if not buffer:
            raise RuntimeError(str(error))
    try:
        start, size = ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer)
        return ctypes.string_at(start, size)
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def unlocked(name: str) -> Any:
    """A function of LLVM without llvmlite's lock (with it, where a later llvmlite keeps it elsewhere)."""
    function = getattr(ffi.lib, name)
    return getattr(function, "_cfn", function)


# -- forks ----------------------------------------------------------------------------------------------------------
class Inside:
    """How many threads are inside LLVM without llvmlite's lock; whoever forks waits until there are none."""

    def __init__(self) -> None:
        self.count, self.changed = 0, threading.Condition()

    def acquire(self) -> None:
        self.changed.acquire()
        self.changed.wait_for(lambda: self.count == 0)

    def release(self) -> None:
        self.changed.release()

    def add(self, number: int) -> None:
        with self.changed:
            self.count += number
            self.changed.notify_all()


class LlvmliteLock:
    """What llvmlite holds during a call into LLVM."""

    def acquire(self) -> None:
        ffi.lib._lock.__enter__()

    def release(self) -> None:
        ffi.lib._lock.__exit__()


held_at_fork(LlvmliteLock(), Depth.LLVM)
_inside = held_at_fork(Inside(), Depth.COMPILING)


@contextmanager
def inside_llvm() -> Iterator[None]:
    _inside.add(1)
    try:
        yield
    finally:
        _inside.add(-1)


# -- one of each ----------------------------------------------------------------------------------------------------
@cache
def initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def new_machine() -> Any:
    """(On x86-64 code and what it calls may lie more than 2 GiB apart, which only the large model can reach.)"""
    initialise()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    reach = "large" if "x86_64" in llvm.get_default_triple() else "small"
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, codemodel=reach, **SETTINGS)


def thread_machine() -> Any:
    if not hasattr(_local, "machine"):
        _local.machine = new_machine()
    return _local.machine


@cache
def jit() -> Any:
    return llvm.create_lljit_compiler(new_machine(), use_jit_link=False, suppress_errors=True)


@cache
def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="airgraph-llvm")


os.register_at_fork(after_in_child=workers.cache_clear)
