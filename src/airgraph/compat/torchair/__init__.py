"""TorchAir's API on airgraph: `import torchair` after `airgraph.compat.install()` or under `airgraph run`.

config = torchair.CompilerConfig()
config.debug.graph_dump.type = "py"
model = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
"""

from __future__ import annotations

from typing import Any

from airgraph.capture.patterns import register_replacement
from airgraph.compat.torchair import configs, core, ge, inference, ops
from airgraph.compat.torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig
from airgraph.compat.torchair.core.utils import logger
from airgraph.compat.torchair.npu_export import dynamo_export
from airgraph.compat.torchair.npu_fx_compiler import get_compiler, get_npu_backend

__all__ = [
    "CompilerConfig",
    "configs",
    "core",
    "dynamo_export",
    "ge",
    "get_compiler",
    "get_npu_backend",
    "inference",
    "logger",
    "ops",
    "register_fx_node_ge_converter",
    "register_replacement",
]

# Parts of TorchAir that airgraph does not have yet: asking for one says so instead of looking like a typing error.
LATER = (
    "llm_datadist",
    "npu_format_cast_via_cpu",
    "patch_for_hcom",
    "scope",
    "tools",
    "use_internal_format_weight",
)


def __getattr__(name: str) -> Any:
    if name in LATER:
        raise AttributeError(f"torchair.{name} is not available in this version of airgraph: see docs/torchair.md")
    raise AttributeError(f"module 'torchair' has no attribute {name!r}")
