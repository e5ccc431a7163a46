"""What happened to a program: its graphs, where they break, why they are compiled again, and what runs each op.

    airgraph explain SCRIPT [ARGS]

    report = airgraph.explain(model, x, more=[(y,), (z,)])
    print(report.text())

The report is made of two records: Dynamo's (`dynamo_trace`) and the journals of airgraph's own compilations.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from airgraph.api import backend
from airgraph.compilation import reading_plans
from airgraph.config import Config
from airgraph.journal import Journal
from airgraph.passes import PASSES
from airgraph.plan.steps import Plan
from airgraph.tools.dynamo_trace import AIRGRAPH, DynamoFrame, FailedGuard, SourceLine, Trace, listening, user_line
from airgraph.tools.explain_text import FOUND, render
from airgraph.tools.roofline import MachineSpeed, planned_kernels
from airgraph.tools.run import Script, run_script
from airgraph.tools.terminal import colours, waiting, width


@dataclass(frozen=True)
class Symbol:
    """A size or number that is open: its name in the graph, what it is in the code, and why it is open."""

    name: str
    source: str
    why: str


@dataclass(frozen=True)
class KernelReport:
    """A kernel of a program, and what it takes at least: the longer of moving its bytes and doing its operations, at the
    bandwidth and the peak of this machine. None where a size is symbolic."""

    kernel: str
    bytes: int | None
    flops: int | None
    seconds: float | None
    source: str


@dataclass(frozen=True)
class GraphReport:
    name: str
    phase: str  # forward, backward or inference
    classification: str  # "dynamic FX graph, static GE graph"
    function: str
    place: SourceLine | None
    frame: str | None
    symbols: tuple[Symbol, ...]
    converted: int  # ops that converters turned into GE ops
    fallbacks: int  # ops that PyTorch runs
    stages: dict[str, float]  # seconds
    passes: dict[str, int]  # how many rewrites each pass made
    refusals: tuple[str, ...]
    remarks: tuple[str, ...]
    cache: str = ""  # whether its program was in the compilation cache; empty: it was not looked for
    kernels: tuple[KernelReport, ...] = ()  # in their order; none where a program came from the cache or has no plan

    @property
    def shapes(self) -> str:
        """Of a static graph every tensor has a fixed shape; numbers may be open."""
        kind, _, what = self.classification.rpartition(", ")[2].partition(" ")
        return kind if what == "GE graph" else "-"  # not finished, or run op by op without a graph


@dataclass(frozen=True)
class Break:
    """A line Dynamo cannot trace: the graph ends there, Python runs the line, and the next graph begins."""

    place: SourceLine | None
    reason: str
    explanation: str
    hints: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Recompile:
    """A function compiled again because no earlier compilation fits the call; `guards` are what each of them failed."""

    function: str
    place: SourceLine | None
    caller: SourceLine | None
    guards: tuple[FailedGuard, ...]
    frame: str


@dataclass(frozen=True)
class OpReport:
    target: str
    by: str  # converter, user or pytorch
    reason: str
    count: int
    places: tuple[SourceLine, ...]


@dataclass(frozen=True)
class Report:
    graphs: tuple[GraphReport, ...]
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    ops: tuple[OpReport, ...]
    seconds: dict[str, float]  # compile time by stage, over all graphs
    elsewhere: tuple[str, ...] = ()  # functions that another backend compiled
    unread: int = 0  # records of Dynamo's that could not be read

    def text(self, colour: bool = False, width: int = 100) -> str:
        """For people, in lines of at most `width` columns."""
        return render(self, colour, width)

    def json(self) -> dict[str, Any]:
        """Plain data: dicts, lists, strings and numbers."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


