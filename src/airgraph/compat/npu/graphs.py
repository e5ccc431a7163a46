"""`torch.npu.NPUGraph` and `torch.npu.graph`: capture a sequence of device work once, replay it many times.

    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = model(x)
    x.copy_(new_data)           # the graph reads the memory x had in the capture
    g.replay()                  # and writes the memory of y

On a CPU host `capture` records and replays the ops; on a CUDA host `pieces` has CUDA's own graphs of the same memory, and
records what these cannot hold.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import torch

from airgraph.compat.npu import state, work
from airgraph.compat.npu.capture import TaskList
from airgraph.compat.npu.chip_only import super_kernel_optimize
from airgraph.compat.npu.conditional import check_predicate
from airgraph.compat.npu.handlers import GraphDispatchMode, check_updates
from airgraph.compat.npu.pieces import on_cuda, recording_of
from airgraph.compat.npu.streams import Stream, StreamContext, current_stream, default_stream, synchronize
from airgraph.errors import CompatError

Pool: TypeAlias = tuple[int, int]
ERROR_MODES = ("global", "thread_local", "relaxed")
_pools = itertools.count(1)


def is_current_stream_capturing() -> bool:
    capture = work.capture
    return capture is not None and capture.forks.takes_part(capture.stream_here(current_stream()))


def graph_pool_handle() -> Pool:
    """A token for a memory pool, to be given to several captures.

    On a CPU host each graph keeps its own memory, and the token only names the pool.
    """
    if state.host_device().type == "cuda":
        return torch.cuda.graph_pool_handle()
    return (0, next(_pools))


class NPUGraph:
    """Work of the device that was captured and can be replayed."""

    def __init__(self) -> None:
        self.auto_dispatch_capture = False
        self.graph_dispatch_mode = GraphDispatchMode()
        self._captured: _Body | None = None
        self._capturing: _Body | None = None

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        """Write down what the current stream does from now on, until `capture_end()`."""
        _check_environment()
        if self._captured is not None or self._capturing is not None:
            raise CompatError(
                "This NPUGraph instance already owns a captured graph. To capture a new graph, create a new instance.",
                hint="or call reset() on this one first",
            )
        if capture_error_mode not in ERROR_MODES:
            raise CompatError(
                f"capture_error_mode cannot be {capture_error_mode!r}", where={"allowed": ", ".join(ERROR_MODES)}
            )
        stream = current_stream()
        if stream == default_stream():
            raise CompatError(
                "NPU graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)",
                hint="with torch.npu.stream(torch.npu.Stream()):, or with torch.npu.graph(g):",
            )
        body = _Body(self, _checked_pool(pool), stream, capture_error_mode)
        self.graph_dispatch_mode.records.clear()
        body.begin()
        self._capturing = body
        if self.auto_dispatch_capture:
            self.graph_dispatch_mode.__enter__()

    def capture_end(self) -> None:
        body, self._capturing = self._capturing, None
        if body is None:
            raise CompatError("capture_end() was called, but this graph is not capturing", hint="capture_begin() first")
        if self.auto_dispatch_capture:
            self.graph_dispatch_mode.__exit__(None, None, None)
        strays = body.capture.forks.strays()
        body.end()
        if current_stream() != body.capture.stream:
            raise CompatError(
                "Capture must end on the same stream it began on.", hint="what was captured is lost; capture again"
            )
        if strays:
            raise CompatError(
                f"the capture ends with work of {strays[0]} that its first stream has not waited for",
                hint="first_stream.wait_stream(that_stream) before the capture ends; what was captured is lost",
            )
        if body.content.outside:
            raise CompatError(
                "capture_end() was called inside a conditional node", hint="end_capture_to_conditional_node() first"
            )
        if not body.content.tasks:
            warnings.warn("the captured graph is empty: no work was given to the stream that captures", stacklevel=2)
        self._captured = body

    def begin_capture_to_if_node(self, predicate: torch.Tensor) -> None:
        """What is captured from here on is done by a replay only where `predicate` is True."""
        body = self._branching("begin_capture_to_if_node")
        check_predicate(predicate, body.capture.stream.device_index)
        body.content.begin_branch(predicate)

    def end_capture_to_conditional_node(self) -> None:
        content = self._branching("end_capture_to_conditional_node").content
        if not content.outside:
            raise CompatError("no conditional node is open", hint="begin_capture_to_if_node(predicate) first")
        content.end_branch()

    def _branching(self, name: str) -> _Body:
        if self._capturing is None:
            raise CompatError(f"{name}: this graph is not capturing", hint="conditional nodes are part of a capture")
        return self._capturing

    def replay(self) -> None:
        """Do the captured work again, on the current stream."""
        body = self._owned("Called NPUGraph::replay without a preceding successful capture.")
        if work.capture is not None and is_current_stream_capturing():
            raise CompatError(f"{work.NOT_PERMITTED}: a replay cannot be part of another capture")
        work.check_not_blocked("a replay", current_stream())
        body.content.replay()

    def reset(self) -> None:
        """Forget what was captured; `capture_begin` may be called again."""
        if self._capturing is not None:
            raise CompatError("a graph cannot be reset while it captures", hint="call capture_end() first")
        if self._captured is not None:
            self._captured.content.clear()
        self._captured = None
        self.auto_dispatch_capture = False
        self.graph_dispatch_mode.records.clear()

    def pool(self) -> Pool:
        """The token of this graph's memory pool."""
        return self._owned("Called NPUGraph::pool() without a preceding successful capture.").content.pool

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """New values for host arguments of captured ops, for the next replay.

            g.update([{"actual_seq_lengths_kv": [17]}])

        One dictionary for each updatable op in the order of the capture, or a single one for all.
        """
        if not self.auto_dispatch_capture:
            raise CompatError(
                "The current npu_graph does not support update, Try to capture by setting auto_dispatch_capture=True "
                "during capture",
                hint="with torch.npu.graph(g, auto_dispatch_capture=True):",
            )
        self._owned("Called NPUGraph::update without a preceding successful capture.")
        mode = self.graph_dispatch_mode
        mode.update(check_updates(mode.records, cpu_update_input))

    def enable_debug_mode(self) -> None:
        """Nothing to switch on: what was captured can always be dumped."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the captured ops to a JSON file, in order, with the types and sizes of what they read and give."""
        body = self._owned("Called NPUGraph::debug_dump without a preceding successful capture.")
        Path(debug_path).write_text(json.dumps({"tasks": body.content.describe()}, indent=1) + "\n", encoding="utf-8")

    def register_generator_state(self, generator: Any) -> None:
        warnings.warn(
            "NPUGraph.register_generator_state does nothing: a generator is registered by its first use in a capture",
            DeprecationWarning,
            stacklevel=2,
        )

    def super_kernel_optimize(self, optimize_options: Any = None, debug_options: Any = None) -> None:
        """Kernels of the captured graph are not fused again: a warning."""
        self._owned("Called NPUGraph::super_kernel_optimize without a preceding successful capture.")
        super_kernel_optimize(optimize_options, debug_options)

    @staticmethod
    def get_currently_capturing_graph() -> NPUGraph:
        if work.capture is None:
            raise CompatError("no graph is capturing", hint="torch.npu.is_current_stream_capturing() tells")
        return work.capture.graph

    def _owned(self, otherwise: str) -> _Body:
        if self._captured is None:
            raise CompatError(otherwise, hint="capture_begin() … capture_end(), or with torch.npu.graph(g):")
        return self._captured


