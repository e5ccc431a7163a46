"""TorchAir's CompilerConfig.

config = CompilerConfig()
config.debug.graph_dump.type = "py"
config.debug.graph_dump.type.value      # "py"; True is "1" and 64 is "64", because scripts compare with these strings
config.to_config()                      # airgraph.config.Config(dump="py", …)
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from airgraph.compat.torchair.configs.error_line import error_line
from airgraph.compat.torchair.configs.options import ACL, COMPILE_OPTIONS, GE, OPTIONS, SORTING, Ge
from airgraph.compat.torchair.configs.tree import Leaf, OptionTree, spell

__all__ = ["CompilerConfig", "Leaf", "apply_options", "check_support"]


class CompilerConfig(OptionTree):
    """The configuration of a TorchAir backend."""

    options = OPTIONS
    fields = {"log": "torchair"}
    of_gears: Mapping[str, str] = {}  # GE's options for the gears of one graph, on a copy for it

    def captures(self) -> bool:
        return bool(self.mode != GE)

    def more_remarks(self, fields: Mapping[str, Any]) -> list[str]:
        remarks = []
        if "dump_path" in fields and "dump" not in fields:
            remarks.append(f"{self.debug.graph_dump.path!r} has no effect while config.debug.graph_dump.type is None")
        return remarks

    def as_dict(self) -> tuple[dict[str, str], dict[str, str]]:
        """GE's options, (local, global). Those that depend on a graph, such as frozenInput, are not among them."""
        of_graph = self._ge_options("local") | _always_local() | dict(self.of_gears)
        return of_graph, self._ge_options("global") | ALWAYS_GLOBAL

    def _ge_options(self, scope: str) -> dict[str, str]:
        """Options that are None or empty are left to GE. Level O1 asks for a stable order unless another was chosen."""
        found = {}
        for leaf in self.leaves():
            match leaf.option.ge:
                case Ge(at, key, spelled, needs) if at == scope and leaf.value and (not needs or self.leaf(needs)):
                    found[key] = spell(leaf.plain, spelled) if spelled else leaf.value
        order_is_free = not self.experimental_config.topology_sorting_strategy.changed
        if scope == "local" and self.ge_config.oo_level == "O1" and order_is_free:
            found["ge.topoSortingMode"] = SORTING["StableRDFS"]
        return found


ALWAYS_GLOBAL = {"ge.exec.staticMemoryPolicy": "2", "ge.opSelectImplmode": "high_precision"}


def _always_local() -> dict[str, str]:
    import torch  # only here, so that a configuration can be made and checked without loading torch

    deterministic = "1" if torch.are_deterministic_algorithms_enabled() else "0"
    return {"ge.deterministic": deterministic, "ge.deterministicLevel": deterministic, "ge.exec.atomicCleanPolicy": "1"}


def check_support(config: CompilerConfig) -> None:
    """Warn about options that are set but belong to the other mode, and about a mode that TorchAir no longer develops."""
    if config.mode == ACL:
        warnings.warn(
            "mode reduce-overhead is deprecated in TorchAir since torch_npu 7.3.0: "
            'torch.compile(model, backend="npugraph_ex") takes its place',
            DeprecationWarning,
            stacklevel=3,
        )
    mode = GE if config.mode == GE else ACL
    foreign = [leaf for leaf in config.changed() if leaf.option.only not in (None, mode)]
    if foreign:
        listed = ", ".join(f"config.{leaf.option.path}:{leaf}" for leaf in foreign)
        warnings.warn(
            "The following torchair config or properties may not take effect or report error "
            f"in {config.mode} mode: {listed}",
            UserWarning,
            stacklevel=2,
        )


def apply_options(config: CompilerConfig, options: Mapping[str, Any] | None) -> CompilerConfig:
    """A copy of `config` with the options of `torch.compile(options=...)` set.

    A copy, because TorchAir keeps them on a class, where they stay for the next compilation.
    """
    result = copy.deepcopy(config)
    for key, value in (options or {}).items():
        with error_line(f"option: {key!r} of torch.compile(options=...)"):
            if key not in COMPILE_OPTIONS:
                raise ValueError(f"Invalid option '{key}', allowed options: {list(COMPILE_OPTIONS)}")
            path = COMPILE_OPTIONS[key]
            leaf = result.leaf(path.removeprefix("not "))
            checked = leaf.option.checked(value)
            leaf.plain = not checked if path.startswith("not ") else checked
    return result
