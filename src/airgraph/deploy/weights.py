"""The file of weights: a head of words that says whose they are, then each tensor's memory, aligned for vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

MAGIC = int.from_bytes(b"airgrph1", "little")
ALIGNED = 64
HEAD = 64  # bytes


@dataclass(frozen=True)
class PlacedWeight:
    """A tensor with the word of the frame that its address goes to. `state`: the program writes to it."""

    name: str
    tensor: torch.Tensor
    at: int
    state: bool = False

    @property
    def memory(self) -> memoryview:
        """From its first to its last element, gaps included."""
        t = self.tensor.detach()
        if not t.numel():
            return memoryview(b"")
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        return t.as_strided((span,), (1,)).view(torch.uint8).numpy().data


class WeightsFile:
    """Where each weight lies. `identity`: the words at the beginning, the last of them the size of the file."""

    def __init__(self, weights: Sequence[PlacedWeight], constants: Sequence[PlacedWeight]) -> None:
        self.weights = [*weights, *constants]
        self.offsets: list[int] = []
        at = HEAD
        for weight in self.weights:
            self.offsets.append(at)
            at += -(-weight.memory.nbytes // ALIGNED) * ALIGNED
        digest = hashlib.sha256()
        for weight, offset in zip(self.weights, self.offsets):
            t = weight.tensor
            digest.update(repr((weight.name, str(t.dtype), list(t.shape), list(t.stride()), offset)).encode())
        for constant in constants:  # part of the program, while weights may be trained further
            digest.update(constant.memory)
        first, second = (int.from_bytes(digest.digest()[i : i + 7], "little") for i in (0, 7))
        self.identity = [MAGIC, first, second, at]

    def pieces(self) -> Iterator[bytes | memoryview]:
        head = b"".join(word.to_bytes(8, "little") for word in self.identity)
        yield head + bytes(HEAD - len(head))
        for weight in self.weights:
            memory = weight.memory
            yield memory
            yield bytes(-memory.nbytes % ALIGNED)

    def write(self, path: Path) -> None:
        with open(path, "wb") as file:
            for piece in self.pieces():
                file.write(piece)
