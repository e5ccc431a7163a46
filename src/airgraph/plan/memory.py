"""Where intermediates lie: each at an offset in the block of a call, or in an output that is not written yet.

Two tensors that are in use at the same time (lifetimes.py) do not overlap. The arrangement is found once, at the sizes of
the first call: large ones are placed first, each as low as it can be, which leaves the gaps for small ones. What that
decides is which tensor lies above which. For other sizes the order stays and the offsets follow from it:

    offset of t  =  max over what lies right below t of (its offset + its size)

so no two overlap whatever the sizes are, and an offset is a `Term` (sizes.py) like any other number that depends on sizes.
An output lends its memory only if all that was to lie in it fits; otherwise an arrangement without loans is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from airgraph.plan.lifetimes import Lifetimes
from airgraph.plan.sizes import Amount, both, choose, less, maximum

ALIGN = 64
BLOCK = 0  # the home that is no output: slot 0 is nobody's


@dataclass(eq=False)
class Buffer:
    """Memory for one tensor, or for several that are written over each other."""

    slots: list[int]
    size: int  # bytes, at the sizes for which the arrangement is made
    first: int
    last: int
    home: int = BLOCK  # the slot of the output it lies in; every output is the home of one buffer from the start

    def take(self, later: Buffer) -> None:
        """What is written over this one lies here, too."""
        self.slots += later.slots
        self.last, self.home = later.last, later.home


class FixedLocation(NamedTuple):
    """A location at the sizes for which the arrangement is made."""

    home: int
    offset: int


class Location(NamedTuple):
    """Of a slot: bytes behind the memory of slot `home`, or behind the beginning of the block."""

    home: Amount
    offset: Amount


@dataclass(frozen=True)
class Arrangement:
    locations: dict[int, Location]  # by slot
    size: Amount  # bytes of the block

    def text(self, names: Mapping[int, str], values: Sequence[int] = ()) -> str:
        """Each slot's place for one set of values."""

        def number(x: Amount) -> int:
            return x if isinstance(x, int) else values[x.index]

        where = {slot: (number(home), number(offset)) for slot, (home, offset) in self.locations.items()}
        lines = [f"{names[s]}: {names[h] if h else 'block'} + {offset}" for s, (h, offset) in sorted(where.items())]
        return "\n".join([*lines, f"block: {number(self.size)}"])


def aligned(size: Amount) -> Amount:
    return (size + (ALIGN - 1)) // ALIGN * ALIGN


def buffers(
    alive: Lifetimes, sizes: Mapping[int, int], same: Mapping[int, Amount], outputs: Sequence[int]
) -> list[Buffer]:
    """`sizes`: bytes by slot now; `same`: for any sizes (equal amounts are one object or equal numbers)."""
    found = {
        slot: Buffer([slot], sizes[slot], *span, slot if slot in outputs else BLOCK)
        for slot, span in alive.spans.items()
    }
    for t, x in alive.over:
        above, below = found[t], found[x]
        fits = above is not below and (same[t] is same[x] or same[t] == same[x])
        if fits and below.home == BLOCK and len(above.slots) == 1 and below.slots[-1] == x:
            below.take(above)
            found[t] = below
    return list(dict.fromkeys(found.values()))


def arrange(units: Sequence[Buffer], lend: bool = True) -> tuple[dict[int, FixedLocation], int]:
    """Where each slot lies, and the bytes of the block. `lend`: also in outputs that are not written yet."""
    outputs = {buffer.home: buffer for buffer in units if buffer.home != BLOCK}
    placed: dict[int, list[tuple[int, Buffer]]] = {
        BLOCK: [],
        **{home: [(0, buffer)] for home, buffer in outputs.items()},
    }
    smallest_first = sorted(outputs.items(), key=lambda output: output[1].size) if lend else []
    top = 0
    for buffer in sorted((u for u in units if u.home == BLOCK), key=lambda u: (-u.size, u.first)):
        free = [home for home, output in smallest_first if buffer.last < output.first and buffer.size <= output.size]
        home = next((home for home in free if gap(placed[home], buffer) + buffer.size <= outputs[home].size), BLOCK)
        offset = gap(placed[home], buffer)
        placed[home].append((offset, buffer))
        if home == BLOCK:
            top = max(top, offset + int_aligned(buffer.size))
    fixed = {
        slot: FixedLocation(home, offset)
        for home, inside in placed.items()
        for offset, buffer in inside
        for slot in buffer.slots
    }
    return fixed, top


