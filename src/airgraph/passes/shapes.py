"""What rules ask about types and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.ops.rules import axes_of
from airgraph.ir.types import DataType, Dim, TensorType
from airgraph.passes.rewrite import UnsupportedRewrite, no

EXACT = (DataType.DT_FLOAT, DataType.DT_DOUBLE)


def same_type(a: Value, b: Value) -> bool:
    return a.type.dtype == b.type.dtype and a.type.shape == b.type.shape and a.type.shape is not None


def rounds(*values: Value) -> UnsupportedRewrite | None:
    """Half types round after every op: one op in their place gives other digits than the ops it replaces."""
    other = [v.dtype.name for v in values if v.dtype not in EXACT]
    return no("only float32 and float64 are fused", *dict.fromkeys(other)) if other else None


def axis_of(numbers: Any, rank: int) -> int | None:
    """The one axis a known list names, counted from the front."""
    axes = axes_of(numbers, rank) if rank > 0 and numbers is not None else None
    return axes[0] if axes is not None and len(axes) == 1 else None


def last_axes(numbers: Any, rank: int) -> int | None:
    """How many axes a known list names, if they are the last ones."""
    axes = axes_of(numbers, rank) if rank > 0 and numbers is not None else None
    return len(axes) if axes and sorted(axes) == list(range(rank - len(axes), rank)) else None


def permutation(value: Value) -> tuple[int, ...] | None:
    """The new order of the axes, counted from the front; None where it is only known when run."""
    known = value.known
    if not isinstance(known, tuple) or not all(isinstance(a, int) for a in known):
        return None
    return tuple(a % len(known) for a in known)


def swapped(axes: Sequence[Any]) -> tuple[Any, ...]:
    """The last two change places."""
    return (*axes[:-2], axes[-1], axes[-2])


def reshaped(x: Value, shape: Sequence[Dim], *sources: Value) -> Value:
    """x in another shape. Symbolic sizes are read off `sources`, which have them; one alone is -1."""
    if x.type.shape == tuple(shape):
        return x
    symbolic = [d for d in shape if not isinstance(d, int)]
    if len(symbolic) < 2 and 0 not in shape:
        y: Value = ge.Reshape(x, [d if isinstance(d, int) else -1 for d in shape])
    else:
        y = ge.Reshape(x, ge.Pack([size_of(d, (x, *sources)) for d in shape], N=len(shape)) if symbolic else shape)
    y.type = TensorType(x.dtype, tuple(shape), x.type.place)
    return y


def size_of(dim: Dim, sources: Sequence[Value]) -> Any:
    if isinstance(dim, int):
        return ge.constant(dim, DataType.DT_INT64, literal=True)
    value, axis = next((v, v.type.shape.index(dim)) for v in sources if v.type.shape and dim in v.type.shape)
    return ge.Gather(ge.Shape(value, dtype=int(DataType.DT_INT64)), axis)


def can_reshape(shape: Sequence[Dim], *sources: Value) -> bool:
    """`reshaped` will find every symbolic size it needs."""
    symbolic = [d for d in shape if not isinstance(d, int)]
    return len(symbolic) < 2 or all(any(d in (v.type.shape or ()) for v in sources) for d in symbolic)
