"""A model ahead of time: torch.export reads it once, and what is called later has no guards.

exported = export_model(model, (x,), None, None)
exported.graph_module(*parameters, *buffers, *inputs)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from airgraph.capture.aot import GraphCompiler, Traced, compile_by_aot
from airgraph.capture.empty_masks import calls_with_empty_masks, drop_empty_masks
from airgraph.capture.model_call import as_arguments, as_module, state_of
from airgraph.capture.undone_writes import UndoneWrites, with_numbers_kept
from airgraph.errors import ConvertError


@dataclass
class Exported:
    graph_module: torch.fx.GraphModule
    inputs: list[Any]  # fake tensors and symbolic numbers, in the order of the graph's placeholders
    state: list[torch.Tensor]  # parameters, buffers and constants: the first placeholders
    in_spec: Any
    out_spec: Any
    names: list[str] = field(default_factory=list)  # of the state
    model: torch.nn.Module = field(default_factory=torch.nn.Module)  # whose state it is

    @property
    def argument_names(self) -> list[str]:
        """Of the state, then of the arguments as the model's signature has them."""
        placeholders = [node.name for node in self.graph_module.graph.find_nodes(op="placeholder")]
        return [*self.names, *placeholders[len(self.names) :]]

    def of(self, copied: torch.nn.Module, memo: dict[int, Any]) -> Exported:
        """The same for a copy of the model."""
        held = state_of(copied)
        pairs = zip(self.names, self.state)
        state = [held[name] if name in held else copy.deepcopy(tensor, memo) for name, tensor in pairs]
        return replace(self, state=state, model=copied)


