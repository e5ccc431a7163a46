"""The parameters and buffers of a model as they are now, not as they were when it was compiled.

`m.weight = nn.Parameter(...)`, `load_state_dict(assign=True)` and `m.layer = nn.Linear(...)` put other tensors into the
dictionaries of the modules. Every call therefore asks whether one of those dictionaries has changed
(engine/native/dict_watch.py), and reads them again if so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from airgraph.engine.native.dict_watch import DictWatch, Row
from airgraph.errors import BindError


class LiveState:
    """Reads the state by its names; constants of the graph are no part of the model and stay."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self.model = model
        self.names = list(names)
        held = {
            name for part in (model.named_parameters, model.named_buffers) for name, _ in part(remove_duplicate=False)
        }
        self.constants = {name: tensor for name, tensor in zip(names, tensors) if name not in held}
        self.now = self.look_up()

    def read(self) -> list[torch.Tensor]:
        """The caller must not change the list: the next call gets the same one."""
        return self.watched()[1]

    def watched(self) -> tuple[DictWatch, list[torch.Tensor]]:
        """What is read, and what notices that it is read no more."""
        now = self.now
        if not now[0].unchanged():
            now = self.now = self.look_up()
        return now

    def look_up(self) -> tuple[DictWatch, list[torch.Tensor]]:
        rows: dict[str, Row] = {}  # by the name of a module or tensor
        tensors = [self.constants[name] if name in self.constants else self.find(name, rows) for name in self.names]
        return DictWatch(list(rows.values())), tensors

    def find(self, name: str, rows: dict[str, Row]) -> torch.Tensor:
        """A tensor; where it and the modules on the way to it were found goes into `rows`."""
        module, path = self.model, name.split(".")
        for depth, part in enumerate(path[:-1], 1):
            child = module._modules.get(part)
            if child is None:
                raise self.missing(name)
            rows[".".join(path[:depth])] = (module._modules, part, child)
            module = child
        for owner in (module._parameters, module._buffers):
            tensor = owner.get(path[-1])
            if tensor is not None:
                rows[name] = (owner, path[-1], tensor)
                return tensor
        raise self.missing(name)

    def missing(self, name: str) -> BindError:
        return BindError(f"the model no longer has {name!r}, which it was compiled with", hint="compile it again")
