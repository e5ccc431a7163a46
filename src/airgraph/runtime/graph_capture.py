"""A capture in pieces: CUDA graphs that share a memory pool, with whatever cannot be captured between them.

    capture.begin() ─ work ─ capture.end()      a graph; None where nothing was captured
    …                                           not captured
    capture.begin() ─ work ─ capture.end()      another one, in the same pool
    capture.abort()                             after an error in between

This is the only place that begins and ends a capture of PyTorch's. `runtime/parts` cuts a compiled program with it, the
emulated NPU (`compat/npu/pieces`) whatever a script does between `capture_begin` and `capture_end`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

EMPTY = "CUDA Graph is empty"


def nothing_to_recover() -> None:
    pass


@dataclass(eq=False)
class GraphCapture:
    """`new_graph` makes a `torch.cuda.CUDAGraph` (or what stands for one in a test), which captures what is done on
    `stream`. `recover` is called after a capture that failed."""

    pool: Any
    error_mode: str
    stream: Any = None
    new_graph: Callable[[], Any] = field(default_factory=lambda: torch.cuda.CUDAGraph)
    recover: Callable[[], None] = nothing_to_recover
    graphs: list[Any] = field(default_factory=list)  # the empty ones as well: a pool ends with its last graph
    generators: list[Any] = field(default_factory=list)  # besides the default one
    current: Any = None  # the graph that captures now

    def on_stream(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def begin(self) -> None:
        """Capture from here on, for the first time or again."""
        graph = self.current = self.new_graph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with self.on_stream():
            graph.capture_begin(pool=self.pool, capture_error_mode=self.error_mode)
        self.graphs.append(graph)

    def end(self) -> Any:
        """The graph of what was captured; None if that was nothing. An error leaves it to `abort`."""
        graph = self.current
        with warnings.catch_warnings(record=True) as said, self.on_stream():
            warnings.simplefilter("always")
            graph.capture_end()
        self.current = None
        for one in said:
            if EMPTY not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return None if any(EMPTY in str(one.message) for one in said) else graph

    def abort(self) -> None:
        """Leave a capture that failed. Ending it fails with the error that is on its way already."""
        graph, self.current = self.current, None
        if graph is not None:
            with suppress(RuntimeError):
                graph.capture_end()
        self.recover()

    def clear(self) -> None:
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
