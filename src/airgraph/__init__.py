"""airgraph: readable, optimised static graphs from torch.compile, on any machine.

    torch.compile(model, backend="airgraph")

Importing this package changes nothing in PyTorch, and loads nothing: each public name is imported when it is first used.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airgraph.api import backend, export, get_compiler, load_export
    from airgraph.artifacts import load, save
    from airgraph.building import build
    from airgraph.capture.marks import mark_bucket
    from airgraph.capture.patterns import register_replacement
    from airgraph.config import Config
    from airgraph.convert import register_converter
    from airgraph.engine.meanings import register_kernel
    from airgraph.named_models import compile
    from airgraph.runtime.captured import graphs, release
    from airgraph.runtime.recording import mark_step_begin
    from airgraph.tools.bench.run import bench
    from airgraph.tools.compare import compare
    from airgraph.tools.explain import explain
    from airgraph.tools.report.page import report

__version__ = "0.1.0"
__all__ = [
    "Config",
    "backend",
    "bench",
    "build",
    "compare",
    "compile",
    "explain",
    "export",
    "get_compiler",
    "graphs",
    "load",
    "load_export",
    "mark_bucket",
    "mark_step_begin",
    "register_converter",
    "register_kernel",
    "register_replacement",
    "release",
    "report",
    "save",
]
# Where each public name lives.
_HOMES = {
    "Config": "config",
    "backend": "api",
    "bench": "tools.bench.run",
    "build": "building",
    "compare": "tools.compare",
    "compile": "named_models",
    "explain": "tools.explain",
    "export": "api",
    "get_compiler": "api",
    "graphs": "runtime.captured",
    "load": "artifacts",
    "load_export": "api",
    "mark_bucket": "capture.marks",
    "mark_step_begin": "runtime.recording",
    "register_converter": "convert",
    "register_kernel": "engine.meanings",
    "register_replacement": "capture.patterns",
    "release": "runtime.captured",
    "report": "tools.report.page",
    "save": "artifacts",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from airgraph.collector import no_collection

        with no_collection():  # classes and functions, which all stay
            home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        globals()[name] = value = getattr(home, name)
        return value
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # a submodule: `airgraph.errors.ConfigError`
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
