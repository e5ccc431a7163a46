"""`torchair.inference`: sizes by gears."""

from __future__ import annotations

from typing import Any

from airgraph.compat.torchair.inference.gears import set_dim_gears

__all__ = ["set_dim_gears"]

LATER = ("cache_compile", "readable_cache")


def __getattr__(name: str) -> Any:
    if name in LATER:
        raise AttributeError(
            f"torchair.inference.{name} is not available in this version of airgraph: see docs/torchair.md"
        )
    raise AttributeError(f"module 'torchair.inference' has no attribute {name!r}")
