"""A garbage collection, with a finalizer of the test's, in the next allocation that may begin one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, finalize: Callable[[], Any]) -> None:
        self.itself, self.finalize = self, finalize

    def __del__(self) -> None:
        self.finalize()


def call_collecting(function: Callable[..., Any], args: tuple[Any, ...], finalize: Callable[[], Any]) -> Any:
    """`function(*args)`, in which the first new list or tuple makes Python collect garbage (until 3.11 wherever that is made,
    from 3.12 on in the next line of Python)."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    gc.set_threshold(1, 1, 1)
    Cycle(finalize)
    # Python keeps some lists and tuples for the next ones: it has none left when these are held.
    held: list[Any] = [[[] for _ in range(200)], [(i,) for i in range(4096)], [(i, i) for i in range(4096)]]
    try:
        gc.enable()
        return function(*args)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        held.clear()
