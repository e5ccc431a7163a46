"""LLVM modules into one object file for any CPU, and that into a shared library where a linker is at hand."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airgraph.engine.native.llvm.compiler import emit, inside_llvm, llvm, unlocked
from airgraph.engine.native.llvm.cpu import BuildTarget
from airgraph.engine.native.llvm.machine import PASSES

LAST_PASSES = ("global_dead_code_eliminate",)


def object_file(texts: Sequence[str], exports: Sequence[str], cpu: BuildTarget) -> bytes:
    """Whatever is not exported is local to the object, and left out where nothing needs it."""
    machine = machine_for(cpu)
    context = llvm.create_context()
    module, *others = [llvm.parse_assembly(text, context=context) for text in texts]
    for other in others:
        module.link_in(other)
    module.data_layout, module.triple = str(machine.target_data), machine.triple
    module.name = exports[0]
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in exports:
            value.linkage = "internal"
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    manager = llvm.create_new_module_pass_manager()
    for name in (*PASSES, *LAST_PASSES):
        getattr(manager, f"add_{name}_pass")()
    with inside_llvm():
        unlocked("LLVMPY_RunNewModulePassManager")(manager, module, builder)
    return emit(machine, module, use_object=True)


def machine_for(cpu: BuildTarget) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if cpu.triple is None:
        target, name = llvm.Target.from_default_triple(), llvm.get_host_cpu_name()
        return target.create_target_machine(
            cpu=name, features=llvm.get_host_cpu_features().flatten(), opt=2, reloc="pic"
        )
    return llvm.Target.from_triple(cpu.triple).create_target_machine(cpu=cpu.cpu, opt=2, reloc="pic")


def shared_library(objects: Sequence[Path], library: Path, cpu: BuildTarget) -> str | None:
    """Links it; why it could not, else None."""
    linker = next((path for name in cpu.linkers if (path := shutil.which(name))), None)
    if linker is None:
        return f"no linker here: none of {', '.join(cpu.linkers)}"
    command = [linker, "-shared", "-o", str(library), *map(str, objects), "-lm", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() or f"{linker} failed" if done.returncode else None
