"""Where the sizes that gears speak of are: among the tensors of a call, and as symbols of the graph made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from airgraph.gears import BATCH, Gears
from airgraph.torch_types import SYMBOLIC


@dataclass(frozen=True)
class GearedSize:
    """A size that is handled: where it is among the tensors."""

    tensor: int
    dim: int
    gears: Gears


def places_of(settings: Sequence[Gears], tensors: Sequence[torch.Tensor]) -> list[GearedSize]:
    """Where the sizes are. Without `indices`: every tensor that has the dimension, and there the size of the first."""
    found: list[GearedSize] = []
    for gears in settings:
        dims = gears.dimensions
        if gears.indices:
            at = [(i, dims[n] if len(dims) > 1 else dims[0]) for n, i in enumerate(gears.indices)]
        else:
            having = [i for i, t in enumerate(tensors) if t.ndim > dims[0]]
            first = tensors[having[0]].shape[dims[0]] if having else 0
            at = [(i, dims[0]) for i in having if tensors[i].shape[dims[0]] == first]
        for i, dim in at:
            if i >= len(tensors) or dim >= tensors[i].ndim:
                raise ValueError(f"shape handling: there is no dimension {dim} in tensor {i} of {len(tensors)}")
            found.append(GearedSize(i, dim, gears))
    check_batch(tensors, found)
    return found


def check_batch(tensors: Sequence[torch.Tensor], places: Sequence[GearedSize]) -> None:
    sizes = {tensors[p.tensor].shape[p.dim] for p in places if p.gears.type == BATCH}
    if len(sizes) > 1:
        raise ValueError(f"shape handling: the batch is {', '.join(map(str, sorted(sizes)))} in several tensors")


def gear_marks(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Sequence[Gears]) -> dict[Any, str]:
    """Symbol → type of gears, for the sizes of a call that are dynamic in the graph Dynamo has made of it."""
    tensors = call_tensors() if settings else None
    if tensors is None:
        return {}
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = {id(given): node.meta.get("example_value") for node, given in zip(nodes, example_inputs)}
    found: dict[Any, str] = {}
    for place in places_of(settings, tensors):
        fake = fakes.get(id(tensors[place.tensor]))
        size = fake.shape[place.dim] if isinstance(fake, torch.Tensor) else None
        if isinstance(size, SYMBOLIC) and size.node.expr.is_Symbol:
            found[size.node.expr] = place.gears.type
    return found


def call_tensors() -> list[torch.Tensor] | None:
    """The tensors among the arguments of the function that Dynamo compiles, in their order. None: it compiles nothing, or
    what comes after a break, whose arguments are not the caller's."""
    translator = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    if translator is None or translator.output.root_tx.f_code.co_name.startswith("torch_dynamo_resume_in"):
        return None
    frame = translator.output.root_tx
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    arguments = [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
