"""A program of the native engine: its arguments are checked, its outputs made and its steps run by one native call.

Python only comes in where something has to be put right (other strides, tensors of an emulated device) and for results that
are views; their sizes and strides are computed by native code like all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from airgraph.engine.native.dict_watch import DictWatch
from airgraph.engine.native.frame_call import FrameCall, is_available
from airgraph.engine.native.runner import POOL, FrameRunner
from airgraph.engine.native.short_call import counts_natively
from airgraph.engine.native.state_gather import WholeArguments
from airgraph.engine.protocol import Symbols
from airgraph.ir.boundary import Boundary, Fresh, Number, NumberIn, OfInput, OfOutput
from airgraph.ir.symbols import evaluate, is_expression
from airgraph.journal import Journal
from airgraph.runtime.program import Program, quiet, to_host


class NativeProgram(Program):
    """`direct`: every output is made by native code, as its caller gets it or with views of it; so are all numbers.
    `others`: the outputs that PyTorch makes, if native code makes all others as their caller gets them."""

    by_builtin = True

    def __init__(self, name: str, boundary: Boundary, executable: FrameRunner, journal: Journal) -> None:
        super().__init__(name, boundary, executable, journal)
        self.native = executable
        self.host = all(torch.device(getattr(a, "device", "cpu")).type == "cpu" for a in boundary.arguments)
        laid_out = self.host and not executable.loose
        native = laid_out and not any(executable.made)
        fresh = [r.index for r in boundary.results if isinstance(r, Fresh)]
        self.plain = native and fresh == list(range(len(executable.made))) and len(boundary.results) == len(fresh)
        self.given = {a.expr: i for i, a in enumerate(boundary.arguments) if isinstance(a, NumberIn)}
        self.numbers = list(dict.fromkeys(x for r in boundary.results for x in self.expressions(r)))
        self.direct = native and all(map(executable.computes, self.numbers))
        self.short = self.direct
        self.others = {i for i, by_torch in enumerate(executable.made) if by_torch} if laid_out else None
        executable.numbers = (
            self.numbers if self.direct else [s.symbol for s in executable.sources if s.kind != "number"]
        )

    def expressions(self, result: Any) -> list[Any]:
        """The sizes, strides and numbers of a result that are not known when compiling."""
        match result:
            case OfInput(itself=True):
                found: tuple[Any, ...] = ()
            case OfInput(_, layout, _) | OfOutput(_, _, layout, _, _):
                found = (*layout.shape, *layout.strides, layout.offset)
            case Number(expr):
                found = () if expr in self.given else (expr,)
            case _:
                found = ()
        return [x for x in found if is_expression(x)]

    def past(self, around: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
        """As `Program.past`. Its attribute `builtin` is the same without a frame of Python, `reading` that for arguments of
        which some are modules, `behind` that for a model's state in front of them."""
        if not self.plain:
            return around
        call: Any = super().past(around, written)
        if not self.by_builtin or not is_available() or not counts_natively(written):
            return call
        found: Any = partial(call)  # (a function with the builtin as its attribute would hold itself)
        found.listed = call.listed
        found.builtin = self.frame_call(written).builtin(call, stateless=True)
        found.reading = lambda arguments: self.reading(call.listed, written, arguments)
        found.behind = lambda: FrameStateCall(self, call.listed, written)
        return found

    def frame_call(self, written: Sequence[int]) -> FrameCall:
        return FrameCall(self, self.native, len(self.boundary.arguments), written)

    def reading(
        self, listed: Callable[[list[Any]], Any], written: Sequence[int], arguments: WholeArguments
    ) -> Callable[..., Any]:
        """How it is called with modules in place of their state."""
        calls = self.frame_call(written)

        def call(*args: Any) -> Any:
            given, gather = arguments.whole(args)
            calls.follow(gather)
            return listed(given)

        return calls.builtin(call)

    def attempt(self, args: list[Any]) -> list[Any] | None:
        if not self.native.by_python and quiet(self.journal):
            try:
                results = self.native.native(args)
            except BaseException:
                self.native.finish()
                raise
            if type(results) is list:
                self.calls += 1
                return results if self.plain else self.assembled(args, results)
            self.native.fail(results)
        return None

    def run(self, args: list[Any]) -> list[Any]:
        start = time.perf_counter()
        given = args if self.host else [to_host(a) for a in args]
        known = {} if self.host else self.bind(args)  # before the call, which may let go of arguments
        bound = time.perf_counter()
        listening = torch.autograd.profiler._is_profiler_enabled
        with profiled(self.native) if listening else nullcontext():
            outputs, _ = self.native.call(given, lambda _: known or self.bind(args))
        self.log_run(start, bound)
        if self.direct:
            return outputs if self.plain else self.assembled(args, outputs)
        count = len(outputs) - len(self.native.numbers)
        symbols: Symbols = {**self.native.learned(), **{x: args[i] for x, i in self.given.items()}}
        symbols |= {**known, **dict(zip(self.native.numbers, outputs[count:]))}
        owned = self.own(outputs[:count], given, symbols, self.others)
        return [self.result(r, args, owned, symbols) for r in self.boundary.results]

    def assembled(self, args: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The results, from what native code gave: outputs, then numbers."""
        symbols = dict(zip(self.numbers, outputs[len(outputs) - len(self.numbers) :]))
        return [self.result(r, args, outputs, symbols) for r in self.boundary.results]

    def size(self, expr: Any, symbols: Symbols) -> Any:
        """Native code has computed it, as all that a direct program needs."""
        if self.direct and isinstance(expr, tuple):
            return tuple([x if isinstance(x, int) else symbols[x] for x in expr])
        return symbols[expr] if self.direct and expr in symbols else super().size(expr, symbols)

    def result(self, result: Any, args: Sequence[Any], owned: Sequence[Any], symbols: Symbols) -> Any:
        if isinstance(result, Number):
            given = self.given.get(result.expr)  # (also where it is no number for native code: of a jagged tensor)
            return args[given] if given is not None else evaluate(result.expr, symbols)
        if self.host and isinstance(result, Fresh):
            return owned[result.index]
        return super().result(result, args, owned, symbols)


class FrameStateCall:
    """As StateCall (state_call.py), for a native program."""

    def __init__(self, program: NativeProgram, listed: Callable[[list[Any]], Any], written: Sequence[int]) -> None:
        self.program, self.listed, self.written = program, listed, written
        self.calls: FrameCall | None = None

    def builtin(self, width: int, form: str) -> Callable[..., Any]:
        self.calls = FrameCall(self.program, self.program.native, width, self.written, form)
        return self.calls.builtin()

    def call(self, owners: DictWatch, state: list[torch.Tensor], args: Sequence[Any]) -> Any:
        if self.calls is not None:
            self.calls.stay_behind(owners, state)
        return self.listed([*state, *args])


class ReleasingProgram(NativeProgram):
    """One that gives the memory of its intermediates back after every call."""

    by_builtin = False

    def attempt(self, args: list[Any]) -> list[Any] | None:
        try:
            return super().attempt(args)
        finally:
            POOL.release()

    def run(self, args: list[Any]) -> list[Any]:
        try:
            return super().run(args)
        finally:
            POOL.release()


def profiled(executable: FrameRunner) -> Any:
    from airgraph.engine.native.profiled import named_steps

    return named_steps(executable)
