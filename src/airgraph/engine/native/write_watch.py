"""Whether memory was written to since it was read, however that was done: Linux's page tables tell.

    watch = watch_memory(weight)                  None: it cannot be watched
    generation = watch.settle()                   what is there now; then copy it
    watch.unwritten(generation)                   whether the copy still is what is there

The whole pages of a tensor are write-protected by userfaultfd in its asynchronous mode (Linux 6.7): the first write to such
a page, by an instruction of any thread or by a system call, lifts the protection in the kernel, without a signal and
without a handler. So a page that is protected still has not been written to since `settle` protected it, and the copy was
made after that. The ioctl PAGEMAP_SCAN asks for pages that are not protected any more: 54 weights of a ResNet-50, 25,000
pages. What lies on pages that the tensor shares with others, at both of its ends, is compared byte by byte.

A system call for each tensor costs more than looking at its pages, if these are few. So a frame asks for neighbours at once
(`sweeps`): the kernel passes over memory between them that nobody watches. Two cores of a Xeon at 2.5 GHz, microseconds a
call one by one / at once, medians of 31 alternating batches in one process: DeiT of 180 (25 weights) 1529 / 1486, Qwen3 of
240 (29) 2404 / 2375, ELECTRA (25) 2572 / 2530. This scan takes longer for each page: large tensors are asked for by
themselves.

Memory that others than this process may write to is refused: pages of files, shared memory, and pinned memory, which a
device may write to. A forked child has page tables of its own, and what its parent watched is not watched there: the
generations lie in memory that the kernel clears for the child, so that none of them fits. Where a filter of system calls
is in force (in most containers) the system call is not tried, which might end the process: only /dev/userfaultfd is.

A write to a watched page costs a page fault, and a copy that was made for nothing costs more. So memory that was written to
SHORT seconds after it was copied, and that FEW times in a row, is not watched any more.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import sys
import time
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from airgraph.engine.native.tables import WatchWords, words

PAGE = mmap.PAGESIZE
LEAST = 16 * PAGE  # bytes of a tensor: comparing a smaller one takes as long as copying it
SHORT, FEW = 1.0, 3
SMALL = 128 * PAGE  # bytes of a tensor that is asked for with its neighbours
NEAR = 1 << 20  # bytes between neighbours
CELLS = 1 << 13  # generations, of as many watches at a time
WIPE_ON_FORK = 18  # madvise

# -- numbers of Linux ---------------------------------------------------------------------------------------------------
USERFAULTFD = {"x86_64": 323, "aarch64": 282}  # system calls
USERFAULTFD_NEW, API = 0xAA00, 0xAA
FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | 1  # in user mode only: more needs a privilege, and asynchronous mode does not
WP_UNPOPULATED, WP_ASYNC = 1 << 13, 1 << 15  # features
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC018AA06
REGISTER_WP, PROTECT = 2, 1
PAGEMAP_SCAN = 0xC0606610
IS_WATCHED, IS_WRITTEN, IS_FILE, IS_PRESENT = (1 << i for i in range(4))  # categories of pages


class Tracker:
    """The file descriptors of one process, and the words that hold generations; the first of them says whose they are."""

    def __init__(self) -> None:
        self.faults = opened_faults()
        self.pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self.memory = mmap.mmap(-1, 8 * CELLS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(WIPE_ON_FORK)
        self.cells = (ctypes.c_int64 * CELLS).from_buffer(self.memory)
        self.cells[0] = 1
        self.free = list(range(1, CELLS))
        self.watches: weakref.WeakValueDictionary[tuple[int, int], WriteWatch] = weakref.WeakValueDictionary()
        self.given_up: dict[int, weakref.ref[torch.Tensor]] = {}  # by address

    @property
    def of_this_process(self) -> bool:
        """Else of its parent: the descriptors are still those of the parent's memory."""
        return bool(self.cells[0] == 1)

    def ask(self, request: int, *numbers: int) -> int:
        """An ioctl of userfaultfd; -1 if it fails."""
        return ioctl(self.faults, request, words(numbers))

    def release(self, cell: int, start: int, size: int) -> None:
        if self.of_this_process:
            self.forget(start, start + size)  # a sweep passes over pages that nobody watches
            self.ask(UFFDIO_UNREGISTER, start, size)
            self.free.append(cell)

    def forget(self, start: int, end: int) -> None:
        """No generation of memory that has pages in this range fits any more."""
        for watch in self.watches.values():
            if watch.start < end and start < watch.end:
                self.cells[watch.cell] = 0


