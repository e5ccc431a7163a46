"""A program of an engine whose plans can be read back: its boundary, the text of its plan, what that needs of the graph.

    planned = planned_program(executable, "cuda", boundary)  or why it cannot be written down
    PlannedProgram.from_bytes(planned.to_bytes({...}))
    planned.program(device, maker)                           nothing is converted, rewritten or planned

Where the native engine keeps a frame (engine/native/image.py), other engines are given their plan again. Their kernels are
kept by themselves (engine/cuda/cubins.py).
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from airgraph.engine import find_engine
from airgraph.engine.protocol import Planned, Request, StoredPlans
from airgraph.errors import AirgraphError, VerifyError
from airgraph.ir.boundary import Boundary
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.ir.graph import Graph
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import Plan
from airgraph.plan.text import plan_text
from airgraph.runtime.device import computing_device
from airgraph.runtime.programs import ProgramMaker
from airgraph.store.convention import FUNCTIONS, PLANNED, boundary_data, read_boundary
from airgraph.store.running_graph import read_graph, running_graph, write_graph

LARGEST = 64 << 20  # bytes of a graph with its constants


@dataclass(frozen=True)
class PlannedProgram:
    """`graph`: the part that running the plan takes (running_graph.py). `target`: the number of the target among those of
    its engine. `launches`: what that keeps of the plan besides (StoredPlans.launches). `kernels` gives what it compiled, by
    digest; they are not part of its bytes."""

    engine: str
    graph: Graph
    boundary: Boundary
    plan: str  # its text
    target: int
    launches: Any = None
    kernels: Callable[[], dict[str, bytes]] = field(default=dict, compare=False)

    @property
    def outputs(self) -> int:
        return len(list(self.graph.net_output.values()))

    def to_bytes(self, more: Mapping[str, Any] | None = None) -> bytes:
        """`more` is kept beside it: whatever JSON holds."""
        writer = DataWriter(FUNCTIONS)
        described = boundary_data(self.boundary, writer)
        graph, arrays = write_graph(self.graph, writer)
        texts = [
            json.dumps(graph).encode(),
            arrays,
            self.plan.encode(),
            json.dumps(writer.data(self.launches)).encode(),
        ]
        parts = [zlib.compress(text, 1) for text in texts]
        head = {"engine": self.engine, "target": self.target, "boundary": described, "parts": [*map(len, parts)]}
        start = json.dumps({**head, "symbols": writer.symbol_table(), "more": more or {}}).encode()
        return PLANNED + len(start).to_bytes(8, "little") + start + b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[PlannedProgram, dict[str, Any]]:
        """The program, and what was kept beside it."""
        if not data.startswith(PLANNED):
            raise VerifyError("it is not a program of this version")
        at = len(PLANNED) + 8
        end = at + int.from_bytes(data[at - 8 : at], "little")
        head = json.loads(data[at:end])
        reader = DataReader(head["symbols"], FUNCTIONS)
        graph_data, arrays, plan, launches = unpacked(data[end:], head["parts"])
        graph = read_graph(json.loads(graph_data), arrays, reader)
        boundary = read_boundary(head["boundary"], reader, len(list(graph.net_output.values())))
        table = reader.value(json.loads(launches))
        return cls(head["engine"], graph, boundary, plan.decode(), head["target"], table), head["more"]

    def parsed(self) -> Plan:
        """Its loops are read on demand where `launches` says how they are launched."""
        engine: Any = find_engine(self.engine)
        target, lazy = engine.targets[self.target], self.launches is not None
        return parse_plan(self.plan, self.graph, self.boundary, target, FUNCTIONS, lazy)

    def program(self, device: torch.device, maker: ProgramMaker) -> Any:
        """Ready to run."""
        engine: Any = find_engine(self.engine)
        plan = self.parsed()
        place, mode = computing_device(device), maker.config.mode
        request = Request(
            self.graph,
            self.boundary,
            place,
            mode,
            plan,
            computing_device,
            launches=self.launches,
            journal=maker.journal,
        )
        return engine.program(engine.load(request), maker)


def unpacked(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Parts of these sizes, decompressed."""
    ends = [*itertools.accumulate(sizes)]
    if ends[-1] != len(data):
        raise VerifyError("it was changed: incomplete or truncated")
    try:
        return [zlib.decompress(data[end - size : end]) for size, end in zip(sizes, ends)]
    except zlib.error as error:
        raise VerifyError(f"it was changed: {error}") from error


def planned_program(executable: Any, name: str, boundary: Boundary) -> PlannedProgram | str:
    """What the engine of that name made ready, or why it cannot be written down."""
    from airgraph.store.export import refuse_calls  # it traces models; a program that is read needs none of that

    engine = find_engine(name)
    if not isinstance(executable, Planned) or not isinstance(engine, StoredPlans):
        return "another engine runs it"
    plan = executable.plan
    if plan.target not in engine.targets:
        return "its engine does not read plans for this target"
    try:
        refuse_calls(plan.graph)
        text, target = plan_text(plan, FUNCTIONS), engine.targets.index(plan.target)
        kernels = getattr(getattr(executable, "kernels", None), "binaries", dict)
        launches = engine.launches(executable)
        program = PlannedProgram(name, running_graph(plan, boundary), boundary, text, target, launches, kernels)
        data = program.to_bytes()
    except AirgraphError as error:
        return error.what
    if len(data) > LARGEST:
        return f"its graph has {len(data)} bytes"
    return program if reads_back(data) else "its plan does not read back as it was written"


def reads_back(data: bytes) -> bool:
    """Whether the text of the plan that is read is the text that was written: then it is the same plan."""
    try:
        program, _ = PlannedProgram.from_bytes(data)
        return plan_text(program.parsed(), FUNCTIONS) == program.plan
    except (AirgraphError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
