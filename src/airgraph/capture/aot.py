"""From torch.compile to FX graphs of functional ATen ops: Dynamo has done its part, AOTAutograd does the next.

Forward, backward and inference graphs all go to the same compiler, which is told which one it gets. Writes to inputs stay
in the graph as a closing `copy_`. Ops are decomposed only where PyTorch itself does so on the way (and where the user
asks for it): a graph of the user's own ops is what people want to read. LSTMs go on where PyTorch stops (recurrent.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from airgraph.capture.dtypes import correct_dtypes
from airgraph.capture.images import ImagesLast, save_images_last
from airgraph.capture.recurrent import unroll_lstms
from airgraph.capture.write_strides import WritesKeepStrides
from airgraph.convert.names import names_of, tell

aten = torch.ops.aten
# Views of all elements. Taken of the same memory in the backward graph, they cost nothing there.
VIEWS = {
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}
# Ops that cost less than their results in memory, where kernels are fused.
CHEAP = {
    aten.gelu.default,
    aten.silu.default,
    aten.relu.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.max_pool2d_with_indices.default,
}
Compiled = Callable[[list[Any]], Any]
FxCompiler = Any  # Callable[[GraphModule, Sequence[Any]], Compiled]: PyTorch wants a Protocol with named arguments
_state: ContextVar[frozenset[int]] = ContextVar("arguments that are parameters or buffers", default=frozenset())
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any], str], Compiled]


@dataclass(frozen=True)
class Traced:
    """A module after AOTAutograd. `plain`: its wrapper around an inference program has nothing to do, for no output is a
    view of an input or of another output, and no write is left to it; it only counts the `written` arguments' versions."""

    run: Callable[..., Any]
    plain: bool
    written: tuple[int, ...]


def partition(
    joint: torch.fx.GraphModule, inputs: Sequence[Any], *, lean: bool, images: ImagesLast | None, **options: Any
) -> tuple[Any, Any]:
    """PyTorch's own partition, less what it puts on both sides: an op that acts on the world (a print) of the forward
    pass must not act again in the backward one. `lean`: cheap values are computed twice rather than saved. `images`: those
    of these convolutions are saved as fused kernels make them."""
    correct_dtypes(joint)
    forward, backward = default_partition(joint, inputs, **options)
    done = {node.name for node in forward.graph.nodes if acts(node)}
    for node in reversed(list(backward.graph.nodes)):
        if node.name in done and acts(node) and not node.users:
            backward.graph.erase_node(node)
    save_bases(forward, backward, options["num_fwd_outputs"])
    if lean:
        save_inputs(forward, backward, options["num_fwd_outputs"])
    if images is not None:
        save_images_last(forward, backward, options["num_fwd_outputs"], images)
    forward.recompile()
    backward.recompile()
    return forward, backward


def save_bases(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, count: int) -> None:
    """What is saved for the backward graph (the forward's results from number `count` on) is no view, where it may be:

        forward:  t = permute(weight, [1, 0]); return y, t      →    return y, weight
        backward: mm(dy, t)                                          t = permute(weight, [1, 0]); mm(dy, t)

    A view would be made at every call and be handed through autograd, often beside its base.
    """
    end = forward.graph.output_node()
    written = {node.args[0] for node in forward.graph.nodes if node.target is aten.copy_.default}
    taken = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    results = list(end.args[0])  # type: ignore[arg-type]
    kept = results[:count]
    for saved in results[count:]:
        views = chain_of_views(saved)
        base = views[0].args[0] if views else None
        if not isinstance(base, torch.fx.Node) or base in written or saved.name not in taken:
            kept.append(saved)
            continue
        old = taken.pop(saved.name)
        if base.name not in taken:
            kept.append(base)
            with backward.graph.inserting_before(old):
                taken[base.name] = backward.graph.placeholder(base.name)
                taken[base.name].meta = dict(base.meta)
        new = {base: taken[base.name]}
        with backward.graph.inserting_before(first):
            for view in views:
                new[view] = backward.graph.node_copy(view, new.__getitem__)
        old.replace_all_uses_with(new[saved])
        backward.graph.erase_node(old)
    end.args = (tuple(kept),)
    for node in reversed(list(forward.graph.nodes)):
        if node.target in VIEWS and not node.users:
            forward.graph.erase_node(node)