def compile_lock() -> Any:
    """The lock under which Dynamo compiles. Tracing changes state of the whole process, and torch.export takes no lock:
    beside a torch.compile in another thread, both fail."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def export_model(
    model: Callable[..., Any] | ExportedProgram, args: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> Exported:
    """The model as one graph. A program of torch.export's is taken as it is, with the examples it was made with."""
    owner: torch.nn.Module
    if isinstance(model, ExportedProgram):
        program, owner = model, model.module()
    else:
        owner = as_module(model)
        with compile_lock(), torch.no_grad(), UndoneWrites():
            program = torch.export.export(
                owner, as_arguments(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
    gm = program.graph_module
    held = state_of(owner)
    state: list[torch.Tensor] = []
    names: list[str] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind != torch.export.graph_signature.InputKind.USER_INPUT:
            name = spec.target or ""
            state.append(held[name] if name in held else program.constants[name])
            names.append(name)
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return Exported(gm, inputs, state, program.call_spec.in_spec, program.call_spec.out_spec, names, owner)


def compile_exported(
    exported: Exported, compiler: GraphCompiler, keep_input_mutations: bool, decompositions: Any
) -> Traced:
    """The graph by AOTAutograd."""
    mode = detect_fake_mode(exported.inputs)
    gm = exported.graph_module
    if calls_with_empty_masks(gm):
        gm = copy.deepcopy(gm)  # it may be a program of the user's
        drop_empty_masks(gm)
    with compile_lock(), torch.no_grad(), with_numbers_kept(exported.state), tracing(TracingContext(mode)):
        return compile_by_aot(
            gm,
            exported.inputs,
            compiler,
            keep_input_mutations=keep_input_mutations,
            decompositions=decompositions,
            names=exported.argument_names,
            state=len(exported.state),
        )


@dataclass(frozen=True)
class Captured:
    """The one inference graph of an exported model, to be kept instead of run."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    places: list[int]  # which of the exported inputs each of the graph's is: PyTorch hands one that comes twice in once
    written: tuple[int, ...]  # the exported inputs that the graph writes to
    guards: list[Any]  # expressions of the symbols that must be true
    ranges: dict[Any, tuple[int | None, int | None]]  # of the symbols


def capture_exported(exported: Exported, decompositions: Any) -> Captured:
    """The graph by AOTAutograd. What its wrapper would still have to do after each call cannot be kept: that is refused."""
    seen: list[tuple[torch.fx.GraphModule, list[Any], str, Any]] = []

    def keep(gm: torch.fx.GraphModule, inputs: Sequence[Any], phase: str) -> Callable[[list[Any]], Any]:
        context = TracingContext.try_get()
        seen.append((gm, list(inputs), phase, context.fw_metadata if context else None))
        return lambda args: args

    compile_exported(exported, keep, True, decompositions)
    (gm, inputs, phase, meta), *more = seen
    if more or phase != "inference" or meta is None:
        raise ConvertError(
            "only a single graph for inference can be exported",
            where={"graphs": ", ".join([phase, *(other[2] for other in more)])},
        )
    if meta.mutated_inp_runtime_indices:
        raise ConvertError(
            "the model changes the size, strides or memory of an argument, or two arguments that overlap",
            where={"arguments": ", ".join(map(str, meta.mutated_inp_runtime_indices))},
            hint="return the new tensor instead",
        )
    if meta.tokens:
        raise ConvertError(
            "the model has effects outside of its results, which are ordered by tokens",
            where={"effects": ", ".join(map(str, meta.tokens))},
        )
    written = tuple(meta.mutated_graph_handled_indices_seen_by_autograd)
    written += tuple(i for i, info in enumerate(meta.input_info) if info.mutates_data and i not in written)
    return Captured(gm, inputs, places(exported.inputs, inputs), written, *symbolic_facts(exported.inputs))


def places(exported: Sequence[Any], inputs: Sequence[Any]) -> list[int]:
    first: dict[int, int] = {}
    for i, value in enumerate(exported):
        first.setdefault(id(value) if isinstance(value, torch.Tensor) else -1 - i, i)
    found = list(range(len(exported))) if len(exported) == len(inputs) else sorted(first.values())
    if len(found) != len(inputs):
        raise ConvertError("the model writes to arguments that share memory", hint="a copy of one of them")
    return found


def symbolic_facts(inputs: Sequence[Any]) -> tuple[list[Any], dict[Any, tuple[int | None, int | None]]]:
    """What PyTorch took for granted of the symbols while it read the model: (guards, ranges)."""
    mode = detect_fake_mode(inputs)
    env = getattr(mode, "shape_env", None)
    if env is None:
        return [], {}
    ends = {s: (r.lower, r.upper) for s, r in env.var_to_range.items() if s not in env.replacements}
    whole = {s: tuple(int(e) if e.is_Integer else None for e in pair) for s, pair in ends.items()}
    guards = [guard.expr for guard in env.guards if guard.expr.free_symbols <= whole.keys()]  # not of a size now fixed
    return guards, whole  # type: ignore[return-value]


def example_sizes(inputs: Sequence[Any]) -> dict[Any, int]:
    """The symbols among the inputs at the sizes of the example."""
    sizes = [x for v in inputs for x in ((*v.shape, *v.stride()) if isinstance(v, torch.Tensor) else (v,))]
    nodes = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    return {node.expr: node.hint for node in nodes if node.expr.is_Symbol and isinstance(node.hint, int)}


def all_dynamic(model: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`dynamic_shapes` for torch.export: every size and every int that PyTorch finds may change, but for 0 and 1, which are
    special in torch.compile too, and for those that `torch._dynamo.mark_static` fixed."""
    bound = inspect.signature(as_module(model).forward).bind(*as_arguments(args), **kwargs)
    return {name: pytree.tree_map(dynamic_sizes, value) for name, value in bound.arguments.items()}


def dynamic_sizes(value: Any) -> Any:
    auto = torch.export.Dim.AUTO
    if isinstance(value, torch.Tensor):
        fixed: set[int] = getattr(value, "_dynamo_static_indices", set())
        static = torch.export.Dim.STATIC
        return {i: static if i in fixed or size in (0, 1) else auto for i, size in enumerate(value.shape)}
    return auto if type(value) is int and value not in (0, 1) else None
