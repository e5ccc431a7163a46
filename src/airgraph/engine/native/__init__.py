"""The native engine for CPUs: the whole graph as one native call, through LLVM.

This module needs neither LLVM nor what plans a graph: it says when the engine is chosen, and loads the rest when it is.
"""

from __future__ import annotations

import os
import threading
import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from airgraph.engine.protocol import Programs, Request
from airgraph.errors import ConfigError
from airgraph.locks import Depth, held_at_fork
from airgraph.source_hash import source_hash

if TYPE_CHECKING:
    from airgraph.engine.native.engine import NativeExecutable
    from airgraph.plan.steps import Plan
    from airgraph.plan.target import Target


class NativeEngine:
    """Plans rendered as LLVM, for CPUs."""

    name = "native"

    def serves(self, device: torch.device, mode: str) -> str | None:
        if device.type != "cpu":
            return f"it runs on a CPU, this graph is on {device}"
        return None if mode == "max-autotune" else f"mode {mode} replays PyTorch's own ops"

    def warm_up(self) -> None:
        """The kernels that serve every graph take LLVM a second or two; PyTorch reads the model meanwhile."""
        _awaited.set()
        source_hash()  # here: a thread that reads files waits for Python's lock hundreds of times
        if not any(thread.is_alive() for thread in _preparing):
            _preparing[:] = [threading.Thread(target=prepare, name="airgraph-warm-up") for _ in range(beside())]
            for thread in _preparing:
                thread.start()

    def plan(self, request: Request, target: Target | None = None) -> Plan:
        """`target`: what to plan for instead of this process."""
        from airgraph.engine.fold import fold
        from airgraph.engine.native.target import this_cpu
        from airgraph.passes.cleanup import fulfilled_waits
        from airgraph.plan.groups import make_plan
        from airgraph.plan.index import UnsupportedPlan

        if request.device.type != "cpu":
            reason = self.serves(request.device, request.mode)
            raise ConfigError(f"the native engine cannot run this graph: {reason}", hint='engine="auto"')
        missing = problem()
        if missing is not None:
            raise UnsupportedPlan(missing)
        fulfilled_waits(request.graph)
        fold(request)
        return make_plan(request.graph, request.boundary, target or this_cpu())

    def load(self, request: Request) -> NativeExecutable:
        from airgraph.engine.native.engine import NativeExecutable
        from airgraph.engine.native.kernels.tune import Tuner

        executable = NativeExecutable(request, Tuner(request.journal) if request.autotune else None)
        _awaited.clear()
        _convolves.clear()
        for note in executable.plan.notes:
            request.journal.remark(note)
        return executable

    def program(self, executable: NativeExecutable, programs: Programs) -> Any:
        return programs.direct(executable)


_awaited = threading.Event()  # a graph is being read or compiled, which may use any of the kernels
_convolves = threading.Event()  # … and is known to have convolutions
_preparing: list[threading.Thread] = []


def expect_convolutions() -> None:
    """Their kernels come before others."""
    _convolves.set()


def beside() -> int:
    """How many threads compile while another one reads a model."""
    return max(1, min(3, (os.cpu_count() or 1) - 1))


def prepare() -> None:
    """What every compilation needs: the code that runs a frame, kernels.

    Kernels that the cache has are loaded. Where it has none, the usual ones are compiled until a graph is there: those that
    it does not use would take a core from its first calls. Else those that are missing have not been needed so far.
    """
    if problem() is not None:
        return
    from airgraph.engine.native.kernels.shared_kernels import CONVOLUTION, FAMILIES, most_used

    waiting = [family for family in FAMILIES if family.unit.is_cached()] or list(most_used())
    while waiting and _awaited.is_set() and threading.main_thread().is_alive():
        first = CONVOLUTION if _convolves.is_set() and CONVOLUTION in waiting else waiting[0]
        waiting.remove(first)
        if not first.lock.locked():
            first.code()


_loading = held_at_fork(threading.Lock(), Depth.LOADING)


def problem() -> str | None:
    """Why there is no native engine here (no llvmlite, a CPU that LLVM does not know); None if there is one."""
    with _loading:
        return find_problem()


@cache
def find_problem() -> str | None:
    try:
        if find_spec("llvmlite") is None:  # what is in the cache needs none, but the next graph may not be there
            raise ModuleNotFoundError("No module named 'llvmlite'")
        from airgraph.engine.native.kernels import shared_kernels  # noqa: F401  (under this lock: locks.py)
        from airgraph.engine.native.runtime import entry

        entry()
        return None
    except (ImportError, OSError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
        warnings.warn(f"airgraph: no native engine here, graphs run on the reference engine ({problem})", stacklevel=2)
        return problem
