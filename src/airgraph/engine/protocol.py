"""What a program needs of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from airgraph.ir.graph import Graph

Symbols = dict[Any, Any]  # sympy symbol → its value in this call


class Executable(Protocol):
    """A graph made ready to run on one device."""

    graph: Graph

    def run(
        self, inputs: Mapping[str, Any], symbols: Symbols
    ) -> tuple[Sequence[Any], Sequence[tuple[str, torch.Tensor]]]:
        """`inputs` by the names of the Data nodes. Gives the values of NetOutput, and the writes: (Data name, new value).

        Sizes that only running can tell (of `nonzero`, say) are added to `symbols`.
        """
        ...


@runtime_checkable
class Planned(Protocol):
    """An executable that was planned before it was compiled."""

    plan: Any


class Engine(Protocol):
    name: str

    def has_kernel(self, op: str) -> bool: ...

    def load(self, graph: Graph, device: torch.device) -> Executable: ...
