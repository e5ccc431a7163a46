"""What a pass says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from airgraph.ir.graph import Graph


@dataclass(frozen=True)
class PassResult:
    changed: bool
    notes: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)  # rule → how often it rewrote something
    refused: Counter[str] = field(default_factory=Counter)  # rule → how often it fitted and did not


Pass = Callable[[Graph], PassResult]
