"""Where intermediates lie: each at an offset in the block of a call, or in an output that is not written yet.

Steps are counted; a tensor lives from the first step that writes it to the last one that reads it. Two that live at the
same time do not overlap. Large ones are placed first, each as low as it can be: that leaves the gaps for small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

ALIGN = 64
BLOCK = 0  # the home that is no output: slot 0 is nobody's


@dataclass(eq=False)
class Unit:
    """Memory for one tensor, or for several that are written over each other."""

    slots: list[int]
    size: int
    first: int
    last: int
    home: int = BLOCK  # the slot of the output it lies in; every output is the home of one unit from the start

    def take(self, later: Unit) -> None:
        """What is written over this one lies here, too."""
        self.slots += later.slots
        self.last, self.home = later.last, later.home


class Spot(NamedTuple):
    home: int
    offset: int


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def arrange(units: Sequence[Unit]) -> tuple[dict[int, Spot], int]:
    """Where each slot lies, and the bytes of the block."""
    outputs = {unit.home: unit for unit in units if unit.home != BLOCK}
    placed: dict[int, list[tuple[int, Unit]]] = {BLOCK: [], **{home: [(0, unit)] for home, unit in outputs.items()}}
    smallest_first = sorted(outputs.items(), key=lambda output: output[1].size)
    top = 0
    for unit in sorted((u for u in units if u.home == BLOCK), key=lambda u: (-u.size, u.first)):
        free = [home for home, output in smallest_first if unit.last < output.first and unit.size <= output.size]
        unit.home = next((home for home in free if gap(placed[home], unit) + unit.size <= outputs[home].size), BLOCK)
        offset = gap(placed[unit.home], unit)
        placed[unit.home].append((offset, unit))
        if unit.home == BLOCK:
            top = max(top, offset + aligned(unit.size))
    spots = {
        slot: Spot(home, offset) for home, inside in placed.items() for offset, unit in inside for slot in unit.slots
    }
    return spots, top


def gap(placed: Sequence[tuple[int, Unit]], unit: Unit) -> int:
    """The lowest offset at which there is room for it while it lives."""
    at = 0
    meeting = [(o, u) for o, u in placed if u.first <= unit.last and unit.first <= u.last]
    for offset, other in sorted(meeting, key=itemgetter(0)):
        if offset - at >= unit.size:
            break
        at = max(at, offset + aligned(other.size))
    return at
