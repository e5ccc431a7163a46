"""The whole way, one stage a line. Read this file first.

    torch.compile(model, backend="airgraph")
      Dynamo ─ AOTAutograd ─▶ compile_graph ─▶ FX passes ─▶ convert ─▶ graph passes ─▶ plan ─▶ load ─▶ program
                                                   └─▶ a program from the compilation cache ─────────────▶┘

Each stage writes its result, its time and its reasons into the journal; dumps and logs are made from there. The public
entry points, which call this, are in `api`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from airgraph.capture.announce import announce, classify, device_of, frame_id
from airgraph.capture.aot import first_saved, fixed_inputs, state_inputs
from airgraph.capture.dead_compilations import release_dead
from airgraph.capture.fx_passes import run_fx_passes
from airgraph.config import KNOBS, Config
from airgraph.convert import EMPTY, REGISTRY, Registry, convert, scopes
from airgraph.disk_cache import open_cache
from airgraph.engine import candidates
from airgraph.engine.meanings import has_kernel
from airgraph.engine.protocol import Engine, Executable, InPlace, Planned, Request
from airgraph.gears import gears_of
from airgraph.ir.boundary import Boundary, TensorIn
from airgraph.ir.graph import Graph
from airgraph.ir.verify import verify
from airgraph.journal import Journal, open_journal
from airgraph.passes import run_passes
from airgraph.passes.order import reorder
from airgraph.plan.index import UnsupportedPlan
from airgraph.runtime.buckets import Buckets, Limits, Padded, padded_dimensions
from airgraph.runtime.device import computing_device, host_op
from airgraph.runtime.interpret import InterpretedProgram
from airgraph.runtime.program import Program, Runner
from airgraph.runtime.programs import ProgramMaker
from airgraph.store.data_dump import DataDump, TensorDump
from airgraph.store.dump import Dumper
from airgraph.store.fusion_result import write_fusion_result
from airgraph.store.node_dump import DumpingExecutable, NodeDump
from airgraph.store.program_entry import ProgramEntry, facts_of, not_kept
from airgraph.store.program_key import NotKept, graph_text, program_key
from airgraph.store.programs import Remembered
from airgraph.store.summary import write_summary

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Compilation:
    """One graph on its way: its name, its options, its journal, and what writes its dumps."""

    name: str
    config: Config
    journal: Journal
    dump: Dumper

    @classmethod
    def begin(cls, phase: str, config: Config, model: int) -> Compilation:
        name = f"graph_{next(_numbers)}"
        journal = open_journal(name, phase, config.log)
        return cls(name, config, journal, Dumper(name, phase, config, model))


def compile_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    phase: str,
    config: Config,
    model: int = 0,
    marks: Mapping[Any, str] | None = None,
) -> Runner:
    """One FX graph → one program."""
    release_dead()
    c = Compilation.begin(phase, config, model)
    c.journal.frame = frame_id()
    announce(gm, inputs, config, c.journal)
    start, device = time.perf_counter(), device_of(inputs, gm)

    c.dump.fx("graph", gm)
    if config.data_dump and config.data_dump_stage == "original":
        return interpreted(c, gm)
    gm = after_fx_passes(c, gm, inputs, device)
    if config.run_eagerly or config.data_dump:
        return interpreted(c, gm)
    if config.summary and config.summary_only:
        return summarised(c, gm)
    with _disable_current_modes():  # AOTAutograd calls us under its fake tensor mode; constants must be real
        runner, static = from_cache(c, gm, inputs, device) or compiled(c, gm, inputs, device, marks or {})
    classify(static, inputs, c.journal, time.perf_counter() - start)
    for wrap in _wraps:
        runner = wrap(gm, runner, config)
    return runner


# -- the stages -----------------------------------------------------------------------------------------------------
def after_fx_passes(
    c: Compilation, gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device
) -> torch.fx.GraphModule:
    """The user's FX passes and ours. Inside a captured CUDA graph work may go on at several places at once."""
    with c.journal.stage("fx_passes") as stage:
        gm = run_fx_passes(
            gm, inputs, c.config, observe=lambda step, g: c.dump.fx(f"graph_after_{step}", g), note=stage.notes.append
        )
    c.journal.log.debug("after fx graph optimization, graph is %s", gm.graph)
    eager = c.config.force_eager or c.config.run_eagerly or c.config.data_dump
    has_streams = c.config.mode == "reduce-overhead" and not eager and computing_device(device).type == "cuda"
    for remark in scopes.remarks(gm, c.config.mode, has_streams):
        c.journal.remark(remark)
    return gm


def from_cache(
    c: Compilation, gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device
) -> tuple[Runner, bool] | None:
    """The program as another process compiled it, or as this one does and keeps it; None where it cannot be kept."""
    journal = c.journal
    with journal.stage("cache") as stage, open_cache().watched(stage.notes):
        refusal = "a tool looks on" if _wraps else not_kept(c.config, computing_device(device))
        entry = refusal or cache_entry(c, gm, device)
        if isinstance(entry, str):
            journal.counters["programs not kept"] += 1
            stage.notes.append(f"program not kept: {entry}")
            return None
        found = entry.find()
    if found is not None:
        return found
    with entry.exclusive() as found:  # whoever waited for another process finds what it kept
        if found is not None:
            return found
        before = Remembered.of(journal)
        graph, boundary = converted(c, gm)
        program, graph = made_ready(c, graph, boundary, device, fixed_of(c))
        with journal.stage("keep") as stage:
            stage.notes += entry.keep(program, graph.is_static, inputs, before)
    return program, graph.is_static


