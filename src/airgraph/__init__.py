"""airgraph: readable, optimised static graphs from torch.compile, on any machine.

    torch.compile(model, backend="airgraph")

Importing this package changes nothing in PyTorch.
"""

from typing import TYPE_CHECKING, Any

from airgraph.capture.marks import mark_bucket
from airgraph.capture.patterns import register_replacement
from airgraph.config import Config
from airgraph.convert import register_converter
from airgraph.engine.meanings import register_kernel
from airgraph.pipeline import backend, compile, export, get_compiler, load_export
from airgraph.runtime.recording import mark_step_begin
from airgraph.runtime.replay import graphs, release

if TYPE_CHECKING:
    from airgraph.tools.compare import compare
    from airgraph.tools.explain import explain

__version__ = "0.1.0"
__all__ = [
    "Config",
    "backend",
    "compare",
    "compile",
    "explain",
    "export",
    "get_compiler",
    "graphs",
    "load_export",
    "mark_bucket",
    "mark_step_begin",
    "register_converter",
    "register_kernel",
    "register_replacement",
    "release",
]


def __getattr__(name: str) -> Any:
    """`explain` and `compare` are loaded when they are asked for: nothing needs them to compile a model."""
    if name == "explain":
        from airgraph.tools.explain import explain

        return explain
    if name == "compare":
        from airgraph.tools.compare import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
