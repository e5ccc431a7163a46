"""The FX graph itself, op by op, by PyTorch: the program without anything of ours in it.

    run_eagerly   PyTorch runs the FX graph after its passes; what is still wrong then is not wrong in our graph
    data_dump     the same with an observer that writes every tensor (store.data_dump)
    compare       the same with an observer that keeps every value (tools.compare)

Arguments, results, views and writes to arguments are as PyTorch has them, and on an emulated device the ops are that
device's own eager ops: devices named in the graph stay what the user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from airgraph.journal import Journal


class Observer(Protocol):
    """Sees every node of an FX graph, but not the placeholders, while it runs. Inputs are shown before the op, which may
    write to them."""

    def start(self, call: int) -> None: ...

    def inputs(self, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None: ...

    def output(self, node: torch.fx.Node, result: Any) -> None: ...


class ObservedInterpreter(torch.fx.Interpreter):
    """PyTorch's interpreter, which frees a value after its last reader, with an observer beside it."""

    def __init__(self, gm: torch.fx.GraphModule, observer: Observer) -> None:
        super().__init__(gm)
        self.observer = observer

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self.observer.inputs(n, args, kwargs)
        del args, kwargs  # what only this node reads may be freed with it
        result = super().run_node(n)
        self.observer.output(n, result)
        return result


class InterpretedProgram:
    """Called like a `Program`: the arguments of the FX graph as one list."""

    _boxed_call = True

    def __init__(self, name: str, gm: torch.fx.GraphModule, journal: Journal, observer: Observer | None = None) -> None:
        self.name = name
        self.gm = gm
        self.journal = journal
        self.observer = observer
        self.calls = 0

    def __call__(self, args: list[Any], *rest: Any) -> list[Any]:
        given = [*args, *rest] if isinstance(args, list | tuple) else [args, *rest]
        if isinstance(args, list):
            args.clear()
        with torch.autograd.profiler.record_function("fx_run_eagerly"):
            results = interpret(self.gm, given, self.observer, self.calls)
        self.calls += 1
        return results


def interpret(gm: torch.fx.GraphModule, args: list[Any], observer: Observer | None = None, call: int = 0) -> list[Any]:
    """The results of the graph. `args` is emptied, so that they can be freed on the way."""
    if observer is None:
        return list(torch.fx.Interpreter(gm).boxed_run(args))
    observer.start(call)
    return list(ObservedInterpreter(gm, observer).boxed_run(args))
