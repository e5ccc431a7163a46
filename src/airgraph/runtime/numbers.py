"""Numbers among the arguments that a captured program reads from memory instead of having them built in.

    y = x * scale        scale: an int that changes from call to call

A CUDA graph keeps the numbers its kernels were launched with, so each value of `scale` would be another capture. Where a
number only meets tensors as an operand, it is handed to PyTorch as a tensor without dimensions on the device, and a
replay writes the new value there first. Types do not change by that: such a tensor has no say in them against one with
dimensions of the same kind of type, as a number has none. Half precision is left out: there PyTorch computes with a number
in float32, but would round a tensor to half first.
"""

from __future__ import annotations

from typing import Any

from airgraph.engine.reference import ReferenceExecutable
from airgraph.ir.boundary import Boundary, NumberIn
from airgraph.ir.graph import Node, Value
from airgraph.ir.types import DataType

OPERANDS = {f"aten.{op}.Tensor" for op in ("add", "sub", "mul", "div")}
EXACT = (DataType.DT_FLOAT, DataType.DT_DOUBLE)


def free_numbers(boundary: Boundary, executable: ReferenceExecutable) -> frozenset[int]:
    """The arguments that are such numbers; `executable` is told to hand them on as tensors."""
    graph = executable.graph
    values = {node.name: node.output for node in graph.inputs}
    found = {}
    for i, spec in enumerate(boundary.arguments):
        if not isinstance(spec, NumberIn) or spec.kind is bool or spec.name not in values:
            continue
        value = values[spec.name]
        operand = bool(value.users) and all(is_operand(node, value) for node in value.users)
        if operand and not shapes(spec.expr, value, executable) and not tells_results(boundary, spec.expr):
            found[i] = id(value)
    executable.cells |= set(found.values())
    return frozenset(found)


def is_operand(node: Node, value: Value) -> bool:
    """The second operand of an arithmetic op whose first is a tensor with dimensions, exact enough for any number."""
    if node.op != "AtenCall" or node.attrs["target"] not in OPERANDS or node.attrs["kwargs"]:
        return False
    args = node.attrs["args"]
    operands = list(node.values())
    if len(args) != 2 or len(operands) != 2 or operands[1] is not value or args != ["%0", "%1"]:
        return False
    tensor = operands[0]
    return tensor.dtype in EXACT and len(tensor.type.shape or ()) > 0


def shapes(expr: Any, value: Value, executable: ReferenceExecutable) -> bool:
    """Whether the number has a say in a size, a stride or another number of the graph."""
    if expr is None:
        return False
    for node in executable.graph.nodes:
        for output in node.outputs:
            sizes = [s for s in output.type.shape or () if not isinstance(s, int)]
            known = [] if output is value or output.known is None else [output.known]
            if any(expr in getattr(e, "free_symbols", ()) for e in (*sizes, *flat(known))):
                return True
        if any(expr in getattr(e, "free_symbols", ()) for e in flat(node.attrs.get("strides") or ())):
            return True
    return False


def flat(things: Any) -> list[Any]:
    if isinstance(things, list | tuple):
        return [leaf for thing in things for leaf in flat(thing)]
    return [things]


def tells_results(boundary: Boundary, expr: Any) -> bool:
    """Whether a result, or its layout, is computed from it."""
    for result in boundary.results:
        parts: list[Any] = [getattr(result, "expr", None), *getattr(result, "base", ())]
        layout = getattr(result, "layout", None)
        if layout is not None:
            parts += [*layout.shape, *layout.strides, layout.offset]
        if any(expr in getattr(p, "free_symbols", ()) for p in parts):
            return True
    return False
