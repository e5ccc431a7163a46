"""A compiled method as a file: its graph and how it is called, without its weights.

    write_method(path, stored, owned, {"name": "Model.decode", ...})
    stored = read_method(path, state_of(module))

The weights are those of the module it is loaded for, by their names; only constants that belong to no module are kept. The
file is an `.air` file (`store.export`) but for that, readable only by its owner, and data like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from airgraph.errors import ExportError
from airgraph.ir.exact import DataWriter
from airgraph.ir.proto import ModelDef
from airgraph.ir.stored import EXTRA, write_graph
from airgraph.store.air_file import read_air, write_air
from airgraph.store.convention import FUNCTIONS, VERSION, StoredModel, describe
from airgraph.store.export import place_weights, refuse_calls
from airgraph.store.load_export import read_export


def write_method(path: Path, stored: StoredModel, owned: Collection[str], about: Mapping[str, str]) -> None:
    """`owned`: weights that are the module's. `about`: what people want to know of it, and what makes it stale."""
    message = method_message(stored, owned, path.parent, about)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        write_air(path, message, 0o600)
    except OSError as error:
        raise ExportError(f"{path} could not be written", where={"reason": str(error)}) from error


def method_message(stored: StoredModel, owned: Collection[str], folder: Path, about: Mapping[str, str]) -> Any:
    """A `ge.proto.ModelDef`, in which the weights that are `owned` have only names."""
    refuse_calls(stored.graph)
    writer = DataWriter(FUNCTIONS)
    graph = write_graph(stored.graph, writer)
    place_weights(graph, stored, {}, {}, folder, owned)
    message = ModelDef(name=folder.name, version=VERSION, graph=[graph])
    message.attr[EXTRA].s = json.dumps({**describe(stored, writer), "about": dict(about)}, ensure_ascii=False).encode()
    return message


def read_method(path: Path, state: Mapping[str, torch.Tensor] | None = None) -> StoredModel:
    """Without `state`, to be looked at: tensors of the device meta stand for the weights."""
    refuse_foreign(path)
    return read_export(path, weights=state is not None, state=state)


def about(path: Path) -> dict[str, str]:
    message = read_air(path)
    found: Any = json.loads(message.attr[EXTRA].s) if EXTRA in message.attr else {}
    told = found.get("about") if isinstance(found, dict) else None
    return {str(k): str(v) for k, v in told.items()} if isinstance(told, dict) else {}


def refuse_foreign(path: Path) -> None:
    """Only a file that nobody else could have written."""
    status = path.lstat()
    if path.is_symlink() or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()) or status.st_mode & 0o022:
        raise ExportError(f"{path} is a link, belongs to somebody else, or others can write to it")
