"""What this CPU offers, by its features rather than by the name of the platform."""

from __future__ import annotations

import platform
from functools import cache

import llvmlite.binding as llvm


@cache
def vector_lanes() -> int:
    """The floats in the widest vector register: 16 with AVX-512, 8 on another x86-64, 4 on Arm."""
    if not is_x86_64():
        return 4
    return 16 if llvm.get_host_cpu_features().get("avx512f") else 8


@cache
def is_x86_64() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
