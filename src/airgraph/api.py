"""The public entry points: a backend for torch.compile, compiling ahead of time, export, and what they need of options.

    torch.compile(model, backend=airgraph.backend(dump="py"))       backend
    fast = airgraph.compile(model, (x,))                            compile_model
    airgraph.export(model, (x,), path="export_file")                export, load_export

Files that also carry object code are in `artifacts`, models that are kept under a name in `named_models`. The stages
they go through are in `pipeline`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from airgraph.capture.announce import announce, convolves, device_of
from airgraph.capture.aot import GraphCompiler, Traced, compile_by_aot
from airgraph.capture.compiled import CompiledModel
from airgraph.capture.empty_masks import drop_empty_masks
from airgraph.capture.export import Exported, all_dynamic, capture_exported, compile_exported, export_model
from airgraph.capture.fx_passes import run_fx_passes
from airgraph.capture.gear_marks import gear_marks
from airgraph.capture.images import IMAGES_LAST
from airgraph.capture.live_state import LiveState
from airgraph.capture.marks import bucket_marks
from airgraph.capture.model_call import as_module, state_of
from airgraph.compilation import Compilation
from airgraph.config import Config
from airgraph.convert import REGISTRY, any_op, convert
from airgraph.engine import find_engine, warm_up
from airgraph.engine.native import expect_convolutions
from airgraph.errors import AirgraphError, ConfigError, ExportError
from airgraph.gears import gears_of
from airgraph.ir.boundary import Boundary
from airgraph.ir.graph import Graph
from airgraph.journal import Journal, get_logger
from airgraph.passes import FAMILIES, PASSES
from airgraph.pipeline import compile_graph, converted, made_ready
from airgraph.runtime.buckets import Buckets, Limits, Padded, wanted_buckets
from airgraph.runtime.device import computing_device
from airgraph.runtime.loaded import LoadedModel
from airgraph.runtime.program import Program, Runner
from airgraph.store.dump import write_model
from airgraph.store.program_entry import expect_programs

if TYPE_CHECKING:
    from airgraph.store.convention import StoredModel

Backend = Callable[..., Any]
_models = itertools.count()


def backend(config: Config | None = None, **options: Any) -> Backend:
    """A backend for torch.compile.

        torch.compile(model, backend=airgraph.backend(dump="py", dump_path="graphs"))

    `config` and `options` are fields of `airgraph.Config`; an option wins over the same field of `config`.
    """
    base = make_config(config, options)

    def compile_module(
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        chosen = make_config(base, {**({"mode": mode} if mode else {}), **(options or {})})
        if convolves(gm):
            expect_convolutions()
        prepare(chosen, device_of(example_inputs))
        model = next(_models)
        write_model(model, gm, chosen)
        if chosen.mode == "max-autotune":
            drop_empty_masks(gm)
        marks = {**bucket_marks(gm, example_inputs), **gear_marks(gm, example_inputs, gears_of(chosen))}
        programs, compiler = collecting(chosen, model, marks)
        fuses, computing = chosen.mode == "max-autotune", computing_device(device_of(example_inputs)).type
        traced = compile_by_aot(
            gm,
            example_inputs,
            compiler,
            keep_input_mutations=chosen.keep_input_mutations,
            decompositions=chosen.decompositions,
            lean=fuses and computing == "cuda",
            images=IMAGES_LAST.get(computing) if fuses else None,
        )
        run = shortest(programs, traced, len(example_inputs))
        return reading_modules(gm, run) if from_dynamo(gm) else getattr(run, "builtin", run)

    return compile_module


def from_dynamo(gm: torch.fx.GraphModule) -> bool:
    return any("grapharg" in node.meta for node in gm.graph.find_nodes(op="placeholder"))


def reading_modules(gm: torch.fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """How Dynamo, which waits for it, is to call it: with modules in place of their parameters, and with guards on them
    that native code watches, where it can be told so."""
    from airgraph.capture.model_guards import watch_model  # these need Dynamo
    from airgraph.capture.module_arguments import module_arguments, waiting

    output = waiting(gm)
    if output is not None:
        watch_model(output)
    found = None if output is None else module_arguments(gm)
    return getattr(run, "builtin", run) if found is None else found.wrapped(run)


def prepare(config: Config, device: torch.device) -> None:
    """Before PyTorch traces a model of this device."""
    warm_up(config.engine, computing_device(device), config.mode)
    expect_programs(computing_device(device))


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


def compile_model(
    model: Callable[..., Any] | torch.export.ExportedProgram,
    example_args: Any,
    example_kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    config: Config | None,
    options: Mapping[str, Any],
) -> CompiledModel:
    """`airgraph.compile` without a name in the cache."""
    chosen = make_config(config, options)
    start = time.perf_counter()
    programs, compiler = collecting(chosen)
    state = state_of(model) if isinstance(model, torch.nn.Module) else {}
    if isinstance(model, torch.nn.Module) and any(isinstance(part, torch.nn.Conv2d) for part in model.modules()):
        expect_convolutions()
    prepare(chosen, device_of([*torch.utils._pytree.tree_leaves((example_args, example_kwargs)), *state.values()]))
    exported = export_model(model, example_args, example_kwargs, dynamic_shapes)
    traced = compile_exported(exported, compiler, chosen.keep_input_mutations, chosen.decompositions)
    guarded = replace(traced, run=torch.no_grad()(traced.run))
    run = shortest(programs, guarded, len(exported.inputs))
    return CompiledModel(exported, run, time.perf_counter() - start, chosen)


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
    record_modules: bool = False,
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Writes the model as a file of GE ops with its weights, for inference; returns the path of the file.

        airgraph.export(model, (x,), path="export_file")        export_file/export.air
        airgraph.load_export("export_file/export.air")(x)

    `dynamic`: every size may change that PyTorch can keep open; `dynamic_shapes` is torch.export's, for a finer choice.
    `external_weights`: each weight in a file of its own; None: only where they are too many for one file.
    `record_modules`: each op says which module it comes from. docs/export.md says what is written, and what cannot be.
    """
    from airgraph.store.export import ExportTarget, write_export  # needs protobuf, which compiling does not

    chosen = make_config(config, options)
    refuse_modes(chosen)
    if dynamic and dynamic_shapes is None:
        dynamic_shapes = all_dynamic(model, example_args, example_kwargs or {})
    try:
        exported = export_model(model, example_args, example_kwargs, dynamic_shapes)
    except Exception as error:  # PyTorch's, of many types
        reason = next(iter(str(error).splitlines()), "")
        raise ExportError(
            "torch.export cannot trace this model as one graph",
            where={"reason": f"{type(error).__name__}: {reason}"},
            hint="PyTorch's own message above says where; docs/export.md lists what is not exported",
        ) from error
    stored = exported_graph(exported, chosen)
    if calls := stored.graph.of("AtenCall"):
        targets = ", ".join(sorted({node.attrs["target"] for node in calls}))
        log = get_logger(chosen.log)
        log.warning("export: GE has no op for %s; airgraph loads the file, GE's own tools do not", targets)
    target = ExportTarget(path, name, rank)
    return write_export(stored, target, external=external_weights, modules=record_modules)