class graph:
    """`with torch.npu.graph(g):` captures the block, on a stream of its own unless one is given.

    `auto_dispatch_capture` makes ops with a handler updatable: see `NPUGraph.update`.
    """

    default_capture_stream: Stream | None = None

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Pool | None = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        default = graph.default_capture_stream
        if default is None or default.device_index != state.current_device():
            graph.default_capture_stream = Stream()
        self.npu_graph = npu_graph
        self.pool = pool
        self.capture_stream = graph.default_capture_stream if stream is None else stream
        self.auto_dispatch_capture = auto_dispatch_capture
        self.capture_error_mode = capture_error_mode

    def __enter__(self) -> None:
        synchronize()
        if os.environ.get("TORCH_NPUGRAPH_GC") == "1":
            gc.collect()
        if state.host_device().type == "cuda":
            torch.cuda.empty_cache()
        self.on_stream = StreamContext(self.capture_stream)
        self.on_stream.__enter__()
        before = self.npu_graph.auto_dispatch_capture
        try:
            self.npu_graph.auto_dispatch_capture = self.auto_dispatch_capture
            self.npu_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException:
            self.npu_graph.auto_dispatch_capture = before
            self.on_stream.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self.npu_graph.capture_end()
        finally:
            self.on_stream.__exit__()


class _Body:
    """A capture and what came of it."""

    def __init__(self, graph: NPUGraph, pool: Pool | None, stream: torch.Stream, error_mode: str) -> None:
        self.capture = work.Capture(graph, stream, error_mode, new_content(pool, error_mode))
        self.content: TaskList = self.capture.content
        self.recording = recording_of(self.capture)

    def begin(self) -> None:
        work.begin(self.capture)
        try:
            self.content.begin()
        except BaseException:
            work.end()
            raise
        self.recording.__enter__()

    def end(self) -> None:
        self.recording.__exit__(None, None, None)
        try:
            self.content.end()
        finally:
            work.end()
        self.recording.undo()


def new_content(pool: Pool | None, error_mode: str) -> TaskList:
    """What a graph is made of, by host: a list of ops, or CUDA's graphs."""
    host = state.host_device()
    return on_cuda(pool, error_mode, host) if host.type == "cuda" else TaskList(pool or graph_pool_handle())


def _checked_pool(pool: Any) -> Pool | None:
    if pool is None or (isinstance(pool, tuple) and len(pool) == 2):
        return pool
    raise CompatError(f"pool must be a pool's token, got {pool!r}", hint="torch.npu.graph_pool_handle() or g.pool()")


def _check_environment() -> None:
    """What the device refuses to capture with."""
    if os.environ.get("TASK_QUEUE_ENABLE") == "2":
        raise CompatError("a graph cannot be captured with TASK_QUEUE_ENABLE=2", hint="TASK_QUEUE_ENABLE=1 or 0")
    for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "pin_memory_expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise CompatError(f"a graph cannot be captured with pin_memory_expandable_segments:True in {name}")
