"""A capture on a CUDA host: CUDA graphs, and between them what a CUDA graph cannot hold.

    tasks    Piece ─ Wait ─ Reset ─ RecordedOp (a task group's) ─ Piece ─ LoadState ─ Piece …

A CUDA graph has no arguments to update, does not wait for the host, and runs nothing on it. So CUDA's capture ends where
one of these is asked for and another begins behind it, in the same memory pool; a replay does all of it in order, on one
stream. Tensors of one piece that are used in the next are alive in between, so the pool does not give their memory away.

A device does nothing while it captures, and neither does this one: the ops of a task group are written down with sizes
from their meta kernels and memory of their own, which the graph keeps, as it does with all that they read. A replay runs
them and copies their results there, so whatever comes behind finds them at one address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from airgraph.collector import no_collection
from airgraph.compat.npu import random, work
from airgraph.compat.npu.capture import OpRecorder, TaskList, compiled_code_off, described_op
from airgraph.compat.npu.dispatch import Written, signature_of
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.errors import CompatError
from airgraph.runtime.arena import arena_of
from airgraph.runtime.graph_capture import GraphCapture

aten = torch.ops.aten


@dataclass(eq=False)
class Piece:
    """A CUDA graph, and the ops in it."""

    graph: Any
    ops: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        self.graph.replay()

    def describe(self) -> list[dict[str, Any]]:
        return self.ops


class Pieces(TaskList):
    """What was captured. `new_graph` makes a `torch.cuda.CUDAGraph` (or what stands for one in a test), which captures what
    is done on the stream `side`."""

    def __init__(self, new_graph: Callable[[], Any], pool: Any, error_mode: str, side: Any) -> None:
        super().__init__(pool)
        self.error_mode, self.side = error_mode, side
        self.capture = GraphCapture(pool, error_mode, side, new_graph)
        self.piece: Piece | None = None  # the one that captures now; none in a task group
        self.failed = False
        self.thread = threading.get_ident()
        self.meanwhile = ExitStack()  # what holds as long as it captures

    # The capture.

    def begin(self) -> None:
        if self.side is not None:
            wake_libraries(self.side.device, self.thread)
            self.outer = torch.cuda.current_stream(self.side.device)
            self.side.wait_stream(self.outer)
        self.meanwhile.enter_context(no_collection())
        # A backward pass belongs to the capture: it runs in this thread and on this stream, not in those of autograd.
        self.meanwhile.enter_context(torch.autograd.set_multithreading_enabled(False))
        self.meanwhile.enter_context(self.capture.on_stream())
        try:
            self.begin_piece()
        except BaseException:
            self.leave()
            raise

    def end(self) -> None:
        try:
            if self.piece is not None:
                self.end_piece()
        finally:
            self.leave()
        if self.failed:
            raise CompatError(
                "the capture failed where it was interrupted for a task group or an event",
                hint="the error there says why; what was captured is lost",
            )

    def leave(self) -> None:
        super().end()  # a task group that was left open by an exception
        self.meanwhile.close()
        if self.side is not None:
            self.outer.wait_stream(self.side)

    def clear(self) -> None:
        super().clear()
        self.capture.clear()

    # Pieces.

    def begin_piece(self) -> None:
        self.capture.begin()
        self.piece = Piece(self.capture.current)

    def end_piece(self) -> None:
        piece, self.piece = self.piece, None
        assert piece is not None
        try:
            captured = self.capture.end()
        except BaseException:
            self.failed = True
            self.recover()
            raise
        if captured is not None:
            self.tasks.append(piece)

    def recover(self) -> None:
        """After a capture that failed."""
        if self.side is not None:
            arena_of(self.side.device).recover(self.pool)

    def draw_from(self, generator: Any) -> None:
        """A graph must know a generator before it begins."""
        known: list[Any] = [random.generator(), *self.capture.generators]
        if generator._cdata not in {g._cdata for g in known}:
            with self.between():
                self.capture.generators.append(generator)

    @contextmanager
    def between(self) -> Iterator[None]:
        if self.piece is None:  # in a task group, where nothing captures
            yield
            return
        self.check_thread()
        self.end_piece()
        try:
            yield
        finally:
            self.begin_piece()

    def begin_group(self) -> None:
        self.check_thread()
        self.end_piece()
        self.stance = compiled_code_off()

    def end_group(self) -> None:
        super().end()
        self.begin_piece()

    def begin_branch(self, predicate: torch.Tensor) -> None:
        if not self.outside:
            self.begin_group()
        super().begin_branch(predicate)

    def end_branch(self) -> None:
        super().end_branch()
        if not self.outside:
            self.end_group()

    def check_thread(self) -> None:
        if threading.get_ident() != self.thread and self.error_mode != "relaxed":
            raise CompatError(
                "on a CUDA host task groups, events and states of the generator belong to the thread that captures",
                hint='capture_error_mode="relaxed"',
            )


class Watching(OpRecorder):
    """Sees every op of the capture: refuses what waits, and writes down those of task groups. CUDA captures the others."""

    content: Pieces

    def writes_down(self) -> bool:
        return self.content.piece is None

    def record(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.writes_down():
            return super().record(func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                self.content.draw_from(leaf)
        piece = self.content.piece
        assert piece is not None
        if func is aten.copy_.default and args[1].is_cpu and args[1].dim() == 0:
            result = args[0].fill_(args[1].item())  # a number: CUDA would have to copy it from the host
        else:
            result = func(*args, **kwargs)
        piece.ops.append(described_op(func, (args, kwargs), result))
        return result

    def perform(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return unrun(func, args, kwargs)

    def keep(self, func: torch._ops.OpOverload, result: Any) -> Any:
        """Memory of a captured piece is the pool's."""
        return super().keep(func, result) if self.writes_down() else result


def unrun(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op would give, without running it: memory of the right sizes, with nothing in it."""
    try:
        described = func(*tree_map(_meta, list(args)), **tree_map(_meta, kwargs))
    except NotImplementedError as error:
        raise CompatError(
            f"{func} does not tell the sizes of its results without running, which a task group on a CUDA host needs",
            hint="torch.library.register_fake",
        ) from error
    signature = signature_of(func)
    if not signature.results:
        return None
    given = {**dict(zip(signature.names, args)), **kwargs}
    parts = [described] if len(signature.results) == 1 else described
    made = [
        given[kind.name] if isinstance(kind, Written) else tree_map(_memory_for, part)
        for kind, part in zip(signature.results, parts)
    ]
    return made[0] if len(signature.results) == 1 else tuple(made)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _memory_for(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE_TYPE)


@cache
def wake_libraries(device: torch.device, thread: int) -> None:
    """The libraries for products and convolutions take memory at their first call in a thread, which a capture forbids."""
    x = torch.ones(1, 1, 8, 8, device=device)
    torch.nn.functional.conv2d(x @ x, x)


def on_cuda(pool: Any, error_mode: str, host: torch.device) -> Pieces:
    """The content of a capture whose host is a GPU: CUDA captures on a stream that is not its default one."""
    return Pieces(torch.cuda.CUDAGraph, pool or torch.cuda.graph_pool_handle(), error_mode, torch.cuda.Stream(host))


def recording_of(capture: work.Capture) -> OpRecorder:
    return Watching(capture) if isinstance(capture.content, Pieces) else OpRecorder(capture)