@cache
def system_calls() -> Any:
    libc = ctypes.CDLL(None)
    libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
    return libc


def ioctl(file: int, request: int, argument: Any) -> int:
    return int(system_calls().ioctl(file, request, ctypes.addressof(argument)))


def opened_faults() -> int:
    """The file descriptor of userfaultfd; raises OSError where there is none with the features that are needed."""
    number = USERFAULTFD.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise OSError("no userfaultfd here")
    if "\nSeccomp:\t0\n" in Path("/proc/self/status").read_text():
        file: int = system_calls().syscall(number, FLAGS)
    else:  # a filter knows ordinary calls
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        file = system_calls().ioctl(device, USERFAULTFD_NEW, FLAGS)
        os.close(device)
    if file < 0:
        raise OSError("userfaultfd is not allowed")
    if ioctl(file, UFFDIO_API, words([API, WP_ASYNC | WP_UNPOPULATED, 0])) != 0:
        os.close(file)
        raise OSError("userfaultfd has no asynchronous mode")
    return file


_tracker: list[Tracker | None] = []  # none yet, or that of this process


def tracker() -> Tracker | None:
    """None where nothing can be watched."""
    found = _tracker[0] if _tracker else None
    if not _tracker or (found is not None and not found.of_this_process):
        try:
            found = Tracker()
        except OSError:
            found = None
        _tracker[:] = [found]
    return found


