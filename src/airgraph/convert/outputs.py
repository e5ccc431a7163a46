"""What a graph returns, for the boundary: which outputs are memory of their own and which are views, of what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from airgraph.convert.metadata import ge_type, layout_of, place_of, size_of, strides_of, unbacked_offsets
from airgraph.ir import ge
from airgraph.ir.boundary import Fresh, Number, OfInput, OfOutput, Plain
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType, TensorType
from airgraph.torch_types import SYMBOLIC

if TYPE_CHECKING:
    from airgraph.convert.walk import Walker


class Outputs:
    """Sorts what a graph returns: memory of its own, views of inputs, views of other outputs, numbers, plain values."""

    def __init__(self, walker: Walker) -> None:
        self.walker = walker
        self.values: list[Value] = []
        self.places: dict[int, int] = {}  # id of a value → its place among the outputs
        nodes = walker.gm.graph.nodes
        self.inputs = [
            (i, n)
            for i, n in enumerate(n for n in nodes if n.op == "placeholder")
            if isinstance(n.meta.get("val"), torch.Tensor)
        ]
        self.owners = storage_owners(walker.gm)
        self.offsets = unbacked_offsets(walker.gm.graph)

    def result(self, out: Any) -> Any:
        if not isinstance(out, torch.fx.Node):
            return Plain(out)
        meta = out.meta.get("val")
        if isinstance(meta, SYMBOLIC):
            return Number(size_of(meta))
        if not isinstance(meta, torch.Tensor):
            value = self.walker.lookup(out)
            return Plain(value if not isinstance(value, Value) else None)
        sharing = [(i, n) for i, n in self.inputs if storage_key(n.meta["val"]) == storage_key(meta)]
        if sharing:
            index, argument = next(((i, n) for i, n in sharing if n is out), sharing[0])
            layout = layout_of(meta, argument.meta["val"], self.offsets)
            return OfInput(index, layout, int(ge_type(meta.dtype)), itself=argument is out)
        return self.computed(out, meta)

    def computed(self, out: torch.fx.Node, meta: torch.Tensor) -> Fresh | OfOutput:
        owner = self.owners.get(storage_key(meta), out)
        if owner is out:
            index = self.place(out)
            by_pytorch = self.walker.is_pytorchs(out)  # its strides are eager's, also where FX has others
            return Fresh(index, None if by_pytorch else layout_of(meta), str(meta.device))
        base = owner.meta["val"]
        dtype = int(ge_type(meta.dtype))
        return OfOutput(
            self.place(owner), strides_of(base), layout_of(meta, base, self.offsets), dtype, str(meta.device)
        )

    def place(self, node: torch.fx.Node) -> int:
        """Each value leaves once, cast to the type FX says it has."""
        value = self.walker.lookup(node)
        key = id(value)
        if key not in self.places:
            self.places[key] = len(self.values)
            meta = node.meta["val"]
            dtype = ge_type(meta.dtype)
            if value.node.op != "AtenCall" and dtype != DataType.DT_UNDEFINED:  # what PyTorch returns is right as it is
                place = place_of(meta.device)
                value = ge.Cast(value, dst_type=int(dtype))
                value.type = TensorType(dtype, value.type.shape, place)
            self.values.append(value)
        return self.places[key]


def storage_key(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def storage_owners(gm: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """For memory that several outputs share: the node that made it, so that they can be handed out as views of it."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    results = [n.meta["val"] for n in set(output.all_input_nodes) if isinstance(n.meta.get("val"), torch.Tensor)]
    for result in results:
        strides_of(result)  # an error for a sparse one, which has no memory of this kind
    keys = [storage_key(result) for result in results]
    shared = {key for key in keys if keys.count(key) > 1}
    owners: dict[int, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and storage_key(value) in shared:
            owners.setdefault(storage_key(value), node)
    return owners
