"""npugraph_ex's API on airgraph: `import npugraph_ex` or `torch.npu.npugraph_ex` after `airgraph.compat.install()`.

    model = torch.compile(model, backend="npugraph_ex", options={"clone_output": True, "capture_limit": 16})

The backend's name works without `install()`, on the tensors of any device. Every op is PyTorch's own; graphs are
captured and replayed. docs/npugraph_ex.md says what each option does here.
"""

from __future__ import annotations

from airgraph.capture.patterns import register_replacement
from airgraph.compat.mirrors import make_mirrors
from airgraph.compat.npugraph_ex import configs, inference, scope
from airgraph.compat.npugraph_ex.configs.compiler_config import CompilerConfig
from airgraph.compat.npugraph_ex.npu_fx_compiler import compile_fx, get_compiler, get_npu_backend
from airgraph.journal import get_logger

core, ops, tools = make_mirrors(__name__, "core", "ops", "tools")
logger = get_logger("npugraph_ex")

__all__ = [
    "CompilerConfig",
    "compile_fx",
    "configs",
    "core",
    "get_compiler",
    "get_npu_backend",
    "inference",
    "logger",
    "ops",
    "register_replacement",
    "scope",
    "tools",
]
