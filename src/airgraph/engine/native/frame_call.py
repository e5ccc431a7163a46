"""A call of a native program without a frame of Python: one builtin function lists the arguments and runs the program.

    calls = FrameCall(program, runner, width=3, written=[])    where `is_available()`
    call = calls.builtin(around)                                `call(*args)` runs, or calls `around(*args)`

`around` is called where somebody wants to be told about calls, where Python does some steps, and where the native code has
something to ask for: a frame for these sizes, more memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from airgraph.engine.native.builtin import table_builtin
from airgraph.engine.native.replay_code import native_method
from airgraph.engine.native.runner import FrameRunner
from airgraph.engine.native.short_call import CallHead
from airgraph.engine.native.state_gather import StateGather
from airgraph.engine.native.tables import FrameCallWords, words


def is_available() -> bool:
    return native_method("frame_call") is not None


class FrameCall:
    """What `builtin()` reads."""

    def __init__(self, program: Any, runner: FrameRunner, width: int, written: Sequence[int]) -> None:
        self.head = CallHead(program, width, written)
        objects = (runner.native, list, runner.fail, runner.finish)
        native, results, failed, finish = map(id, objects)
        by_python = ctypes.addressof(runner.words)
        self.table = words([*self.head.words, native, by_python, 0, results, failed, finish])
        self.kept = (objects, runner.words)
        self.gather: StateGather | None = None

    def builtin(self, fallback: Callable[..., Any]) -> Callable[..., Any]:
        method = native_method("frame_call")
        assert method is not None
        self.table[FrameCallWords.FALLBACK] = id(fallback)
        return table_builtin(method, self.table, self, fallback)

    def follow(self, gather: StateGather | None) -> None:
        """Where state is to be read among the arguments from now on."""
        if gather is not self.gather:
            self.table[FrameCallWords.GATHER] = 0 if gather is None else gather.address
            self.gather = gather