# -- the ways in -----------------------------------------------------------------------------------------------------
def explain(
    model: Callable[..., Any],
    /,
    *args: Any,
    config: Config | None = None,
    dynamic: bool | None = None,
    more: Sequence[tuple[Any, ...]] = (),
    **kwargs: Any,
) -> Report:
    """Compile `model` with airgraph, call it with `args` and `kwargs`, and report what happened.

        report = airgraph.explain(model, torch.ones(4, 8))
        report = airgraph.explain(model, torch.ones(4, 8), more=[(torch.ones(5, 8),), (torch.ones(6, 8),)])

    `more` are the arguments of further calls: they show what is compiled again. `config` and `dynamic` are those of
    `airgraph.backend` and `torch.compile`. The model itself stays as it was. A training step has more than a call in it:
    for one, see `recording`.
    """
    plain = plain_model(model)
    with recording(only_new=True) as record:
        compiled = torch.compile(plain, backend=backend(config), dynamic=dynamic)
        compiled(*args, **kwargs)
        for further in more:
            compiled(*further)
    return record()


def plain_model(model: Callable[..., Any]) -> Callable[..., Any]:
    """What was given to torch.compile, if it was."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        inner: Callable[..., Any] | None = getattr(model, name, None)
        if inner is not None:
            return inner
    return model


@contextmanager
def recording(only_new: bool = False) -> Iterator[Callable[[], Report]]:
    """Whatever is compiled meanwhile, by airgraph, npu or TorchAir's backends, ends up in the report.

    with recording() as record:
        loss(compiled(x)).backward()
    print(record().text())

    With `only_new`, code that was compiled before does not make a compilation a recompilation.
    """
    plans: dict[str, tuple[torch.device, Plan]] = {}
    with (
        listening(Trace(only_new)) as trace,
        reading_plans(lambda name, device, plan: plans.update({name: (device, plan)})),
    ):
        yield lambda: make_report(trace, plans)


def explain_script(script: Script, *, json_file: str | None = None) -> int:
    """Run a script as `airgraph run` does, then print the report, also when the script fails."""
    script.check("explain")
    with recording() as record:
        try:
            return run_script(script, "explain")
        finally:
            with waiting("reading the records of all compilations"):
                report = record()
            sys.stdout.flush()
            print(report.text(colours(), width()))
            if json_file:
                Path(json_file).write_text(json.dumps(report.json(), indent=2) + "\n", encoding="utf-8")


# -- from the records to the report ----------------------------------------------------------------------------------
def make_report(trace: Trace, plans: Mapping[str, tuple[torch.device, Plan]]) -> Report:
    trace.take_journals()
    pairs: list[tuple[DynamoFrame | None, Journal]] = [(f, j) for f in trace.frames for j in f.journals]
    pairs = sorted([*pairs, *((None, j) for j in trace.loose)], key=lambda pair: number(pair[1]))
    return Report(
        graphs=tuple(graph_report(frame, journal, plans.get(journal.graph)) for frame, journal in pairs),
        breaks=breaks(trace),
        recompiles=tuple(Recompile(f.function, f.place, f.caller, f.guards, f.id) for f in trace.frames if f.guards),
        ops=ops([journal for _, journal in pairs]),
        seconds=seconds(trace.frames, [journal for _, journal in pairs]),
        elsewhere=tuple(f"{f.function} ({f.place})" for f in trace.frames if by_another_backend(f)),
        unread=trace.unread,
    )


def number(journal: Journal) -> int:
    return int(journal.graph.rpartition("_")[2] or 0)


def graph_report(frame: DynamoFrame | None, journal: Journal, planned: tuple[torch.device, Plan] | None) -> GraphReport:
    rewrites = {s.name: [n for n in s.notes if " refused " not in n] for s in journal.stages if s.name in PASSES}
    refusals = [f"{s.name}: {n}" for s in journal.stages for n in s.notes if " refused " in n]
    return GraphReport(
        name=journal.graph,
        phase=journal.phase,
        classification=journal.classification,
        function=frame.function if frame and not wrapper(frame) else "a module of torch",
        place=frame.caller if frame and wrapper(frame) else frame.place if frame else None,
        frame=journal.frame,
        symbols=tuple(symbol(name, frame) for name in journal.symbols),
        converted=sum(count for use, count in journal.ops.items() if use.by != "pytorch"),
        fallbacks=sum(count for use, count in journal.ops.items() if use.by == "pytorch"),
        stages={s.name: s.seconds for s in journal.stages},
        passes={name: len(notes) for name, notes in rewrites.items() if notes},
        refusals=tuple(refusals),
        remarks=tuple(journal.remarks),
        cache=from_cache(journal),
        kernels=kernels(*planned) if planned else (),
    )


def kernels(device: torch.device, plan: Plan) -> tuple[KernelReport, ...]:
    machine = MachineSpeed(device.type)
    return tuple(KernelReport(k.name, k.bytes, k.flops, machine.seconds(k), k.source) for k in planned_kernels(plan))


def from_cache(journal: Journal) -> str:
    if journal.counters["program hits"]:
        return FOUND
    notes = [n for s in journal.stages if s.name == "keep" for n in s.notes]
    return "; ".join(["missed", *notes]) if journal.counters["program misses"] else ""


def wrapper(frame: DynamoFrame) -> bool:
    """Dynamo wraps a module that is PyTorch's own; the line that called it tells more."""
    return frame.place is None or frame.place.ours