def cache_entry(c: Compilation, gm: torch.fx.GraphModule, device: torch.device) -> ProgramEntry | str:
    """Where the program of this graph is in the cache, or why it cannot be there."""
    cache = open_cache()
    if cache.secret is None:
        return "the cache folder cannot be used"
    try:
        text = graph_text(gm, registry_of(c.config))
    except NotKept as reason:
        return str(reason)
    key = program_key(text, {**facts_of(c.config), "phase": c.journal.phase, "device": str(computing_device(device))})
    maker = ProgramMaker(c.name, Boundary(), c.journal, c.config)
    return ProgramEntry(cache, key, text, maker, lambda: recompiled(c, gm, device))


def recompiled(c: Compilation, gm: torch.fx.GraphModule, device: torch.device) -> Any:
    """The executable of a graph whose program came from the cache, for what only a plan can do."""
    c.journal.remark("compiled after all: a program from the cache has no plan, and one was needed")
    again = replace(c, journal=Journal(c.name, c.journal.phase, c.config.log))
    with _disable_current_modes():
        graph, boundary = converted(again, gm)
        return made_ready(again, graph, boundary, device, frozenset())[0].executable


def compiled(
    c: Compilation, gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device, marks: Mapping[Any, str]
) -> tuple[Runner, bool]:
    """Through all stages; and whether the graph is static."""
    graph, boundary = converted(c, gm)
    padding = padded(c, gm, graph, boundary, inputs, marks)
    program, graph = made_ready(c, graph, boundary, device, fixed_of(c))
    return padding.around(program) if padding else program, graph.is_static


def fixed_of(c: Compilation) -> frozenset[int]:
    """The arguments that stay where they are."""
    return fixed_inputs() if c.journal.phase != "backward" else frozenset()


def converted(c: Compilation, gm: torch.fx.GraphModule) -> tuple[Graph, Boundary]:
    """The graph before its passes."""
    registry = registry_of(c.config)
    with c.journal.stage("convert"):
        graph, boundary = convert(
            gm,
            c.name,
            registry,
            c.journal,
            strict=c.config.strict,
            has_kernel=has_kernel,
            host_op=host_op,
            fold_views=c.config.fold_views,
        )
    if c.config.summary:
        write_summary(gm, registry, c.journal, c.config.dump_path)
    emitted = graph
    if c.config.dump and c.journal.counters["emitted without a kernel"]:
        # Op types of the user's own that PyTorch stands in for: the dump has what his converters emitted.
        emitted, _ = convert(gm, c.name, registry, Journal(), has_kernel=anything, fold_views=c.config.fold_views)
    c.dump.graph("original", emitted)
    return graph, boundary


def padded(
    c: Compilation,
    gm: torch.fx.GraphModule,
    graph: Graph,
    boundary: Boundary,
    inputs: Sequence[Any],
    marks: Mapping[Any, str],
) -> Padded | None:
    """The buckets that are set and safe. The analysis knows GE ops only: for a graph of ATen ops it gets one of its own."""
    gears = gears_of(c.config)
    if c.config.buckets is None and not gears:
        return None
    if c.journal.phase != "inference":
        c.journal.remark(f"buckets: a {c.journal.phase} graph runs at its true sizes; only inference is padded")
        return None
    with c.journal.stage("buckets"):
        if registry_of(c.config) is not REGISTRY:
            graph, boundary = convert(gm, c.name, REGISTRY, Journal(), has_kernel=anything)
        return analysed(c, graph, boundary, Limits.of(inputs), marks)


def analysed(
    c: Compilation, graph: Graph, boundary: Boundary, limits: Limits, marks: Mapping[Any, str]
) -> Padded | None:
    """The sizes of a graph of GE ops, before its passes, that may be padded to the buckets that are set."""
    buckets = Buckets.make({**(c.config.buckets or {}), **{g.type: g.gears for g in gears_of(c.config)}})
    dimensions = padded_dimensions(graph, boundary, buckets, marks, c.journal)
    return Padded(boundary, dimensions, buckets, limits, c.journal) if dimensions else None


def optimised(c: Compilation, graph: Graph, boundary: Boundary, device: torch.device) -> Request:
    """The graph after its passes, as engines take it."""
    config, check = c.config, c.config.verify or KNOBS["AIRGRAPH_VERIFY"].on()
    if check:
        verify(graph, "convert")
    off = config.passes_off if config.pattern_fusion_pass else (*config.passes_off, "patterns")
    graph = run_passes(
        graph, c.journal, off=off, check=check, frozen=config.frozen_parameter, observe=c.dump.after_pass
    )
    reorder(graph, config.node_order)
    if config.ref_data:
        show_ref_data(graph, boundary, c.journal)
    c.dump.graph("optimized", graph)
    write_fusion_result(c.journal, config)
    return Request(
        graph,
        boundary,
        computing_device(device),
        mode=config.mode,
        map_device=computing_device,
        frozen=config.frozen_parameter,
        state=state_inputs() if c.journal.phase == "inference" else frozenset(),
        autotune=config.autotune,
        in_place=InPlace(config.inplace_pass, config.input_inplace_pass),
        journal=c.journal,
    )


