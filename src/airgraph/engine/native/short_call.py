"""A replayed call without a frame of Python: one builtin function checks, launches and makes the results.

    short = ShortCall(program, width=3)               where `is_available()`
    call = short.builtin(around)                      `call(*args)` replays, or calls `around(*args)`
    short.launch([RecordedLaunch(…)], None)           what it may replay, tried in this order

What Python does for a call (`ReplayProgram.attempt`) took 3.6 µs of an MLP's 5.3 on a Neoverse-N1 core, and 6 µs within
Dynamo's frame evaluation. This serves what is simple: a recording that is one launch, with nothing to copy and nothing
but new tensors as results. Everything else, and every call that finds something changed, is left to Python, which then
says what to replay.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch.autograd import profiler

from airgraph.engine.native.address_watch import AddressWatch, LayoutWatch, TensorWatch, words_at
from airgraph.engine.native.builtin import table_builtin
from airgraph.engine.native.dict_watch import DictWatch
from airgraph.engine.native.replay_code import bump_function, inference_function, native_method
from airgraph.engine.native.replay_tensors import TensorMaker, WriteCounter
from airgraph.engine.native.state_gather import StateGather
from airgraph.engine.native.tables import ShortCallWords, words
from airgraph.locks import Depth, held_at_fork

changing_state = held_at_fork(threading.Lock(), Depth.STATE)  # tables of state, and who holds what they point to
TICK = words([0])  # counts uses of all recordings
PROFILED = "_is_profiler_enabled"
FORMS = ("list", "tuple", "single")  # of results: DirectCallWords.LIST, TUPLE, SINGLE


def is_available() -> bool:
    """Not without LLVM, and not where PyTorch's objects are unknown."""
    return native_method("call") is not None and reference_word() is not None


class RecordedLaunch:
    """A recording that is replayed by one launch: LaunchWords. Of one that was dropped its version is still read."""

    def __init__(
        self,
        recording: Any,
        same: AddressWatch,
        laid_out: LayoutWatch | None,
        maker: TensorMaker,
        gather: StateGather | None = None,
        unmoved: Any = None,
    ) -> None:
        """`gather`: where its state is read, of which the table `unmoved` says where it was."""
        (launch, arguments), version = recording.launching, recording.owner.words
        self.versions = (recording.words, version)
        self.gather = gather
        self.kept: tuple[Any, ...] = (launch, arguments, *self.versions, same, laid_out, maker)
        self.tables = (gather, unmoved)
        tables = [0 if watch is None else ctypes.addressof(watch.table) for watch in (same, laid_out, maker)]
        places = (ctypes.addressof(recording.words), ctypes.addressof(version))
        state = (0, 0) if gather is None else (gather.address, ctypes.addressof(unmoved))
        self.words = words([*places, *tables, id(launch), id(arguments), id(self.kept), *state])

    def drop(self) -> None:
        """The recording's version fits no more; what it launched and its results are not held any longer."""
        self.kept = ()


def without_allocation(function: Callable[..., Any] | None) -> tuple[Any, tuple[Any, ...]]:
    """A function and the tuple of its arguments, so that nothing is allocated before it begins: calling a method of a
    builtin class (the replay of a CUDA graph) makes that tuple otherwise, which may run finalizers."""
    if type(function) is MethodType:
        return function.__func__, (function.__self__,)
    return function, ()


def counts_natively(written: Sequence[int]) -> bool:
    """Whether native code can give what is written to the next version."""
    return not written or bool(bump_function() and inference_function())


class CallHead:
    """DirectCallWords of a program: what is asked before every call, and where it is counted."""

    def __init__(self, program: Any, width: int, written: Sequence[int], form: str) -> None:
        objects = [vars(profiler), PROFILED, program.levels, program.event_level]
        self.writes = words([len(written), *written])
        self.kept = (*objects, program.words)
        writes = ctypes.addressof(self.writes) if written else 0
        counted, how = ctypes.addressof(program.words), FORMS.index(form)
        self.words = [*map(id, objects), 0, id(None), id(False), width, counted, writes, how]


