"""Locks that a fork cannot leave locked.

    _loading = held_at_fork(threading.Lock())

A forked child has one thread. A lock that another thread of the parent held at that moment stays locked in the child for
ever, and what it protects may be half changed. So whoever forks takes these locks first, and gives them back in both
processes. The last one registered is taken first: a lock that is taken inside another must be registered before it, which
follows from the order of imports.
"""

from __future__ import annotations

import os
from typing import Protocol, TypeVar


class AnyLock(Protocol):
    def acquire(self) -> object: ...

    def release(self) -> object: ...


Held = TypeVar("Held", bound=AnyLock)


def held_at_fork(lock: Held) -> Held:
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
