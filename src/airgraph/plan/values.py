"""What the values of a graph are: formulas (lower.py), or results of steps of their own (opaque.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy

from airgraph.ir.boundary import Boundary, NumberIn, TensorIn
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.types import DataType
from airgraph.plan.conv_gradients import (
    CONV_GRADIENTS,
    ConvGradients,
    ConvPart,
    FilterGradient,
    filter_gradient,
    gradient_operands,
    input_gradient,
    interleaved,
)
from airgraph.plan.index import UnsupportedPlan, strides_of
from airgraph.plan.lower import constant, lower
from airgraph.plan.lowerings.table import TYPES, UnsupportedLowering
from airgraph.plan.opaque import (
    Convolution,
    KernelStep,
    Opaque,
    Product,
    Scatter,
    TorchCall,
    as_product,
    channels_last,
    new_buffer,
    opaque,
    reads_last,
    with_bias,
)
from airgraph.plan.operands import lies_last
from airgraph.plan.steps import Allocation
from airgraph.plan.store_layouts import ordered_strides
from airgraph.plan.target import Target
from airgraph.plan.tensors import TO_LAST, Tensor, as_last, buffer, cast, const, from_last, iota, next_id, reduce
from airgraph.plan.widening import Widening, pays, reads_halves


def is_image(node: Node, found: Opaque) -> bool:
    """Whether the step makes the image of a convolution with channels last."""
    return found.last if isinstance(found, Convolution) else node.op == "Conv2D"


@dataclass(frozen=True)
class PartOf:
    """One of several steps that a node is."""

    node: Node
    number: int


class GraphValues:
    """`tensors` has the formula of every value, `opaque` the nodes that are steps of their own, `order` both as they come,
    `allocations` the memory of arguments, constants and results of calls."""

    def __init__(self, graph: Graph, boundary: Boundary, target: Target) -> None:
        self.graph, self.boundary, self.target = graph, boundary, target
        self.tensors: dict[int, Tensor] = {}  # by id of the IR value
        self.wide = Widening(self.of)
        self.allocations: dict[int, Allocation] = {}
        self.opaque: dict[Node | PartOf, Opaque] = {}
        self.calls: dict[int, Tensor] = {}  # what calls make, by id of the IR value
        self.notes: list[str] = []
        self.makers: list[tuple[int, Node]] = []
        self.order: list[Tensor | Node | PartOf] = []
        self.symbols = {
            s
            for spec in boundary.arguments
            if isinstance(spec, TensorIn)
            for d in spec.type.shape or ()
            if isinstance(d, sympy.Basic)
            for s in d.free_symbols
        }
        self.symbols |= {
            spec.expr
            for spec in boundary.arguments
            if isinstance(spec, NumberIn) and spec.expr is not None and getattr(spec.expr, "is_Symbol", False)
        }

    def of(self, value: Value) -> Tensor:
        found = self.tensors.get(id(value))
        if found is None:
            known = value.known
            if (
                value.type.shape == ()
                and value.dtype in TYPES
                and value.dtype.is_int
                and known is not None
                and not isinstance(known, tuple | float | bool)
            ):
                return iota((), -1, known, 0, value.dtype)
            raise UnsupportedLowering("a value without a tensor")
        return found

    def data(self, node: Node) -> None:
        value = node.output
        known = value.known
        spec = next((a for a in self.boundary.arguments if a.name == node.name), None)
        if isinstance(spec, NumberIn) and value.dtype.is_int and known is not None:
            self.tensors[id(value)] = iota((), -1, known, 0, value.dtype)
            return
        t = buffer(value.type.shape or (), value.dtype, value)
        strides = spec.strides if isinstance(spec, TensorIn) else ()
        self.allocations[t.id] = Allocation(t, "input", tuple(strides), 0, node.name)
        self.tensors[id(value)] = as_last(t) if self.target.images_last and lies_last(t.shape, strides) else t

    def formulas(self) -> None:
        for node in self.graph.nodes:
            match node.op:
                case "Data":
                    self.data(node)
                case "Const":
                    t = constant(node)
                    if t.op == "buffer":
                        self.allocations[t.id] = Allocation(t, "const", strides_of(t.shape), 0, node.output)
                    self.tensors[id(node.output)] = t
                case "NetOutput" | "Assign":
                    pass
                case _:
                    self.formula(node)

    def formula(self, node: Node) -> None:
        self.makers.append((next_id(), node))
        try:
            if not self.bound(node):
                raise UnsupportedLowering("sizes that only running can tell")
            if (
                all(isinstance(v.known, int | sympy.Basic) and not isinstance(v.known, bool) for v in node.outputs)
                and node.outputs
                and all(v.type.shape == () and v.dtype.is_int for v in node.outputs)
            ):
                for v in node.outputs:
                    self.tensors[id(v)] = iota((), -1, v.known, 0, v.dtype)
                return
            if self.opaque_node(node):
                return
            for value, t in zip(node.outputs, lower(node, self.of)):
                if t is not None:
                    self.tensors[id(value)] = t
                    self.order.append(t)
        except (UnsupportedLowering, UnsupportedPlan) as reason:
            self.call(node, str(reason))

    def bound(self, node: Node) -> bool:
        for v in (*node.values(), *(o for o in node.outputs if o.users)):
            for d in v.type.shape or ():
                if isinstance(d, sympy.Basic) and not d.free_symbols <= self.symbols:
                    return False
            if v.type.shape is None or (v.known is not None and not self.knows(v.known)):
                return False
        return True

    def call(self, node: Node, reason: str) -> None:
        if node.op == "AtenCall" and node.attrs["target"] == "aten.sym_storage_offset.default":
            raise UnsupportedPlan("the offset of a view is asked for, and what calls make may have been moved")
        self.notes.append(f"{node.op} {node.name} by PyTorch: {reason}")
        reads = [(v, self.tensors[id(v)]) for v in dict.fromkeys(node.values()) if id(v) in self.tensors]
        last = self.target.calls_last and reads_last(node, reads)
        self.opaque[node] = TorchCall(node, reads, [new_buffer(value) for value in node.outputs], last)
        self.order.append(node)
        for value, t in zip(node.outputs, self.opaque[node].outputs):
            image = last and len(t.shape) == 4
            strides = ordered_strides(t.shape, TO_LAST) if image else self.target.call_strides(value)
            self.allocations[t.id] = Allocation(t, "call", strides or strides_of(t.shape), 0, value)
            self.tensors[id(value)] = as_last(t) if image else t
            self.calls[id(value)] = t

    def opaque_node(self, node: Node) -> bool:
        """A step of its own, with the result in planned memory."""
        if node.op in CONV_GRADIENTS and self.target.conv_gradients:
            self.conv_gradients(node)
            return True
        found = self.recognised(node)
        if found is None:
            return False
        refused = None if isinstance(found, Scatter) else self.target.refuses(found)
        if refused is not None:
            raise UnsupportedLowering(refused)
        if isinstance(found, Convolution) and self.target.channels_last:
            found = channels_last(found, self.target.weights_last, found.x.dtype in self.target.multiplies)
        bias = None
        if isinstance(found, Convolution) and found.bias is not None and not self.target.adds_bias(found):
            found, bias = replace(found, bias=None), found.bias
        self.opaque[node] = found
        self.order.append(node)
        for value, t in zip(node.outputs, found.outputs):
            made = from_last(t) if is_image(node, found) else t
            summed = made if bias is None else with_bias(made, bias)
            self.tensors[id(value)] = result = cast(summed, value.dtype)
            if result is not made:
                self.order.append(result)
        if isinstance(found, Scatter) and found.in_place:
            memory = self.allocations[found.x.id]
            self.allocations[found.out.id] = Allocation(
                found.out, "input", memory.strides, 0, memory.source, alias=memory
            )
        return True

    def conv_gradients(self, node: Node) -> None:
        """Those of a convolution that are wanted: convolutions of dy, several where there is a stride; a product; a sum."""
        g = gradient_operands(node, self.wide if pays(node, self.target) else self.of)
        if g.dy.dtype not in (DataType.DT_FLOAT, *self.target.multiplies):
            raise UnsupportedLowering(f"there is no kernel for {g.dy.dtype.name}")
        steps: list[Convolution | FilterGradient] = []
        made: list[tuple[Value, Tensor]] = []
        if g.dx is not None and g.w is not None:
            parts = [[self.image_part(part, g, steps) for part in row] for row in input_gradient(g.w, g.sizes)]
            single = (g.sizes.sh, g.sizes.sw) == (1, 1)
            made.append((g.dx, from_last(parts[0][0] if single else interleaved(parts, g.sizes))))
        if g.dw is not None and g.x is not None:
            steps.append(product := filter_gradient(g.x, g.dy, g.sizes))
            made.append((g.dw, product.shown(product.out)))
        if g.db is not None:
            made.append((g.db, reduce("sum", cast(g.dy, DataType.DT_FLOAT), (0, 2, 3), False)))
        for step in steps:
            refused = self.target.refuses(step)
            if refused is not None:
                raise UnsupportedLowering(refused)
        for number, step in enumerate(steps):
            self.opaque[PartOf(node, number)] = step
            self.order.append(PartOf(node, number))
        for value, t in made:
            self.tensors[id(value)] = result = cast(t, value.dtype)
            self.order.append(result)

    def image_part(self, part: ConvPart | None, g: ConvGradients, steps: list[Any]) -> Tensor:
        """What a convolution makes of dy, [n, h, w, c]; its step is added to the others."""
        s = g.sizes
        if part is None:
            return const(0.0, g.dy.dtype, (s.n, -(-s.h // s.sh), -(-s.w // s.sw), s.c))
        out = buffer((s.n, s.c, part.sizes.oh, part.sizes.ow), g.dy.dtype, g.dx)
        found = Convolution(g.dy, part.w, None, part.sizes, out, last=False)
        steps.append(channels_last(found, self.target.weights_last, found.x.dtype in self.target.multiplies))
        return steps[-1].out

    def recognised(self, node: Node) -> Scatter | KernelStep | None:
        if reads_halves(node, self.target):
            weight = node.inputs[1]
            found = opaque(node, lambda v: self.of(v) if v is weight else self.wide(v))
            if isinstance(found, Product) and found.by_rows_of_b:
                return found
        found = self.convolved(node) if node.op == "Conv2D" else None
        return found or opaque(node, self.wide if pays(node, self.target) else self.of)

    def convolved(self, node: Node) -> Product | Convolution | None:
        """A convolution of a type that the target multiplies; one of 1 × 1 is a product."""
        if not self.target.channels_last or node.output.dtype not in self.target.multiplies:
            return None
        found = opaque(node, self.of)
        assert isinstance(found, Convolution)
        found = as_product(found) or found
        return found if self.target.refuses(found) is None else None

    def knows(self, known: Any) -> bool:
        """Numbers that follow from the sizes of the arguments."""
        numbers = known if isinstance(known, tuple) else (known,)
        return known is not None and all(n.free_symbols <= self.symbols for n in numbers if isinstance(n, sympy.Basic))
