"""Ops that write to an argument. An FX graph of AOTAutograd has hardly any: it is functional.

In our graph a value never changes. Two nodes that compute the same become one, a copy that nobody needs is none, and a
tensor is read when its turn comes. So an op such as `masked_fill_` on something the graph computed would reach whoever
shares that tensor: `clone(x)` may be `x` itself, and the caller's x be damaged. Its writes are seen in no order. Such an op
has no right place in a graph: no converter could give it one, and PyTorch cannot run it there either.

What may write: `copy_` to an argument (the graph's own way to say that it changes an input), ops that write to nothing but
arguments, and those that work on the storage itself, which AOTAutograd leaves where they stand for a purpose.

A converter for an op that writes to arguments gives the new values; the walk assigns them and lets later readers see them.

    x: masked_fill_(x, m, 5); y = x * 2   →   v = MaskedFill(x, m, 5); Assign(x, v); y = Mul(v, 2)

An op of the user's that writes is `auto_functionalized_v2` in a graph. His converter is given copies of what it writes, and
emits a GE op that has an output of the same name as the input: the new value (`functionalised`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.registry import Converter, UnsupportedConversion
from airgraph.ir import ge
from airgraph.ir.ge import current_graph
from airgraph.ir.graph import Node, Value
from airgraph.ir.ops import OPS

# Overloads that write to arguments and have a converter.
aten = torch.ops.aten
WRITES = (
    aten.masked_fill_.Scalar,
    aten.bitwise_right_shift_.Tensor,
    aten.expm1.out,
    aten.mish.out,
    aten.nan_to_num.out,
    aten.log_sigmoid_forward.output,
    aten.log_sigmoid_backward.grad_input,
    aten._native_batch_norm_legit.default,
)
OF_STORAGE = ("set_", "resize_", "resize_storage_bytes_")
# What a pass on FX may take for its argument, so that a later reader would see the write.
COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    aten.repeat.default,
    aten.constant_pad_nd.default,
    aten.pow.Tensor_Scalar,
    aten.lift_fresh_copy.default,
}


def stray_writes(node: torch.fx.Node) -> list[str]:
    """The names of the arguments that a node writes to although the graph computed them, or reads them again by another
    name that would not show the write."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name.rpartition("::")[2] in OF_STORAGE:
        return []
    return [name for name, arg in written(node).items() if not all(free(node, n) for n in nodes(arg))]


def written(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments that a node writes to, by name, in the order of the schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return {}
    given = {**{a.name: v for a, v in zip(target._schema.arguments, node.args)}, **node.kwargs}
    names = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return {name: given.get(name) for name in names}


def returned(target: Any) -> dict[str, int]:
    """Which output of an op is the new value of which argument."""
    places = {name: i for i, r in enumerate(target._schema.returns) if r.alias_info for name in r.alias_info.before_set}
    sets = {a.name: a.alias_info.before_set for a in target._schema.arguments if a.alias_info and a.alias_info.is_write}
    return {name: places[mark] for name, marks in sets.items() for mark in marks if mark in places}


def free(node: torch.fx.Node, argument: torch.fx.Node) -> bool:
    """`node` may write to it: an input, and for our converters one that nobody reads as something else afterwards."""
    if argument.op != "placeholder":
        return False
    return node.target not in WRITES or not any(read_after(other, node) for other in shown_by(argument, node))


def shown_by(argument: torch.fx.Node, end: torch.fx.Node) -> list[torch.fx.Node]:
    """The views of an argument that are made before a node, and what may turn out to be one."""
    found = [argument]
    for node in argument.graph.nodes:
        if node is end:
            break
        source = node.args[0] if node.args else None
        if source in found and (node.target in COPIES or shares(node, argument)) and node.target not in WRITES:
            found.append(node)
    return found[1:]


def shares(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    metas = [n.meta.get("val") for n in (a, b)]
    if not all(isinstance(m, torch.Tensor) and m.layout == torch.strided for m in metas):
        return False
    return len({m.untyped_storage()._cdata for m in metas if isinstance(m, torch.Tensor)}) == 1


def read_after(node: torch.fx.Node, point: torch.fx.Node) -> bool:
    """What leaves the graph does so with the memory it should have."""
    return any(user > point and user.op != "output" for user in node.users)


def nodes(arg: Any) -> list[torch.fx.Node]:
    return [n for n in torch.utils._pytree.tree_leaves(arg) if isinstance(n, torch.fx.Node)]


# -- ops of the user's ----------------------------------------------------------------------------------------------
def functionalised(
    converter: Converter, metas: Any, op: torch._ops.OpOverload, *, _all_bases: Sequence[Value], **given: Any
) -> list[Any]:
    """auto_functionalized_v2(op, …): what the op returns, and the new values of what it writes."""
    schema = op._schema
    mutated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    places = {name: given.pop(f"_{name}_base_index", None) for name in mutated}
    views = [name for name in given if name.startswith("_")]
    if views or not all(isinstance(place, int) for place in places.values()):
        raise UnsupportedConversion("it writes to a view, or to a list of tensors")
    copies = [ge.TensorMove(base) for base in _all_bases]
    args = [
        copies[places[a.name]] if a.name in places else given.get(a.name, a.default_value) for a in schema.arguments
    ]
    count, graph = len(schema.returns), current_graph()
    before = len(graph.nodes)
    graph.results_wanted = count + len(copies)
    outputs = metas[:count] if count != 1 else metas[0]
    result = converter.function(*args, **({"meta_outputs": outputs} if converter.wants_meta else {}))
    new = [written_by(graph.nodes[before:], copy, i) for i, copy in enumerate(copies)]
    results = list(result) if isinstance(result, list | tuple) else [result]
    return [*(results[:count] if count else [None]), *new]


def written_by(emitted: Sequence[Node], copy: Value, place: int) -> Value:
    """The output that has the name of the input which the copy is. Where names are numbers, new values come first."""
    for node in emitted:
        row = OPS.get(node.op) if "output_names" not in node.attrs else None
        inputs = [slot.name for slot in row.slots] if row is not None else node.attrs["input_names"]
        outputs = row.outputs if row is not None else node.attrs["output_names"]
        for name, value in zip(inputs, node.inputs):
            if value is copy and name in outputs:
                return node.outputs[outputs.index(name)]
            if value is copy and name.startswith("x") and name[1:].isdigit() and outputs[:1] == ("y0",):
                return node.outputs[place]
    raise UnsupportedConversion("its converter emits no output of the written input's name")
