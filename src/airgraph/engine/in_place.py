"""Which calls into PyTorch may write over their first argument.

An FX graph is functional: `relu(x)` makes a new tensor even where nobody will read x again, and an argument that the user
changes in place is recomputed and copied back at the end. For a cache of keys that is two copies of the whole cache for
one new row. Here is found what can be undone, for an engine that runs a graph call by call:

    y = relu(x)                  relu_(x)               x dies here, and its memory is the graph's own
    n = index_put(cache, …)      index_put_(cache, …)   n is what `cache` will be, and nobody reads the old one
    copy_(cache, n)              (nothing)

The IR stays functional (its values never change; `convert.writes` says why), so nothing is rewritten: the result is a table
from nodes to what to call instead. PyTorch's own pass for this, `torch.fx.passes.reinplace`, works on FX graphs and leaves
ops in them that the IR cannot take.

What must hold is a matter of memory. Values that may share some are in one class: what an op returns is in the class of
what it reads, unless the op is known to make memory of its own. An op may write over its argument if no other value of that
class is read afterwards. The class must have come from the graph's own ops, or from one argument whose new value this is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from airgraph.aten_call import find_target
from airgraph.engine.protocol import Env, InPlace, Symbols
from airgraph.engine.strides import contiguous_strides
from airgraph.ir.graph import Graph, Node, Value
from airgraph.torch_types import TORCH_TYPES

aten = torch.ops.aten
Types = tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class InPlaceCall:
    """What to call in place of the op, with the same arguments: it writes to the first of them and gives it back.

    `dtypes` are those FX knows of the tensors that go in.
    """

    call: Callable[..., Any]
    name: str
    dtypes: Types = ()

    def instead(self, env: Env, symbols: Symbols, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        return self.call if self.fits(inputs) else None

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether it would give what the op gives, strides and type too: a plain tensor, and types as FX said."""
        x = inputs[0]
        if torch.is_grad_enabled() or x.layout != torch.strided or not x.is_contiguous():
            return False
        if 1 in x.shape and x.stride() != contiguous_strides(x.shape):
            return False
        return types_fit(self.dtypes, inputs)


def types_of(node: Node) -> Types:
    return tuple(TORCH_TYPES.get(v.dtype) for v in node.values())


def types_fit(dtypes: Types, inputs: Sequence[Any]) -> bool:
    """Whether the tensors that go into a call have the types FX knows."""
    return all(d is None or not isinstance(t, torch.Tensor) or t.dtype == d for t, d in zip(inputs, dtypes))


# Ops that are not element-wise, and whose results are always memory of their own.
MAKES_NEW = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._softmax.default,
        aten._log_softmax.default,
        aten.embedding.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
        aten.cat.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.copy.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten.max_pool2d_with_indices.default,
    }
)

# Ops that copy their first argument and change a part of the copy: op → the view of that part.
PARTS = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
# The same, with a form of PyTorch's own that changes the argument.
CHANGES = frozenset(
    {
        aten.index_put.default,
        aten.index_copy.default,
        aten.index_add.default,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.masked_scatter.default,
    }
)


class AliasClass:
    """A class of values that may share memory: what must be known to let one of them be written."""

    def __init__(self, value: Value, last: int) -> None:
        self.readers = [(last, value)]  # the two of its values that are read last, the later one first
        self.arguments = {value} if value.node.op == "Data" else set()
        self.unknown = False  # it may be anybody's

    def take(self, other: AliasClass) -> None:
        self.readers = sorted([*self.readers, *other.readers], key=lambda r: -r[0])[:2]
        self.arguments |= other.arguments
        self.unknown = self.unknown or other.unknown

    def read_after(self, place: int, written: Value) -> bool:
        """Whether a value is read after this place, or (but for the one that is written) by the node there."""
        return any(last > place or (last == place and value is not written) for last, value in self.readers)


def find_writers(
    graph: Graph, wanted: InPlace, cats: Collection[Node] = (), parts: Collection[Node] = ()
) -> dict[Node, InPlaceCall]:
    """The nodes whose call may write over its first argument, and the `copy_` that is left to do nothing. `parts` are
    written into the memory of `cats` instead."""
    return InPlaceSearch(graph, wanted, cats, parts).run() if wanted.values or wanted.arguments else {}


class InPlaceSearch:
    """One walk in the order of execution."""

    def __init__(self, graph: Graph, wanted: InPlace, cats: Collection[Node], parts: Collection[Node]) -> None:
        self.graph = graph
        self.wanted = wanted
        self.cats = cats
        calls = [node for node in graph.of("AtenCall") if node not in parts]
        self.writers = {node: writer for node in calls if (writer := writer_of(node, graph))}
        self.copies = [node for node in graph.of("AtenCall") if is_assignment(node)]
        self.last = last_readers(graph)
        self.future = future_of(graph, self.copies, self.writers)
        self.leader: dict[Value, Value] = {}  # a value → one of its class, and so on up to the one that stands for it
        self.classes: dict[Value, AliasClass] = {}

    def run(self) -> dict[Node, InPlaceCall]:
        found: dict[Node, InPlaceCall] = {}
        for place, node in enumerate(self.graph.nodes):
            if node in self.writers and self.allowed(node, place):
                found[node] = self.writers[node]
                self.join([first(node), *node.outputs])
            else:
                self.follow(node)
        return found | {node: SETTLE for node in self.copies if self.wanted.arguments}

    def follow(self, node: Node) -> None:
        """What shares memory after an ordinary node."""
        if not node.outputs:
            return
        kind = "shared" if node in self.cats else memory_of(node, self.graph)
        self.join(node.outputs if kind == "new" else [*node.values(), *node.outputs])
        if kind == "unknown":
            self.memory(node.output).unknown = True

    def join(self, values: Iterable[Value]) -> None:
        """These values may share memory from now on."""
        leaders = list(dict.fromkeys(map(self.find, values)))
        for other in leaders[1:]:
            self.leader[other] = leaders[0]
            self.classes[leaders[0]].take(self.classes.pop(other))

    def find(self, value: Value) -> Value:
        if value not in self.leader:
            self.leader[value] = value
            self.classes[value] = AliasClass(value, self.last.get(value, -1))
        while self.leader[value] is not value:
            self.leader[value] = self.leader[self.leader[value]]
            value = self.leader[value]
        return value

    def memory(self, value: Value) -> AliasClass:
        return self.classes[self.find(value)]

    def allowed(self, node: Node, place: int) -> bool:
        written, *others = node.values()
        memory = self.memory(written)
        if memory.unknown or memory.read_after(place, written):
            return False  # somebody would see the write
        if any(self.find(other) is self.find(written) for other in others):
            return False
        if not memory.arguments:
            return self.wanted.values
        return self.wanted.arguments and memory.arguments == {self.future.get(node.output)}