def save_inputs(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, count: int) -> None:
    """What a cheap op makes of a tensor that is saved anyway is not saved, but made again where it is read first:

    forward:  y = gelu(x); return …, x, y      →    return …, x
    backward: mm(dz, y)                             y = gelu(x); mm(dz, y)
    """
    end = forward.graph.output_node()
    results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    written = {node.args[0] for node in forward.graph.nodes if node.target is aten.copy_.default}
    taken: dict[Any, torch.fx.Node] = {n.target: n for n in backward.graph.nodes if n.op == "placeholder"}
    order = {node: i for i, node in enumerate(backward.graph.nodes)}
    saved = [n for n in results[count:] if isinstance(n, torch.fx.Node) and n.name in taken and n not in written]
    made: dict[torch.fx.Node, list[torch.fx.Node]] = {}  # a cheap op → which of its results are saved
    for node in saved:
        op = node.args[0] if node.target is operator.getitem else node
        if isinstance(op, torch.fx.Node) and op.target in CHEAP and node not in results[:count]:
            made.setdefault(op, []).append(node)
    gone = {node for nodes in made.values() for node in nodes}
    for op, nodes in made.items():
        views = chain_of_views(op.args[0])
        base: Any = views[0].args[0] if views else op.args[0]
        seen, readers = readers_of(taken[node.name] for node in nodes)
        if base not in saved or base in gone or not readers:
            gone -= set(nodes)
            continue
        first = min(readers, key=order.__getitem__)
        new = {base: taken[base.name]}
        with backward.graph.inserting_before(first):
            for node in (*views, op, *(n for n in nodes if n is not op)):
                new[node] = backward.graph.node_copy(node, new.__getitem__)
        for view in sorted(seen, key=order.__getitem__):
            first.prepend(view)
        for node in nodes:
            taken[node.name].replace_all_uses_with(new[node])
            backward.graph.erase_node(taken[node.name])
    end.args = ((*results[:count], *(node for node in results[count:] if node not in gone)),)


def readers_of(nodes: Iterable[torch.fx.Node]) -> tuple[set[torch.fx.Node], set[torch.fx.Node]]:
    """The views of these nodes, and what reads them or a view of them."""
    views: set[torch.fx.Node] = set()
    readers: set[torch.fx.Node] = set()
    waiting = [user for node in nodes for user in node.users]
    while waiting:
        node = waiting.pop()
        if node.target in VIEWS:
            views.add(node)
            waiting += node.users
        else:
            readers.add(node)
    return views, readers


def chain_of_views(node: Any) -> list[torch.fx.Node]:
    """The views that lead to `node`, the first one first; those with symbolic sizes end the chain."""
    found: list[torch.fx.Node] = []
    while isinstance(node, torch.fx.Node) and node.target in VIEWS and node.all_input_nodes == [node.args[0]]:
        found.insert(0, node)
        node = node.args[0]
    return found


def state_inputs() -> frozenset[int]:
    """While AOTAutograd compiles a forward or inference graph: its arguments that are parameters or buffers, also those of
    an exported model. They stay where they are from call to call."""
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context else None
    return frozenset(getattr(meta, "static_input_indices", None) or ()) | _state.get()


def first_saved() -> int | None:
    """While AOTAutograd compiles a forward graph: from which of its results on they are saved for the backward graph."""
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context else None
    return getattr(meta, "num_forward", None)


def unknown_size(*args: Any, **kwargs: Any) -> Any:
    """In place of an op of gradients whose result has as many elements as the data decide, where PyTorch (2.11) guesses the
    number from zeros: the graph would be wrong. As with other such ops, the function stays eager."""
    raise DynamicOutputShapeException(aten._unique.default)


# Where PyTorch knows that only running can tell, it sees to that itself.
GUESSED = {} if torch.Tag.dynamic_output_shape in aten._unique.default.tags else {aten._unique.default: unknown_size}


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
    state: int = 0,
    lean: bool = False,
    images: ImagesLast | None = None,
) -> Traced:
    """The module compiled: `compiler(gm, inputs, phase)` is called for each graph AOTAutograd makes of it.

    `names` are the users' names of the inputs; None: Dynamo knows them. `state`: so many of the first inputs are parameters
    and buffers (of those that Dynamo lists PyTorch knows). `lean`, `images`: see `partition`.
    """
    known = names_of(gm) if names is None else names
    strides = WritesKeepStrides()

    def phase(name: str) -> FxCompiler:
        def compile_named(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            tell(graph, known)
            with strides.paused():
                return compiler(graph, inputs, name)

        return compile_named

    def corrected(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        correct_dtypes(graph)
        unroll_lstms(graph, decompositions or {})  # (a backward graph would need the workspace of oneDNN's forward)
        tell(graph, known)
        same = len(inputs) == len(example_inputs)  # PyTorch hands in once what is given twice
        token = _state.set(frozenset(range(state if same else 0)))
        try:
            with strides.paused():
                return compiler(graph, inputs, "inference")
        finally:
            _state.reset(token)

    inference: FxCompiler = corrected
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    own: dict[Any, Callable[..., Any]] = GUESSED if trains else {}

    with strides:
        run = aot_module_simplified(
            gm,
            list(example_inputs),
            fw_compiler=phase("forward"),
            bw_compiler=phase("backward"),
            inference_compiler=inference,
            partition_fn=partial(partition, lean=lean, images=images),
            decompositions={**own, **(decompositions or {})},
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
