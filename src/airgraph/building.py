"""Programs for machines without Python: `airgraph.build`.

    fast = airgraph.compile(model, (x,))
    airgraph.build(fast, "out")                       out/model.o  model.h  weights.bin  libmodel.so
    airgraph.build("model.airp", "out", target="aarch64")

Kernels are written for one CPU in a process, so that another target is built in a child process from a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from airgraph.api import exported_graph, make_config, refuse_modes
from airgraph.artifacts import as_compiled
from airgraph.capture.compiled import CompiledModel
from airgraph.compilation import Compilation
from airgraph.config import KNOBS, Config
from airgraph.deploy import build_stored
from airgraph.engine.native.llvm.cpu import TARGETS
from airgraph.errors import BuildError, ConfigError, did_you_mean
from airgraph.store.artifact import Artifact
from airgraph.store.convention import StoredModel
from airgraph.store.export import ExportTarget, write_export
from airgraph.store.load_export import moved, read_export
from airgraph.store.rehearsal import rehearsal_of


def build(
    model: CompiledModel | str | Path,
    out: str | Path,
    *,
    target: str = "host",
    name: str = "model",
    entry: str | None = None,
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Writes the model as an object file with a C interface, a header and a file of weights; gives back the folder.

        airgraph.build(airgraph.compile(model, (x,)), "out")

    `model` is compiled (`airgraph.compile`) or a file (`airgraph.save`, `airgraph.export`), of whose entry points `entry`
    is built. `target`: host, x86-64-v3, x86-64-v4 or aarch64. `name` begins the names of the files and of the C functions.
    What C cannot have is a `BuildError`: docs/deploy.md lists it.
    """
    if target not in TARGETS:
        raise ConfigError(f"no target {target!r}{did_you_mean(target, TARGETS)}", where={"targets": ", ".join(TARGETS)})
    compiled = model if isinstance(model, CompiledModel) else None
    chosen, folder = make_config(config or (compiled.config if compiled else None), options), Path(out)
    if target != KNOBS["AIRGRAPH_BUILD_TARGET"].get():
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) if compiled else Path(str(model))
            if compiled:
                path = write_export(stored_model(compiled, chosen), ExportTarget(temporary, "model"))
            build_in_child(path, folder, target, name, entry)
        return folder
    c = Compilation.begin("inference", chosen, 0)
    stored = stored_model(compiled, chosen) if compiled else stored_file(c, Path(str(model)), entry)
    for remark in build_stored(c, stored, folder, name, target):
        c.journal.remark(remark)
    return folder


def stored_model(model: CompiledModel, config: Config) -> StoredModel:
    refuse_modes(config)
    stored = exported_graph(model.exported, config)
    stored.contract.ranges = as_compiled(stored.contract.ranges)
    return stored


def stored_file(c: Compilation, path: Path, entry: str | None) -> StoredModel:
    """The model of a file, on the CPU. The sizes that it states are checked, as far as they can be before a call."""
    if path.suffix == ".airp":
        artifact = Artifact.open(path)
        if entry is None and len(artifact.entries) > 1:
            where = {"entry points": ", ".join(artifact.entries)}
            raise BuildError(f"{path} has several entry points", where=where, hint="--entry: one object for each")
        read = artifact.stored(entry or next(iter(artifact.entries)), artifact.tensors())
    else:
        read = read_export(path)
    stored = moved(read, "cpu", c.journal.remark)
    rehearsal_of(stored, str(path), c.journal.remark)
    return stored


def build_in_child(file: Path, folder: Path, target: str, name: str, entry: str | None) -> None:
    command = [sys.executable, "-m", "airgraph", "build", str(file), "-o", str(folder), "--name", name]
    command += ["--target", target, *(["--entry", entry] if entry else [])]
    environment = {**os.environ, "AIRGRAPH_BUILD_TARGET": target}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        raise BuildError(f"the build for {target} failed", where={"reason": done.stderr.decode().strip()})
