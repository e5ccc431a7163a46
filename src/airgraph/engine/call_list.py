"""Steps that run again and again at the same sizes, as one function of Python: the calls into PyTorch and nothing else.

    def run(env, symbols):
        v0 = env[k0]
        v1 = f0(c0, v0, c1)        f0: addmm, c1: the transposed weight, a view that was taken once
        v2 = f1(v1); del v1
        env[k1] = v2

The text has names of our own and keywords of the op's schema, nothing that a graph could bring along. What an op is called
with is found out by running it once. At the same sizes and layouts an op of PyTorch gives the same ones again, so nothing
is looked at after that. Other steps (ops of other libraries, whose results may look different every time, and what reads
those) run as before, on `env`.

A view of memory that stays where it is (arguments at a fixed address, buffers, constants) is taken once. It holds on to
nothing: it is a mere address, as in a captured CUDA graph, and whoever replays has checked that the memory is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from airgraph.engine.protocol import BoundCall, Env, ReadValue, Step, Symbols
from airgraph.engine.strides import restride
from airgraph.ir.graph import Graph

Function = Callable[[Env, Symbols], None]


@dataclass
class CallList:
    """Steps that are noted while they run for the first time. `steady`: the values that are at the same address, with the
    same layout, in every run."""

    graph: Graph
    steady: Collection[int]
    calls: list[tuple[Step, BoundCall | None]] = field(default_factory=list)  # None: it runs as before
    regular: set[int] = field(default_factory=set)  # values whose layout is the same in every run
    views: dict[int, torch.Tensor] = field(default_factory=dict)  # values that are views of steady memory

    def advance(self, step: Step, env: Env, symbols: Symbols) -> None:
        """Run a step for the first time."""
        call = step.bind(env, symbols, step.chosen() is step.in_place) if step.bind else None
        read = [r.key for r in reads_of(call)] if call else []
        if any(key not in self.steady and key not in self.regular for key in read):
            call = None
        lent = [env[key] for key in read if key in self.steady or key in self.views] if call else []
        step.advance(env, symbols, self.graph)
        self.calls.append((step, call))
        if call is None:
            return
        self.regular.update(step.makes)
        if call.only_reads and len(step.makes) == 1 and len(lent) == len(read):
            (key,) = step.makes
            if is_view(env.get(key), lent):
                self.views[key] = address_only(env[key])

    def function(self) -> Function:
        """All steps again, as one function."""
        return ListWriter(self).function()


class ListWriter:
    """Writes the function: a line for each call, so that the line of an exception tells the step."""

    def __init__(self, calls: CallList) -> None:
        self.calls = calls.calls
        self.graph = calls.graph
        self.folded = {key: view for key, view in calls.views.items() if self.may_fold(key)}
        self.names: dict[int, str] = {}  # values that are local variables now
        self.made: set[int] = set()  # those of them that are not in `env`
        self.numbers = itertools.count()
        self.globals: dict[str, Any] = {}
        self.lines: list[str] = []
        self.steps: list[Step | None] = []  # of each line

    def may_fold(self, key: int) -> bool:
        """Only our calls see it, and it dies here: a tensor that is a mere address must not get into other hands."""
        readers = [call for step, call in self.calls if key in step.reads]
        return None not in readers and any(key in step.last_uses for step, _ in self.calls)

    def function(self) -> Function:
        for step, call in self.calls:
            if call is None:
                self.as_before(step)
            elif not (self.folded.keys() & step.makes.keys()):
                self.call(step, call)
                self.forget(step)
        for key in self.made:
            self.line(f"env[{key}] = {self.names[key]}")
        text = "\n ".join(["def run(env, symbols):", *self.lines, "return"])
        exec(compile(text, FILE, "exec"), self.globals)
        return guarded(self.globals["run"], self.steps, self.graph)

    def line(self, text: str, step: Step | None = None) -> None:
        self.lines.append(text)
        self.steps.append(step)

    def call(self, step: Step, call: BoundCall) -> None:
        args = [self.argument(a) for a in call.args]
        args += [f"{name}={self.argument(a)}" for name, a in call.kwargs.items()]
        function = call.function._op if isinstance(call.function, OpOverload) else call.function
        results = ", ".join(map(self.local, step.makes)) + ("," if call.unpacked else "")
        self.made |= step.makes.keys()
        self.line(f"{results} = {self.constant(function)}({', '.join(args)})", step)

    def forget(self, step: Step) -> None:
        dying = [key for key in step.last_uses if key not in self.folded]
        places = [self.names.pop(key) for key in dying if key in self.names]
        places += [f"env[{key}]" for key in dying if key not in self.made]
        self.made.difference_update(dying)
        if places:
            self.line(f"del {', '.join(places)}")

    def as_before(self, step: Step) -> None:
        """On `env`, where the values that it reads are for as long as it runs."""
        lent = [key for key in step.reads if key in self.made]
        for key in lent:
            self.line(f"env[{key}] = {self.names[key]}")
        for key in step.last_uses:
            if name := self.names.pop(key, None):
                self.line(f"del {name}")
        self.line(f"{self.constant(step.advance)}(env, symbols, {self.constant(self.graph)})", step)
        for key in lent:
            if key not in step.last_uses:
                self.line(f"del env[{key}]")
        self.made.difference_update(step.last_uses)

    # -- text -----------------------------------------------------------------------------------------------------------
    def local(self, key: int) -> str:
        self.names[key] = f"v{next(self.numbers)}"
        return self.names[key]

    def constant(self, value: Any) -> str:
        name = f"c{len(self.globals)}"
        self.globals[name] = value
        return name

    def argument(self, arg: Any) -> str:
        if not any(isinstance(leaf, ReadValue) for leaf in tree_leaves(arg)):
            return self.constant(arg)
        match arg:
            case ReadValue(key, None):
                return self.value(key)
            case ReadValue(key, strides):
                return f"{self.constant(restride)}({self.value(key)}, {strides})"
            case list():
                return f"[{', '.join(map(self.argument, arg))}]"
            case tuple():
                return f"({', '.join(map(self.argument, arg))},)"
            case dict():
                return f"{{{', '.join(f'{name!r}: {self.argument(a)}' for name, a in arg.items())}}}"
        raise AssertionError(arg)

    def value(self, key: int) -> str:
        if key in self.folded:
            return self.constant(self.folded[key])
        if key not in self.names:
            self.line(f"{self.local(key)} = env[{key}]")
        return self.names[key]


FILE = "<airgraph replay>"


def guarded(run: Function, steps: Sequence[Step | None], graph: Graph) -> Function:
    """Errors name the op and the user's line, as those of single steps do."""

    def checked(env: Env, symbols: Symbols) -> None:
        try:
            run(env, symbols)
        except Exception as error:
            step = steps[line_in(error) - 2]
            if step is None:
                raise
            step.blame(error, graph)

    return checked


def line_in(error: BaseException) -> int:
    """The line of the function that an exception came from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    assert trace is not None
    return trace.tb_lineno


def reads_of(call: BoundCall) -> Iterator[ReadValue]:
    return (leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, ReadValue))


def is_view(result: Any, inputs: Sequence[Any]) -> bool:
    """A plain tensor in the memory of one of the inputs."""
    if type(result) is not torch.Tensor or result.layout != torch.strided or result.is_conj() or result.is_neg():
        return False
    address = result.untyped_storage().data_ptr()
    return address != 0 and any(x.untyped_storage().data_ptr() == address for x in inputs)


def address_only(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, which does not keep its memory alive."""
    end = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    storage = torch._C._construct_storage_from_data_pointer(x.data_ptr(), x.device, end * x.element_size())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())
