"""A GE node as the formulas of its outputs; the families are in lowerings/."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from airgraph.ir.graph import Node, Value
from airgraph.ir.ops import NodeView, row
from airgraph.ir.types import Dim
from airgraph.plan.index import same
from airgraph.plan.lowerings import LOWERINGS, TYPES, UnsupportedLowering
from airgraph.plan.tensors import Tensor, buffer, cast, const, converted, expand_to, reshape


def lower(node: Node, of: Callable[[Value], Tensor]) -> list[Tensor | None]:
    """The formula of each output; None for one that nothing reads, and of which no sizes are known. Raises
    UnsupportedLowering where the library has to do it."""
    op = row(node)
    if op is None or node.control or node.op not in LOWERINGS:
        raise UnsupportedLowering("it has no formula")
    unread = [v for v in node.outputs if v.type.shape is None and not v.users]
    if any(v.dtype not in TYPES for v in (*node.values(), *node.outputs)) or any(
        v.type.shape is None for v in (*node.values(), *node.outputs) if v not in unread
    ):
        raise UnsupportedLowering("an element type or a rank that loops do not have")
    result = LOWERINGS[node.op](NodeView(op, node.inputs, node.attrs, of, node))
    results = [result] if isinstance(result, Tensor) else result
    if results is None:
        raise UnsupportedLowering("its formula does not cover this case")
    return [
        None if t is None or v in unread else shaped(cast(t, v.dtype), v.type.shape)
        for t, v in zip(results, node.outputs)
    ]


def shaped(t: Tensor, shape: tuple[Dim, ...] | None) -> Tensor:
    """FX's shape: symbols are written the same way everywhere then, and a broadcast that is missing is made."""
    shape = shape or ()
    if t.shape == shape:
        return t
    if len(t.shape) == len(shape) and all(same(a, b) for a, b in zip(t.shape, shape)):
        return reshape(t, shape)
    return expand_to(t, shape)


def constant(node: Node) -> Tensor:
    """A number is part of the formulas; an array is memory."""
    value, v = node.attrs["value"], node.output
    if isinstance(value, np.ndarray) or np.ndim(value) or isinstance(value, str | complex) or v.dtype not in TYPES:
        return buffer(v.type.shape or (), v.dtype, v)
    return const(converted(value, v.dtype), v.dtype)
