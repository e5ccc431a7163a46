"""Memory for the results of captured programs.

A captured program writes to the same addresses at every replay. What a user still holds must not change, so results lie
in *slots*: pieces of memory that are written again only while nobody holds a tensor of them. All recordings of a graph,
for whatever sizes, share its slots. (Two graphs do not: the gradients of one step would stand in the way of the next
forward.) Whether somebody holds one is what PyTorch counts anyway, the references to a storage: there is nothing to
register and nothing to wait for, and a tensor kept by a view, by autograd or by another thread counts like any other.

What a forward graph saves for its backward graph are hundreds of tensors that autograd keeps and drops together. One of
them is made for each call and counts for all of them (`tickets`); of the others autograd gets the very tensors that we
keep, at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

references = torch._C._storage_Use_Count  # of a storage, from the address PyTorch calls `_cdata`


class Slot:
    """One piece of memory, and how many tensors of ours (not handed out) are on it."""

    def __init__(self, nbytes: int, device: torch.device, user: str | None, owner: Slots) -> None:
        self.storage = torch.UntypedStorage(nbytes, device=device)
        self.handle = self.storage._cdata
        self.own = references(self.handle)
        self.templates = 0
        self.tickets: set[Slot] = set()  # while one of these is held, this one is
        self.user = user
        self.owner = owner

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    def held(self) -> bool:
        """Somebody has a tensor of this memory that was made for him."""
        return references(self.handle) != self.own

    def free(self) -> bool:
        return not self.held() and not any(t.held() for t in self.tickets)

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

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self.version = 0  # of who uses which

    def take(self, sizes: Sequence[int], user: str | None) -> list[Slot]:
        """A free slot of this user for each size, the smallest that fits, or a new one; without a user a new one that
        nobody else will have. Each must get a template: the last one to go takes the slot with it."""
        taken: list[Slot] = []
        for size in sizes:
            mine = [s for s in self.slots if s.user == user and s.nbytes >= size and s not in taken and s.free()]
            if mine and user is not None:
                taken.append(min(mine, key=lambda s: s.nbytes))
                continue
            taken.append(Slot(max(size, 1), self.device, user, self))
            self.slots.append(taken[-1])
        return taken

    def holds(self, address: int) -> bool:
        """Whether memory that begins here is a slot's that is handed out."""
        return any(s.user is not None and s.storage.data_ptr() == address for s in self.slots)


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor of these strides spans."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))
