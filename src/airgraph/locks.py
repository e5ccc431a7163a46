"""Locks that a fork cannot leave locked.

    _loading = held_at_fork(threading.Lock(), Depth.LOADING)

A forked child has one thread. A lock that another thread of the parent held at that moment would stay locked in the child
forever, and what it protects may be half changed. So whoever forks takes these locks first, in the order in which threads
take one inside another, and releases them in both processes. A module that is imported late is imported under such a lock,
too: in the child nobody would finish an import that another thread had begun.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Protocol, TypeVar


class Depth(IntEnum):
    """A lock that is taken inside another stands below it."""

    LOADING, TUNING, BINDING, POOL, KERNELS, IMPORTING, COMPILING, LLVM, CACHE, STATE = range(10)


class AnyLock(Protocol):
    def acquire(self) -> object: ...

    def release(self) -> object: ...


Held = TypeVar("Held", bound=AnyLock)
_locks: list[tuple[Depth, AnyLock]] = []
_taken: list[AnyLock] = []  # by the thread that forks


def held_at_fork(lock: Held, depth: Depth) -> Held:
    _locks.append((depth, lock))
    return lock


class Inside:
    """How many threads are inside some code; whoever forks waits until there are none."""

    def __init__(self) -> None:
        self.count, self.changed = 0, threading.Condition()

    def acquire(self) -> None:
        self.changed.acquire()
        self.changed.wait_for(lambda: self.count == 0)

    def release(self) -> None:
        self.changed.release()

    def add(self, number: int) -> None:
        with self.changed:
            self.count += number
            self.changed.notify_all()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self.add(1)
        try:
            yield
        finally:
            self.add(-1)


def take_all() -> None:
    for depth in Depth:  # an import that had to be waited for may have brought locks of the depths below it
        for lock in [lock for at, lock in _locks if at == depth]:
            lock.acquire()
            _taken.append(lock)


def release_all() -> None:
    held = [*_taken]
    _taken.clear()
    for lock in reversed(held):
        lock.release()


os.register_at_fork(before=take_all, after_in_parent=release_all, after_in_child=release_all)
