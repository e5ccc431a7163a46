"""Programs for machines without Python: `airgraph.build`.

    fast = airgraph.compile(model, (x,))
    airgraph.build(fast, "out")                       out/model.o  model.h  weights.bin  libmodel.so
    airgraph.build("model.air", "out", target="aarch64")

Kernels are written for one CPU in a process, so that another target is built in a child process from a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from airgraph.api import exported_graph, make_config
from airgraph.capture.compiled import CompiledModel
from airgraph.config import KNOBS, Config
from airgraph.deploy import build_stored
from airgraph.engine.native.llvm.cpu import TARGETS
from airgraph.errors import BuildError, ConfigError, did_you_mean
from airgraph.pipeline import Compilation
from airgraph.store.convention import StoredModel


def build(
    model: CompiledModel | str | Path,
    out: str | Path,
    *,
    target: str = "host",
    name: str = "model",
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Writes the model as an object file with a C interface, a header and a file of weights; gives back the folder.

        airgraph.build(airgraph.compile(model, (x,)), "out")

    `model` is compiled (`airgraph.compile`) or a file (`airgraph.export`). `target`: host, x86-64-v3, x86-64-v4 or
    aarch64. `name` begins the names of the files and of the C functions. What C cannot have is a `BuildError`:
    docs/deploy.md lists it.
    """
    if target not in TARGETS:
        raise ConfigError(f"no target {target!r}{did_you_mean(target, TARGETS)}", where={"targets": ", ".join(TARGETS)})
    chosen, folder = make_config(config, options), Path(out)
    if target != KNOBS["AIRGRAPH_BUILD_TARGET"].get():
        build_in_child(model, folder, target, name, chosen)
        return folder
    c = Compilation.begin("inference", chosen, 0)
    stored = exported_graph(model.exported, chosen) if isinstance(model, CompiledModel) else stored_file(c, model)
    for remark in build_stored(c, stored, folder, name, target):
        c.journal.remark(remark)
    return folder


def stored_file(c: Compilation, path: str | Path) -> StoredModel:
    """The model of a file, on the CPU. The sizes that it states are checked, as far as they can be before a call."""
    from airgraph.store.load_export import moved, read_export
    from airgraph.store.rehearsal import rehearsal_of

    stored = moved(read_export(path), "cpu", c.journal.remark)
    rehearsal_of(stored, str(path), c.journal.remark)
    return stored


def build_in_child(model: CompiledModel | str | Path, folder: Path, target: str, name: str, config: Config) -> None:
    from airgraph.store.export import ExportTarget, write_export

    with tempfile.TemporaryDirectory() as temporary:
        if isinstance(model, CompiledModel):
            stored = exported_graph(model.exported, config)
            model = write_export(stored, ExportTarget(temporary, "model"))
        command = [sys.executable, "-m", "airgraph", "build", str(model), "-o", str(folder), "--name", name]
        command += ["--target", target]
        done = subprocess.run(command, env={**os.environ, "AIRGRAPH_BUILD_TARGET": target}, stderr=subprocess.PIPE)
    if done.returncode:
        raise BuildError(f"the build for {target} failed", where={"reason": done.stderr.decode().strip()})
