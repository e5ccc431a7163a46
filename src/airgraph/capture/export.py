"""A model ahead of time: torch.export reads it once, and what is called later has no guards.

exported = export_model(model, (x,), None, None)
exported.graph_module(*parameters, *buffers, *inputs)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.utils import _pytree as pytree

from airgraph.capture.aot import GraphCompiler, Traced, compile_by_aot
from airgraph.errors import BindError


@dataclass
class Exported:
    graph_module: torch.fx.GraphModule
    inputs: list[Any]  # fake tensors and symbolic numbers, in the order of the graph's placeholders
    state: list[torch.Tensor]  # parameters, buffers and constants: the first placeholders
    in_spec: Any
    out_spec: Any


def export_model(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> Exported:
    with torch.no_grad():
        program = torch.export.export(
            model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
    gm = program.graph_module
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    state: list[torch.Tensor] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind != torch.export.graph_signature.InputKind.USER_INPUT:
            name = spec.target or ""
            state.append(held[name] if name in held else program.constants[name])
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return Exported(gm, inputs, state, program.call_spec.in_spec, program.call_spec.out_spec)


def compile_exported(exported: Exported, compiler: GraphCompiler, keep_input_mutations: bool,
                     decompositions: Any) -> Traced:  # fmt: skip
    """The graph by AOTAutograd."""
    mode = detect_fake_mode(exported.inputs)
    with torch.no_grad(), tracing(TracingContext(mode)):
        return compile_by_aot(exported.graph_module, exported.inputs, compiler,
                              keep_input_mutations=keep_input_mutations, decompositions=decompositions)  # fmt: skip


class CompiledModel:
    """Called like the model. Arguments of another structure, type, size or device are errors."""

    def __init__(self, model: torch.nn.Module, exported: Exported, run: Callable[..., Any]) -> None:
        self.model = model
        self.exported = exported
        self.state = exported.state
        self.run = run
        self.in_spec, self.out_spec = exported.in_spec, exported.out_spec
        self.count = self.in_spec.num_leaves
        self.flat = self.in_spec == pytree.tree_structure((tuple(range(self.count)), {}))  # plain arguments, in a row
        self.single = self.out_spec == pytree.tree_structure(0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = args if self.flat and not kwargs and len(args) == self.count else self.flatten(args, kwargs)
        results = self.run(*self.state, *leaves)
        return results[0] if self.single else pytree.tree_unflatten(results, self.out_spec)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            raise BindError("the arguments have another structure than those the model was compiled for",
                            where={"compiled": str(self.in_spec), "called": str(spec)})  # fmt: skip
        return leaves
