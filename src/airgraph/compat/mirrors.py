"""Modules of torchair and npugraph_ex that only hand on names: a table instead of a folder of files.

    torchair.core.utils             logger, EVENT_LEVEL
    torchair.patterns.pattern_pass_manager    register_replacement

A row is (module, its docstring, {name: where it is}). A module of the table is made when its package is imported, below the
package's own name; `compat.install` gives it the name scripts import it by, as it does for modules with a file.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from airgraph.journal import EVENT_LEVEL, get_logger

TRACES = "airgraph.compat.task_traces"
PATTERNS = "airgraph.capture.patterns"
FORMATS = "airgraph.compat.torchair.formats"
IN_FORMATS = ("use_internal_format_weight", "npu_format_cast_via_cpu")
TRACE_TOOLS = {
    "align_trace": "align_trace_json",
    "deadlock_check": "deadlock_check",
    "filter_operators": "filter_comm_ops",
}
# `python -m` of one of them: the tool of airgraph.compat.task_traces.
COMMANDS = {
    f"{package}.{tool}": tool
    for package in ("torchair.tools.gegraph_check", "npugraph_ex.tools.aclgraph_check")
    for tool in TRACE_TOOLS
}
CONVERTERS = ("fx2ge_converter", "ge_apis", "supported_declaration", "utils")
OLD_PATCH = ("ge_converter", "ge_converter.experimental", "ge_converter.experimental.patch_for_hcom_allreduce")


class Mirror(NamedTuple):
    module: str  # below the package
    doc: str
    names: Mapping[str, str] = {}  # name → "module:name" or "module"


def shared(checks: str) -> tuple[Mirror, ...]:
    """What both packages have. `checks`: the name of the tools that read traces."""
    return (
        Mirror("core", "The logger."),
        Mirror("core.utils", "`from torchair.core.utils import logger, EVENT_LEVEL`"),
        Mirror("patterns", "What `pattern_fusion_pass` looks for; docs/passes.md lists what is there from the start."),
        Mirror(
            "patterns.pattern_pass_manager",
            "Where patterns of one's own are registered.",
            {"register_replacement": f"{PATTERNS}:register_replacement"},
        ),
        Mirror("tools", f"{checks}, which reads traces of an NPU's streams."),
        Mirror(f"tools.{checks}", f"What may run at the same time on the streams of a traced graph: {TRACES}."),
        *(
            Mirror(f"tools.{checks}.{tool}", f"{TRACES} has it.", {name: f"{TRACES}:{name}"})
            for tool, name in TRACE_TOOLS.items()
        ),
    )


MIRRORS: dict[str, tuple[Mirror, ...]] = {
    "torchair": (
        *shared("gegraph_check"),
        Mirror("experimental", "Where two functions stood before they moved to `torchair`."),
        Mirror("experimental.inference", "Their old place.", {name: f"{FORMATS}:{name}" for name in IN_FORMATS}),
        Mirror(
            "ge_concrete_graph", "What `torchair._ge_concrete_graph` was called once. Using it warns, once a module."
        ),
        *(Mirror(f"ge_concrete_graph.{m}", f"An old name of `torchair._ge_concrete_graph.{m}`.") for m in CONVERTERS),
        *(Mirror(f"ge_concrete_graph.{m}", "For `patch_for_hcom_allreduce`.") for m in OLD_PATCH[:-1]),
        Mirror(f"ge_concrete_graph.{OLD_PATCH[-1]}", "Importing it made collectives traceable; they are."),
    ),
    "npugraph_ex": (
        *shared("aclgraph_check"),
        Mirror(
            "ops",
            "Importing it defines `torch.ops.npugraph_ex.{scope_enter, scope_exit, record, wait}`, which a pass of one's"
            " own on the FX graph may put around nodes. (airgraph.compat.scopes has them.)",
            {"scopes": "airgraph.compat.scopes"},
        ),
    ),
}


def make_mirrors(package: str, *wanted: str) -> list[ModuleType]:
    """The modules of the table below a package, which is being imported; gives those that are named."""
    api = package.rpartition(".")[2]
    for row in MIRRORS[api]:
        name = f"{package}.{row.module}"
        module = sys.modules[name] = ModuleType(name, row.doc)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for attribute, place in row.names.items():
            setattr(module, attribute, found(place))
        if row.names:
            module.__dict__["__all__"] = list(row.names)
        if row.module == "core.utils":
            vars(module).update(logger=get_logger(api), EVENT_LEVEL=EVENT_LEVEL, __all__=["EVENT_LEVEL", "logger"])
        if row.module.startswith("ge_concrete_graph."):
            module.__dict__["__getattr__"] = moved(row.module.partition(".")[2], package)
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, module)
    return [sys.modules[f"{package}.{name}"] for name in wanted]


def mirrors_of(package: str) -> Iterator[str]:
    """The full names of the modules of the table below a package."""
    return (f"{package}.{row.module}" for row in MIRRORS.get(package.rpartition(".")[2], ()))


def found(place: str) -> Any:
    module, _, attribute = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


WARNED: set[str] = set()


def moved(module: str, package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose contents are elsewhere by now."""
    old, new = f"torchair.ge_concrete_graph.{module}", f"torchair._ge_concrete_graph.{module}"

    def look_up(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}._ge_concrete_graph.{module}"), name)
        if module not in WARNED:
            WARNED.add(module)
            warnings.warn(f"{old} is an old name of {new}", DeprecationWarning, stacklevel=2)
        return value

    return look_up
