"""A hash of airgraph's own sources: what was made by other sources is not used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
OUTSIDE = ("tools",)  # they only look on


@cache
def source_hash() -> str:
    digest = hashlib.sha256()
    for path in sources(str(FOLDER)):
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        digest.update(f"{path[len(str(FOLDER)) :]} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def sources(folder: str, outside: tuple[str, ...] = OUTSIDE) -> Iterator[str]:
    """Every start of a process reads all of them, so they are found without the objects of pathlib."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            if entry.name not in outside:
                yield from sources(entry.path, ())
        elif entry.name.endswith(".py"):
            yield entry.path
