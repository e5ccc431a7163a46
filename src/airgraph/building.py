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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airgraph.api import make_config
from airgraph.artifacts import ONLY, captured_graph, checked_name, graph_entry, versions
from airgraph.capture.compiled import CompiledModel
from airgraph.capture.model_call import as_model
from airgraph.compilation import Compilation
from airgraph.config import KNOBS, Config
from airgraph.deploy import Begun, build_stored
from airgraph.engine.native.llvm.cpu import TARGETS
from airgraph.errors import BuildError, ConfigError, did_you_mean
from airgraph.store.artifact import Artifact, write_artifact
from airgraph.store.load_export import moved, read_export
from airgraph.store.rehearsal import rehearsal_of


def build(
    model: CompiledModel | Mapping[str, CompiledModel] | str | Path,
    out: str | Path,
    *,
    target: str = "host",
    name: str = "model",
    entry: str | None = None,
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Writes the model as an object file with a C interface, a header and a file of weights; returns the folder.

        airgraph.build(airgraph.compile(model, (x,)), "out")
        airgraph.build({"prefill": prefill, "decode": decode}, "out")     compiled models that share their weights

    `model` is compiled (`airgraph.compile`) or a file (`airgraph.save`, `airgraph.export`). Of several entry points each
    gets an object and a header of its own, unless `entry` names one of them; all share one file of weights. `target`: host,
    x86-64-v3, x86-64-v4 or aarch64. `name` begins the names of the files and of the C functions. What C cannot express is a
    `BuildError`: docs/deploy.md lists it.
    """
    if target not in TARGETS:
        raise ConfigError(f"no target {target!r}{did_you_mean(target, TARGETS)}", where={"targets": ", ".join(TARGETS)})
    folder, file = Path(out), Path(model) if isinstance(model, str | Path) else None
    here = target == KNOBS["AIRGRAPH_BUILD_TARGET"].get()
    if file is None:
        begun = {part: captured(compiled, config, options) for part, compiled in wanted(model, entry).items()}
    elif here:
        begun = read_file(file, entry, make_config(config, options))
    if here:
        return build_stored(
            {f"{name}_{part}" if len(begun) > 1 else name: b for part, b in begun.items()}, folder, name, target
        )
    with tempfile.TemporaryDirectory() as temporary:
        if file is None:
            file, entry = Path(temporary) / "model.airp", None
            write_artifact(file, {part: graph_entry(stored) for part, (_, stored) in begun.items()}, versions())
        build_in_child(file, folder, target, name, entry)
    return folder


def wanted(model: Any, entry: str | None) -> Mapping[str, CompiledModel]:
    """Compiled models by the names of their entry points."""
    given = {checked_name(name): part for name, part in model.items()} if isinstance(model, Mapping) else {ONLY: model}
    parts = {name: as_model(part) for name, part in given.items()}
    for part in parts.values():
        if not isinstance(part, CompiledModel):
            raise ConfigError(f"a {type(part).__name__} is not compiled", hint="airgraph.compile(model, example)")
    if entry is not None and entry not in parts:
        raise ConfigError(f"no entry point {entry!r}", where={"entry points": ", ".join(parts)})
    return {entry: parts[entry]} if entry is not None else parts


def captured(model: CompiledModel, config: Config | None, options: Mapping[str, Any]) -> Begun:
    chosen = make_config(config or model.config, dict(options))
    return Compilation.begin("inference", chosen, 0), captured_graph(model.exported, chosen)


def read_file(path: Path, entry: str | None, config: Config) -> dict[str, Begun]:
    """The models of a file, on the CPU. The sizes that it states are checked, as far as they can be before a call."""
    if path.suffix == ".airp":
        artifact = Artifact.open(path)
        tensors = artifact.tensors()
        read = {name: artifact.stored(name, tensors) for name in ([entry] if entry else artifact.entries)}
    else:
        read = {ONLY: read_export(path)}
    found = {}
    for name, part in read.items():
        c = Compilation.begin("inference", config, 0)
        stored = moved(part, "cpu", c.journal.remark)
        rehearsal_of(stored, str(path), c.journal.remark)
        found[name] = (c, stored)
    return found


def build_in_child(file: Path, folder: Path, target: str, name: str, entry: str | None) -> None:
    command = [sys.executable, "-m", "airgraph", "build", str(file), "-o", str(folder), "--name", name]
    command += ["--target", target, *(["--entry", entry] if entry else [])]
    environment = {**os.environ, "AIRGRAPH_BUILD_TARGET": target}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        raise BuildError(f"the build for {target} failed", where={"reason": done.stderr.decode().strip()})
