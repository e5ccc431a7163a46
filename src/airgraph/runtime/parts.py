"""A program cut into parts: what is captured, and what has to run by itself in between.

    parts    captured ─ open ─ captured …     steps in their order

On CUDA a captured part is a CUDA graph. On a CPU it is the list of its calls into PyTorch on the same fixed memory:
arguments, results, writes and splits go the very same way, which is how all of it is tested without a GPU.

A captured part is replayed as soon as it is recorded. So the values an open step reads are there when it runs for the
first time, and a recording is a call like any other: its results are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves as leaves

from airgraph.aten_call import find_target
from airgraph.collector import no_collection
from airgraph.engine.call_list import CallList
from airgraph.engine.protocol import Env, Step, Steps, Symbols
from airgraph.ir.graph import Graph, Node, Value
from airgraph.runtime.arena import Arena
from airgraph.runtime.graph_capture import GraphCapture
from airgraph.runtime.lanes import Lanes, Streams, apart, is_split

Work = Callable[[Env, Symbols], None]
Capture = Callable[[Sequence[Step], Work], "ProgramPart"]  # steps, and what comes after them


class ProgramPart(Protocol):
    def record(self, env: Env, symbols: Symbols) -> None: ...

    def run(self, env: Env, symbols: Symbols) -> None: ...


@dataclass
class BoundPart:
    """Steps on fixed memory: one by one when they are recorded, from then on as one function (engine/call_list.py); those
    that are divided between streams one by one every time.

    `steady`: the values that are at the same address in every call."""

    executable: Steps
    steps: Sequence[Step]
    finish: Work
    steady: Collection[int]
    streams: Streams | None
    work: Work | None = None

    def record(self, env: Env, symbols: Symbols) -> None:
        if self.streams is not None and is_split(self.steps):
            self.work = steps_work(self.executable, self.steps, self.streams)
            self.work(env, symbols)
        else:
            calls = CallList(self.executable.graph, self.steady)
            for step in self.steps:
                calls.advance(step, env, symbols)
            self.work = calls.function()
        self.finish(env, symbols)

    def run(self, env: Env, symbols: Symbols) -> None:
        self.work(env, symbols)  # type: ignore[misc]
        self.finish(env, symbols)


@dataclass
class CapturedPart:
    """A CUDA graph."""

    work: Work
    arena: Arena
    pool: Any
    error_mode: str
    graph: Any = None

    def record(self, env: Env, symbols: Symbols) -> None:
        """(cuBLAS has a workspace for each stream. That of the capture may be the arena's again: no other program runs
        beside this one.)"""
        capture = GraphCapture(self.pool, self.error_mode, self.arena.stream, recover=self.recover)
        torch.cuda.synchronize(self.arena.device)
        with capture.on_stream(), no_collection():
            try:
                capture.begin()
                self.work(env, symbols)
                capture.end()
            except BaseException:
                capture.abort()
                raise
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        self.graph = capture.graphs[0]
        self.work = nothing  # it holds what it was recorded with
        self.graph.replay()

    def recover(self) -> None:
        self.arena.spoil(self.pool)
        self.arena.recover(self.pool)

    def run(self, env: Env, symbols: Symbols) -> None:
        self.graph.replay()


@dataclass
class OpenPart:
    """Steps that cannot be captured. What a captured part reads of their results has a fixed place."""

    work: Work
    results: tuple[int, ...]  # values of these steps that captured parts read

    def record(self, env: Env, symbols: Symbols) -> None:
        self.work(env, symbols)

    def run(self, env: Env, symbols: Symbols) -> None:
        places = {key: env[key] for key in self.results if key in env}
        self.work(env, symbols)
        for key, place in places.items():
            env[key] = place.copy_(env[key])


# -- what can be captured -----------------------------------------------------------------------------------------------
def split_text(graph: Graph, node: Node, reason: str) -> str:
    """For the journal: which op, why, and the user's line."""
    from airgraph.ir.verify import place  # with the table of ops, which a program from the cache has no use for

    source = place(graph, node).get("from")
    return f"not captured: {node.attrs.get('target', node.op)} ({reason})" + (f", from {source}" if source else "")


def why_open(node: Node, device: torch.device, executable: Steps, sizes: set[Any]) -> str | None:
    """The reason a step cannot be part of a captured program; None if it can. `sizes`: the symbols arguments tell."""
    if node.op == "PrintV2":
        return "it prints"
    if node.op == "AtenCall":
        tags = getattr(find_target(node.attrs["target"], executable.graph), "tags", ())
        if torch.Tag.cudagraph_unsafe in tags:
            return "it is marked cudagraph_unsafe"
        if torch.Tag.data_dependent_output in tags:
            return "it hands a value to the host"
        if torch.Tag.dynamic_output_shape in tags:
            return "the size of its result is known only when it runs"
    unknown = {s for v in (*node.values(), *node.outputs) for s in symbols_of(v)} - sizes
    if unknown:
        return f"the size {', '.join(sorted(map(str, unknown)))} is known only when it runs"
    if device.type == "cuda":
        if any(on_host(v) for v in node.outputs):
            return "its result is on the CPU"
        baked = executable.constants.keys() | executable.cells
        if any(on_host(v) and id(v) not in baked for v in node.values()):
            return "it reads a tensor on the CPU"
    return None


