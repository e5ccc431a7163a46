"""A built model called through its shared library: the C interface, from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from airgraph.deploy.words import MOST_DIMENSIONS
from airgraph.engine.native.frames import DTYPE_NUMBER

DTYPES = {number: dtype for dtype, number in DTYPE_NUMBER.items()}


class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * MOST_DIMENSIONS),
    ]

    @classmethod
    def of(cls, t: torch.Tensor) -> CTensor:
        sizes = (ctypes.c_int64 * MOST_DIMENSIONS)(*t.shape)
        return cls(t.data_ptr(), t.numel() * t.element_size(), DTYPE_NUMBER[t.dtype], t.ndim, sizes)


class CModel:
    """`outputs`: how many there are; `prefix`: of its functions. Errors are RuntimeErrors with C's text."""

    def __init__(
        self, folder: Path, *, threads: int = 2, weights: bytes | None = None, outputs: int = 1, prefix: str = "model"
    ) -> None:
        self.library, self.prefix = ctypes.CDLL(str(folder / "libmodel.so")), prefix
        for name in ("create", "create_from_memory", "share", "prepare", "run"):
            self.function(name).restype = ctypes.c_char_p
        self.outputs, self.handle, self.weights = outputs, ctypes.c_void_p(), weights
        place = ctypes.byref(self.handle)
        if weights is None:
            check(self.function("create")(str(folder / "weights.bin").encode(), threads, place))
        else:
            size = ctypes.c_int64(len(weights))
            check(self.function("create_from_memory")(weights, size, threads, place))

    def function(self, name: str) -> Any:
        return getattr(self.library, f"{self.prefix}_{name}")

    def share(self, other: CModel) -> None:
        check(self.function("share")(self.handle, other.handle))

    def prepare(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Outputs with memory, and the bytes of the arena."""
        given, made, arena = self.tensors(inputs), (CTensor * max(self.outputs, 1))(), ctypes.c_int64()
        check(self.function("prepare")(self.handle, given, made, ctypes.byref(arena)))
        found = [torch.empty(list(t.sizes[: t.rank]), dtype=DTYPES[t.dtype]) for t in made[: self.outputs]]
        assert [t.bytes for t in made[: self.outputs]] == [t.numel() * t.element_size() for t in found]
        return found, arena.value

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], arena: torch.Tensor | None = None
    ) -> None:
        address, size = (arena.data_ptr(), arena.numel()) if arena is not None else (None, 0)
        given, made = self.tensors(inputs), self.tensors(outputs)
        check(self.function("run")(self.handle, given, made, ctypes.c_void_p(address), ctypes.c_int64(size)))

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.prepare(inputs)
        self.run(inputs, outputs)
        return outputs[0]

    def tensors(self, tensors: Sequence[torch.Tensor]) -> ctypes.Array[CTensor]:
        return (CTensor * max(len(tensors), 1))(*map(CTensor.of, tensors))

    def close(self) -> None:
        self.function("destroy")(self.handle)


def check(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())
