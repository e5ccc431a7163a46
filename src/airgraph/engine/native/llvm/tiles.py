"""AMX's tiles: a CPU that has them, and an operating system that lets this process use them.

Linux lets no process keep data in tiles that has not asked for it (arch_prctl), since they are 8 KiB for each thread. The
permission is for all threads of a process and for its children. It can be refused: by an old kernel, by a sandbox, because
of a thread whose stack for signals is too small for the larger state.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

from airgraph.config import KNOBS

ARCH_PRCTL, ASK, TILE_DATA = 158, 0x1023, 18  # the system call, ARCH_REQ_XCOMP_PERM, the state to be kept
FEATURES = ("amx_tile", "amx_bf16")


def why_no_tiles(features: str) -> str | None:
    """Why products in bfloat16 cannot use AMX on a CPU with these features; None: they can."""
    if not all(name in features.split() for name in FEATURES):
        return "the CPU has no AMX"
    if KNOBS["AIRGRAPH_AMX"].get() == "off":
        return "AIRGRAPH_AMX is off"
    return refusal()


@cache
def refusal() -> str | None:
    """What the operating system answers to the only question; None: this process may use tiles."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ARCH_PRCTL, ASK, TILE_DATA) == 0:
        return None
    number = ctypes.get_errno()
    return f"the system refuses AMX's tiles: {errno.errorcode.get(number, number)}, {os.strerror(number)}"
