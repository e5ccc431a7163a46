"""Steps that depend on parameters only: a frame runs them once, when it is made, and keeps what they compute.

    once_steps(kernels, table, known) → the numbers of these steps; `known`: slots of what never changes

A batch norm that is folded into a convolution (passes/linear.py) is such a step: it multiplies all weights of the
convolution, which took 12 % of a ResNet-50 when every call did it. Its result is read like a constant, so the convolution's
weights can be packed (packing.py).

Frozen parameters are taken by their address, since `frozen_parameter` says that they keep their content. The other tensors
of a model (its buffers: the statistics of a batch norm) are tagged with all of their numbers: a frame is only taken while
they are what they were.

Parameters that may change are tagged like those that are packed, where their memory can be watched: a weight in half
precision that is widened for a product (plan/widening.py) is widened once. (Four blocks of 256→1024→256 with 64 rows in
bfloat16, two cores of a Xeon: 2.06 ms a call, as when frozen.) What is kept counts as packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from airgraph.engine.native.code import NativeStep
from airgraph.engine.planned import SlotTable
from airgraph.plan.steps import CallStep, LoopStep

LARGEST = 1 << 14  # numbers of a buffer that every call compares


def once_steps(kernels: Sequence[NativeStep], table: SlotTable, known: Collection[int]) -> list[int]:
    """In order. What they write is read by native steps only, and is no result of the graph."""
    writers = Counter(slot for origin, slots in origins(kernels, table).items() for slot in slots)
    outside = {slot for step, reads in zip(kernels, table.reads) if isinstance(step.origin, CallStep) for slot in reads}
    outside |= {*table.outputs}
    kept, found = set(known), list[int]()
    for number, (step, reads, writes) in enumerate(zip(kernels, table.reads, table.writes)):
        own = all(slot in table.memory and slot not in outside and writers[slot] == 1 for slot in writes)
        if own and reads <= kept and is_plain(step):
            found.append(number)
            kept |= writes
    return found


def origins(kernels: Sequence[NativeStep], table: SlotTable) -> dict[int, frozenset[int]]:
    """What each step of the plan writes. (One of several kernels is one step.)"""
    return {id(step.origin): writes for step, writes in zip(kernels, table.writes)}


def is_plain(step: NativeStep) -> bool:
    """A loop of known sizes that cannot fail."""
    sizes = all(isinstance(x, int) for x in (*step.sizes, step.jobs))
    return isinstance(step.origin, LoopStep) and step.kind == "loop" and not step.checks and sizes


def can_be_compared(buffer: object) -> bool:
    """Whether every call can compare all of its numbers."""
    if type(buffer) is not torch.Tensor or buffer.dtype != torch.float32 or buffer.device.type != "cpu":
        return False
    return buffer.dim() == 1 and 0 < buffer.numel() <= LARGEST and buffer.is_contiguous() and not buffer.is_inference()
