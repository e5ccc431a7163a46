"""Several streams inside one captured graph: each step on the stream its scope names.

    a = add(x, y)                   main ──a──┬──────c────┬──
    with npu_stream_switch("1"):              └──b──┐     │        b waits for a, c for nobody, d for b
        b = mm(a, y)                "1"             └─────d
    c = relu(a)
    d = add(b, c)

A captured graph keeps of the streams only what must come before what, so the order is made of as little as is right:

    a value     read on another stream: that stream waits for the step that made it
    a wait      of the program (a control edge of the graph): the same
    a write     to an argument of the graph: waits for all streams, and all wait for it
    the ends    every stream begins after the first step's place on the main one, which in the end waits for all

Writing over a value that nobody reads any more is left out: somebody on another stream may be reading it still, and a wait
for him costs more than memory does. Memory that a step of another stream reads is not handed out again before that step is
done: PyTorch's allocator sees to it when it is told (`record_stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch

from airgraph.aten_call import find_target
from airgraph.engine.protocol import Env, Step
from airgraph.ir.graph import Graph, Node, stream_of

Label = str | None  # None: the main stream


class LaneStream(Protocol):
    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None: ...


class Streams(Protocol):
    """Those of a device."""

    def named(self, label: Label) -> LaneStream:
        """The stream of that name; None is the one that is current when a capture begins."""

    def on(self, stream: LaneStream) -> AbstractContextManager[Any]: ...

    def hold(self, tensor: torch.Tensor, stream: LaneStream) -> None:
        """`stream` reads the tensor, whose memory is another's."""


class CudaStreams:
    """`made`: streams by name, which serve every capture of a device."""

    def __init__(self, device: torch.device, main: torch.cuda.Stream, made: dict[str, torch.cuda.Stream]) -> None:
        self.device = device
        self.main = main
        self.made = made

    def named(self, label: Label) -> Any:
        if label is None:
            return self.main
        if label not in self.made:
            self.made[label] = torch.cuda.Stream(self.device)
        return self.made[label]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        if tensor.device.type == "cuda":
            tensor.record_stream(stream)


def is_split(steps: Sequence[Step]) -> bool:
    return any(lane_of(step) is not None for step in steps)


def lane_of(step: Step) -> Label:
    """The stream a step is on: that of its nodes, which do not differ."""
    return stream_of(step.nodes[-1])


def apart(steps: Sequence[Step]) -> list[Step]:
    """Steps that write to arguments, but not over each other's values."""
    return [step if step.over is None else replace(step, in_place=None, over=None) for step in steps]


class Lanes:
    """The streams of one run over some steps."""

    def __init__(self, streams: Streams, steps: Sequence[Step], graph: Graph) -> None:
        self.streams = streams
        self.graph = graph
        self.awaited = {node for step in steps for node in sources(step) if stream_of(node) != lane_of(step)}
        self.lanes: dict[Label, LaneStream] = {None: streams.named(None)}
        self.begin = self.lanes[None].record_event()
        self.done: dict[Node, Any] = {}  # a step somebody waits for → its event
        self.ran: set[Node] = set()
        self.waited: set[tuple[Label, Node]] = set()

    def run(self, step: Step, env: Env, call: Callable[[], None]) -> None:
        label = lane_of(step)
        lane = self.lane(label)
        for source in sources(step):
            if source in self.done and stream_of(source) != label and (label, source) not in self.waited:
                lane.wait_event(self.done[source])
                self.waited.add((label, source))
        for node in step.nodes:
            self.hold(node, env, lane)
        exclusive = changes(step, self.graph)
        if exclusive:
            self.gather(label)
        with self.streams.on(lane):
            call()
        self.ran.update(step.nodes)
        awaited = self.awaited.intersection(step.nodes)
        if awaited:
            self.done.update(dict.fromkeys(awaited, lane.record_event()))
        if exclusive:
            self.scatter(label)

    def lane(self, label: Label) -> LaneStream:
        if label not in self.lanes:
            self.lanes[label] = self.streams.named(label)
            self.lanes[label].wait_event(self.begin)
        return self.lanes[label]

    def hold(self, node: Node, env: Env, lane: LaneStream) -> None:
        for value in node.values():
            tensor = env.get(id(value))
            if value.node in self.ran and stream_of(value.node) != stream_of(node) and isinstance(tensor, torch.Tensor):
                self.streams.hold(tensor, lane)

    def gather(self, label: Label) -> None:
        """This stream waits for all others."""
        for other, lane in self.lanes.items():
            if other != label:
                self.lanes[label].wait_event(lane.record_event())

    def scatter(self, label: Label) -> None:
        """All others wait for this stream, also those that begin later."""
        self.begin = self.lanes[label].record_event()
        for other, lane in self.lanes.items():
            if other != label:
                lane.wait_event(self.begin)

    def join(self) -> None:
        self.gather(None)


def sources(step: Step) -> set[Node]:
    """The nodes of other steps that must have run before."""
    found = {node for own in step.nodes for node in (*(value.node for value in own.values()), *own.control)}
    return found.difference(step.nodes)


def changes(step: Step, graph: Graph) -> bool:
    """Whether it writes to memory that others may read."""
    if step.in_place is not None:
        return True
    targets = [find_target(node.attrs["target"], graph) for node in step.nodes if node.op == "AtenCall"]
    schemas = [getattr(target, "_schema", None) for target in targets]
    return any(schema is not None and schema.is_mutable for schema in schemas)
