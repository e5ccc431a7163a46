"""What a pass says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from airgraph.ir.graph import Graph


@dataclass(frozen=True)
class PassResult:
    changed: bool
    notes: list[str] = field(default_factory=list)


Pass = Callable[[Graph], PassResult]
