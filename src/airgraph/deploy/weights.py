"""The file of weights: a head of words that says whose they are, then each tensor's memory, aligned for vectors.

file = WeightsFile([prefill.placed, decode.placed])        what both have is there once
file.offset(weight), file.state(weight)
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

MAGIC = int.from_bytes(b"airgrph1", "little")
ALIGNED = 64
HEAD = 64  # bytes


@dataclass(frozen=True)
class PlacedWeight:
    """A tensor with the word of the frame that its address goes to. `state`: the program writes to it. `constant`: it is
    part of the program, while weights may be trained further. `packed`: what it is a packed copy of, and how."""

    name: str
    tensor: torch.Tensor
    at: int
    state: bool = False
    constant: bool = False
    packed: Hashable = None

    @cached_property
    def memory(self) -> memoryview:
        """From its first to its last element, gaps included."""
        t = self.tensor.detach()
        if not t.numel():
            return memoryview(b"")
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        return t.as_strided((span,), (1,)).view(torch.uint8).numpy().data

    @cached_property
    def key(self) -> Any:
        """Equal for what is written once: the same memory, constants of the same content, equal copies of one tensor."""
        if self.packed is not None:
            return self.packed
        if self.constant:
            return hashlib.sha256(self.memory).digest()
        return (self.tensor.data_ptr(), self.memory.nbytes) if self.tensor.numel() else b""

    @property
    def room(self) -> int:
        return -(-self.memory.nbytes // ALIGNED) * ALIGNED


class WeightsFile:
    """The weights of one or more programs. `identity`: the words at the beginning, the last of them the size of the file.
    `state_bytes`: of an instance's own copy of what one of the programs writes to."""

    def __init__(self, programs: Sequence[Sequence[PlacedWeight]]) -> None:
        every = [weight for placed in programs for weight in placed]
        self.weights: list[PlacedWeight] = []
        self.offsets: dict[Any, int] = {}
        self.states: dict[Any, int] = {}
        at, self.state_bytes = HEAD, 0
        for weight in every:
            if weight.key not in self.offsets:
                self.weights.append(weight)
                self.offsets[weight.key] = at
                at += weight.room
            if weight.state and weight.key not in self.states:
                self.states[weight.key] = self.state_bytes
                self.state_bytes += weight.room
        digest = hashlib.sha256()
        for weight in every:
            t, places = weight.tensor, (self.offset(weight), self.state(weight))
            digest.update(repr((weight.name, str(t.dtype), list(t.shape), list(t.stride()), *places)).encode())
            if weight.constant:
                digest.update(weight.memory)
        first, second = (int.from_bytes(digest.digest()[i : i + 7], "little") for i in (0, 7))
        self.identity = [MAGIC, first, second, at]

    def offset(self, weight: PlacedWeight) -> int:
        return self.offsets[weight.key]

    def state(self, weight: PlacedWeight) -> int:
        """Where it lies in an instance's own copy; -1 if no program writes to it."""
        return self.states.get(weight.key, -1)

    def pieces(self) -> Iterator[bytes | memoryview]:
        head = b"".join(word.to_bytes(8, "little") for word in self.identity)
        yield head + bytes(HEAD - len(head))
        for weight in self.weights:
            yield weight.memory
            yield bytes(weight.room - weight.memory.nbytes)