def show_ref_data(graph: Graph, boundary: Boundary, journal: Journal) -> None:
    """Dumps show the arguments that are written to as RefData, GE's word for them."""
    written = {node.inputs[0].node.name for node in graph.of("Assign")}  # type: ignore[union-attr]
    for argument in boundary.arguments:
        if isinstance(argument, TensorIn) and argument.name in written:
            graph.ref_data.add(argument.name)
            words = [*(argument.type.shape or ()), *argument.strides, 0, argument.name]
            name = "_".join(map(str, ["RefData", *words]))
            journal.log.debug("Replace %s:RefData with %s:Data in graph %s", name, argument.name, graph.name)


def made_ready(
    c: Compilation, graph: Graph, boundary: Boundary, device: torch.device, fixed: frozenset[int]
) -> tuple[Program, Graph]:
    """From a graph to a program. `fixed`: the arguments that stay where they are."""
    config = c.config
    request = optimised(c, graph, boundary, device)
    if config.node_dump and config.mode == "max-autotune":
        return dumping(c, request), request.graph
    engine, executable = planned_and_loaded(request, config.engine)
    if isinstance(executable, Planned):
        c.dump.text("plan", executable.plan.text())
    saved = first_saved() if c.journal.phase == "forward" else None
    maker = ProgramMaker(c.name, boundary, c.journal, config, fixed, saved)
    return engine.program(executable, maker), request.graph


def dumping(c: Compilation, request: Request) -> Program:
    """The graph by the reference engine, which writes the tensors of its nodes."""
    executable = DumpingExecutable(request.graph, request.device, request.map_device)
    executable.dump = NodeDump(c.config.node_dump or {}, c.name, request.graph)
    c.journal.remark(
        f"node_dump: the reference engine runs this graph, and writes tensors below {executable.dump.root}"
    )
    return Program(c.name, request.boundary, executable, c.journal)


def planned_and_loaded(request: Request, engine_name: str) -> tuple[Engine, Executable]:
    """By the engine that is asked for, or by the first that serves the device and mode; the next where one refuses."""
    journal, refusals = request.journal, []
    left_out: list[str] = []
    for engine in candidates(engine_name, request.device, request.mode, left_out.append):
        try:
            with journal.stage("plan") as stage:
                stage.notes += left_out
                plan = engine.plan(request)
            with journal.stage("load") as stage, open_cache().watched(stage.notes):
                executable = engine.load(replace(request, plan=plan))
        except UnsupportedPlan as reason:
            refusals.append(f"as the {engine.name} one cannot: {reason}")
            continue
        for text in refusals:
            journal.remark(f"the {engine.name} engine runs this graph, {text}")
        return engine, executable
    raise AssertionError("the reference engine runs every graph")


def summarised(c: Compilation, gm: torch.fx.GraphModule) -> InterpretedProgram:
    """The table of the graph's ops, and the FX graph by PyTorch."""
    with _disable_current_modes():
        converted(c, gm)
    return interpreted(c, gm)


def interpreted(c: Compilation, gm: torch.fx.GraphModule) -> InterpretedProgram:
    """The FX graph by PyTorch, op by op; with `data_dump` every tensor goes into a file."""
    config, journal = c.config, c.journal
    option = "data_dump" if config.data_dump else "summary_only" if config.summary_only else "run_eagerly"
    journal.remark(f"{option}: PyTorch runs the FX graph op by op; no GE graph is made of it, dumped or run")
    journal.classification = "FX graph, run op by op"
    wanted = scopes.only_in_dump_scopes(gm, config.data_dump_filter)
    kind = TensorDump if config.data_dump == "pt" and not config.force_eager else DataDump
    dump = kind(config.data_dump_path, c.name, wanted) if config.data_dump else None
    if dump:
        journal.remark(f"data_dump: every call writes its tensors below {dump.root}")
    return InterpretedProgram(c.name, gm, journal, dump)


def registry_of(config: Config) -> Registry:
    return REGISTRY if config.mode == "max-autotune" else EMPTY


def anything(op: str) -> bool:
    """For a graph that is only read: every op may be in it."""
    return True


# -- a tool's hand on every program ---------------------------------------------------------------------------------
Wrap = Callable[[torch.fx.GraphModule, Any, Config], Any]
_wraps: list[Wrap] = []


@contextmanager
def wrapping(wrap: Wrap) -> Iterator[None]:
    """Meanwhile every new program goes through `wrap(gm, program, config)`: PyTorch calls what that gives back.

    For the whole process, because PyTorch compiles backward graphs in threads of its own.
    """
    _wraps.append(wrap)
    try:
        yield
    finally:
        _wraps.remove(wrap)