def symbol(name: str, frame: DynamoFrame | None) -> Symbol:
    """Dynamo opens a size when it has seen two values of it, or when it is told to."""
    source = frame.symbols.get(name, "") if frame else ""
    if name.startswith("u"):
        return Symbol(name, source or "a value computed by the program", "only known when the program runs")
    if frame and not frame.id.endswith("/0"):
        return Symbol(name, source, why_open(source, frame.guards))
    return Symbol(name, source, "symbolic from the first call on: dynamic=True or mark_dynamic")


def why_open(source: str, guards: Sequence[FailedGuard]) -> str:
    """The guard that speaks of the same variable: "tensor 'x' size mismatch at index 0" for x.size(0)."""
    variable = re.escape(re.split(r"\.size\(", source)[0])
    failed = next((g.text for g in guards if variable and re.search(rf"(?<!\w){variable}(?!\w)", g.text)), "")
    return f"it changed: {failed}" if failed else "it changed between calls"


def breaks(trace: Trace) -> tuple[Break, ...]:
    """Each line once: a break in a called function is met when it is traced into, and again when it is on its own."""
    found = [note for note in trace.breaks if note.place is None or not note.place.file.startswith(AIRGRAPH)]
    counts = Counter((note.place, note.reason) for note in found)
    notes = {(note.place, note.reason): note for note in reversed(found)}
    return tuple(
        Break(place, reason, notes[place, reason].explanation, notes[place, reason].hints, count)
        for (place, reason), count in counts.items()
    )


def ops(journals: Sequence[Journal]) -> tuple[OpReport, ...]:
    """What PyTorch runs first, then by number."""
    counts: Counter[tuple[str, str, str]] = Counter()
    places: dict[tuple[str, str, str], dict[SourceLine, None]] = {}
    for use, count in (item for journal in journals for item in journal.ops.items()):
        key = (use.target, use.by, use.reason)
        counts[key] += count
        place = user_line(use.stack)
        places.setdefault(key, {}).update({place: None} if place else {})
    rows = [OpReport(*key, count, tuple(places[key])) for key, count in counts.items()]
    return tuple(sorted(rows, key=lambda op: (op.by != "pytorch", -op.count, op.target)))


def seconds(frames: Sequence[DynamoFrame], journals: Sequence[Journal]) -> dict[str, float]:
    """Dynamo, AOTAutograd, then our own stages. AOTAutograd's share is what its time leaves when ours is taken away."""
    total: defaultdict[str, float] = defaultdict(float)
    for frame in frames:
        whole, below = (frame.metrics.get(f"{k}_compile_time_s") or 0.0 for k in ("entire_frame", "backend"))
        listened = (frame.metrics.get("structured_logging_overhead_us") or 0) / 1e6
        ours = sum(s.seconds for j in frame.journals if j.phase != "backward" for s in j.stages)
        total["Dynamo"] += max(whole - below - listened, 0.0)
        total["AOTAutograd"] += max(below - ours, 0.0) if frame.journals else 0.0
    for stage in (stage for journal in journals for stage in journal.stages):
        total["graph passes" if stage.name in PASSES else stage.name] += stage.seconds
    return dict(total)


def by_another_backend(frame: DynamoFrame) -> bool:
    return bool(frame.metrics.get("graph_op_count") and frame.metrics.get("has_guarded_code") and not frame.journals)
