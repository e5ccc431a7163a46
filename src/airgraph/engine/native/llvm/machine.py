"""What object code depends on besides its text: the CPU, the version of the compiler and how it is used.

Found out without LLVM where the operating system tells (Linux), so that a process whose object code is all in the cache
need not load LLVM.
"""

from __future__ import annotations

import importlib.metadata
import platform
from functools import cache
from pathlib import Path

from airgraph.config import KNOBS
from airgraph.engine.native.llvm.tiles import why_no_tiles

PASSES = ("global_dead_code_eliminate", "always_inliner", "sroa", "instruction_combine", "new_gvn", "simplify_cfg")
SETTINGS = {"opt": 2, "reloc": "pic", "jit": True}  # of a target machine
NAMES = (
    "model name",
    "cpu family",
    "model",
    "stepping",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
)
FEATURES = ("flags", "Features")


@cache
def machine() -> dict[str, str]:
    """As fields of a key."""
    name, features = by_system() or by_llvm()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": name,
        "features": features,
        "llvmlite": importlib.metadata.version("llvmlite"),
        "passes": f"{' '.join(PASSES)}, {SETTINGS}",
        "target": KNOBS["AIRGRAPH_BUILD_TARGET"].get(),
        "tiles": why_no_tiles(features) or "permitted",
    }


def by_system() -> tuple[str, str] | None:
    """The name and the features of the first core, as Linux lists them."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return None
    rows = [line.split(":", 1) for line in first.splitlines() if ":" in line]
    found = {name.strip(): text.strip() for name, text in rows}
    features = next((found[name] for name in FEATURES if name in found), "")
    return (" ".join(found[name] for name in NAMES if name in found), features) if features else None


def by_llvm() -> tuple[str, str]:
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
