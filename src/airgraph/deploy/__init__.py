"""Programs without Python: planned graphs as object files with a C interface, beside the file of their weights.

    build_stored({"model": (c, stored)}, Path("out"), "model", "host")     out/model.o  model.h  weights.bin  libmodel.so

`program` turns the frame and the kernels of the native engine into LLVM modules, `runtime` and `pool` are what the engine
leaves to Python and PyTorch (arguments, memory, threads), `objects` compiles it all for a CPU, `interface` is what C sees.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from airgraph.compilation import Compilation
from airgraph.deploy.interface import header, interface_of
from airgraph.deploy.objects import object_file, shared_library
from airgraph.deploy.program import BuildExecutable, ProgramWriter
from airgraph.deploy.weights import WeightsFile
from airgraph.engine.native import NativeEngine
from airgraph.engine.native.llvm.cpu import build_target
from airgraph.engine.native.target import this_cpu
from airgraph.errors import BuildError
from airgraph.pipeline import optimised
from airgraph.plan.widening import HALVES
from airgraph.store.convention import StoredModel
from airgraph.torch_types import TORCH_TYPES

WEIGHTS = "weights.bin"


Begun = tuple[Compilation, StoredModel]


def build_stored(entries: Mapping[str, Begun], folder: Path, name: str, target: str) -> Path:
    """Writes the files, for the CPU that this process writes kernels for. `entries`: by the names that their C functions
    begin with; `name`: of the library. What was there before stays until all new files are complete."""
    for prefix in (name, *entries):
        if not re.fullmatch(r"[a-z]\w*", prefix, re.ASCII):
            raise BuildError(f"{prefix!r} cannot begin the names of C functions", hint="letters, as in `model`")
    programs = {prefix: planned_program(c, stored) for prefix, (c, stored) in entries.items()}
    plain = frozenset[int]().union(*(executable.plain() for executable in programs.values()))
    writers = {
        prefix: program_writer(executable, entries[prefix][1], plain, prefix) for prefix, executable in programs.items()
    }
    weights, cpu = WeightsFile([writer.placed for writer in writers.values()]), build_target()
    objects = {}
    for prefix, writer in writers.items():
        program = writer.program(weights)
        objects[prefix] = object_file(program.texts, program.exports, cpu)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as temporary:
        new = Path(temporary)
        with open(new / WEIGHTS, "wb") as file:
            file.writelines(weights.pieces())
        for prefix, code in objects.items():
            (new / f"{prefix}.o").write_bytes(code)
            (new / f"{prefix}.h").write_text(header(prefix, writers[prefix].interface, target))
        if name not in objects:
            (new / f"{name}.h").write_text("".join(f'#include "{prefix}.h"\n' for prefix in objects))
        reason = shared_library([new / f"{prefix}.o" for prefix in objects], new / f"lib{name}.so", cpu)
        if reason is not None:
            for c, _ in entries.values():
                c.journal.remark(f"lib{name}.so is not written: {reason}")
        for path in sorted(new.iterdir()):
            os.replace(path, folder / path.name)
    return folder


def planned_program(c: Compilation, stored: StoredModel) -> BuildExecutable:
    request = optimised(c, stored.graph, stored.boundary, torch.device("cpu"))
    plan = NativeEngine().plan(
        request,
        replace(
            this_cpu(), widens=HALVES, widens_convolutions=HALVES, widens_attention=HALVES, widen_rows=1, multiplies=()
        ),
    )  # a C program has no PyTorch to leave any to
    return BuildExecutable(replace(request, plan=plan), stored.contract, stored.weights)


def program_writer(
    executable: BuildExecutable, stored: StoredModel, plain: frozenset[int], prefix: str
) -> ProgramWriter:
    """`plain`: the addresses of weights that one of the programs reads or writes as they are."""
    executable.lay_out(plain)
    dtypes = [TORCH_TYPES[value.dtype] for value in executable.plan.output_values]
    written = [i for i, a in enumerate(stored.boundary.arguments) if a.name in executable.written]
    interface = interface_of(stored.boundary, len(stored.weights), stored.contract, written, dtypes)
    return ProgramWriter(executable, interface, prefix)
