"""Other people's scripts, unchanged: `torchair`, `torch_npu`, `npugraph_ex` and the `npu` device, on any machine.

    import airgraph.compat
    airgraph.compat.install()
    import torch_npu, torchair

Nothing is changed by importing this package; `install()` does it, and `uninstall()` takes the modules away again. A real
`torchair` or `torch_npu` is never shadowed: where one is installed, `install()` says so and stops.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

from airgraph.compat.mirrors import mirrors_of
from airgraph.errors import CompatError

# The names that become importable, and the packages behind them.
MODULES = {
    "torchair": "airgraph.compat.torchair",
    "torch_npu": "airgraph.compat.torch_npu",
    "npugraph_ex": "airgraph.compat.npugraph_ex",
    "torch.npu.npugraph_ex": "airgraph.compat.npugraph_ex",
}
# Modules that stand elsewhere: `torch_npu.npu` is `torch.npu`.
ALIASES = {
    "torchair.ge.attr": "airgraph.ir.attr",
    "torchair._ge_concrete_graph.ge_apis": "airgraph.ir.ge",
    "torch_npu.npu": "airgraph.compat.npu.module",
    "torch_npu.npu.amp": "airgraph.compat.npu.amp",
    "torch_npu.npu.memory": "airgraph.compat.npu.usage",
    "torch_npu.npu.random": "airgraph.compat.npu.random",
    "torch.npu.amp": "airgraph.compat.npu.amp",
    "torch.npu.memory": "airgraph.compat.npu.usage",
    "torch.npu.random": "airgraph.compat.npu.random",
    "torch_npu.npu.graphs": "airgraph.compat.npu.graphs",
    "torch_npu.npu.streams": "airgraph.compat.npu.streams",
    "torch_npu.npu._npugraph_conditional_nodes": "airgraph.compat.npu.conditional",
    "torch_npu.npu._npugraph_handlers": "airgraph.compat.npu.handlers",
    "torch_npu.npu._npugraph_handlers.npugraph_handler": "airgraph.compat.npu.handlers",
}
# Importing this one does something, so it is left to the script; it is found in the folder of its package.
BY_THE_SCRIPT = {"torch_npu.contrib.transfer_to_npu": "airgraph.compat.torch_npu.contrib.transfer_to_npu"}
REAL = ("torchair", "torch_npu", "npugraph_ex")
_installed: dict[str, object] = {}


def install(host: str = "cpu", devices: int | None = None) -> None:
    """Make `torchair`, `torch_npu` and `npugraph_ex` importable and the device `npu` usable; its tensors live on `host`,
    "cpu" or "cuda". There are as many `devices` as asked for here or by AIRGRAPH_NPU_DEVICES in the environment, or one.

    `torch.compile(backend="inductor")` compiles graphs of npu tensors for the host from then on. A second call does
    nothing.
    """
    if _installed:
        return
    for name in REAL:
        if is_real(name):
            raise CompatError(
                f"a real {name} is installed here, and airgraph does not shadow it",
                hint=f"use it as it is, or pip uninstall {name} to run on the emulation",
            )
    from airgraph.compat import inductor, npu, shape_handling

    npu.install(host=host, devices=devices)
    shape_handling.install()
    for alias, package in MODULES.items():
        for name in all_modules(package):
            _installed[alias + name.removeprefix(package)] = importlib.import_module(name)
    for alias, name in ALIASES.items():
        _installed[alias] = importlib.import_module(name)
    sys.modules.update(_installed)  # type: ignore[arg-type]
    inductor.install()
    npu.steps.install()
    npu.module.npugraph_ex = _installed["npugraph_ex"]


def uninstall() -> None:
    """Take the modules away again. (PyTorch keeps the name `npu` for the rest of the process.)"""
    from airgraph.compat import inductor, npu, shape_handling

    npu.transfer.uninstall()
    for name in BY_THE_SCRIPT:
        sys.modules.pop(name, None)
    shape_handling.uninstall()
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
    inductor.uninstall()
    npu.steps.uninstall()
    vars(npu.module).pop("npugraph_ex", None)
    npu.uninstall()


def is_real(name: str) -> bool:
    """Installed, and not one of ours."""
    module = sys.modules.get(name)
    if module is not None:
        return module not in _installed.values()
    return importlib.util.find_spec(name) is not None


def all_modules(package: str) -> list[str]:
    """A package and everything below it that may be imported beforehand."""
    root = importlib.import_module(package)
    below = [m.name for m in pkgutil.walk_packages(root.__path__, f"{package}.")]
    return [package, *(name for name in below if name not in BY_THE_SCRIPT.values()), *mirrors_of(package)]
