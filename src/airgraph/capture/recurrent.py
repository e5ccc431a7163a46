"""An LSTM layer that PyTorch would leave to oneDNN, step by step: its products and gates are fused, its weights packed.

Two layers of 256, 32 steps of 4 rows, on two cores of a Xeon (`lstm_module` in benchmarks/cpu.py): 1.4 ms, by oneDNN 2.7.
One step is traced, and its nodes are written once for every step: tracing all of them took three times as long as the rest
of that model's compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LSTM = 2  # of oneDNN's kinds of recurrent layers
MOST_STEPS = 64  # each is a dozen nodes of the graph
WORKSPACE = 3  # of its results: for a backward
ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "from_node")  # of what a node was made
Decompositions = Mapping[Any, Callable[..., Any]]


def unroll_lstms(gm: GraphModule, decompositions: Decompositions) -> None:
    """Each layer of float32 with a known, small number of steps, as PyTorch's own decomposition calls it."""
    layers = [node for node in gm.graph.find_nodes(op="call_function", target=LAYER) if unrolls(node)]
    for layer in layers:
        unroll(gm.graph, layer, dict(decompositions))
    if layers:
        gm.recompile()


def unrolls(layer: Node) -> bool:
    *_, batch_sizes, mode, _, layers, _, bidirectional, batch_first, train = layer.args
    if mode != LSTM or layers != 1 or batch_sizes or bidirectional or batch_first or train:
        return False
    if any(user.args[1] == WORKSPACE for user in layer.users):
        return False
    x: torch.Tensor = layer.args[0].meta["val"]  # type: ignore[union-attr]
    return x.dtype == torch.float32 and isinstance(x.shape[0], int) and 0 < x.shape[0] <= MOST_STEPS


def unroll(graph: Graph, layer: Node, decompositions: dict[Any, Callable[..., Any]]) -> None:
    x, input_weight, hidden_weight, input_bias, hidden_bias, hidden, cell, reverse, *_ = layer.args
    has_biases = layer.args[12]

    def begin(hidden: torch.Tensor, cell: torch.Tensor, x: torch.Tensor, *given: torch.Tensor) -> tuple[Any, ...]:
        weight, *biases = given
        ready = F.linear(x, weight, biases[0] + biases[1] if has_biases else None)
        return hidden.squeeze(0), cell.squeeze(0), *ready.unbind(0)

    def step(h: torch.Tensor, c: torch.Tensor, ready: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i, f, g, o = (ready + F.linear(h, weight)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def end(h: torch.Tensor, c: torch.Tensor, *made: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.stack(made), h.unsqueeze(0), c.unsqueeze(0)

    def traced(function: Callable[..., Any], given: Sequence[Any]) -> Graph:
        """(Inputs are told apart by their values, and the copies of a node share one.)"""
        values = [node.meta["val"] for node in given]
        own = [v.detach() if any(v is before for before in values[:i]) else v for i, v in enumerate(values)]
        return make_fx(function, decompositions, "fake")(*own).graph

    def write(text: Graph, given: Sequence[Any]) -> tuple[Node, ...]:
        """Copies of these nodes, before the layer. What they return."""
        *nodes, output = text.nodes
        written = dict(zip(nodes, given))
        for node in nodes[len(given) :]:
            written[node] = copy = graph.node_copy(node, written.__getitem__)
            copy.meta |= {key: layer.meta[key] for key in ORIGIN if key in layer.meta}
        return tuple(written[node] for node in output.args[0])

    with graph.inserting_before(layer):
        given = [hidden, cell, x, input_weight, *((input_bias, hidden_bias) if has_biases else ())]
        h, c, *ready = write(traced(begin, given), given)
        text, made = traced(step, [h, c, ready[0], hidden_weight]), list[Node]()
        for part in reversed(ready) if reverse else ready:
            h, c = write(text, [h, c, part, hidden_weight])
            made.append(h)
        given = [h, c, *(reversed(made) if reverse else made)]
        results = write(traced(end, given), given)
    for user in list(layer.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    for unused in (layer, *(node for node in results if not node.users)):
        graph.erase_node(unused)
