"""In which layout a tensor is stored, where the step that reads it would first copy it into another.

y = group_norm(x)   z = conv(y)        →    y lies with channels last, and the convolution reads it as it lies
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from airgraph.ir.types import Dim
from airgraph.plan.index import strides_of
from airgraph.plan.opaque import KernelStep, TorchCall
from airgraph.plan.operands import Operands
from airgraph.plan.steps import Allocation
from airgraph.plan.tensors import TO_LAST, VIEWS, Tensor, point

ORDERS = {3: (0, 2, 1), 4: TO_LAST}  # of the axes in memory, outermost first, that are tried beside the plain one
Strides = tuple[Dim, ...]


@dataclass(frozen=True)
class AssumedMemory:
    """As if every root had memory already: as `given` says, else contiguous (kernels.Memory)."""

    allocations: Mapping[int, Allocation]
    roots: Mapping[int, Tensor]
    given: Mapping[int, Strides]

    def __call__(self, t: Tensor) -> tuple[Sequence[Dim], Dim] | None:
        if t.id in self.allocations:
            return self.allocations[t.id].strides, self.allocations[t.id].offset
        return self.target(t) if t.id in self.roots or t.op == "buffer" else None

    def target(self, t: Tensor) -> tuple[Sequence[Dim], Dim]:
        return self.given.get(t.id, strides_of(t.shape)), 0


def store_layouts(
    steps: Sequence[KernelStep | TorchCall], roots: Mapping[int, Tensor], allocations: Mapping[int, Allocation]
) -> dict[int, Strides]:
    """Strides of roots, by the number of the tensor, that save a copy for the only step that reads them."""
    readers: dict[int, list[KernelStep | TorchCall]] = {}
    for step in steps:
        for t in step.operands:
            while t.id not in roots and t.op in VIEWS:
                (t,) = t.inputs
            readers.setdefault(t.id, []).append(step)
    memory = AssumedMemory(allocations, roots, {})
    found: dict[int, Strides] = {}
    for t in roots.values():
        order = ORDERS.get(len(t.shape))
        if order is None or t.id in allocations or len(readers.get(t.id, ())) != 1:
            continue
        (step,) = readers[t.id]
        strides = ordered_strides(t.shape, order)
        before = copies(step, memory)
        if before and copies(step, replace(memory, given={t.id: strides})) < before:
            found[t.id] = strides
    return found


def ordered_strides(shape: Sequence[Dim], order: Sequence[int]) -> Strides:
    """Of a tensor whose axes lie in memory in this order."""
    inside = dict(zip(order, strides_of([shape[i] for i in order])))
    return tuple(inside[i] for i in range(len(shape)))


def copies(step: KernelStep | TorchCall, memory: AssumedMemory) -> int:
    """How many operands the step would copy."""
    made: list[Tensor] = []

    def copy(t: Tensor) -> Tensor:
        made.append(t)
        return point("copy", (t,), t.dtype, t.shape)

    step.step(Operands(lambda: memory, copy))
    return len(made)
