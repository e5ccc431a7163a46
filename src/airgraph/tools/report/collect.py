"""What a report shows, as plain data.

Lines of all stages are linked by FX nodes: a line carries the numbers of the nodes it belongs to, in the source, in the FX
graph, in the GE graph before and after the passes, in the plan, and in the loop nests of its kernels.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from airgraph.compilation import registry_of, wrapping
from airgraph.config import Config
from airgraph.convert import convert
from airgraph.convert.fx_text import node_code
from airgraph.convert.names import NAME
from airgraph.engine.meanings import has_kernel
from airgraph.engine.native.tables import FrameWords
from airgraph.engine.protocol import Planned
from airgraph.ir.graph import Graph, Node
from airgraph.ir.text import call_text, targets
from airgraph.journal import Journal
from airgraph.plan.nest_text import nest_text
from airgraph.plan.origins import nodes_of, title
from airgraph.plan.steps import AttentionStep, CallStep, ConvStep, GemmStep, LoopStep, Plan, step_reads, step_writes
from airgraph.plan.tensors import Tensor
from airgraph.plan.text import PlanText
from airgraph.tools.explain import Report, recording
from airgraph.tools.terminal import UNLIMITED
from airgraph.torch_types import TORCH_TYPES

Line = tuple[str, list[int]]  # a text, and the FX nodes it belongs to; -1, -2, … are the arguments
SOURCE = re.compile(r'"(?P<file>[^"]+)", line (?P<line>\d+)')
AROUND = 2  # lines of source shown above and below those that were traced
STEP = re.compile(r"^(\d+) ")
CALLED = {
    GemmStep: "the matrix product kernel that all graphs share",
    AttentionStep: "the attention kernel that all graphs share",
    ConvStep: "the convolution kernel that all graphs share",
    CallStep: "PyTorch",
}


@dataclass
class GraphRecord:
    """One compiled graph, kept until the report is made: only then its memory has been laid out."""

    gm: torch.fx.GraphModule
    program: Any
    original: Graph

    @property
    def journal(self) -> Journal:
        return inner(self.program).journal

    def data(self) -> dict[str, Any]:
        program = inner(self.program)
        executable = getattr(program, "executable", None)
        graph = getattr(executable, "graph", self.original)
        plan = executable.plan if isinstance(executable, Planned) else None
        stages = [
            ("source", source_lines(self.original)),
            ("FX", fx_lines(self.gm)),
            ("GE", ge_lines(self.original)),
            ("after passes", ge_lines(graph)),
            *([("plan", plan_lines(plan)), ("kernels", kernel_lines(plan))] if plan else []),
        ]
        return {
            "name": self.journal.graph,
            "phase": self.journal.phase,
            "classification": self.journal.classification,
            "stages": [{"name": name, "lines": lines} for name, lines in stages],
            "nodes": drawing(graph),
            "arena": arena(executable) if plan else None,
            "passes": [{"name": s.name, "ms": s.seconds * 1e3, "notes": s.notes} for s in self.journal.stages],
            "remarks": list(self.journal.remarks),
        }


@dataclass
class GraphCollector:
    """Collects while it is listening; `data` afterwards."""

    graphs: list[GraphRecord] = field(default_factory=list)
    explained: Callable[[], Report] | None = None

    def wrap(self, gm: torch.fx.GraphModule, program: Any, config: Config) -> Any:
        with _disable_current_modes():
            original, _ = convert(gm, gm.__class__.__name__, registry_of(config), Journal(), has_kernel=has_kernel)
        self.graphs.append(GraphRecord(gm, program, original))
        return program

    def data(self, kernels: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        assert self.explained is not None
        told = self.explained()
        return {
            "torch": torch.__version__,
            "overview": told.json(),
            "text": told.text(width=UNLIMITED),
            "graphs": [record.data() for record in self.graphs],
            "kernels": list(kernels),
        }


@contextmanager
def collecting() -> Iterator[GraphCollector]:
    """Whatever airgraph compiles meanwhile is recorded."""
    recorder = GraphCollector()
    with recording() as recorder.explained, wrapping(recorder.wrap):
        yield recorder


def inner(program: Any) -> Any:
    """The program behind what pads its sizes."""
    while not hasattr(program, "journal") and hasattr(program, "program"):
        program = program.program
    return program


# -- stages ---------------------------------------------------------------------------------------------------------
def fx_lines(gm: torch.fx.GraphModule) -> list[Line]:
    """Notes are numbered as the converter does: nodes that have a stack."""
    lines: list[Line] = []
    number, arguments = -1, 0
    for node in gm.graph.nodes:
        if node.op == "call_function":
            number += bool(node.stack_trace)
            lines.append((node_code(node), [number] if number >= 0 else []))
        elif node.op == "placeholder":
            arguments += 1
            name = node.meta.get(NAME)
            lines.append((f"{node.name}{f'    # {name}' if name else ''}", [-arguments]))
    return lines


def ge_lines(graph: Graph) -> list[Line]:
    lines: list[Line] = []
    for node in graph.nodes:
        if node.op != "Const":
            name = graph.names.get(node.name)
            text = f"{targets(node)} = {call_text(node)}{f'    # {name}' if name else ''}"
            number = -1 - node.attrs["index"] if node.op == "Data" else node.note
            lines.append((text, [number] if node.op == "Data" or (node.op != "NetOutput" and number >= 0) else []))
    return lines


def plan_lines(plan: Plan) -> list[Line]:
    lines: list[Line] = []
    numbers: list[int] = []
    for text in plan.text().splitlines():
        begins = STEP.match(text)
        if begins and int(begins[1]) < len(plan.steps):
            numbers = notes(plan, int(begins[1]))
        lines.append((text, [] if text.startswith("output ") else numbers))
    return lines


def kernel_lines(plan: Plan) -> list[Line]:
    """The loop nest of every kernel that is generated, and the name of what any other step calls."""
    lines: list[Line] = []
    names = PlanText(plan)
    names.lines()  # tensors are called what the plan's text calls them
    for number, step in enumerate(plan.steps):
        linked = notes(plan, number)
        called = "" if isinstance(step, LoopStep) else f": {CALLED[type(step)]}"
        lines.append((f"{number} {title(plan, step)}{called}", linked))
        loops = [getattr(step, "prologue", None), getattr(step, "epilogue", None), step]
        nests = [nest for loop in loops if isinstance(loop, LoopStep) for nest in loop.nests]
        lines += [(f"    {line}", linked) for nest in nests for line in nest_text(nest, names.name).splitlines()]
    return lines


def notes(plan: Plan, number: int) -> list[int]:
    return list(dict.fromkeys(n.note for n in nodes_of(plan, plan.steps[number]) if n.note >= 0))


def source_lines(graph: Graph) -> list[Line]:
    """The files the graph was traced from, around the lines that were traced."""
    traced: dict[str, dict[int, list[int]]] = {}
    for number, note in enumerate(graph.notes):
        found = SOURCE.search(note.file or "")
        if found:
            traced.setdefault(found["file"], {}).setdefault(int(found["line"]), []).append(number)
    lines: list[Line] = []
    for file, wanted in traced.items():
        lines.append((f"# {file}", []))
        shown = {n for at in wanted for n in range(max(at - AROUND, 1), at + AROUND + 1)}
        before = 0
        for at in sorted(shown):
            text = linecache.getline(file, at).rstrip()
            if not text and at not in wanted:
                continue
            if before and at > before + 1:
                lines.append(("    ⋮", []))
            lines.append((f"{at:>5}  {text}", wanted.get(at, [])))
            before = at
    return lines


# -- pictures -------------------------------------------------------------------------------------------------------
def drawing(graph: Graph) -> list[dict[str, Any]]:
    """Nodes with the edges that come in: [the number of the node, the type of the value]."""
    nodes = [node for node in graph.nodes if node.op != "Const"]
    numbers = {node: i for i, node in enumerate(nodes)}
    return [
        {
            "op": node.op,
            "name": graph.names.get(node.name, node.name),
            "module": module_of(graph, node),
            "note": node.note,
            "in": [[numbers[v.node], short_type(v)] for v in dict.fromkeys(node.values()) if v.node in numbers],
        }
        for node in nodes
    ]


def module_of(graph: Graph, node: Node) -> str:
    """The path of the module a node is drawn in; a parameter belongs to its own."""
    if node.op == "Data":
        return graph.names.get(node.name, "").rpartition(".")[0]
    return graph.notes[node.note].module if 0 <= node.note < len(graph.notes) else ""


def short_type(value: Any) -> str:
    return f"{value.dtype.name.removeprefix('DT_').lower()}[{', '.join(map(str, value.type.shape or ()))}]"


def arena(executable: Any) -> dict[str, Any] | None:
    """Where each intermediate lay in the last call, and when it was alive; None for a program that has not run.

    One that lies in the memory of a result, which it is written over by, has no offset.
    """
    if not executable.frames:
        return None
    plan, frame = executable.plan, executable.frames[-1]
    found: dict[int, dict[str, Any]] = {}
    for number, step in enumerate(plan.steps):
        for t in (*step_reads(step), *step_writes(step)):
            place = plan.allocations.get(t.id)
            if place is not None and place.kind == "arena" and place.alias is None:
                if t.id not in found:
                    found[t.id] = {"first": number, "type": t.dtype.name, **where(executable, frame, t)}
                found[t.id]["last"] = number
    inside = [entry for entry in found.values() if entry["offset"] is not None]
    if not inside:
        return None
    base = min(entry["offset"] for entry in inside)
    for entry in inside:
        entry["offset"] -= base
    total = max(entry["offset"] + entry["bytes"] for entry in inside)
    return {"bytes": total, "steps": len(plan.steps), "tensors": inside, "lent": len(found) - len(inside)}


def where(executable: Any, frame: Any, t: Tensor) -> dict[str, Any]:
    shape = [frame.value(d) for d in t.shape]
    size = TORCH_TYPES[t.dtype].itemsize * math.prod(shape)
    offset = frame.slots[executable.table.slot(t)] - frame.words[FrameWords.BASE]
    return {"shape": shape, "bytes": size, "offset": offset if 0 <= offset < frame.need else None}
