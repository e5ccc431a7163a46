"""The whole way, one stage a line. Read this file first.

    torch.compile(model, backend="airgraph")
      Dynamo ─ AOTAutograd ─▶ compile_graph ─▶ FX passes ─▶ convert ─▶ graph passes ─▶ engine ─▶ program

Each stage writes its result, its time and its reasons into the journal; dumps and logs are made from there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import CompileContext
from torch.utils._python_dispatch import _disable_current_modes

from airgraph.capture.aot import GraphCompiler, Traced, compile_by_aot, fixed_inputs
from airgraph.capture.compiled import CompiledModel
from airgraph.capture.export import Exported, all_dynamic, capture_exported, compile_exported, export_model
from airgraph.capture.fx_passes import run_fx_passes
from airgraph.capture.gears import gear_marks, gears_of
from airgraph.capture.marks import bucket_marks
from airgraph.config import KNOBS, Config
from airgraph.convert import EMPTY, REGISTRY, Registry, convert, scopes
from airgraph.convert.metadata import SYMBOLIC
from airgraph.engine import candidates, find_engine, warm_up
from airgraph.engine.meanings import has_kernel
from airgraph.engine.protocol import Engine, Executable, InPlace, Planned, Request
from airgraph.errors import AirgraphError, ConfigError, ExportError
from airgraph.ir.boundary import Boundary
from airgraph.ir.graph import Graph
from airgraph.ir.verify import verify
from airgraph.journal import Journal, open_journal
from airgraph.passes import FAMILIES, PASSES, run_passes
from airgraph.plan.index import Refuse
from airgraph.runtime.buckets import Buckets, Limits, bucketed
from airgraph.runtime.device import computing_device
from airgraph.runtime.interpret import InterpretedProgram
from airgraph.runtime.loaded import LoadedModel
from airgraph.runtime.program import Program, Runner
from airgraph.runtime.programs import ProgramMaker
from airgraph.store.data_dump import DataDump
from airgraph.store.dump import Dumper, write_model
from airgraph.store.fusion_result import write_fusion_result
from airgraph.store.summary import write_summary

if TYPE_CHECKING:
    from airgraph.store.convention import StoredModel

_numbers = itertools.count(1)


def compile_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    phase: str,
    config: Config,
    model: int = 0,
    marks: Mapping[Any, str] | None = None,
) -> Runner:
    """One FX graph → one program."""
    name = f"graph_{next(_numbers)}"
    journal = open_journal(name, phase, config.log)
    journal.frame = frame_id()
    dump = Dumper(name, phase, config, model)
    announce(gm, inputs, config, journal)
    start = time.perf_counter()

    dump.fx("graph", gm)
    if config.data_dump and config.data_dump_stage == "original":
        return interpreted(gm, name, config, journal)
    with journal.stage("fx_passes") as stage:
        gm = run_fx_passes(
            gm, inputs, config, observe=lambda step, g: dump.fx(f"graph_after_{step}", g), note=stage.notes.append
        )
    for remark in scopes.remarks(gm, config.mode, has_streams(config, inputs)):
        journal.remark(remark)
    if config.run_eagerly or config.data_dump:
        return interpreted(gm, name, config, journal)
    with _disable_current_modes():  # AOTAutograd calls us under its fake tensor mode; constants must be real
        made, graph = build(gm, name, config, journal, dump, device_of(inputs))
    classify(graph, inputs, journal, time.perf_counter() - start)
    program = in_buckets(made, gm, inputs, config, journal, marks or {})
    for wrap in _wraps:
        program = wrap(gm, program, config)
    return program


def build(
    gm: torch.fx.GraphModule, name: str, config: Config, journal: Journal, dump: Dumper, device: torch.device
) -> tuple[Program, Graph]:
    """From an FX graph with its metadata to something that runs."""
    with journal.stage("convert"):
        graph, boundary = to_graph(gm, name, config, journal)
    if config.summary:
        write_summary(gm, registry_of(config), journal, config.dump_path)
    dump.graph("original", as_emitted(gm, graph, config, journal))
    fixed = fixed_inputs() if journal.phase != "backward" else frozenset()
    return make_ready(graph, boundary, config, journal, dump, device, fixed)


def make_ready(
    graph: Graph,
    boundary: Boundary,
    config: Config,
    journal: Journal,
    dump: Dumper,
    device: torch.device,
    fixed: frozenset[int],
) -> tuple[Program, Graph]:
    """From a graph to a program. `fixed`: the arguments that stay where they are."""
    check = config.verify or KNOBS["AIRGRAPH_VERIFY"].on()
    if check:
        verify(graph, "convert")
    graph = run_passes(
        graph, journal, off=switched_off(config), check=check, frozen=config.frozen_parameter, observe=dump.after_pass
    )
    dump.graph("optimized", graph)
    write_fusion_result(journal, config)
    request = Request(
        graph,
        boundary,
        computing_device(device),
        mode=config.mode,
        map_device=computing_device,
        frozen=config.frozen_parameter,
        autotune=config.autotune,
        in_place=InPlace(config.inplace_pass, config.input_inplace_pass),
        journal=journal,
    )
    engine, executable = load(request, config)
    if isinstance(executable, Planned):
        dump.text("plan", executable.plan.text())
    return engine.program(executable, ProgramMaker(graph.name, boundary, journal, config, fixed)), graph


def load(request: Request, config: Config) -> tuple[Engine, Executable]:
    """The graph planned and made ready by the engine that is asked for, or by the first that serves its device and mode."""
    journal, refusals = request.journal, []
    notes: list[str] = []
    for engine in candidates(config.engine, request.device, request.mode, notes.append):
        try:
            with journal.stage("plan") as stage:
                stage.notes += notes
                plan = engine.plan(request)
            with journal.stage("load"):
                executable = engine.load(replace(request, plan=plan))
        except Refuse as reason:
            refusals.append(f"as the {engine.name} one cannot: {reason}")
            continue
        for text in refusals:
            journal.remark(f"the {engine.name} engine runs this graph, {text}")
        return engine, executable
    raise AssertionError("the reference engine runs every graph")


def graph_to_analyse(gm: torch.fx.GraphModule, inputs: Sequence[Any], config: Config) -> tuple[Graph, Boundary]:
    """The graph of GE ops of an FX graph, for somebody who only wants to read it."""
    gm = run_fx_passes(gm, inputs, config, observe=lambda step, g: None)
    with _disable_current_modes():
        return convert(gm, "graph", REGISTRY, Journal(), has_kernel=lambda op: True)


def in_buckets(
    program: Runner,
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    config: Config,
    journal: Journal,
    marks: Mapping[Any, str],
) -> Runner:
    """The program behind the buckets that are asked for. Whether a size may be padded is found out on a graph of GE ops,
    also where the program is one of ATen ops: there are rules for the former, and one set of rules is enough."""
    gears = gears_of(config)
    if config.buckets is None and not gears:
        return program
    if journal.phase != "inference":
        journal.remark(f"buckets: a {journal.phase} graph runs at its true sizes; only inference is padded")
        return program
    with _disable_current_modes(), journal.stage("buckets"):
        graph, boundary = convert(gm, journal.graph, REGISTRY, Journal(), has_kernel=lambda op: True)
        buckets = Buckets.make({**(config.buckets or {}), **{g.type: g.gears for g in gears}})
        return bucketed(program, graph, boundary, buckets, marks, Limits.of(inputs), journal)


def to_graph(
    gm: torch.fx.GraphModule, name: str, config: Config, journal: Journal, made: dict[str, Any] | None = None
) -> tuple[Graph, Boundary]:
    """The graph before its passes. `made` is filled with what each FX node became."""
    registry = registry_of(config)
    return convert(gm, name, registry, journal, strict=config.strict, has_kernel=has_kernel, made=made)


def as_emitted(gm: torch.fx.GraphModule, graph: Graph, config: Config, journal: Journal) -> Graph:
    """What the converters emitted, to be read: with the op types of the user's own for which PyTorch stands in, having no
    kernel here."""
    if not config.dump or not journal.fallbacks:
        return graph
    return convert(gm, journal.graph, registry_of(config), Journal(), has_kernel=lambda op: True)[0]


def switched_off(config: Config) -> tuple[str, ...]:
    """The graph passes not to run."""
    return config.passes_off if config.pattern_fusion_pass else (*config.passes_off, "patterns")


def registry_of(config: Config) -> Registry:
    return REGISTRY if config.mode == "max-autotune" else EMPTY


def interpreted(gm: torch.fx.GraphModule, name: str, config: Config, journal: Journal) -> InterpretedProgram:
    """The FX graph by PyTorch, op by op; with `data_dump` every tensor goes into a file."""
    option = "data_dump" if config.data_dump else "run_eagerly"
    journal.remark(f"{option}: PyTorch runs the FX graph op by op; no GE graph is made of it, dumped or run")
    journal.classification = "FX graph, run op by op"
    wanted = scopes.only_in_dump_scopes(gm, config.data_dump_filter)
    dump = DataDump(config.data_dump_path, name, wanted) if config.data_dump else None
    if dump:
        journal.remark(f"data_dump: every call writes its tensors below {dump.root}")
    return InterpretedProgram(name, gm, journal, dump)


def announce(gm: torch.fx.GraphModule, inputs: Sequence[Any], config: Config, journal: Journal) -> None:
    log = journal.log
    log.info("compiler inputs")
    for i, value in enumerate(inputs):
        log.info("  input %s: %s", i, value)
    log.info("  graph: %s", gm.graph)
    for remark in config.remarks:
        journal.remark(remark)
    if config.mode == "reduce-overhead":
        journal.remark("mode reduce-overhead: every op is PyTorch's own; captured at the second call of its sizes")
    if config.data_dump is None and (config.data_dump_path != "." or config.data_dump_filter is not None):
        journal.remark("data_dump_path and data_dump_filter have no effect while data_dump is None")
    idle = [name for name in ("shape_handling_configs", "shape_handling_dict") if getattr(config, name)]
    if idle and not config.enable_shape_handling:
        journal.remark(f"{' and '.join(idle)} have no effect while enable_shape_handling is False")


def has_streams(config: Config, inputs: Sequence[Any]) -> bool:
    """Inside a captured CUDA graph work may go on at several places at once; elsewhere it goes on in its order."""
    captured = config.mode == "reduce-overhead" and not (config.force_eager or config.run_eagerly or config.data_dump)
    return captured and computing_device(device_of(inputs)).type == "cuda"


def classify(graph: Graph, inputs: Sequence[Any], journal: Journal, seconds: float) -> None:
    """Static or dynamic, as FX has it and as the graph has it: a symbolic number alone makes only FX dynamic."""
    fx = "Dynamic" if any(is_symbolic(i) for i in inputs) else "Static"
    ge = "static" if graph.is_static else "dynamic"
    journal.classification = f"{fx.lower()} FX graph, {ge} GE graph"
    journal.symbols = symbols_of(inputs)
    number = graph.name.removeprefix("graph_")
    log = journal.engine_log
    log.info("%s FX graph compiled to %s Ascend GE graph, graph id: %s", fx, ge, number)
    log.info("Create graph executor for %s graph %s", ge, number)
    log.event("Compile Graph %s consume: %.3f ms.", number, seconds * 1e3)
    log.debug("%s", journal.text())


def is_symbolic(value: Any) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return any(isinstance(s, SYMBOLIC) for s in sizes)


def symbols_of(inputs: Sequence[Any]) -> tuple[str, ...]:
    """The symbols in the sizes and numbers that come in, in order."""
    sizes = [s for i in inputs for s in (i.shape if isinstance(i, torch.Tensor) else [i])]
    found = [sorted(map(str, s.node.expr.free_symbols)) for s in sizes if isinstance(s, SYMBOLIC)]
    return tuple(dict.fromkeys(name for names in found for name in names))


def frame_id() -> str | None:
    """Which compilation of which function this is, as Dynamo counts; None where AOTAutograd was called by hand."""
    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Where the graph works: the first accelerator among its inputs, else the CPU."""
    devices = [i.device for i in inputs if isinstance(i, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


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


# -- the ways in ----------------------------------------------------------------------------------------------------
Backend = Callable[..., Any]
_models = itertools.count()


def backend(config: Config | None = None, **options: Any) -> Backend:
    """A backend for torch.compile.

        torch.compile(model, backend=airgraph.backend(dump="py", dump_path="graphs"))

    `config` and `options` are fields of `airgraph.Config`; an option wins over the same field of `config`.
    """
    base = make_config(config, options)

    def compile_model(
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        chosen = make_config(base, {**({"mode": mode} if mode else {}), **(options or {})})
        warm_up(chosen.engine, computing_device(device_of(example_inputs)), chosen.mode)
        model = next(_models)
        write_model(model, gm, chosen)
        marks = {**bucket_marks(gm, example_inputs), **gear_marks(gm, example_inputs, gears_of(chosen))}
        programs, compiler = collecting(chosen, model, marks)
        traced = compile_by_aot(
            gm,
            example_inputs,
            compiler,
            keep_input_mutations=chosen.keep_input_mutations,
            decompositions=chosen.decompositions,
        )
        return shortest(programs, traced, len(example_inputs))

    return compile_model


def collecting(
    config: Config, model: int = 0, marks: Mapping[Any, str] | None = None
) -> tuple[list[Any], GraphCompiler]:
    """A compiler, and the list its programs go into."""
    programs: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any], phase: str) -> Runner:
        programs.append(compile_graph(graph, inputs, phase, config, model, marks))
        return programs[-1]

    return programs, compiler


def shortest(programs: list[Any], traced: Traced, arguments: int) -> Callable[..., Any]:
    """How the traced module is called: without AOTAutograd's wrapper, if it does nothing for the one program there is."""
    if not traced.plain or len(programs) != 1 or not isinstance(programs[0], Program):
        return traced.run
    (program,) = programs
    if program.journal.phase != "inference" or len(program.boundary.arguments) != arguments:
        return traced.run
    return program.past(traced.run, traced.written)


def compile(
    model: Callable[..., Any] | torch.export.ExportedProgram,
    example_args: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    config: Config | None = None,
    **options: Any,
) -> CompiledModel:
    """The model compiled ahead of time for inference: none of Dynamo's guards at a call, only types, sizes, devices.

        fast = airgraph.compile(model, x)
        y = fast(x)

    `model` is a module, a function or an ExportedProgram, `example_args` a tensor or the tuple of arguments,
    `dynamic_shapes` torch.export's. Parameters and buffers stay the model's own: an optimiser's step or `load_state_dict`
    is seen by the next call, and so is one that is replaced.
    """
    chosen = make_config(config, options)
    start = time.perf_counter()
    programs, compiler = collecting(chosen)
    warm_up(chosen.engine, torch.device("cpu"), chosen.mode)
    exported = export_model(model, example_args, example_kwargs, dynamic_shapes)
    traced = compile_exported(exported, compiler, chosen.keep_input_mutations, chosen.decompositions)
    guarded = replace(traced, run=torch.no_grad()(traced.run))
    run = shortest(programs, guarded, len(exported.inputs))
    return CompiledModel(exported, run, time.perf_counter() - start)


def export(
    model: torch.nn.Module,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    path: str = "export_file",
    name: str = "export",
    rank: int | None = None,
    dynamic: bool = False,
    dynamic_shapes: Any = None,
    external_weights: bool | None = None,
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Writes the model as a file of GE ops with its weights, for inference; gives back the path of the file.

        airgraph.export(model, (x,), path="export_file")        export_file/export.air
        airgraph.load_export("export_file/export.air")(x)

    `dynamic`: every size may change that PyTorch can keep open; `dynamic_shapes` is torch.export's, for a finer choice.
    `external_weights`: each weight in a file of its own; None: only where they are too many for one file. docs/export.md
    says what is written, and what cannot be.
    """
    from airgraph.store.export import Target, write_export  # needs protobuf, which compiling does not

    chosen = make_config(config, options)
    if chosen.mode != "max-autotune":
        raise ConfigError(
            f"only a graph of GE ops can be exported, and mode={chosen.mode!r} keeps every ATen op",
            hint='mode="max-autotune"',
        )
    if dynamic and dynamic_shapes is None:
        dynamic_shapes = all_dynamic(model, example_args, example_kwargs or {})
    try:
        exported = export_model(model, example_args, example_kwargs, dynamic_shapes)
    except Exception as error:  # PyTorch's, of many types
        reason = next(iter(str(error).splitlines()), "")
        raise ExportError(
            "torch.export cannot read this model as one graph",
            where={"reason": f"{type(error).__name__}: {reason}"},
            hint="PyTorch's own message above says where; docs/export.md lists what is not exported",
        ) from error
    stored = exported_graph(exported, chosen)
    return write_export(stored, Target(path, name, rank), external=external_weights)


def exported_graph(exported: Exported, config: Config) -> StoredModel:
    """The graph of an exported model, before the graph passes: whoever loads it runs those of his machine."""
    from airgraph.store.export import arranged

    name = f"graph_{next(_numbers)}"
    journal = open_journal(name, "inference", config.log)
    dump = Dumper(name, "inference", config, next(_models))
    captured = capture_exported(exported, config.decompositions)
    announce(captured.graph_module, captured.inputs, config, journal)
    with journal.stage("fx_passes"):
        gm = run_fx_passes(captured.graph_module, captured.inputs, config, observe=lambda step, g: None)
    with _disable_current_modes(), journal.stage("convert"):
        graph, boundary = to_graph(gm, name, config, journal)
    dump.graph("original", graph)
    journal.classification = f"exported, {'static' if graph.is_static else 'dynamic'} GE graph"
    if graph.of("AtenCall"):
        targets = ", ".join(sorted({node.attrs["target"] for node in graph.of("AtenCall")}))
        journal.log.warning("export: GE has no op for %s; airgraph loads the file, GE's own tools do not", targets)
    return arranged(graph, boundary, exported, captured)


def load_export(
    path: str | Path, *, device: str | None = None, trust: bool = False, config: Config | None = None, **options: Any
) -> LoadedModel:
    """The model of an `.air` file that airgraph wrote, ready to be called; nothing in the file is run to read it.

        model = airgraph.load_export("export_file/export.air")
        y = model(x)

    `device`: where a model that was exported on an accelerator runs now; None: there, if there is one here, else on the
    CPU. `trust`: the file is your own; otherwise the sizes it states are checked against PyTorch's rules, for every new
    set of sizes. Options are those of `airgraph.backend`.
    """
    from airgraph.store.load_export import by_memory, moved, read_export
    from airgraph.store.rehearsal import rehearsal_of

    chosen = make_config(config, options)
    warm_up(chosen.engine, torch.device("cpu"), chosen.mode)
    name = f"graph_{next(_numbers)}"
    journal = open_journal(name, "inference", chosen.log)
    dump = Dumper(name, "inference", chosen, next(_models))
    for option in ("buckets", "data_dump", "run_eagerly"):
        if getattr(chosen, option):
            journal.remark(f"{option} has no effect on a loaded model: it needs the FX graph, which no file holds")
    with journal.stage("read"):
        stored = moved(read_export(path), device, journal.remark)
    rehearse = None
    if not trust:
        with journal.stage("rehearse"):
            rehearse = rehearsal_of(stored, str(path), journal.remark)
        chosen = chosen if rehearse else replace(chosen, engine="reference")
    arguments, laid = stored.boundary.arguments, by_memory(stored)
    main = next((d for d in (getattr(a, "device", "cpu") for a in arguments) if d != "cpu"), "cpu")
    dump.graph("original", stored.graph)
    try:
        weights = frozenset(range(len(stored.weights)))
        program, _ = make_ready(stored.graph, stored.boundary, chosen, journal, dump, torch.device(main), weights)
    except AirgraphError:
        raise
    except Exception as error:  # the checks of a graph cannot foresee everything a file may say
        raise ExportError(
            f"the graph of {path} cannot be made ready to run", where={"reason": repr(error)}, hint="export it again"
        ) from error
    return LoadedModel(
        str(path), stored.contract, stored.boundary, stored.weights, stored.written, laid, program, rehearse
    )


def make_config(base: Config | None, options: Mapping[str, Any]) -> Config:
    config = Config.make(base, **options)
    Buckets.make(config.buckets or {})
    gears_of(config)
    if config.engine != "auto":
        find_engine(config.engine)
    known = [*PASSES, *FAMILIES]
    for name in config.passes_off:
        if name not in known:
            raise ConfigError(f"passes_off names {name!r}, which is no pass", where={"passes": ", ".join(known)})
    return config


def get_compiler(config: Config | None = None, **options: Any) -> Callable[..., Runner]:
    """A compiler for people who call AOTAutograd themselves: `aot_module_simplified(gm, inputs, fw_compiler=...)`."""
    chosen = make_config(config, options)
    return lambda gm, example_inputs: compile_graph(gm, example_inputs, "inference", chosen)


def airgraph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """The backend behind `torch.compile(model, backend="airgraph", mode=..., options={...})`."""
    return backend()(gm, example_inputs, **kwargs)
