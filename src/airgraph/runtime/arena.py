"""What all captured programs of one device share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from airgraph.engine.native.tables import ArenaWords, word_property, words
from airgraph.runtime.graph_capture import GraphCapture
from airgraph.runtime.lanes import CudaStreams
from airgraph.runtime.slots import Slots


@dataclass(frozen=True)
class TensorAddress:
    """Where a tensor was, and the memory it was in. (An address alone may be another tensor's by now.)"""

    address: int
    memory: StorageWeakRef | None

    @classmethod
    def of(cls, value: Any) -> TensorAddress:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return NOWHERE
        return cls(value.data_ptr(), StorageWeakRef(value.untyped_storage()))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is at this address, and the memory has been alive all the time."""
        return self.memory is not None and not self.memory.expired() and tensor.data_ptr() == self.address


NOWHERE = TensorAddress(0, None)


class Arena:
    """What all captured programs of one device share: the memory of their intermediates, the slots of their results, and
    one order. Intermediates die with the run, so the programs may overwrite each other's; that is safe as long as they
    run one after the other, which the lock sees to on the host and `ordered` on the device."""

    busy = word_property(ArenaWords.BUSY)
    last = word_property(ArenaWords.LAST)  # the stream of the last replay

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = Slots(device)
        self.lock = threading.RLock()
        self.words = words([0] * ArenaWords.WORDS)
        self.steady: dict[int, TensorAddress] = {}  # where parameters are, by address
        self.gradients: dict[str, list[StorageWeakRef]] = {}  # of backward graphs that were run op by op, by name
        self._pool: Any = None
        self.keepers: dict[Any, Any] = {}  # an empty graph in each pool, which ends with its last graph
        self.spoiled: set[Any] = set()
        self._stream: Any = None
        self.named: dict[str, Any] = {}  # streams beside it, by the names scopes give them
        cuda = device.type == "cuda"
        self.current: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, device.index) if cuda else int

    def pool(self, given: Any, shared: bool) -> Any:
        """Where a program's intermediates are: in a pool of the user's, in the one all share, or in one of its own."""
        if given is None and not shared:
            return None
        if given is None or given in self.spoiled:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            given = self._pool
        if given not in self.keepers:
            self.keepers[given] = self.empty_graph(given)
        return given

    def spoil(self, pool: Any) -> None:
        """PyTorch cannot capture in this pool any more; what was captured in it stays good."""
        self.spoiled.add(pool)
        self._pool = None if pool == self._pool else self._pool

    def recover(self, pool: Any) -> None:
        """After a capture that failed PyTorch still allocates in its pool and counts random numbers as captured. A capture
        of nothing, in another pool, ends well and stops both."""
        with suppress(RuntimeError):  # where the capture was left in order, this has been done
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
        self.empty_graph(torch.cuda.graph_pool_handle())

    def empty_graph(self, pool: Any) -> Any:
        capture = GraphCapture(pool, "thread_local", self.stream)
        capture.begin()
        capture.end()
        return capture.graphs[0]

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where graphs are captured: the default stream cannot be."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    @property
    def streams(self) -> CudaStreams | None:
        """What a captured graph may run on; None where there are no streams."""
        return CudaStreams(self.device, self.stream, self.named) if self.device.type == "cuda" else None

    def ordered(self) -> None:
        """Work of another stream that uses the arena is waited for. (Nothing to do while there is one stream.)"""
        now = self.current()
        if self.last != now:
            before = torch.cuda.ExternalStream(self.last, self.device)
            torch.cuda.current_stream(self.device).wait_stream(before)
        self.last = now

    def clear_caches(self) -> None:
        """Before a capture: what runs outside of graphs left in PyTorch's allocator, and the workspaces of cuBLAS, are
        given back. Graphs have memory of their own, so both together would be more than eager needs."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def gradients_live(self) -> bool:
        """Somebody holds gradients, of whichever graph."""
        slots = [s for s in self.slots.slots if s.user in self.gradients]
        return any(s.held() for s in slots) or any(not g.expired() for refs in self.gradients.values() for g in refs)

    def reset(self) -> None:
        """Give back the memory, once no program is left."""
        self._pool = None
        self.keepers.clear()
        self.spoiled.clear()
        self.slots = Slots(self.device)
        self.steady.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


_ARENAS: dict[torch.device, Arena] = {}


def arenas() -> list[Arena]:
    return list(_ARENAS.values())


def arena_of(device: torch.device) -> Arena:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _ARENAS.setdefault(device, Arena(device))
