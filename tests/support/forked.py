"""`python ARGS…` as a copy of a process that has PyTorch and airgraph imported, which takes longer than most scripts.

    done = forked.run("-m", "airgraph", "run", "script.py", cwd=folder)

Arguments, folder, environment, output, exit code and signals are those of a process of its own. For tests of what is
imported and when, and for scripts whose own children import `__main__`, `subprocess` starts a new one.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import less_overhead


def run(
    *args: str, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run([sys.executable, *args], capture_output=True, text=True). After the timeout it is killed."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        request = {"args": args, "cwd": str(cwd or Path.cwd()), "env": dict(env or os.environ)}
        process = template()
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({**request, "files": [*map(str, files)]}) + "\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        timer = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        timer.start()
        try:
            code = int(process.stdout.readline())
        finally:
            timer.cancel()
        return subprocess.CompletedProcess(args, code, *(file.read_text("utf-8") for file in files))


@functools.cache
def template() -> subprocess.Popen[str]:
    """The process that is copied. It ends when this one does: nothing more can be read from its input."""
    command = [sys.executable, str(Path(__file__).resolve())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


ACTING = (
    "__main__",
    ".cuda",
    ".torch_npu",
    ".torch_backend",
    ".pytest",
)  # they need a GPU or the emulation, or act when imported


# -- in the process that is copied ------------------------------------------------------------------------------------
def import_all() -> None:

    import airgraph

    for module in pkgutil.walk_packages(airgraph.__path__, "airgraph."):
        if not any(word in module.name for word in ACTING):
            importlib.import_module(module.name)


def next_request() -> dict[str, Any]:
    """Returns in the copies only."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            return json.loads(line)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """What Python does with its arguments."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for target, file in enumerate((os.devnull, *request["files"])):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), target)
    sys.stdin = os.fdopen(0)
    import torch

    # Also makes PyTorch's thread pool anew while there is one thread: the threads of a backward may get none otherwise.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    first, *rest = request["args"]
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import_all()
    less_overhead.apply()
    become(next_request())
