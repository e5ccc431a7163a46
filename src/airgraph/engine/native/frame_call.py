"""A call of a native program without a frame of Python: one builtin function lists the arguments and runs the program.

    calls = FrameCall(program, runner, width=3)      where `is_available()`
    call = calls.builtin(around, stateless=True)     `call(*args)` runs, or calls `around(*args)`
    calls.follow(gather)                             state is read from modules among the arguments (torch.compile)
    calls.stay_behind(owners, state)                 state is in front of the arguments (airgraph.compile)

`around` is called where somebody wants to be told about calls, where Python does some steps, and where the native code has
something to ask for: a frame for these sizes, more memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from airgraph.engine.native.builtin import table_builtin
from airgraph.engine.native.dict_watch import DictWatch
from airgraph.engine.native.replay_code import native_method
from airgraph.engine.native.runner import FrameRunner
from airgraph.engine.native.short_call import CallHead, changing_state
from airgraph.engine.native.state_gather import StateGather
from airgraph.engine.native.tables import FrameCallWords, words

NEVER = -1  # arguments: with so many it is not called


def is_available() -> bool:
    return native_method("frame_call") is not None


class FrameCall:
    """What `builtin()` reads. Calls with state are Python's until it is known where that is."""

    def __init__(
        self, program: Any, runner: FrameRunner, width: int, written: Sequence[int] = (), form: str = "list"
    ) -> None:
        """`width`, `form`: as those of ShortCall. `written`: which of the program's arguments are written to."""
        self.width = width
        self.head = CallHead(program, width, written, form)
        objects = (runner.native, list, runner.fail, runner.finish)
        native, results, failed, finish = map(id, objects)
        by_python = ctypes.addressof(runner.words)
        self.table = words([*self.head.words, native, by_python, 0, results, failed, finish, 0, 0])
        self.kept = (objects, runner.words)
        self.state: Any = None

    def builtin(self, fallback: Callable[..., Any] | None = None, stateless: bool = False) -> Callable[..., Any]:
        """Called with arguments; without a fallback its answer may be None."""
        method = native_method("frame_call")
        assert method is not None
        self.table[FrameCallWords.FALLBACK] = 0 if fallback is None else id(fallback)
        self.table[FrameCallWords.WIDTH] = self.width if stateless else NEVER
        return table_builtin(method, self.table, self, fallback)

    def follow(self, gather: StateGather) -> None:
        """State is read from modules among the arguments."""
        if gather is not self.state:
            self.enter(gather, self.width, gather.address, 0, 0)

    def stay_behind(self, owners: DictWatch, state: list[torch.Tensor]) -> None:
        """State is in front of the arguments, while `owners` are unchanged."""
        now = self.state
        if now is None or now[1] is not state or now[0] is not owners:
            front = words([len(state), *map(id, state)])
            if owners.table is None:
                self.enter((owners, state, front), NEVER, 0, 0, 0)
            else:
                places = (ctypes.addressof(front), ctypes.addressof(owners.table))
                self.enter((owners, state, front), self.width, 0, *places)

    def enter(self, state: Any, width: int, gather: int, front: int, tags: int) -> None:
        """`state` holds what the words of the table point to. Nothing happens where another state is being entered, by
        another thread or around this call: then the next call of this one's tries again.

        Nothing is allocated between the first store and the last, and what was held before is held until then: neither
        finalizers nor other threads find a table that points to what nobody holds."""
        table = self.table
        if not changing_state.acquire(False):
            return
        try:
            before = self.state
            table[FrameCallWords.WIDTH] = NEVER
            self.state = state
            table[FrameCallWords.GATHER] = gather
            table[FrameCallWords.FRONT] = front
            table[FrameCallWords.TAGS] = tags
            table[FrameCallWords.WIDTH] = width
        finally:
            changing_state.release()
        del before  # which may run finalizers