def refuse_modes(config: Config) -> None:
    if config.mode != "max-autotune":
        raise ConfigError(
            f"only a graph of GE ops can be exported, and mode={config.mode!r} keeps every ATen op",
            hint='mode="max-autotune"',
        )


def exported_graph(exported: Exported, config: Config) -> StoredModel:
    """The graph of an exported model, before the graph passes: whoever loads it runs those of his machine."""
    from airgraph.store.export import arranged

    c = Compilation.begin("inference", config, next(_models))
    captured = capture_exported(exported, config.decompositions)
    announce(captured.graph_module, captured.inputs, config, c.journal)
    with c.journal.stage("fx_passes"):
        gm = run_fx_passes(captured.graph_module, captured.inputs, config, observe=lambda step, g: None)
    with _disable_current_modes():
        graph, boundary = converted(c, gm)
    c.journal.classification = f"exported, {'static' if graph.is_static else 'dynamic'} GE graph"
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
    from airgraph.store.load_export import moved, read_export

    c = begin_loading(make_config(config, options))
    with c.journal.stage("read"):
        stored = moved(read_export(path), device, c.journal.remark)
    return loaded_model(c, stored, path, trust)


def begin_loading(config: Config) -> Compilation:
    warm_up(config.engine, torch.device("cpu"), config.mode)
    c = Compilation.begin("inference", config, next(_models))
    for option in ("enable_shape_handling", "data_dump", "run_eagerly"):
        if getattr(config, option):
            c.journal.remark(f"{option} has no effect on a loaded model: it needs the FX graph, which no file holds")
    return c


