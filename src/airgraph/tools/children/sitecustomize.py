"""Found by every Python that `airgraph run` starts, itself or through the script: see `airgraph.tools.children`.

It must not cost anything in a process that has nothing to do with torch, so it only waits.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
OURS = ("torch_npu", "torchair", "npugraph_ex")


class AfterTorch:
    """Installs the emulation when torch has been imported; the modules of OURS import torch, as the real ones do."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in OURS:
            import torch  # noqa: F401

            return importlib.machinery.ModuleSpec(name, Existing(sys.modules[name])) if name in sys.modules else None
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_install(module: ModuleType) -> None:
                run(module)
                install()

            spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


class Existing(importlib.abc.Loader):
    """A loader for a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: Any) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """It has been run."""


def install() -> None:
    from airgraph import compat
    from airgraph.config import KNOBS

    compat.install(host=KNOBS["AIRGRAPH_NPU_HOST"].get())


def the_hidden_one() -> None:
    """Run the `sitecustomize` that Python would have found without this one."""
    paths = [path for path in sys.path if os.path.abspath(path) != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # as the package's module it does nothing
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != FOLDER]
    if os.environ.get("AIRGRAPH_NPU") == "1":
        sys.meta_path.insert(0, AfterTorch())
    the_hidden_one()
