"""`airgraph run`: a script as Python itself would run it, with TorchAir's modules and the npu device in place.

Importing this module does not import torch: the command line starts without it.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from airgraph.errors import CompatError
from airgraph.tools.children import emulation_for_children

# What a command ends with. A script that calls sys.exit(n) ends with its own n.
RAISED = 1  # the script raised an exception, as Python has it
USAGE = 2  # a wrong argument, or airgraph cannot do what was asked
DIFFERS = 3  # `compare` found a difference, `doctor` a missing name
INTERRUPTED = 130  # Ctrl-C, as shells have it
CLOSED_PIPE = 141  # the reader of a pipe went away, as shells have it


@dataclass(frozen=True)
class Script:
    """A script or module to run, its arguments, and the emulated device it runs with."""

    name: str
    args: Sequence[str] = ()
    module: bool = False
    host: str = "cpu"
    devices: int | None = None  # None: what AIRGRAPH_NPU_DEVICES says

    def check(self, command: str) -> None:
        if not self.module:
            find_script(self.name, command)


def run_script(script: Script, command: str = "run") -> int:
    """Run a file, or a module as `python -m` does; its arguments, output, traceback and exit code are its own.

    An exception that the script does not catch, also one of airgraph's, is printed without the frames of this command
    and becomes SystemExit(1). Processes that the script starts (torch.multiprocessing.spawn, torchrun) have the emulation
    too.
    """
    from airgraph.tools.terminal import waiting

    script.check(command)
    with waiting("importing PyTorch and installing the emulated npu"):
        from airgraph import compat
        from airgraph.compat import task_traces
        from airgraph.compat.mirrors import COMMANDS
        from airgraph.compat.npu import state

        if script.module:
            # As Python does: the current folder can be imported from, and is searched before the module is looked for.
            sys.path.insert(0, str(Path.cwd()))
        compat.install(host=script.host, devices=script.devices)
    if not script.module:
        sys.path.insert(0, str(Path(script.name).resolve().parent))
    elif script.name not in COMMANDS:
        check_module(script.name, command)
    sys.argv = [script.name, *script.args]
    watched = nullcontext() if command == "run" else showing_compilations()
    try:
        with watched, emulation_for_children(script.host, max(1, state.device_count())):
            if script.module and script.name in COMMANDS:
                task_traces.main([COMMANDS[script.name], *script.args])
            elif script.module:
                runpy.run_module(script.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script.name, run_name="__main__")
    except Exception as error:
        if isinstance(error, BrokenPipeError) and stdout_is_closed():
            raise
        error.__traceback__ = own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(RAISED) from None
    return 0


@contextmanager
def showing_compilations() -> Iterator[None]:
    """A spinner on stderr while Dynamo compiles, until the script calls `torch._dynamo.reset()`, which drops callbacks."""
    from torch._dynamo.callback import callback_handler

    from airgraph.tools.terminal import waiting

    shown: list[AbstractContextManager[Any]] = []

    def start(args: Any) -> None:
        shown.append(waiting(f"compiling {args.compile_id}"))
        shown[-1].__enter__()

    def end(args: Any) -> None:
        shown.pop().__exit__(None, None, None)

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        for callbacks, ours in ((callback_handler.start_callbacks, start), (callback_handler.end_callbacks, end)):
            if ours in callbacks:
                callbacks.remove(ours)


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on; none for a script that does not parse."""
    while trace is not None and is_runner(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def is_runner(file: str) -> bool:
    return file in (__file__, runpy.__file__, "<frozen runpy>")


def stdout_is_closed() -> bool:
    """Whether nobody reads our output any more: `airgraph show model.air | head`."""
    try:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # a stdout without a file
        return False
    return any(event & select.POLLERR for _, event in watch.poll(0))


def forget_stdout() -> None:
    """What is still buffered goes nowhere, instead of raising once more when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def find_script(script: str, command: str) -> Path:
    path = Path(script)
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise CompatError(f"the script {script} {reason}", hint=f"airgraph {command} SCRIPT [ARGS]")
    return path


def check_module(name: str, command: str) -> None:
    """What `-m` names must be a module, or a package with a `__main__`."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        if find_spec(f"{name}.__main__") is None:
            raise CompatError(
                f"the package {name} has no __main__, so it cannot be run",
                hint=f"airgraph {command} -m {name}.MODULE [ARGS]",
            )
    elif spec is None:
        hint = f"airgraph {command} {name} [ARGS]" if name.endswith(".py") else f"airgraph {command} -m MODULE [ARGS]"
        raise CompatError(f"there is no module {name}", hint=hint)


def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A parent that is not there is an answer; one that cannot be imported for another reason tells its own.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