def int_aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def gap(placed: Sequence[tuple[int, Buffer]], buffer: Buffer) -> int:
    """The lowest offset at which there is space for it while it lives."""
    at = 0
    meeting = [(o, u) for o, u in placed if u.first <= buffer.last and buffer.first <= u.last]
    for offset, other in sorted(meeting, key=itemgetter(0)):
        if offset - at >= buffer.size:
            break
        at = max(at, offset + int_aligned(other.size))
    return at


# -- for all sizes ------------------------------------------------------------------------------------------------------
def memory(units: Sequence[Buffer], sizes: Mapping[int, Amount]) -> Arrangement:
    """The arrangement for any sizes; `sizes`: bytes by slot."""
    block, loans, size, fits = stacked(units, sizes, lend=True)
    if isinstance(fits, int):
        assert fits, "the arrangement was made for other sizes"
        return Arrangement({**block, **loans}, size)
    others, _, alternative, _ = stacked(units, sizes, lend=False)
    locations = {
        slot: Location(choose(fits, place.home, 0), choose(fits, place.offset, others[slot].offset))
        for slot, place in {**block, **loans}.items()
        if slot in others
    }
    outputs = {slot: place for slot, place in loans.items() if slot not in others}
    return Arrangement({**locations, **outputs}, choose(fits, size, alternative))


def stacked(
    units: Sequence[Buffer], sizes: Mapping[int, Amount], lend: bool
) -> tuple[dict[int, Location], dict[int, Location], Amount, Amount]:
    """(locations in the block, locations in outputs, bytes of the block, whether all fits in the outputs it lies in)"""
    fixed, _ = arrange(units, lend)
    order = sorted(units, key=lambda u: (fixed[u.slots[0]].offset, u.size))  # of two at one offset one is empty: below
    block, loans, top, fits = dict[int, Location](), dict[int, Location](), 0, 1
    ends: dict[Buffer, Amount] = {}
    for buffer, below in lying_below(order, fixed):
        home = fixed[buffer.slots[0]].home
        offset: Amount = 0
        for other in below:
            offset = maximum(offset, ends[other])
        ends[buffer] = offset + aligned(sizes[buffer.slots[0]])
        for slot in buffer.slots:
            (block if home == BLOCK else loans)[slot] = Location(home, offset)
        if home == BLOCK:
            top = maximum(top, ends[buffer])  # type: ignore[assignment]
        elif buffer.home == BLOCK:
            fits = both(fits, less(offset + sizes[buffer.slots[0]], sizes[home] + 1))  # type: ignore[assignment]
    return block, loans, top, fits


def lying_below(order: Sequence[Buffer], fixed: Mapping[int, FixedLocation]) -> list[tuple[Buffer, list[Buffer]]]:
    """For each buffer those right below it that are in use at the same time; what lies below these is implied."""
    covered = dict[Buffer, int]()
    found = []
    for i, buffer in enumerate(order):
        home = fixed[buffer.slots[0]].home
        right_below, known = [], 0
        for j in reversed(range(i)):
            other = order[j]
            meets = other.first <= buffer.last and buffer.first <= other.last
            if meets and fixed[other.slots[0]].home == home and not known >> j & 1:
                right_below.append(other)
                known |= covered[other] | 1 << j
        covered[buffer] = known
        found.append((buffer, right_below))
    return found
