"""`airgraph run`: a script as Python itself would run it, with TorchAir's modules and the npu device in place."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from airgraph import compat
from airgraph.errors import CompatError


def run_script(script: str, args: Sequence[str], *, host: str = "cpu") -> int:
    """Exceptions and SystemExit of the script pass through, so that its traceback and exit code are its own."""
    path = find_script(script, "run")
    compat.install(host=host)
    sys.argv = [script, *args]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")
    return 0


def find_script(script: str, command: str) -> Path:
    path = Path(script)
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise CompatError(f"the script {script} {reason}", hint=f"airgraph {command} SCRIPT [ARGS]")
    return path