@cache
def can_watch() -> bool:
    """Tried once: whether a write to memory of our own is seen."""
    memory = torch.zeros(2 * LEAST // 4)
    watch = watch_memory(memory)
    generation = watch.settle() if watch is not None else None
    if watch is None or generation is None or not watch.unwritten(generation):
        return False
    memory[LEAST // 4] = 1.0
    return not watch.unwritten(generation)


# -- one tensor -----------------------------------------------------------------------------------------------------------
_generations = itertools.count(1)


class WriteWatch:
    """Of a tensor that is dense. `words` is what native code reads (tables.WatchWords)."""

    def __init__(self, owner: Tracker, tensor: torch.Tensor) -> None:
        """Raises OSError where the kernel refuses."""
        self.owner, self.tensor = owner, weakref.ref(tensor)
        address, size = self.address, self.size = tensor.data_ptr(), tensor.nbytes
        self.start, self.end = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
        self.since, self.changes = 0.0, 0
        if not owner.free or owner.ask(UFFDIO_REGISTER, self.start, self.end - self.start, REGISTER_WP, 0) != 0:
            raise OSError("not watched")
        self.cell = owner.free.pop()
        owner.cells[self.cell] = 0
        weakref.finalize(self, owner.release, self.cell, self.start, self.end - self.start)
        ends = ((address, self.start - address), (self.end, address + size - self.end))
        self.ends = [(at, ctypes.create_string_buffer(max(count, 1)), count) for at, count in ends]
        self.written = self.scan(mask=IS_WRITTEN, returned=IS_WRITTEN)
        self.foreign = self.scan(inverted=IS_PRESENT, any_of=IS_FILE | IS_PRESENT, returned=IS_FILE)
        self.words = words([0] * WatchWords.WORDS)
        cells = ctypes.addressof(owner.cells)
        self.words[WatchWords.GENERATION], self.words[WatchWords.FILE] = cells + 8 * self.cell, owner.pages
        self.words[WatchWords.SCAN] = ctypes.addressof(self.written)
        for i, (at, copy, count) in enumerate(self.ends):
            place = WatchWords.ENDS + 3 * i
            self.words[place : place + 3] = [at, ctypes.addressof(copy), count]

    @property
    def words_address(self) -> int:
        return ctypes.addressof(self.words)

    def scan(self, **categories: int) -> Any:
        return scan_argument(self.start, self.end, **categories)

    def found(self, scan: Any) -> bool:
        """Whether there is such a page, or the kernel does not say."""
        return ioctl(self.owner.pages, PAGEMAP_SCAN, scan) != 0

    def unwritten(self, generation: int) -> bool:
        """What native code does before every call (runtime.match_watch)."""
        if self.owner.cells[self.cell] != generation or self.found(self.written):
            return False
        return all(ctypes.string_at(at, count) == copy.raw[:count] for at, copy, count in self.ends)

    def settle(self) -> int | None:
        """The generation of what is there from now on; None: it is not watched any more."""
        now, generation = time.monotonic(), int(self.owner.cells[self.cell])
        if generation and self.unwritten(generation):
            return generation
        self.changes = self.changes + 1 if generation and now - self.since < SHORT else 0
        if self.changes >= FEW:
            self.owner.given_up[self.address] = self.tensor
            return None
        self.since = now
        self.owner.forget(self.start, self.end)  # pages that others have in common with it are protected anew
        self.owner.cells[self.cell] = generation = next(_generations)
        protected = self.owner.ask(UFFDIO_WRITEPROTECT, self.start, self.end - self.start, PROTECT) == 0
        for at, copy, count in self.ends:
            ctypes.memmove(copy, at, count)
        if not protected or self.found(self.foreign):
            self.owner.cells[self.cell] = 0
            return None
        return generation


def scan_argument(start: int, end: int, mask: int = 0, inverted: int = 0, any_of: int = 0, returned: int = 0) -> Any:
    """A pm_scan_arg, and behind it the place for one region: all of it ends at the first page that is found."""
    argument = words([0] * (12 + 3))
    head = [12 * 8, 0, start, end, 0, ctypes.addressof(argument) + 12 * 8, 1, 1]
    argument[:12] = [*head, inverted, mask, any_of, returned]
    return argument


class Sweep:
    """Small tensors that are near each other, asked for at once. Between them there may be memory that nobody watches.

    A page that is not there was given back to the kernel (MADV_DONTNEED). It is asked for by name, so that nothing depends
    on whether this kernel counts it as written.
    """

    def __init__(self, watches: list[WriteWatch]) -> None:
        self.watches, self.file = watches, watches[0].owner.pages
        self.written = scan_argument(
            watches[0].start,
            max(watch.end for watch in watches),
            mask=IS_WATCHED,
            inverted=IS_PRESENT,
            any_of=IS_WRITTEN | IS_PRESENT,
            returned=IS_WRITTEN,
        )

    def clean(self) -> bool:
        return ioctl(self.file, PAGEMAP_SCAN, self.written) == 0


def sweeps(watches: Iterable[WriteWatch]) -> list[Sweep]:
    """Those that save system calls. What is in none of them is asked for by itself, as is everything where one of them
    finds a page."""
    found: list[list[WriteWatch]] = [[]]
    for watch in sorted(watches, key=lambda w: w.start):
        large = watch.end - watch.start > SMALL
        if large or (found[-1] and watch.start - found[-1][-1].end > NEAR):
            found.append([])
        if not large:
            found[-1].append(watch)
    return [Sweep(group) for group in found if len(group) > 1]


def watch_memory(tensor: torch.Tensor) -> WriteWatch | None:
    """The watch of a dense tensor in this process's own memory; None: it cannot be watched."""
    found, address, size = tracker(), tensor.data_ptr(), tensor.nbytes
    if found is None or size < LEAST or pinned(tensor):
        return None
    given_up = found.given_up.get(address)
    if given_up is not None and given_up() is tensor:
        return None
    watch = found.watches.get((address, size))
    if watch is None:
        touch(tensor)
        try:
            watch = found.watches[address, size] = WriteWatch(found, tensor)
        except OSError:
            return None
    return watch


def pinned(tensor: torch.Tensor) -> bool:
    return torch.cuda.is_initialized() and tensor.is_pinned()


def touch(tensor: torch.Tensor) -> None:
    """Read from every page: those of memory that nobody has written to yet are there only then."""
    as_stored(tensor)[:: PAGE // tensor.element_size()].sum()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its numbers fill its memory, in their own order or with channels last."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
