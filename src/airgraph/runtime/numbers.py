"""Numbers among the arguments of a captured program that change from call to call.

    y = x * scale            read from memory
    y = x.clamp(max=scale)   handed over by a call that is not captured, once the number has changed often enough

A CUDA graph keeps the numbers its kernels were launched with, so each value of `scale` would be another capture. Where a
number only meets tensors as an operand, it is handed to PyTorch as a tensor without dimensions on the device, and a
replay writes the new value there first (`free_numbers`). Types do not change by that: such a tensor has no say in them
against one with dimensions of the same kind of type, as a number has none. Half precision is left out: there PyTorch
computes with a number in float32, but would round a tensor to half first. Other numbers that are no sizes are part of the
key at first; one that keeps changing is left to the ops that read it, which then run by themselves (`other_numbers`). Of
some ops it is known beforehand that their numbers change with every call, like the lengths an attention is given
(`updatable`): theirs are left to them from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airgraph.engine.protocol import Steps
from airgraph.ir.boundary import Boundary, NumberIn
from airgraph.ir.graph import Node, Value
from airgraph.ir.types import DataType

OPERANDS = {f"aten.{op}.Tensor" for op in ("add", "sub", "mul", "div")}
EXACT = (DataType.DT_FLOAT, DataType.DT_DOUBLE)


def free_numbers(boundary: Boundary, executable: Steps) -> frozenset[int]:
    """The arguments that are such numbers; `executable` is told to hand them on as tensors."""
    graph = executable.graph
    values = {node.name: node.output for node in graph.inputs}
    found = {}
    for i, spec in enumerate(boundary.arguments):
        if not isinstance(spec, NumberIn) or spec.kind is bool or spec.name not in values:
            continue
        value = values[spec.name]
        operand = bool(value.users) and all(is_operand(node, value) for node in value.users)
        fixed = is_size(spec.expr, executable) or is_derived(spec.expr, value, executable)
        if operand and not fixed and not tells_results(boundary, spec.expr):
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


_updatable: list[Callable[[str], bool]] = []


def updatable(test: Callable[[str], bool]) -> None:
    """Ops for which `test("library.op.overload")` holds are given other numbers at each call, if any change at all."""
    _updatable.append(test)


def is_updatable(node: Node) -> bool:
    return node.op == "AtenCall" and any(test(node.attrs["target"]) for test in _updatable)


def other_numbers(boundary: Boundary, executable: Steps) -> dict[int, list[Node]]:
    """The arguments that are numbers, but no sizes, and the nodes that read them or what is computed from them."""
    found = {}
    for i, spec in enumerate(boundary.arguments):
        if isinstance(spec, NumberIn) and getattr(spec.expr, "is_Symbol", False):
            readers = [n for n in executable.graph.nodes if any(tells(v.known, spec.expr) for v in n.values())]
            if readers and not is_size(spec.expr, executable) and not tells_results(boundary, spec.expr):
                found[i] = readers
    return found


def tells(known: Any, expr: Any) -> bool:
    return any(expr in getattr(part, "free_symbols", ()) for part in flat([known]))


def is_size(expr: Any, executable: Steps) -> bool:
    """Whether a size or a stride is computed from the number."""
    for node in executable.graph.nodes:
        sizes = [output.type.shape or () for output in node.outputs]
        if tells([*sizes, node.attrs.get("strides") or ()], expr):
            return True
    return False


def is_derived(expr: Any, value: Value, executable: Steps) -> bool:
    """Whether another number is computed from it."""
    return any(tells(o.known, expr) for node in executable.graph.nodes for o in node.outputs if o is not value)


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
        if tells(parts, expr):
            return True
    return False