def written_inputs(executable: Steps) -> set[str]:
    """The names of the Data nodes a run writes to: by Assign, by a step, or by a call into PyTorch whose schema says so."""
    found = {name for name, _ in executable.writes} | executable.written
    for node in executable.graph.of("AtenCall"):
        schema = getattr(find_target(node.attrs["target"], executable.graph), "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        writes = {
            a.name: i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        }
        given = {**dict(zip((a.name for a in schema.arguments), node.attrs["args"])), **node.attrs["kwargs"]}
        values = [*node.values()]
        for place in leaves([given.get(name) for name in writes]):
            if isinstance(place, str) and place.startswith("%") and values[int(place[1:])].node.op == "Data":
                found.add(values[int(place[1:])].node.name)
    return found


def on_host(value: Value) -> bool:
    """A tensor of the CPU; sizes and numbers, known from the arguments, are none."""
    return value.type.place == "CPU" and value.known is None


def symbols_of(value: Value) -> set[Any]:
    sizes = {s for size in value.type.shape or () if not isinstance(size, int) for s in size.free_symbols}
    return sizes | set(getattr(value.known, "free_symbols", ()))


# -- cutting a program into parts ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """Steps in a row that are captured, or (with a reason for each) not."""

    steps: tuple[Step, ...]
    open: bool


class PartRecorder:
    """Makes the parts of a program while running it once, the last of them with `finish` (results to their slots, writes
    to arguments) at its end. `refused` are steps that cannot be captured; what is found out on the way is added."""

    def __init__(self, executable: Steps, sizes: set[Any], refused: dict[Node, str]) -> None:
        self.executable = executable
        self.sizes = sizes
        self.refused = refused

    def record(
        self, env: Env, symbols: Symbols, finish: Work, capture: Capture, keep: bool = False
    ) -> list[ProgramPart]:
        """`keep`: no value dies, so that all can be looked at afterwards."""
        waiting, parts = self.runs(self.executable.steps), []
        waiting = waiting if waiting and not waiting[-1].open else [*waiting, Run((), False)]
        while waiting:
            run = waiting.pop(0)
            steps = kept(run.steps) if keep else confined(run.steps)
            if run.open:
                part: ProgramPart = OpenPart(steps_work(self.executable, steps), self.placed(run, waiting))
            else:
                part = capture(steps, nothing if waiting else finish)
            before = dict(env)
            try:
                part.record(env, symbols)
            except Exception as error:
                node = getattr(error, "node", None)
                if run.open or node is None or not isinstance(part, CapturedPart):
                    raise
                # Nothing of this part has been done yet: it is cut in two at the step that failed.
                self.refused[node] = str(error.__cause__ or error).splitlines()[0]
                env.clear()
                env.update(before)
                waiting[:0] = self.runs(run.steps) if waiting else [*self.runs(run.steps), Run((), False)]
                continue
            parts.append(part)
        return parts

    def runs(self, steps: Sequence[Step]) -> list[Run]:
        found: list[Run] = []
        for step in steps:
            is_open = self.why(step) is not None
            if found and found[-1].open == is_open:
                found[-1] = Run((*found[-1].steps, step), is_open)
            else:
                found.append(Run((step,), is_open))
        return found

    def why(self, step: Step) -> str | None:
        """Why a step is not captured: the reason of the first of its nodes that cannot be."""
        for node in step.nodes:
            if node not in self.refused:
                reason = why_open(node, self.executable.device, self.executable, self.sizes)
                if reason:
                    self.refused[node] = reason
        return next((self.refused[node] for node in step.nodes if node in self.refused), None)

    def placed(self, run: Run, later: Sequence[Run]) -> tuple[int, ...]:
        """Results of an open run that captured ones read: they need a fixed place."""
        reads = {key for r in later if not r.open for s in r.steps for key in s.reads}
        reads |= {*self.executable.outputs, *(key for _, key in self.executable.writes)}
        return tuple(
            key
            for s in run.steps
            for key, v in s.makes.items()
            if key in reads and (v is None or (v.known is None and not symbols_of(v) - self.sizes))
        )


def confined(steps: Sequence[Step]) -> list[Step]:
    """Values that come from or go to another part stay; the others die as before."""
    born = {key for step in steps for key in step.makes}
    return [replace(s, last_uses=tuple(k for k in s.last_uses if k in born)) for s in steps]


def kept(steps: Sequence[Step]) -> list[Step]:
    """No value dies."""
    return [replace(s, last_uses=()) for s in steps]


def steps_work(executable: Steps, steps: Sequence[Step], streams: Streams | None = None) -> Work:
    split = streams is not None and is_split(steps)
    steps = apart(steps) if split else steps

    def one(step: Step, env: Env, symbols: Symbols) -> None:
        try:
            step.advance(env, symbols, executable.graph)
        except Exception as error:
            error.node = step.nodes[-1]  # type: ignore[attr-defined]
            raise

    def in_order(env: Env, symbols: Symbols) -> None:
        for step in steps:
            one(step, env, symbols)

    def on_streams(env: Env, symbols: Symbols) -> None:
        lanes = Lanes(streams, steps, executable.graph)  # type: ignore[arg-type]
        try:
            for step in steps:
                lanes.run(step, env, lambda step=step: one(step, env, symbols))  # type: ignore[misc]
        finally:
            lanes.join()  # also of a capture that failed: it cannot be ended while streams are apart

    return on_streams if split else in_order


def nothing(env: Env, symbols: Symbols) -> None:
    """The work of a captured part is in its graph."""


def in_order(*works: Work) -> Work:
    def work(env: Env, symbols: Symbols) -> None:
        for one in works:
            one(env, symbols)

    return work
