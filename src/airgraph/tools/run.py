"""`airgraph run`: a script as Python itself would run it, with TorchAir's modules and the npu device in place."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from airgraph import compat
from airgraph.compat.npu import state
from airgraph.errors import AirgraphError, CompatError
from airgraph.tools.children import emulation_for_children


def run_script(
    script: str, args: Sequence[str], *, host: str = "cpu", module: bool = False, devices: int | None = None
) -> int:
    """Run a file, or a module as `python -m` does, with as many npu devices as asked for (or by AIRGRAPH_NPU_DEVICES).

    Exceptions and SystemExit of the script pass through, so that its traceback and exit code are its own. An error of
    airgraph's that the script did not catch is the script's as well: it ends with its traceback and 1, as any other.
    Processes that the script starts (torch.multiprocessing.spawn, torchrun) have the emulation, too.
    """
    if module:
        # As Python does: what stands in the current folder can be imported, and is before it is looked for.
        sys.path.insert(0, str(Path.cwd()))
        compat.install(host=host, devices=devices)
        check_module(script)
    else:
        path = find_script(script, "run")
        compat.install(host=host, devices=devices)
        sys.path.insert(0, str(path.resolve().parent))
    sys.argv = [script, *args]
    try:
        with emulation_for_children(host, max(1, state.device_count())):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")
    except AirgraphError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from error
    return 0


def find_script(script: str, command: str) -> Path:
    path = Path(script)
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise CompatError(f"the script {script} {reason}", hint=f"airgraph {command} SCRIPT [ARGS]")
    return path


def check_module(name: str) -> None:
    """What `-m` names must be a module, or a package with a `__main__`."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        if find_spec(f"{name}.__main__") is None:
            raise CompatError(
                f"the package {name} has no __main__, so it cannot be run", hint=f"airgraph run -m {name}.MODULE [ARGS]"
            )
    elif spec is None:
        hint = f"airgraph run {name} [ARGS]" if name.endswith(".py") else "airgraph run -m MODULE [ARGS]"
        raise CompatError(f"there is no module {name}", hint=hint)


def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A parent that is not there is an answer; one that cannot be imported for another reason tells its own.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
