"""TorchAir's API on airgraph: `import torchair` after `airgraph.compat.install()` or under `airgraph run`.

config = torchair.CompilerConfig()
config.debug.graph_dump.type = "py"
model = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
"""

from __future__ import annotations

from airgraph.capture.patterns import register_replacement
from airgraph.compat import hcom  # noqa: F401  (collectives become GE ops)
from airgraph.compat.mirrors import make_mirrors
from airgraph.compat.torchair import configs, ge, inference, llm_datadist, ops, scope
from airgraph.compat.torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig
from airgraph.compat.torchair.formats import npu_format_cast_via_cpu, patch_for_hcom, use_internal_format_weight
from airgraph.compat.torchair.npu_export import dynamo_export
from airgraph.compat.torchair.npu_fx_compiler import get_compiler, get_npu_backend
from airgraph.journal import get_logger

core, tools = make_mirrors(__name__, "core", "tools")
logger = get_logger("torchair")

__all__ = [
    "CompilerConfig",
    "configs",
    "core",
    "dynamo_export",
    "ge",
    "get_compiler",
    "get_npu_backend",
    "inference",
    "llm_datadist",
    "logger",
    "npu_format_cast_via_cpu",
    "ops",
    "patch_for_hcom",
    "register_fx_node_ge_converter",
    "register_replacement",
    "scope",
    "tools",
    "use_internal_format_weight",
]
