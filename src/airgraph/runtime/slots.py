"""Memory for the results of captured programs.

A captured program writes to the same addresses at every replay. What a user still holds must not change, so results lie
in *slots*: pieces of memory that are written again only while nobody holds a tensor of them. All recordings of a graph,
for whatever sizes, share its slots. (Two graphs do not: the gradients of one step would stand in the way of the next
forward.) Whether somebody holds one is what PyTorch counts anyway, the references to a storage: there is nothing to
register and nothing to wait for, and a tensor kept by a view, by autograd or by another thread counts like any other.

What a forward graph saves for its backward graph are hundreds of tensors that autograd keeps and drops together. One of
them is made for each call and counts for all of them (`tickets`); of the others autograd gets the very tensors that we
keep, at no cost. They are *pieces* of one block, each with a count of its own, so that gradients can be laid over those
that the backward graph has read (`sharing.py`): these are their `guests`, and while one is held, they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from airgraph.engine.native.tables import word_property, words

ALIGNED = 512  # bytes, as PyTorch's allocator on a GPU
references = torch._C._storage_Use_Count  # of a storage, from the address PyTorch calls `_cdata`


class Slot:
    """Some memory, and how many tensors of ours (not handed out) are on it. `block`, `start`: what it is a piece of."""

    def __init__(
        self,
        storage: torch.UntypedStorage,
        user: str | None,
        owner: Slots,
        block: torch.Tensor | None = None,
        start: int = 0,
    ) -> None:
        self.storage = storage
        self.handle = self.storage._cdata
        self.own = references(self.handle)
        self.templates = 0
        self.tickets: set[Slot] = set()  # while one of these is held, this one is
        self.guests: set[Slot] = set()  # the same: results of another graph, which overwrite this memory
        self.lodgers: weakref.WeakSet[Any] = weakref.WeakSet()  # the recordings whose results these are
        self.user = user
        self.owner = owner
        self.block, self.start = block, start

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    def held(self) -> bool:
        """Somebody has a tensor of this memory that was made for him."""
        return references(self.handle) != self.own

    def free(self) -> bool:
        return not self.held() and not any(t.held() for t in (*self.tickets, *self.guests))

    def template(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on this memory that stays with us: `detach` of it is what users get."""
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty(0, dtype=dtype, device=self.storage.device)
            tensor.set_(self.storage, 0, tuple(shape), tuple(strides))
        self.own += 1
        self.templates += 1
        self.owner.version += 1
        return tensor

    def forget(self) -> None:
        """A template is gone. Memory that no program writes to any more is given up."""
        self.own -= 1
        self.templates -= 1
        self.owner.version += 1
        if not self.templates and self in self.owner.slots:
            self.owner.slots.remove(self)


class Slots:
    """The slots of one device."""

    version = word_property(0)  # of who uses which

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self.words = words([0])

    def take(self, sizes: Sequence[int], user: str | None, together: Collection[int] = ()) -> list[Slot]:
        """A free slot of this user for each size, the smallest that fits, or a new one; without a user a new one that
        nobody else will have. New ones at the numbers `together` are pieces of one block. Each must get a template: the
        last one to go takes the slot with it."""
        taken: dict[int, Slot] = {}
        new: list[int] = []
        for i, size in enumerate(sizes):
            mine = [s for s in self.slots if s.user == user and s.nbytes >= size and s not in taken.values()]
            mine = [s for s in mine if (s.block is None or i in together) and s.free()]
            if mine and user is not None:
                taken[i] = min(mine, key=lambda s: s.nbytes)
            elif i in together:
                new.append(i)
            else:
                taken[i] = self.added(Slot(torch.UntypedStorage(max(size, 1), device=self.device), user, self))
        room = sum(aligned(sizes[i]) for i in new)
        block, start = torch.empty(room, dtype=torch.uint8, device=self.device), 0
        for i in new:
            taken[i] = self.piece(block, start, max(sizes[i], 1), user)
            start += aligned(sizes[i])
        return [taken[i] for i in range(len(sizes))]

    def piece(self, block: torch.Tensor, start: int, nbytes: int, user: str | None) -> Slot:
        """A slot that is a part of `block`, and keeps it: DLPack gives the memory a count of references of its own."""
        storage = from_dlpack(to_dlpack(block[start : start + nbytes])).untyped_storage()
        return self.added(Slot(storage, user, self, block, start))

    def added(self, slot: Slot) -> Slot:
        self.slots.append(slot)
        return slot

    def holds(self, address: int) -> bool:
        """Whether memory that begins here is a slot's that is handed out."""
        return any(s.user is not None and s.storage.data_ptr() == address for s in self.slots)


def aligned(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNED), 1) * ALIGNED


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor of these strides spans."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))
