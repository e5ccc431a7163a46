"""How a captured program is called with a model's state in front of its arguments (`airgraph.compile`), or with modules in
place of their state (`torch.compile`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from airgraph.engine.native.address_watch import TensorWatch
from airgraph.engine.native.dict_watch import DictWatch
from airgraph.engine.native.replay_tensors import WriteCounter
from airgraph.engine.native.short_call import ShortCall, is_available
from airgraph.engine.native.state_gather import WholeArguments

if TYPE_CHECKING:
    from airgraph.runtime.replay import ReplayProgram


def reading_calls(
    program: ReplayProgram, around: Callable[..., Any], written: Sequence[int], arguments: WholeArguments
) -> Callable[..., Any]:
    """A builtin function, called with modules in place of their state; `around`, `written`: those of `Program.past`."""
    short, count = ShortCall(program, program.width, written), torch.autograd.graph.increment_version

    def call(*args: Any) -> Any:
        given, gather = arguments.whole(args)
        results = program.attempt([*given], None, True)
        if results is None:
            return around(*given)
        if written:
            count([given[i] for i in written])
        short.launch(program.launches_reading(short.rows, gather, given, arguments.known), None)
        return results

    return short.builtin(call)


class StateCall:
    """Calls of a captured program with a model's state in front of their arguments. Whether the state is where it was is
    one native question: it is neither handed over nor compared with a recording while it stays there."""

    def __init__(self, program: ReplayProgram, around: Callable[..., Any], written: Sequence[int]) -> None:
        """`around`, `written`: those of `Program.past`."""
        self.program, self.around, self.written = program, around, written
        self.last = max(written, default=-1)
        self.short: ShortCall | None = None
        self.now = (DictWatch([]), *self.find([]))

    def find(self, state: list[torch.Tensor]) -> tuple[TensorWatch, WriteCounter]:
        """Where the state is, and what of it calls write to."""
        return TensorWatch(state), WriteCounter([state[i] for i in self.written if i < len(state)])

    def builtin(self, width: int, form: str) -> Callable[..., Any] | None:
        """A call with `width` arguments without a frame of Python, which gives None where `call` is needed; `form`: that of
        its results. None where there is no such thing."""
        if not is_available():
            return None
        count = self.program.width - width
        self.short = ShortCall(self.program, width, [i - count for i in self.written if i >= count], form)
        return self.short.builtin()

    def call(self, owners: DictWatch, state: list[torch.Tensor], args: Sequence[Any]) -> Any:
        """`state` is another list where one of its tensors was replaced, which `owners` has noticed."""
        given = [*args]  # before anything is looked at: finalizers, which it may run, move or replace state
        known, watch, writes = self.now
        native = self.short is None or self.short.tensors is watch  # (by now another thread's state may be there)
        if not native or known is not owners or watch.tensors is not state or not watch.unmoved():
            watch, writes = self.find(state)
            self.now = (owners, watch, writes)
            if self.short is not None:
                self.short.follow(owners, watch, writes)
        results = self.program.attempt(given, watch, False, self.short)
        if results is None:
            return self.around(*state, *args)
        if self.written:
            writes.count()
            if self.last >= len(state):
                others = [args[i - len(state)] for i in self.written if i >= len(state)]
                torch.autograd.graph.increment_version(others)
        return results
