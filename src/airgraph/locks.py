"""Locks that a fork cannot leave locked.

    _loading = held_at_fork(threading.Lock(), Depth.LOADING)

A forked child has one thread. A lock that another thread of the parent held at that moment would stay locked in the child
for ever, and what it protects may be half changed. So whoever forks takes these locks first, in the order in which threads
take one inside another, and releases them in both processes.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Protocol, TypeVar


class Depth(IntEnum):
    """A lock that is taken inside another stands below it."""

    LOADING, TUNING, BINDING, POOL, COMPILING, LLVM, CACHE = range(7)


class AnyLock(Protocol):
    def acquire(self) -> object: ...

    def release(self) -> object: ...


Held = TypeVar("Held", bound=AnyLock)
_locks: list[tuple[Depth, AnyLock]] = []


def held_at_fork(lock: Held, depth: Depth) -> Held:
    _locks.append((depth, lock))
    _locks.sort(key=lambda entry: entry[0])
    return lock


def take_all() -> None:
    for _, lock in _locks:
        lock.acquire()


def release_all() -> None:
    for _, lock in reversed(_locks):
        lock.release()


os.register_at_fork(before=take_all, after_in_parent=release_all, after_in_child=release_all)
