"""Gradients in the memory of saved tensors.

A forward graph saves tensors, its backward graph reads them one after the other and makes gradients: in eager mode the
memory of the ones becomes that of the others. Captured graphs have fixed addresses, and slots of both would exist all the
time (BERT-base: 1.33 times eager's peak). So gradients are laid over saved tensors whose last reader has run:

    forward    writes  a b c d …              (pieces of one block)
    backward   reads d, writes its gradient; reads c, writes over d; reads b, writes over c d; …

That destroys what was saved, so such a recording is replayed only where nobody will read it again: autograd does not
retain the graph, and nobody holds a tensor of the memory (which saved-tensor hooks might). Otherwise there is another
recording, with slots of its own. While a gradient is held, the forward graph's recording is not free. In a program that
holds gradients over the next forward call (accumulation, zero_grad() between forward and backward), that is every time:
its gradients get slots of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from airgraph.runtime.slots import Slot, aligned


@dataclass(frozen=True)
class SavedPiece:
    """A saved tensor, and the last step of the backward graph that reads it."""

    slot: Slot
    last_read: int


@dataclass(frozen=True)
class Wanted:
    """A result of the backward graph, and the first step that writes it."""

    index: int
    nbytes: int
    first_write: int


@dataclass(frozen=True)
class SharedPlace:
    """Where a result lies: in the memory of these slots, all pieces of one block."""

    block: torch.Tensor
    start: int
    over: tuple[Slot, ...]


def shared_places(pieces: Sequence[SavedPiece], results: Sequence[Wanted]) -> Mapping[int, SharedPlace]:
    """Places for results, by their numbers, in the order in which they are written: the smallest gap that is large enough
    among what has been read by then. Those that fit nowhere have none."""
    found: dict[int, SharedPlace] = {}
    waiting = sorted(pieces, key=lambda p: p.last_read)
    gaps: list[tuple[torch.Tensor, int, int]] = []  # block, start, end
    for wanted in sorted(results, key=lambda w: (w.first_write, -w.nbytes)):
        while waiting and waiting[0].last_read < wanted.first_write:
            slot = waiting.pop(0).slot
            assert slot.block is not None
            gaps = joined(gaps, (slot.block, slot.start, slot.start + aligned(slot.nbytes)))
        room = aligned(wanted.nbytes)
        fitting = [gap for gap in gaps if gap[2] - gap[1] >= room]
        if not fitting:
            continue
        gap = min(fitting, key=lambda g: g[2] - g[1])
        block, start, end = gap
        gaps = [g for g in gaps if g is not gap] + ([(block, start + room, end)] if start + room < end else [])
        over = [p.slot for p in pieces if p.slot.block is block and covers(p.slot, start, start + room)]
        found[wanted.index] = SharedPlace(block, start, tuple(over))
    return found


def joined(
    gaps: Sequence[tuple[torch.Tensor, int, int]], new: tuple[torch.Tensor, int, int]
) -> list[tuple[torch.Tensor, int, int]]:
    """With one more gap, which may close up with those beside it."""
    block, start, end = new
    kept = []
    for gap in gaps:
        if gap[0] is block and gap[2] == start:
            start = gap[1]
        elif gap[0] is block and gap[1] == end:
            end = gap[2]
        else:
            kept.append(gap)
    return [*kept, (block, start, end)]


def covers(slot: Slot, start: int, end: int) -> bool:
    return slot.start < end and start < slot.start + aligned(slot.nbytes)
