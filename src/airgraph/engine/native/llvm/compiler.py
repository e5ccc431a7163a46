"""LLVM, through llvmlite: text in, object code out; and its own linker, where ours (loader.py) cannot load an object.

This module is imported when something is compiled. A process that finds all object code in the cache never does.

llvmlite holds one lock around every call into LLVM, although LLVM needs none while each thread has a context of its own;
the two calls that take long go around that lock. A fork waits until no thread is inside LLVM, and the child starts threads
of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

from airgraph.config import KNOBS
from airgraph.engine.native.llvm.machine import PASSES, SETTINGS
from airgraph.locks import Depth, Inside, held_at_fork

_local = threading.local()


def linked(code: bytes, imports: Mapping[str, int], exports: Sequence[str], name: str) -> Any:
    """Loaded by LLVM's own linker."""
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for symbol, address in imports.items():
        builder.import_symbol(symbol, address)
    for symbol in exports:
        builder.export_symbol(symbol)
    return builder.link(jit(), name)


def compiled(text: str, exports: Sequence[str] = ()) -> bytes:
    """The object code of a module; `exports`: of these functions, and of what they need."""
    machine, module = optimised(text, exports)
    return emit(machine, module, use_object=True)


def assembly(text: str) -> str:
    """The machine instructions of a module, for people and for tests."""
    return emit(*optimised(text), use_object=False).decode()


def optimised(text: str, exports: Sequence[str] = ()) -> tuple[Any, Any]:
    """What loop code profits from, and no more: loops come vectorised, LLVM's O2 would only cost time. `exports`: the only
    functions that others see; none: as the text says."""
    machine = thread_machine()
    module = llvm.parse_assembly(text, context=llvm.create_context())
    if KNOBS["AIRGRAPH_VERIFY"].on():
        module.verify()
    for function in module.functions if exports else ():
        if not function.is_declaration and function.name not in exports:
            function.linkage = "internal"
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
class LlvmliteLock:
    """What llvmlite holds during a call into LLVM."""

    def acquire(self) -> None:
        ffi.lib._lock.__enter__()

    def release(self) -> None:
        ffi.lib._lock.__exit__()


held_at_fork(LlvmliteLock(), Depth.LLVM)
inside_llvm = held_at_fork(Inside(), Depth.COMPILING).one_more  # without llvmlite's lock


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
