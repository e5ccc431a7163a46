"""Which calls into PyTorch may write their result into the `cat` that reads it.

    a = relu(x); b = mm(y, z)         whole = empty(…)
    c = cat([a, b])                   relu.out(x, out=whole[:2]); mm.out(y, z, out=whole[2:]); c = whole

An engine that runs a graph call by call copies every part of a `cat` once more. TorchAir's `remove_cat_ops` spares that: a
`cat` along the first dimension whose parts are results of ops with an `out` form. As in `in_place`, the IR stays
functional: what is found is a table of what to call instead.

The part that runs first makes the memory of the whole, which waits in `env` under a key of its own until the `cat` takes
it. Whoever runs the steps may put something else in the place of a part (a copy in fixed memory): a part is written as ever
where there is no whole, and the `cat` copies its parts as ever where one of them is not in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from airgraph.aten_call import find_target
from airgraph.engine.in_place import Types, memory_of, types_fit, types_of
from airgraph.engine.protocol import Env, Symbols
from airgraph.ir.graph import Graph, Node, Value, stream_of
from airgraph.ir.symbols import evaluate
from airgraph.torch_types import TORCH_TYPES

CAT = "aten.cat.default"


def is_captured(device: torch.device) -> bool:
    """Whether what is done now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def usable(made: tuple[torch.Tensor, bool] | None) -> torch.Tensor | None:
    """The whole, if it was made as things are done now: a CUDA graph must not write to memory that was made outside it,
    which is gone when it is replayed."""
    return made[0] if made is not None and made[1] == is_captured(made[0].device) else None


@dataclass(frozen=True)
class Cat:
    """A `cat` of `parts` whose result is the memory they were written to. `first`: the part that runs first."""

    node: Node
    parts: tuple[Value, ...]
    first: Value

    @property
    def key(self) -> int:
        """Where the whole is found in `env`: keys of values are addresses, and no address is negative."""
        return -id(self.node.output)

    def new_whole(self, symbols: Symbols, device: torch.device) -> torch.Tensor:
        out = self.node.output
        return torch.empty(evaluate(out.type.shape, symbols), dtype=TORCH_TYPES[out.dtype], device=device)

    def place(self, whole: torch.Tensor, part: Value, symbols: Symbols) -> torch.Tensor:
        """The rows of the whole that are this part."""
        rows = [evaluate(value.type.shape, symbols)[0] for value in self.parts]
        at = self.parts.index(part)
        return whole.narrow(0, sum(rows[:at]), rows[at])

    def instead(self, env: Env, symbols: Symbols, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """What to call instead of `cat`; None where a part is not where it was to be written."""
        whole = usable(env.pop(self.key, None))
        if whole is None:
            return None
        places = [self.place(whole, part, symbols) for part in self.parts]
        there = all(x.data_ptr() == y.data_ptr() and x.shape == y.shape for x, y in zip(inputs, places))
        return (lambda *args, **named: whole) if there else None


@dataclass(frozen=True)
class PartCall:
    """A call whose result is the `part` of a `cat`, by the `out` form of its op."""

    cat: Cat
    part: Value
    form: OpOverload
    dtypes: Types
    device: torch.device

    def instead(self, env: Env, symbols: Symbols, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        if self.part is self.cat.first:
            env[self.cat.key] = (self.cat.new_whole(symbols, self.device), is_captured(self.device))
        whole = usable(env.get(self.cat.key))
        if whole is None or torch.is_grad_enabled() or not types_fit(self.dtypes, inputs):
            return None
        return partial(self.form, out=self.cat.place(whole, self.part, symbols))


def find_cats(graph: Graph, device: torch.device) -> tuple[dict[Node, Cat], dict[Node, PartCall]]:
    """The `cat`s that need no copy, and the calls that write their parts; `device`: the one that computes. A graph on
    several streams keeps its `cat`s: each write to memory that others read would have all streams wait."""
    cats: dict[Node, Cat] = {}
    parts: dict[Node, PartCall] = {}
    if any(stream_of(node) is not None for node in graph.nodes):
        return cats, parts
    order = {node: i for i, node in enumerate(graph.nodes)}
    known = {s for node in graph.inputs for s in symbols_of(node.output)}
    for node in graph.of("AtenCall"):
        values = concatenated(node)
        forms = {value: form for value in values if (form := out_form(value.node, graph)) is not None}
        taken = any(value.node in parts or value.node in cats for value in values)
        if not values or len(forms) < len(values) or taken or not all(fits(v, node, known, graph) for v in values):
            continue
        cat = cats[node] = Cat(node, tuple(values), min(values, key=lambda v: order[v.node]))
        there = device if node.output.type.place == "NPU" else torch.device("cpu")
        parts |= {v.node: PartCall(cat, v, form, types_of(v.node), there) for v, form in forms.items()}
    return cats, parts


def tell_cats(graph: Graph, cats: Collection[Node], log: logging.Logger) -> None:
    """What became of each `cat`, in TorchAir's words."""
    every = [node for node in graph.of("AtenCall") if node.attrs["target"] == CAT]
    if not every:
        return
    log.debug("[remove_cat_ops] Found %s cat node(s)", len(every))
    for node in every:
        name = graph.notes[node.note].fx_name if node.note >= 0 else node.name
        if node in cats:
            log.debug("Optimizing %s (%s inputs)", name, len(list(node.values())))
        else:
            log.debug("Skip %s: its parts are not all results of ops that can write there", name)
    if cats:
        log.debug("remove_cat_ops: Optimized %s cat node(s)", len(cats))


def concatenated(node: Node) -> list[Value]:
    """What a `cat` of at least two different tensors along their first dimension reads; nothing for any other node."""
    if node.attrs["target"] != CAT:
        return []
    tensors, *dim = node.attrs["args"]
    values = list(node.values())
    several = len(values) > 1 and tensors == [f"%{i}" for i in range(len(values))]
    return values if several and (dim or [node.attrs["kwargs"].get("dim", 0)]) == [0] else []


def fits(part: Value, cat: Node, known: set[Any], graph: Graph) -> bool:
    """The part is plain memory as large as arguments say, and is read by the `cat` and by ops with memory of their own."""
    shape, whole = part.type.shape, cat.output.type.shape
    if not shape or whole is None or len(shape) != len(whole) or shape[1:] != whole[1:]:
        return False
    if part.known is not None or (part.dtype, part.type.place) != (cat.output.dtype, cat.output.type.place):
        return False
    if any(layout is not None for layout in cat.attrs["strides"] or ()) or not symbols_of(part) <= known:
        return False
    others = [user for user in part.users if user is not cat]
    return all(user.op == "AtenCall" and memory_of(user, graph) == "new" for user in others)


def symbols_of(value: Value) -> set[Any]:
    return {s for d in (*(value.type.shape or ()), value.known) for s in getattr(d, "free_symbols", ())}


def out_form(node: Node, graph: Graph) -> OpOverload | None:
    """`aten.add.Tensor` → `aten.add.out`, which takes the same and the tensor to write to."""
    op = find_target(node.attrs["target"], graph) if node.op == "AtenCall" else None
    if not isinstance(op, OpOverload) or len(node.outputs) != 1 or memory_of(node, graph) != "new":
        return None
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None
    ours = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in ("out", f"{op._overloadname}_out"):
        form = getattr(op._overloadpacket, name, None)
        if form is not None and [(a.name, str(a.type)) for a in form._schema.arguments] == [*ours, ("out", "Tensor")]:
            return form
    return None
