"""Files that are whole or not there, and files that only claim to be large."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from airgraph.disk_cache import temporary
from airgraph.errors import ExportError


def write_file(path: Path, pieces: Iterable[bytes], mode: int = 0o640) -> None:
    """Whole or not at all: what was there before stays until the new file is complete."""
    new = temporary(path)
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for piece in pieces:
                file.write(piece)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def refuse_holes(path: Path) -> None:
    """A sparse file of a few bytes may claim to have gigabytes. (Some file systems compress, but weights not so well.)"""
    found = path.stat()
    if found.st_size > 2**20 and getattr(found, "st_blocks", found.st_size) * 512 * 16 < found.st_size:
        raise ExportError(f"{path} is sparse: it has {found.st_size:,} bytes and {found.st_blocks * 512:,} on disk")
