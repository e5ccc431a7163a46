"""Calls of ops that are formulas, replaced by what they are made of, so that loops are fused across them.

    y, g = npu.npu_geglu(x)   ⟶   a, b = split(x); g = gelu(b); y = mul(a, g)

A formula is a function of tensors, traced on the metadata of the call's own arguments, symbolic sizes too. A call stays
where its formula is long or has an op without a converter, and where somebody has registered a converter of his own. A
graph that is shown (dumped, say) keeps all its calls: they are what the user wrote.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from airgraph.capture.fx_passes import remove_noops, views_as_reshapes
from airgraph.convert.registry import REGISTRY, Converter
from airgraph.errors import Unsupported

LONGEST = 256  # nodes of a formula: one that is longer is a loop over tokens, written out
LIBRARY = {torch.ops.aten.view.dtype}  # ops whose converters refuse nearly every use
KEPT = ("stack_trace", "nn_module_stack")  # metadata of a call that the nodes of its formula get


class UnsupportedInlining(Unsupported):
    """The call stays; the text says why."""


class Formula(NamedTuple):
    """What an op computes, the converter it had when that was said, and the calls that are meant: None for all."""

    meaning: Callable[..., Any]
    converter: Converter | None
    where: Callable[..., bool] | None = None


FORMULAS: dict[Any, Formula] = {}


def add_formula(op: Any, meaning: Callable[..., Any], where: Callable[..., bool] | None = None) -> None:
    """`where` gets a call's arguments: an op whose converter takes only some calls is a formula in the others."""
    FORMULAS[op] = Formula(meaning, REGISTRY.find(op), where)


def meanings() -> dict[Any, Callable[..., Any]]:
    """Of the ops that nobody has registered another converter for."""
    return {op: limited(f) for op, f in FORMULAS.items() if REGISTRY.find(op) is f.converter}


def limited(formula: Formula) -> Callable[..., Any]:
    """As an entry of a decomposition table, where NotImplemented leaves the op as it is."""
    meaning, _, where = formula
    if where is None:
        return meaning
    return lambda *args, **kwargs: meaning(*args, **kwargs) if where(*args, **kwargs) else NotImplemented


def is_inlined(node: Node, known: dict[Any, Callable[..., Any]]) -> bool:
    if node.target not in known:
        return False
    where = FORMULAS[node.target].where
    args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, (node.args, node.kwargs))
    return where is None or where(*args, **kwargs)


def inlined(gm: GraphModule) -> tuple[GraphModule, list[str]]:
    """The graph with formulas in place of calls, and what happened to each. The graph that is given stays as it is, and
    is given back where it has no such call."""
    known = meanings()
    if not any(is_inlined(node, known) for node in gm.graph.nodes):
        return gm, []
    notes: list[str] = []
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {})).meta = dict(gm.graph.output_node().meta)
    copy = GraphModule(gm, graph)  # with the tensors that the graph has of its own
    for node in [n for n in copy.graph.nodes if is_inlined(n, known)]:
        try:
            replace(copy.graph, node, traced(node, known))
            notes.append(f"{node.target}: fused as its formula")
        except UnsupportedInlining as reason:
            notes.append(f"{node.target}: stays a call: {reason}")
    remove_noops(copy, ())
    views_as_reshapes(copy, ())
    copy.graph.lint()
    copy.recompile()
    return copy, notes


def traced(call: Node, known: dict[Any, Callable[..., Any]]) -> Graph:
    """The formula as ATen ops, of the metadata of the nodes among its arguments; other arguments are part of it."""
    leaves, structure = tree_flatten((call.args, call.kwargs))

    def formula(*values: Any) -> Any:
        rest = iter(values)
        args, kwargs = tree_unflatten([next(rest) if isinstance(leaf, Node) else leaf for leaf in leaves], structure)
        return known[call.target](*args, **kwargs)

    values = [node.meta["val"] for node in leaves if isinstance(node, Node)]
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), FakeTensorMode())
    try:
        with mode:  # tensors that the formula makes are fake, too
            graph: Graph = make_fx(torch.func.functionalize(formula), decomposition_table=known)(*values).graph
    except Exception as error:  # what it does depends on values: whatever PyTorch says then
        raise UnsupportedInlining(f"its formula cannot be traced, {type(error).__name__}") from error
    graph.eliminate_dead_code()
    check(graph)
    return graph


def check(formula: Graph) -> None:
    if len(formula.nodes) > LONGEST:
        raise UnsupportedInlining(f"its formula has {len(formula.nodes)} nodes")
    for node in formula.nodes:
        if node.op == "get_attr":
            raise UnsupportedInlining("its formula has tensors of its own")
        if node.op == "call_function" and (node.target in LIBRARY or not converts(node.target)):
            raise UnsupportedInlining(f"{node.target} in its formula has no converter")
    results: Sequence[Any] = tree_flatten(formula.output_node().args[0])[0]
    if any(not isinstance(r, Node) or r.op == "placeholder" for r in results):
        raise UnsupportedInlining("its formula gives back an argument")


def converts(target: Any) -> bool:
    return target is operator.getitem or REGISTRY.find(target) is not None


def replace(graph: Graph, call: Node, formula: Graph) -> None:
    arguments = [leaf for leaf in tree_flatten((call.args, call.kwargs))[0] if isinstance(leaf, Node)]
    copies = dict(zip(formula.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(call):
        made: Any = graph.graph_copy(formula, copies)
    for node in (n for n in formula.nodes if n.op == "call_function"):
        copies[node].meta.update({key: call.meta[key] for key in KEPT if key in call.meta})
    if isinstance(call.meta["val"], torch.Tensor):
        call.replace_all_uses_with(made)
    for user in list(call.users):
        user.replace_all_uses_with(made[user.args[1]])  # getitem: nothing else reads several results
        graph.erase_node(user)
    graph.erase_node(call)
