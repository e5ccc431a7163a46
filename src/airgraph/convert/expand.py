"""A graph of ATen calls, in GE ops: for an analysis that knows these only.

    graph_1: y = ge.AtenCall([x, w, b], target="aten.addmm.default", …)   →   ge.Add(ge.Mul(ge.MatMulV2(x, w), 1), b)

In mode reduce-overhead the calls themselves are replayed, and no converter is asked when the FX graph is converted. Here
the converters are asked, for the graph that was made of it: FX is not read a second time. What is returned is to be read,
not to be run: it has the same inputs and outputs, but a call that writes to an argument or draws random numbers may stand
in it as a call of PyTorch's although there is a GE op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from airgraph.convert.registry import REGISTRY, Converter, Registry, TensorSpec, UnsupportedConversion
from airgraph.convert.views import VIEWS, PendingView, extend, is_itself, step_of
from airgraph.convert.walk import BY_MEMORY, TracedCall, converter_of, resolved
from airgraph.convert.writes import WRITES
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Node, Value

tree_map = torch.utils._pytree.tree_map


def in_ge_ops(graph: Graph, calls: Mapping[Node, TracedCall], registry: Registry = REGISTRY) -> Graph:
    """A new graph, with the calls of the old one by their converters; `calls` is what `convert` recorded of them."""
    expansion = Expansion(graph, calls, registry)
    with ge.building(expansion.graph):
        for node in graph.nodes:
            expansion.visit(node)
    return expansion.graph


class Expansion:
    """`env` has what each value of the old graph has become: a value of the new one or a `PendingView` of one."""

    def __init__(self, old: Graph, calls: Mapping[Node, TracedCall], registry: Registry) -> None:
        self.old, self.calls, self.registry = old, calls, registry
        self.graph = Graph(old.name)
        self.graph.notes, self.graph.modules = old.notes, old.modules
        self.env: dict[Value, Any] = {}

    def visit(self, node: Node) -> None:
        before = len(self.graph.nodes)
        try:
            results = self.expanded(self.calls[node]) if node in self.calls else self.copied(node)
        except UnsupportedConversion:
            self.graph.erase(self.graph.nodes[before:])
            results = self.copied(node)
        self.env |= zip(node.outputs, results)
        for new in self.graph.nodes[before:]:
            new.note = node.note

    def copied(self, node: Node) -> Sequence[Value]:
        inputs = [resolved(entry, Value, self.lookup, is_size=lambda v: False, pack=False) for entry in node.inputs]
        name = node.name if node.op == "Data" else None
        new = self.graph.add(node.op, inputs, node.attrs, [v.type for v in node.outputs], name=name)
        return [described(value, old) for value, old in zip(new.outputs, node.outputs)]

    def expanded(self, call: TracedCall) -> list[Any]:
        """What the results of a call have become, for those that it has."""
        converter = converter_of(self.registry, call.target, call.args, partial(specs, call.results))
        if converter is None or call.target in WRITES:
            raise UnsupportedConversion("it has no converter that could be used here")
        if call.target in VIEWS and not converter.user and not is_itself(call.target, call.results.type.shape):
            return [self.view(call)]
        if call.target in BY_MEMORY and not call.from_the_start:
            raise UnsupportedConversion("it counts in the memory of an argument, or of a part of a value")
        wanted, given = map(torch.utils._pytree.tree_leaves, (call.results, self.converted(call, converter)))
        if len(wanted) != len(given):
            raise UnsupportedConversion(f"it has {len(wanted)} results, its converter gave {len(given)}")
        return [self.result(value, old) for value, old in zip(given, wanted) if old is not None]

    def converted(self, call: TracedCall, converter: Converter) -> Any:
        resolve = partial(resolved, kind=Value, found=self.lookup, is_size=is_number, pack=True)
        args, kwargs = [resolve(a) for a in call.args], {k: resolve(a) for k, a in call.kwargs.items()}
        if converter.wants_meta:
            kwargs["meta_outputs"] = specs(call.results)
        self.graph.results_wanted = len(torch.utils._pytree.tree_leaves(call.results))
        return converter.function(*args, **kwargs)

    def result(self, value: Any, old: Value) -> Any:
        if not isinstance(value, Value) or value.node.op == "Data":
            return value
        value.type = old.type
        return described(value, old)

    # -- views ------------------------------------------------------------------------------------------------------
    def view(self, call: TracedCall) -> PendingView:
        resolve = partial(resolved, kind=Value, found=self.env.__getitem__, is_size=lambda v: False, pack=True)
        args = [resolve(a) for a in call.args]
        return extend(args[0], step_of(call.target, args, call.args[0].type.shape, call.results.type.shape))

    def lookup(self, value: Value) -> Any:
        """What a value became; a waiting view is emitted now."""
        entry = self.env[value]
        if isinstance(entry, PendingView):
            entry = self.env[value] = self.result(entry.emit(), value)
        return entry


def described(new: Value, old: Value) -> Value:
    new.known, new.dense = old.known, old.dense
    return new


def is_number(value: Value) -> bool:
    """A size, or another number that the host knows."""
    return value.known is not None


def specs(results: Any) -> Any:
    """What converters are told of the results. The order in memory is not known here."""
    if isinstance(results, list | tuple):
        return [specs(result) for result in results]
    if not isinstance(results, Value):
        return results
    shape = results.type.shape or ()
    return TensorSpec(results.dtype, len(shape), shape, results.type.place)
