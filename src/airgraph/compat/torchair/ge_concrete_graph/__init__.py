"""`torchair.ge_concrete_graph`: what `torchair._ge_concrete_graph` was called once. Using it warns, once a module."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

_warned: set[str] = set()


def now_in(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose contents are elsewhere by now."""
    old, new = f"torchair.ge_concrete_graph.{module}", f"torchair._ge_concrete_graph.{module}"

    def look_up(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"airgraph.compat.{new}"), name)
        if module not in _warned:
            _warned.add(module)
            warnings.warn(f"{old} is an old name of {new}", DeprecationWarning, stacklevel=2)
        return found

    return look_up
