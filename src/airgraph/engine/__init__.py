"""The engines, in the order in which engine="auto" tries them.

    for engine in candidates("auto", device, mode): engine.load(replace(request, plan=engine.plan(request)))

An engine is a class that follows `protocol.Engine`, or the place of one ("module:class"), which is imported when it is
needed: `import airgraph` loads neither LLVM nor Triton. Others add theirs with `register_engine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from airgraph.config import KNOBS
from airgraph.engine.protocol import Engine
from airgraph.errors import ConfigError

ENGINES: dict[str, Engine | str] = {
    "native": "airgraph.engine.native:NativeEngine",
    "cuda": "airgraph.engine.cuda:CudaEngine",
    "reference": "airgraph.engine.reference:ReferenceEngine",
}
Note = Callable[[str], Any]
LAST = "reference"  # serves every graph


def register_engine(engine: Engine) -> None:
    """Adds an engine to the table, before the last one: engine="auto" takes it where it serves and none before it does."""
    last = ENGINES.pop(LAST)
    ENGINES[engine.name] = engine
    ENGINES[LAST] = last


def find_engine(name: str) -> Engine:
    row = ENGINES.get(name)
    if row is None:
        raise ConfigError(f"engine cannot be {name!r}", where={"allowed": ", ".join(map(repr, ("auto", *ENGINES)))})
    if isinstance(row, str):
        module, _, attribute = row.partition(":")
        row = ENGINES[name] = getattr(importlib.import_module(module), attribute)()
    return row


def candidates(name: str, device: torch.device, mode: str, note: Note = str) -> Iterator[Engine]:
    """The engines to try, in order; `note` is told why others are left out.

    One that is asked for by name, by the option or by AIRGRAPH_ENGINE (for graphs on the CPU), is not asked whether it
    serves: it raises `UnsupportedPlan` if it cannot run the graph, and the last one of the table does.
    """
    if name == "auto" and device.type == "cpu":
        name = KNOBS["AIRGRAPH_ENGINE"].get() or "auto"
    if name not in ("auto", LAST):
        yield find_engine(name)
    for engine in map(find_engine, list(ENGINES) if name == "auto" else [LAST]):
        reason = engine.serves(device, mode)
        if reason is None:
            yield engine
        else:
            note(f"not {engine.name}: {reason}")


def warm_up(name: str, device: torch.device, mode: str) -> None:
    """Let the engine that will probably be chosen prepare itself, while PyTorch reads the model."""
    next(candidates(name, device, mode)).warm_up()