# -- one node -------------------------------------------------------------------------------------------------------
def memory_of(node: Node, graph: Graph) -> Literal["new", "shared", "unknown"]:
    """Whose memory the node's results lie in: their own, that of what it reads, or anybody's."""
    if node.op == "Data":
        return "shared"
    op = find_target(node.attrs["target"], graph) if node.op == "AtenCall" else None
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return "unknown"  # a constant serves every call, and an op of a user's may return what it keeps
    if op is aten._unsafe_view.default or any(r.alias_info is not None for r in op._schema.returns):
        return "shared"
    new = torch.Tag.pointwise in op.tags or op in MAKES_NEW or op in PARTS or op in CHANGES or not any(node.values())
    return "new" if new else "unknown"


def writer_of(node: Node, graph: Graph) -> InPlaceCall | None:
    """None where there is no call that writes, or where the result is of another type or shape than the argument."""
    op = find_target(node.attrs["target"], graph)
    if not isinstance(op, OpOverload) or len(node.outputs) != 1 or not reads_first(node):
        return None
    written, made = first(node), node.output
    if written.known is not None or made.known is not None or made.type.shape is None:
        return None
    if (written.dtype, written.type.shape, written.type.place) != (made.dtype, made.type.shape, made.type.place):
        return None
    if op in PARTS:
        return InPlaceCall(part_writer(PARTS[op]), f"{PARTS[op]._opname}().copy_", types_of(node))
    if op not in CHANGES and (torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags):
        return None
    form = in_place_form(op)
    return InPlaceCall(form, form._opname, types_of(node)) if form is not None else None


def in_place_form(op: OpOverload) -> OpOverload | None:
    """`aten.relu.default` → `aten.relu_.default`, if it is there, takes the same and writes to its first argument only."""
    packet = getattr(getattr(torch.ops, op.namespace), f"{op._opname}_", None)
    form = getattr(packet, op._overloadname, None)
    if form is None or op._schema.is_mutable:
        return None
    ours, theirs = op._schema.arguments, form._schema.arguments
    same = [(a.name, str(a.type)) for a in ours] == [(a.name, str(a.type)) for a in theirs]
    writes = [a.alias_info is not None and a.alias_info.is_write for a in theirs]
    return form if same and writes[:1] == [True] and not any(writes[1:]) else None


def part_writer(view: OpOverload) -> Callable[..., torch.Tensor]:
    def write(x: torch.Tensor, source: torch.Tensor, *where: Any, **named: Any) -> torch.Tensor:
        view(x, *where, **named).copy_(source)
        return x

    return write


def settle(x: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`copy_` of what may have been written there already."""
    already = x.data_ptr() == source.data_ptr() and (x.shape, x.stride(), x.dtype) == (
        source.shape,
        source.stride(),
        source.dtype,
    )
    return x if already else x.copy_(source, *rest)


SETTLE = InPlaceCall(settle, "")


def reads_first(node: Node) -> bool:
    """Its first argument is a tensor of the graph, and no other argument is the same one."""
    args = node.attrs["args"]
    return bool(args) and args[0] == "%0" and "'%0'" not in repr([*args[1:], node.attrs["kwargs"]])


def first(node: Node) -> Value:
    return next(node.values())


def is_assignment(node: Node) -> bool:
    """`copy_` to an argument: the graph's own way to say that it changes an input."""
    return node.attrs["target"] == "aten.copy_.default" and reads_first(node) and first(node).node.op == "Data"


def last_readers(graph: Graph) -> dict[Value, int]:
    """A value → the place of the last node that reads it; what leaves the graph is read by its end."""
    last: dict[Value, int] = {}
    for place, node in enumerate(graph.nodes):
        written = first(node) if node.op == "AtenCall" and is_assignment(node) else None
        for value in node.values():
            if value is not written:
                last[value] = len(graph.nodes) if node.op == "NetOutput" else place
    return last


def future_of(graph: Graph, copies: Iterable[Node], writers: Mapping[Node, InPlaceCall]) -> dict[Value, Value]:
    """A value → the argument (the output of its Data) that it will be, perhaps after further ops that write over it."""
    future = {value: argument for argument, value in (tuple(node.values())[:2] for node in copies)}
    for node in reversed(graph.nodes):
        if node in writers and node.output in future and first(node).node.op != "Data":
            future.setdefault(first(node), future[node.output])
    return future
