"""The CPU that kernels are written for: this machine's by its features, or another one that is built for.

Everything that depends on the CPU asks here. A process that builds for another CPU (`airgraph build --target`) has the
environment variable AIRGRAPH_BUILD_TARGET set from its start, since what was asked is remembered.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache

from airgraph.config import KNOBS
from airgraph.engine.native.llvm.machine import machine


@dataclass(frozen=True)
class BuildTarget:
    """A kind of CPU, as LLVM knows it. `lanes`: the floats in its widest vector register. None: as this machine has it."""

    triple: str | None
    cpu: str
    lanes: int | None
    linkers: tuple[str, ...]  # programs that make a shared library for it


X86_64, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
X86_MACHINES = ("x86_64", "amd64")  # as `platform` names them
NATIVE = ("cc", "gcc", "clang")
X86_LINKERS = ("x86_64-linux-gnu-gcc", *(NATIVE if platform.machine() == "x86_64" else ()))
ARM_LINKERS = ("aarch64-linux-gnu-gcc", *(NATIVE if platform.machine() == "aarch64" else ()))
TARGETS = {
    "host": BuildTarget(None, "", None, NATIVE),
    "x86-64-v3": BuildTarget(X86_64, "x86-64-v3", 8, X86_LINKERS),
    "x86-64-v4": BuildTarget(X86_64, "x86-64-v4", 16, X86_LINKERS),
    "aarch64": BuildTarget(ARM, "generic", 4, ARM_LINKERS),
}


@cache
def build_target() -> BuildTarget:
    return TARGETS[KNOBS["AIRGRAPH_BUILD_TARGET"].get()]


def features() -> set[str]:
    """What this machine's CPU can do, as Linux or LLVM names it, with underscores."""
    return set(re.split("[ ,+]", machine()["features"].replace("-", "_")))


@cache
def multiplies_bfloat16() -> bool:
    """Whether this machine has matrix instructions for bfloat16 (AMX)."""
    return build_target().triple is None and "amx_bf16" in features()


def why_no_amx() -> str | None:
    """Why products in bfloat16 cannot use AMX; None: they can."""
    if build_target().triple is not None:
        return "the program is built for another CPU"
    tiles = machine()["tiles"]
    return None if tiles == "permitted" else tiles


@cache
def lacks_halves() -> bool:
    """Whether PyTorch is far slower in half precision than in float32, whatever the size: on Arm without bfloat16."""
    return not is_x86_64() and "bf16" not in features()


@cache
def vector_lanes() -> int:
    """The floats in the widest vector register: 16 with AVX-512, 8 on another x86-64, 4 on Arm."""
    lanes = build_target().lanes
    if lanes is not None:
        return lanes
    if not is_x86_64():
        return 4
    return 16 if "avx512f" in features() else 8


@cache
def is_x86_64() -> bool:
    triple = build_target().triple
    return triple.startswith("x86_64") if triple else platform.machine().lower() in X86_MACHINES
