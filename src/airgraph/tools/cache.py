"""`airgraph cache`: what the compilation cache holds, whether it is whole, and making room.

airgraph cache path       the folder
airgraph cache list       each entry: kind, size, last use, what it depends on
airgraph cache verify     exit code 3 where an entry is not whole
airgraph cache prune      least recently used entries go until the limit is kept
airgraph cache clear      all entries go
"""

from __future__ import annotations

import time
from collections.abc import Callable

from airgraph.disk_cache import Cache, CacheEntry, open_cache
from airgraph.tools.escape import printable

SHOWN = ("cpu", "llvmlite", "torch", "graph")  # fields of a key worth a column


def cache(action: str) -> int:
    opened = open_cache()
    code = ACTIONS[action](opened)
    for note in opened.notes:
        print(f"note: {printable(note)}")
    return code


def path(cache: Cache) -> int:
    print(cache.folder)
    return 0


def listing(cache: Cache) -> int:
    entries = cache.entries() if usable(cache) else []
    for entry in reversed(entries):
        print(line(entry, time.time()))
    print(f"{len(entries)} entries, {size(sum(e.size for e in entries))} of {size(cache.limit)}, in {cache.folder}")
    return 0


def line(entry: CacheEntry, now: float) -> str:
    fields = entry.fields()
    shown = ", ".join(f"{name} {fields[name]}" for name in SHOWN if name in fields)
    return printable(f"{entry.kind:<8} {size(entry.size):>9}  used {age(now - entry.used):>4} ago  {shown}")


def verify(cache: Cache) -> int:
    if not usable(cache):
        return 3
    whole, broken = cache.verify()
    for file in broken:
        print(f"not whole: {file}")
    print(f"{whole} entries are whole, {len(broken)} are not and will not be used")
    return 3 if broken else 0


def prune(cache: Cache) -> int:
    print(f"{size(cache.prune())} freed")
    return 0


def clear(cache: Cache) -> int:
    print(f"{cache.clear()} entries removed from {cache.folder}")
    return 0


def usable(cache: Cache) -> bool:
    return cache.secret is not None


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


ACTIONS: dict[str, Callable[[Cache], int]] = {
    "list": listing,
    "verify": verify,
    "prune": prune,
    "clear": clear,
    "path": path,
}