class ShortCall:
    """What `builtin()` reads. It changes under the arena's lock only."""

    def __init__(self, program: Any, width: int, written: Sequence[int] = (), form: str = "list") -> None:
        """`width`, `written`: the number of arguments, and which of them are written to. `form`: of the results, a "list",
        a "tuple", or a "single" tensor."""
        arena = program.arena
        capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)
        objects: list[Any] = [arena.lock.acquire, arena.lock.release, arena.current, capturing]
        self.head = CallHead(program, width, written, form)
        self.kept = [*objects, arena.words]
        places = map(ctypes.addressof, (arena.words, TICK))
        self.table = words([*self.head.words, *map(id, objects), *places, 0, 0, 0, 0, 0])
        self.arena = arena
        self.counts = counts_natively(written)
        self.possible = self.counts
        self.tensors: TensorWatch | None = None
        self.state: tuple[Any, ...] = ()
        self.rows: list[RecordedLaunch] = []
        self.addresses = words([])  # of what is in `rows`

    def builtin(self, fallback: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Called with arguments; without a fallback its answer may be None."""
        method = native_method("call")
        assert method is not None
        self.table[ShortCallWords.FALLBACK] = 0 if fallback is None else id(fallback)
        return table_builtin(method, self.table, self, fallback)

    def follow(self, owners: DictWatch, tensors: TensorWatch, writes: WriteCounter) -> None:
        """The state in front of the arguments: where it is found, where it is, what of it is written to. Nothing happens
        where another state is being entered, by another thread or around this call.

        Nothing is allocated between the first store and the last, and what was held before is held until then: neither
        finalizers nor other threads find a table that points to what nobody holds."""
        state, rows = (owners, tensors, writes), list[RecordedLaunch]()
        tables = [watch.table for watch in state]
        possible = self.counts and all(table is not None for table in tables)
        tags, places, written = [ctypes.addressof(table) for table in tables] if possible else [0, 0, 0]
        table, before, rows_before = self.table, None, None
        with self.arena.lock:
            if not changing_state.acquire(False):
                return
            try:
                before, rows_before = self.state, self.rows
                table[ShortCallWords.COUNT] = 0
                self.state = state
                self.tensors = tensors
                self.rows = rows
                self.possible = possible
                table[ShortCallWords.TAGS] = tags
                table[ShortCallWords.STATE] = places
                table[ShortCallWords.STATE_WRITES] = written
            finally:
                changing_state.release()
        del before, rows_before  # which may run finalizers

    def launch(self, rows: list[RecordedLaunch], tensors: TensorWatch | None) -> None:
        """What may be replayed from now on, behind this state: in another thread it may be another one by now."""
        addresses = words([ctypes.addressof(row.words) for row in rows])
        with self.arena.lock:
            if rows == self.rows or tensors is not self.tensors or not changing_state.acquire(False):
                return
            try:
                before, addresses_before = self.rows, self.addresses
                self.table[ShortCallWords.COUNT] = 0
                self.rows = rows
                self.addresses = addresses
                self.table[ShortCallWords.LAUNCHES] = ctypes.addressof(addresses)
                self.table[ShortCallWords.COUNT] = len(rows) if self.possible else 0
            finally:
                changing_state.release()
        del before, addresses_before


def free_table(slots: Sequence[tuple[int, int]]) -> Any:
    """Of (storage, references while nobody else holds it): what `free_rows` reads."""
    place = 8 * (reference_word() or 0)
    return words([len(slots), *(word for storage, own in slots for word in (storage + place, own))])


@cache
def reference_word() -> int | None:
    """The word of a storage of C++ whose lower half is the number of references to it; None where there is none."""
    tensor = torch.empty(4)
    storage = tensor.untyped_storage()
    found, views = set(range(4)), []
    for _ in range(3):
        count, seen = torch._C._storage_Use_Count(storage._cdata), words_at(storage._cdata, 4)
        found &= {i for i, word in enumerate(seen) if word & 0xFFFFFFFF == count}
        views.append(tensor[1:])
    return found.pop() if len(found) == 1 else None
