"""A program of the native engine: its arguments are checked, its outputs made and its steps run by one native call.

Python only comes in where something has to be put right (new sizes, other strides, tensors of an emulated device) and for
results that are views or numbers.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from airgraph.engine.native.engine import NativeExecutable
from airgraph.engine.native.profiled import named_steps
from airgraph.engine.protocol import Symbols
from airgraph.ir.boundary import Boundary, Fresh
from airgraph.journal import Journal
from airgraph.runtime.program import Program, quiet, to_host


class NativeProgram(Program):
    def __init__(self, name: str, boundary: Boundary, executable: NativeExecutable, journal: Journal) -> None:
        super().__init__(name, boundary, executable, journal)
        self.native = executable
        self.plain = [r.index for r in boundary.results if isinstance(r, Fresh)] == list(
            range(len(executable.plan.outputs))
        )
        self.plain = self.plain and len(boundary.results) == len(executable.plan.outputs)
        self.plain = self.plain and all(t is not None for t in executable.plan.outputs) and not executable.plan.loose
        self.host = all(torch.device(getattr(a, "device", "cpu")).type == "cpu" for a in boundary.arguments)
        self.short = self.plain and self.host

    def attempt(self, args: list[Any]) -> list[Any] | None:
        if not self.native.by_python and quiet(self.journal):
            try:
                results = self.native.native(args)
            except BaseException:
                self.native.finish()
                raise
            if type(results) is list:
                self.calls += 1
                return results
            self.native.fail(results)
        return None

    def run(self, args: list[Any]) -> list[Any]:
        start = time.perf_counter()
        given = args if self.host else [to_host(a) for a in args]
        plain = self.short
        known = {} if plain else self.bind(args)  # before the call, which may let go of arguments
        bound = time.perf_counter()
        listening = torch.autograd.profiler._is_profiler_enabled
        with named_steps(self.native) if listening else nullcontext():
            outputs, _ = self.native.call(given, lambda _: self.bind(args) if plain else known)
        self.log_run(start, bound)
        if plain:
            return outputs
        symbols: Symbols = {**known, **self.native.learned()}
        owned = self.own(outputs, given, symbols)
        return [self.result(r, args, owned, symbols) for r in self.boundary.results]
