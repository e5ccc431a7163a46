"""A hash of airgraph's own sources: what was made by other sources is not used."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
OUTSIDE = ("compat", "tools")  # what they do shows in graphs and options


@cache
def source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(FOLDER.rglob("*.py")):
        name = path.relative_to(FOLDER)
        if name.parts[0] not in OUTSIDE:
            content = path.read_bytes()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
