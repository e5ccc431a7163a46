"""Programs without Python: a planned graph as an object file with a C interface, beside the file of its weights.

    build_stored(stored, Path("out"), name="model")         out/model.o  model.h  weights.bin  libmodel.so

`program` turns the frame and the kernels of the native engine into LLVM modules, `runtime` and `pool` are what the engine
leaves to Python and PyTorch (arguments, memory, threads), `objects` compiles it all for a CPU, `interface` is what C sees.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from airgraph.compilation import Compilation
from airgraph.deploy.interface import header, interface_of
from airgraph.deploy.objects import object_file, shared_library
from airgraph.deploy.program import BuildExecutable, ProgramWriter
from airgraph.engine.native import NativeEngine
from airgraph.engine.native.llvm.cpu import build_target
from airgraph.engine.native.target import this_cpu
from airgraph.errors import BuildError
from airgraph.pipeline import optimised
from airgraph.plan.widening import HALVES
from airgraph.store.convention import StoredModel
from airgraph.torch_types import TORCH_TYPES


def build_stored(c: Compilation, stored: StoredModel, folder: Path, name: str, target: str) -> list[str]:
    """Writes the files, for the CPU that this process writes kernels for; gives remarks for people."""
    if not re.fullmatch(r"[a-z]\w*", name, re.ASCII):
        raise BuildError(f"{name!r} cannot begin the names of C functions", hint="lower-case letters, as in `model`")
    request = optimised(c, stored.graph, stored.boundary, torch.device("cpu"))
    plan = NativeEngine().plan(
        request, replace(this_cpu(), widens=HALVES)
    )  # a C program has no PyTorch to leave any to
    executable = BuildExecutable(replace(request, plan=plan), stored.contract)
    dtypes = [TORCH_TYPES[value.dtype] for value in plan.output_values]
    written = [i for i, a in enumerate(stored.boundary.arguments) if a.name in executable.written]
    interface = interface_of(stored.boundary, len(stored.weights), stored.contract, written, dtypes)
    program = ProgramWriter(executable, interface, stored.weights, name).program()
    folder.mkdir(parents=True, exist_ok=True)
    cpu = build_target()
    object = folder / f"{name}.o"
    object.write_bytes(object_file(program.texts, program.exports, cpu))
    (folder / f"{name}.h").write_text(header(name, interface, target))
    program.weights.write(folder / "weights.bin")
    reason = shared_library(object, folder / f"lib{name}.so", cpu)
    return [] if reason is None else [f"lib{name}.so is not written: {reason}"]
