"""The parameters and buffers of a model as they are now, not as they were when it was compiled.

`m.weight = nn.Parameter(...)`, `load_state_dict(assign=True)` and `m.layer = nn.Linear(...)` put other tensors into the
dictionaries of the modules. Every call therefore reads those dictionaries: 40 ns for each tensor and each module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from airgraph.errors import BindError

NONE = id(None)


class LiveState:
    """Reads the state by its names; constants of the graph are no part of the model and stay."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self.model = model
        self.names = list(names)
        held = {
            name for part in (model.named_parameters, model.named_buffers) for name, _ in part(remove_duplicate=False)
        }
        self.constants = {name: tensor for name, tensor in zip(names, tensors) if name not in held}
        self.look_up()

    def look_up(self) -> None:
        self.modules: dict[str, tuple[Mapping[str, Any], str, Any]] = {}  # (the parent's, name there, what was found)
        self.places = [self.place(name) for name in self.names]
        self.found = list(self.modules.values())

    def place(self, name: str) -> tuple[Mapping[str, torch.Tensor], str]:
        """The dictionary that holds a tensor, and its name there."""
        if name in self.constants:
            return self.constants, name
        module, path = self.model, name.split(".")
        for depth, part in enumerate(path[:-1], 1):
            child = module._modules.get(part)
            if child is None:
                raise self.missing(name)
            self.modules[".".join(path[:depth])] = (module._modules, part, child)
            module = child
        for owner in (module._parameters, module._buffers):
            if owner.get(path[-1]) is not None:
                return owner, path[-1]  # type: ignore[return-value]
        raise self.missing(name)

    def missing(self, name: str) -> BindError:
        return BindError(f"the model no longer has {name!r}, which it was compiled with", hint="compile it again")

    def read(self) -> list[torch.Tensor]:
        for parent, name, module in self.found:
            if parent.get(name) is not module:
                self.look_up()
                break
        try:
            tensors = [owner[name] for owner, name in self.places]
        except KeyError:
            self.look_up()
            return [owner[name] for owner, name in self.places]
        if NONE in map(id, tensors):  # by identity: `==` of a tensor is an op of PyTorch's
            raise self.missing(next(name for name, tensor in zip(self.names, tensors) if tensor is None))
        return tensors
