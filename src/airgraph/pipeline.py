"""The whole way, one stage a line. Read this file first.

    torch.compile(model, backend="airgraph")
      Dynamo ─ AOTAutograd ─▶ compile_graph ─▶ FX passes ─▶ convert ─▶ graph passes ─▶ plan ─▶ load ─▶ program
                                                   └─▶ a program from the compilation cache ─────────────▶┘

Each stage writes its result, its time and its reasons into the journal; dumps and logs are made from there. The public
entry points, which call this, are in `api`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from airgraph.capture.announce import announce, classify, device_of, frame_id
from airgraph.capture.aot import first_saved, state_inputs
from airgraph.capture.dead_compilations import release_dead
from airgraph.capture.fx_passes import run_fx_passes
from airgraph.capture.inlining import inlined
from airgraph.collector import no_collection
from airgraph.compilation import PLAN_READERS, WRAPS, Compilation, wrapped
from airgraph.config import KNOBS, Config
from airgraph.convert import REGISTRY, TracedCall, convert, in_ge_ops, scopes
from airgraph.convert.stand_ins import CallStandIn, take_places
from airgraph.disk_cache import open_cache
from airgraph.engine import candidates
from airgraph.engine.meanings import has_kernel
from airgraph.engine.protocol import Engine, Executable, InPlace, Planned, Request
from airgraph.ir.boundary import Boundary
from airgraph.ir.graph import Graph, Node
from airgraph.ir.verify import verify
from airgraph.journal import Journal
from airgraph.passes import run_passes
from airgraph.passes.order import reorder
from airgraph.plan.index import UnsupportedPlan
from airgraph.runtime.buckets import Limits, Padded, wanted_buckets
from airgraph.runtime.device import computing_device, host_op
from airgraph.runtime.program import Program, Runner
from airgraph.runtime.programs import ProgramMaker
from airgraph.store.data_dump import interpreted
from airgraph.store.dump import show_ref_data
from airgraph.store.fusion_result import write_fusion_result
from airgraph.store.node_dump import dumping_program
from airgraph.store.program_entry import entry_of
from airgraph.store.programs import Remembered
from airgraph.store.summary import write_summary


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
        return interpreted(gm, c.name, config, c.journal)
    gm = after_fx_passes(c, gm, inputs, device)
    if config.run_eagerly or config.data_dump:
        return interpreted(gm, c.name, config, c.journal)
    with _disable_current_modes():  # AOTAutograd calls us under its fake tensor mode; constants must be real
        if config.summary and config.summary_only:
            converted(c, gm)
            return interpreted(gm, c.name, config, c.journal)
        runner, static = from_cache(c, gm, inputs, device) or compiled(c, gm, inputs, device, marks or {})
    classify(static, inputs, config, c.journal, time.perf_counter() - start)
    return wrapped(gm, runner, config)


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
    with journal.stage("cache") as stage, open_cache().watched(stage.notes), no_collection():
        maker = program_maker(c, Boundary(), c.fixed)
        entry = (
            "a tool looks on"
            if WRAPS
            else entry_of(gm, c.registry, maker, computing_device(device), lambda: recompiled(c, gm, device))
        )
        if isinstance(entry, str):
            journal.counters["programs not kept"] += 1
            stage.notes.append(f"program not kept: {entry}")
            return None
        stage.notes += entry.notes()
        found = entry.find()
    if found is not None:
        return found
    with entry.exclusive() as found:  # whoever waited for another process finds what it kept
        if found is not None:
            return found
        before = Remembered.of(journal)
        program, graph = made_ready(c, *converted(c, gm), device, c.fixed)
        with journal.stage("keep") as stage:
            stage.notes += entry.keep(program, graph.is_static, inputs, before)
    return program, graph.is_static


def recompiled(c: Compilation, gm: torch.fx.GraphModule, device: torch.device) -> Any:
    """The executable of a graph whose program came from the cache, for what only a plan can do."""
    c.journal.remark("compiled after all: a program from the cache has no plan, and one was needed")
    again = replace(c, journal=Journal(c.name, c.journal.phase, c.config.log))
    with _disable_current_modes():
        return made_ready(again, *converted(again, gm), device, frozenset())[0].executable


def compiled(
    c: Compilation, gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device, marks: Mapping[Any, str]
) -> tuple[Runner, bool]:
    """Through all stages; and whether the graph is static."""
    calls: dict[Node, TracedCall] = {}
    graph, boundary = converted(c, gm, calls)
    padding = padded(c, graph, boundary, calls, inputs, marks)
    program, graph = made_ready(c, graph, boundary, device, c.fixed)
    return padding.around(program) if padding else program, graph.is_static


def converted(
    c: Compilation, gm: torch.fx.GraphModule, calls: dict[Node, TracedCall] | None = None
) -> tuple[Graph, Boundary]:
    """The graph before its passes; `calls` is filled with its calls into PyTorch."""
    config, stand_ins = c.config, list[CallStandIn]()
    with c.journal.stage("convert") as stage:
        shown = config.dump or config.node_dump or config.summary  # then it stays as it was written
        opened, notes = (gm, []) if shown or c.registry is not REGISTRY else inlined(gm)
        stage.notes += notes
        graph, boundary = convert(
            opened,
            c.name,
            c.registry,
            c.journal,
            strict=config.strict,
            has_kernel=has_kernel,
            host_op=host_op,
            fold_views=config.fold_views,
            calls=calls,
            stand_ins=stand_ins if config.dump else None,
        )
    if config.summary:
        write_summary(gm, c.registry, c.journal, config.dump_path)
    c.dump.graph("original", graph)
    take_places(graph, stand_ins)
    return graph, boundary


def padded(
    c: Compilation,
    graph: Graph,
    boundary: Boundary,
    calls: Mapping[Node, TracedCall],
    inputs: Sequence[Any],
    marks: Mapping[Any, str],
) -> Padded | None:
    """The buckets that are set and safe. The analysis knows GE ops only: it reads a graph of ATen calls in these."""
    buckets = wanted_buckets(c.config, c.journal)
    if buckets is None:
        return None
    with c.journal.stage("buckets"):
        readable = graph if c.registry is REGISTRY else in_ge_ops(graph, calls)
        return Padded.of(readable, boundary, buckets, marks, Limits.of(inputs), c.journal)


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
        in_place=InPlace(config.inplace_pass, config.input_inplace_pass, config.remove_cat_ops),
        journal=c.journal,
    )


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


def made_ready(
    c: Compilation, graph: Graph, boundary: Boundary, device: torch.device, fixed: frozenset[int]
) -> tuple[Program, Graph]:
    """From a graph to a program. `fixed`: the arguments that stay where they are."""
    request = optimised(c, graph, boundary, device)
    if c.config.node_dump and c.config.mode == "max-autotune":
        return dumping_program(c.name, request, c.config.node_dump), request.graph
    engine, executable = planned_and_loaded(request, c.config.engine)
    if isinstance(executable, Planned):
        c.dump.text("plan", executable.plan.text)
        for read in PLAN_READERS:
            read(c.name, request.device, executable.plan)
    return engine.program(executable, program_maker(c, boundary, fixed)), request.graph


def program_maker(c: Compilation, boundary: Boundary, fixed: frozenset[int]) -> ProgramMaker:
    saved = first_saved() if c.journal.phase == "forward" else None
    return ProgramMaker(c.name, boundary, c.journal, c.config, fixed, saved)
