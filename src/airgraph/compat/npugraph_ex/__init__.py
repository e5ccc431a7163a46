"""npugraph_ex's API on airgraph: `import npugraph_ex` or `torch.npu.npugraph_ex` after `airgraph.compat.install()`.

    model = torch.compile(model, backend="npugraph_ex", options={"clone_output": True, "capture_limit": 16})

The backend's name works without `install()`, on the tensors of any device. Every op is PyTorch's own; graphs are
captured and replayed. docs/npugraph_ex.md says what each option does here.
"""

from __future__ import annotations

from typing import Any

from airgraph.capture.patterns import register_replacement
from airgraph.compat.npugraph_ex import configs, core, scope
from airgraph.compat.npugraph_ex.configs.compiler_config import CompilerConfig
from airgraph.compat.npugraph_ex.core.utils import logger
from airgraph.compat.npugraph_ex.npu_fx_compiler import compile_fx, get_compiler, get_npu_backend

__all__ = [
    "CompilerConfig",
    "compile_fx",
    "configs",
    "core",
    "get_compiler",
    "get_npu_backend",
    "logger",
    "register_replacement",
    "scope",
]

LATER = ("inference", "tools")


def __getattr__(name: str) -> Any:
    if name in LATER:
        raise AttributeError(
            f"npugraph_ex.{name} is not available in this version of airgraph: see docs/npugraph_ex.md"
        )
    raise AttributeError(f"module 'npugraph_ex' has no attribute {name!r}")
