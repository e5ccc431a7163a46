"""Programs in the compilation cache.

    kept = KeptPrograms(open_cache())
    found = kept.find(key)                          KeptProgram(image, boundary, journal …), or None
    kept.keep(key, image, boundary, text, journal)

An entry is a program's image (engine/native/image.py) with what the runtime needs beside it: the boundary, what the journal
said when it was compiled, and the text of its graph, by which `airgraph cache why` explains misses.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airgraph.disk_cache import Cache, Key
from airgraph.engine.native.image import ProgramImage, opened
from airgraph.errors import AirgraphError
from airgraph.ir.boundary import Boundary
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.journal import Journal, OpUse
from airgraph.store.convention import FUNCTIONS, PLANNED, boundary_data, read_boundary

if TYPE_CHECKING:
    from airgraph.store.planned_program import PlannedProgram

KIND = "program"


@dataclass(frozen=True)
class KeptProgram:
    image: ProgramImage | PlannedProgram
    boundary: Boundary
    static: bool  # its graph is
    said: Mapping[str, Any]  # what the journal said

    def tell(self, journal: Journal) -> None:
        """What was true when it was compiled is true of it now."""
        for target, reason, source in self.said["fallbacks"]:
            journal.fall_back(target, reason, source)
        for remark in self.said["remarks"]:
            journal.remark(remark)
        for *use, count in self.said["ops"]:
            journal.ops[OpUse(*use)] += count
        journal.counters.update({k: v for k, v in self.said["counters"].items() if k != "fallbacks"})


@dataclass(frozen=True)
class Remembered:
    """How much a journal had said before a graph was compiled, so that only the rest is kept."""

    remarks: int
    fallbacks: int

    @classmethod
    def of(cls, journal: Journal) -> Remembered:
        return cls(len(journal.remarks), len(journal.fallbacks))

    def since(self, journal: Journal) -> dict[str, Any]:
        fallbacks = [[f.target, f.reason, f.source] for f in journal.fallbacks[self.fallbacks :]]
        shown = [(use, count) for use, count in journal.ops.items()]
        ops = [[u.target, u.by, u.reason, u.stack if u.reason else None, count] for u, count in shown]
        return {
            "remarks": journal.remarks[self.remarks :],
            "fallbacks": fallbacks,
            "ops": merged(ops),
            "counters": {name: n for name, n in journal.counters.items() if not name.startswith("program")},
        }


def merged(ops: list[list[Any]]) -> list[list[Any]]:
    """Ops that differ only in the lines they come from are one."""
    counts: dict[tuple[Any, ...], int] = {}
    for *use, count in ops:
        counts[tuple(use)] = counts.get(tuple(use), 0) + count
    return [[*use, count] for use, count in counts.items()]


@dataclass(frozen=True)
class KeptPrograms:
    cache: Cache

    def find(self, key: Key) -> KeptProgram | None:
        """None for what is not there or is no program of this version."""
        data = self.cache.get(KIND, key)
        if data is None:
            return None
        try:
            return read(data)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, StopIteration, AirgraphError):
            self.cache.discard(KIND, self.cache.path(KIND, key))
            return None

    def keep(self, key: Key, image: ProgramImage | PlannedProgram, boundary: Boundary, more: Mapping[str, Any]) -> bool:
        """`more`: {"static": …, "said": …, "text": the graph}. False if it cannot be written."""
        writer = DataWriter(FUNCTIONS)
        text = base64.b64encode(zlib.compress(more["text"].encode())).decode()
        described = {**boundary_data(boundary, writer), "symbols": writer.symbol_table()}
        return self.cache.put(KIND, key, image.to_bytes({**more, "text": text, "boundary": described}))


def read(data: bytes) -> KeptProgram:
    if data.startswith(PLANNED):
        from airgraph.store.planned_program import PlannedProgram

        planned, more = PlannedProgram.from_bytes(data)
        return KeptProgram(planned, planned.boundary, more["static"], more["said"])
    image, more = ProgramImage.from_bytes(data)
    described = more["boundary"]
    boundary = read_boundary(described, DataReader(described["symbols"], FUNCTIONS), len(image.made))
    return KeptProgram(image, boundary, more["static"], more["said"])


def text_of(data: bytes) -> str:
    """The graph of an entry, as its key has it."""
    if data.startswith(PLANNED):
        at = len(PLANNED) + 8
        head = json.loads(data[at : at + int.from_bytes(data[at - 8 : at], "little")])
    else:
        head, _ = opened(data)
    return zlib.decompress(base64.b64decode(head["more"]["text"])).decode()
