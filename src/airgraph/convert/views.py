"""Views that wait. `t(t(x))` costs nothing, and a Transpose stands where it is used, not where it was written.

A chain of permutations and reshapes is kept as steps; neighbours of the same kind merge and identities vanish. The nodes
are emitted when an op that is no view needs the value. This is what TorchAir's `enable_view_optimize` does, and why its
dumps show a Transpose after the FX line of the matmul that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.ir import ge
from airgraph.ir.graph import Value

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
PERMUTES = {aten.t.default, aten.transpose.int, aten.permute.default}
VIEWS = RESHAPES | PERMUTES


@dataclass(frozen=True)
class Permute:
    perm: tuple[int, ...]
    by_permute: bool = False  # written as `permute`: TorchAir does not transpose where only axes of size 1 move


@dataclass(frozen=True)
class Reshape:
    shape: tuple[Any, ...]  # ints and host values
    is_identity: bool


Step = Permute | Reshape


@dataclass(frozen=True)
class PendingView:
    base: Value
    steps: tuple[Step, ...]

    def emit(self) -> Value:
        value = self.base
        for step in shortest(self.base.type.shape, self.steps):
            if isinstance(step, Permute):
                value = permuted(value, step)
            elif all(isinstance(d, int) for d in step.shape):
                value = ge.Reshape(value, list(step.shape))
            else:
                value = ge.Reshape(value, ge.Pack(list(step.shape), N=len(step.shape)))
        return value


def shortest(shape: Sequence[Any] | None, steps: tuple[Step, ...]) -> Sequence[Step]:
    """A long chain as one Reshape and one Permute where there are such: a Permute that only moves axes of size 1 is a
    Reshape, and fixed sizes have strides, which say what the whole chain does."""
    if len(steps) < 3 or shape is None:
        return steps
    merged: list[Step] = []
    at: tuple[Any, ...] = tuple(shape)
    for step in steps:
        if isinstance(step, Permute):
            after = tuple(at[axis] for axis in step.perm)
            given = merged and isinstance(merged[-1], Reshape)  # its sizes are ints and host values
            step = Reshape(after, is_identity=False) if given and moves_only_ones(at, step.perm) else step
            at = after
        else:
            at = step.shape
        if merged and isinstance(step, Reshape) and isinstance(merged[-1], Reshape):
            merged.pop()
        merged.append(step)
    return by_strides(shape, merged) or merged if len(merged) > 2 else merged


def by_strides(shape: Sequence[Any], steps: Sequence[Step]) -> list[Step] | None:
    """Reshape to the sizes in the order of their strides, then Permute; None where sizes are symbolic or a step copies."""
    sizes = [*shape, *(size for step in steps if isinstance(step, Reshape) for size in step.shape)]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    view = torch.empty(tuple(shape), device="meta")
    try:
        for step in steps:
            view = view.permute(step.perm) if isinstance(step, Permute) else view.view(step.shape)
    except RuntimeError:  # a reshape that is no view
        return None
    strides = view.stride()
    order = sorted(range(view.ndim), key=lambda axis: (-strides[axis], view.shape[axis] != 1))
    through = tuple(view.shape[axis] for axis in order)
    found: list[Step] = [
        Reshape(through, is_identity=through == tuple(shape)),
        Permute(tuple(order.index(axis) for axis in range(view.ndim))),
    ]
    return [step for step in found if not identity(step)]


def permuted(x: Value, step: Permute) -> Value:
    shape = x.type.shape
    if shape is None or not step.by_permute or not moves_only_ones(shape, step.perm):
        return ge.Transpose(x, list(step.perm))
    gone = [axis for axis, size in enumerate(shape) if size == 1]
    back = [i for i, axis in enumerate(step.perm) if axis in gone]
    return ge.Unsqueeze(ge.Squeeze(x, axis=gone), axes=back)


def moves_only_ones(shape: Sequence[Any], perm: Sequence[int]) -> bool:
    moved = [axis for axis in perm if shape[axis] != 1]
    return moved == sorted(moved)


def extend(source: Value | PendingView, step: Step) -> PendingView:
    """`source` seen through one more view."""
    pending = source if isinstance(source, PendingView) else PendingView(source, ())
    return add(pending, step)


def as_written(source: Value, step: Step) -> PendingView:
    """One view of `source`, a node of its own even where it changes nothing."""
    return PendingView(source, (step,))


def step_of(target: Any, args: Sequence[Any], before: Sequence[Any], after: Sequence[Any]) -> Step:
    """The view that an op takes of its argument; `before` and `after` are its shapes."""
    if target in RESHAPES:
        shape = tuple(after) if all(isinstance(d, int) for d in after) else tuple(args[1])
        return Reshape(shape, is_identity=tuple(before) == tuple(after))
    perm = permutation(target, len(before), args[1:])
    return Permute(perm, by_permute=target is aten.permute.default)


def is_itself(target: Any, after: Sequence[Any]) -> bool:
    """`t` of fewer than two dimensions."""
    return target is aten.t.default and len(after) < 2


def permutation(target: Any, rank: int, args: Sequence[Any]) -> tuple[int, ...]:
    if target is aten.permute.default:
        return tuple(a % rank for a in args[0])
    axes = list(range(rank))
    a, b = (0, 1) if target is aten.t.default else args[:2]
    if rank > 1:
        axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def add(pending: PendingView, step: Step) -> PendingView:
    steps = list(pending.steps)
    last = steps[-1] if steps else None
    if isinstance(step, Permute) and isinstance(last, Permute):
        perm = tuple(last.perm[i] for i in step.perm)  # (x.permute(p)).permute(q) = x.permute(p∘q)
        steps[-1] = Permute(perm, by_permute=last.by_permute and step.by_permute)
    elif isinstance(step, Reshape) and isinstance(last, Reshape):
        if not step.is_identity:
            steps[-1] = Reshape(step.shape, is_identity=False)
    else:
        steps.append(step)
    return PendingView(pending.base, tuple(s for s in steps if not identity(s)))


def identity(step: Step) -> bool:
    return step.is_identity if isinstance(step, Reshape) else step.perm == tuple(range(len(step.perm)))
