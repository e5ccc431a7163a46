"""From torch.compile to FX graphs of functional ATen ops: Dynamo has done its part, AOTAutograd does the next.

Forward, backward and inference graphs all go to the same compiler, which is told which one it gets. Writes to inputs stay
in the graph as a closing `copy_`. Ops are decomposed only where PyTorch itself does so on the way (and where the user
asks for it): a graph of the user's own ops is what people want to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext

from airgraph.capture.dtypes import correct_dtypes
from airgraph.convert.names import names_of, tell

Compiled = Callable[[list[Any]], Any]
FxCompiler = Any  # Callable[[GraphModule, Sequence[Any]], Compiled]: PyTorch wants a Protocol with named arguments
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any], str], Compiled]


@dataclass(frozen=True)
class Traced:
    """A module after AOTAutograd. `plain`: its wrapper around an inference program has nothing to do, for no output is a
    view of an input or of another output, and no write is left to it; it only counts the `written` arguments' versions."""

    run: Callable[..., Any]
    plain: bool
    written: tuple[int, ...]


def partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    """PyTorch's own partition, less what it puts on both sides: an op that acts on the world (a print) of the forward
    pass must not act again in the backward one."""
    correct_dtypes(joint)
    forward, backward = default_partition(joint, inputs, **options)
    done = {node.name for node in forward.graph.nodes if acts(node)}
    for node in reversed(list(backward.graph.nodes)):
        if node.name in done and acts(node) and not node.users:
            backward.graph.erase_node(node)
    backward.recompile()
    return forward, backward


def fixed_inputs() -> frozenset[int]:
    """While AOTAutograd compiles a forward or inference graph: its arguments that are parameters or buffers, which stay
    where they are from call to call."""
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context else None
    return frozenset(getattr(meta, "static_input_indices", None) or ())


def acts(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target in torch.fx.node._side_effectful_functions


def compile_by_aot(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: GraphCompiler,
    *,
    keep_input_mutations: bool,
    decompositions: Mapping[Any, Callable[..., Any]] | None,
    names: Sequence[str] | None = None,
) -> Traced:
    """The module compiled: `compiler(gm, inputs, phase)` is called for each graph AOTAutograd makes of it.

    `names` are the users' names of the inputs; None: Dynamo knows them.
    """
    known = names_of(gm) if names is None else names

    def phase(name: str) -> FxCompiler:
        def compile_named(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            tell(graph, known)
            return compiler(graph, inputs, name)

        return compile_named

    def corrected(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        correct_dtypes(graph)
        tell(graph, known)
        return compiler(graph, inputs, "inference")

    inference: FxCompiler = corrected

    run = aot_module_simplified(
        gm,
        list(example_inputs),
        fw_compiler=phase("forward"),
        bw_compiler=phase("backward"),
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(decompositions or {}),
        keep_inference_input_mutations=keep_input_mutations,
    )
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context else None
    if meta is None:
        return Traced(run, False, ())
    plain = all(o.output_type is OutputType.non_alias for o in meta.output_info) and not meta.tokens
    plain = plain and not meta.mutated_inp_runtime_indices and not meta.num_intermediate_bases
    written = meta.mutated_graph_handled_indices_seen_by_autograd if keep_input_mutations else ()
    return Traced(run, plain, tuple(written))
