"""What this CPU offers, by its features rather than by the name of the platform."""

from __future__ import annotations

import platform
import re
from functools import cache

from airgraph.engine.native.llvm.machine import machine


@cache
def vector_lanes() -> int:
    """The floats in the widest vector register: 16 with AVX-512, 8 on another x86-64, 4 on Arm."""
    if not is_x86_64():
        return 4
    return 16 if "avx512f" in re.split("[ ,+]", machine()["features"]) else 8


@cache
def is_x86_64() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