def loaded_model(c: Compilation, stored: StoredModel, path: str | Path, trust: bool) -> LoadedModel:
    """What was read, made ready to run."""
    from airgraph.store.load_export import by_memory
    from airgraph.store.rehearsal import rehearsal_of

    rehearse = None
    if not trust:
        with c.journal.stage("rehearse"):
            rehearse = rehearsal_of(stored, str(path), c.journal.remark)
        c = c if rehearse else replace(c, config=replace(c.config, engine="reference", buckets=None))
    laid = by_memory(stored)
    c.dump.graph("original", stored.graph)
    try:
        program, _ = ready(c, stored, rehearse)
    except AirgraphError:
        raise
    except Exception as error:  # the checks of a graph cannot foresee everything a file may say
        raise ExportError(
            f"the graph of {path} cannot be compiled", where={"reason": repr(error)}, hint="export it again"
        ) from error
    return LoadedModel(
        str(path), stored.contract, stored.boundary, stored.weights, stored.written, laid, program, rehearse
    )


def ready(
    c: Compilation, stored: StoredModel, rehearse: Callable[[Mapping[Any, Any]], None] | None = None
) -> tuple[Runner, Graph]:
    padding = None
    buckets = wanted_buckets(c.config, c.journal) if c.config.buckets is not None else None
    if buckets is not None:
        with c.journal.stage("buckets"):
            limits = Limits.of_contract(stored.contract, rehearse)
            padding = Padded.of(stored.graph, stored.boundary, buckets, {}, limits, c.journal)
    weights = frozenset(range(len(stored.weights)))
    program, graph = made_ready(c, stored.graph, stored.boundary, torch.device(stored.device), weights)
    return padding.around(program) if padding else program, graph


def compiled_stored(stored: StoredModel, config: Config) -> tuple[Any, bool]:
    """The program of a graph that was stored, and whether the graph is static. The graph is changed by the passes."""
    program, graph = ready(Compilation.begin("inference", config, next(_models)), stored)
    return program, graph.is_static


def keep_method(
    method: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    path: Path,
    *,
    dynamic: bool,
    about: Mapping[str, str],
    config: Config,
) -> LoadedModel:
    """A method of a module, compiled for such arguments and kept at `path`, where `load_method` finds it."""
    from airgraph.store.method_file import write_method

    shapes = all_dynamic(method, args, kwargs) if dynamic else None
    exported = export_model(method, args, kwargs, shapes)
    stored = exported_graph(exported, config)
    write_method(path, stored, state_of(exported.model), about)
    return load_method(method, path, config)


def load_method(method: Callable[..., Any], path: Path, config: Config) -> LoadedModel:
    """A method that `keep_method` kept, with the parameters and buffers its module has now."""
    from airgraph.store.method_file import read_method

    warm_up(config.engine, torch.device("cpu"), config.mode)
    owner = as_module(method)
    c = Compilation.begin("inference", config, next(_models))
    with c.journal.stage("read"):
        stored = read_method(path, state_of(owner))
    model = loaded_model(c, stored, path, trust=False)
    model.live = LiveState(owner, list(stored.weights), list(stored.weights.values())).read
    return model


def make_config(base: Config | None, options: Mapping[str, Any]) -> Config:
    config = Config.make(base, **options)
    Buckets.make(config.buckets or {})
    gears_of(config)
    if config.engine != "auto":
        find_engine(config.engine)
    known = [*PASSES, *FAMILIES]
    for name in config.passes_off:
        if name not in known:
            raise ConfigError(f"passes_off names {name!r}, which is not a pass", where={"passes": ", ".join(known)})
    return config


def get_compiler(config: Config | None = None, **options: Any) -> Callable[..., Runner]:
    """A compiler for code that calls AOTAutograd itself: `aot_module_simplified(gm, inputs, fw_compiler=...)`."""
    chosen = make_config(config, options)
    return lambda gm, example_inputs: compile_graph(gm, example_inputs, "inference", chosen)


def airgraph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """The backend behind `torch.compile(model, backend="airgraph", mode=..., options={...})`."""
    return backend()(gm, example_inputs, **kwargs)


def graph_to_analyse(gm: torch.fx.GraphModule, inputs: Sequence[Any], config: Config) -> tuple[Graph, Boundary]:
    """The graph of GE ops of an FX graph, for somebody who only wants to read it."""
    gm = run_fx_passes(gm, inputs, config, observe=lambda step, g: None)
    with _disable_current_modes():
        return convert(gm, "graph", REGISTRY, Journal(), has_kernel=any_op)
