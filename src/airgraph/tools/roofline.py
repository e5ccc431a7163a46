"""What the kernels of a plan cost at least: the bytes they move and the operations they do, at this machine's speed.

    for kernel in planned_kernels(plan):
        machine.seconds(kernel)             the longer of moving its bytes and doing its operations

The machine's bandwidth and peak are measured with PyTorch, a copy and a matrix product of the type that a kernel computes
in, once in a process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from airgraph.engine.reference import attributes
from airgraph.plan.origins import nodes_of, notes_of, title
from airgraph.plan.steps import AttentionStep, CallStep, ConvStep, GemmStep, Plan, Step, step_reads, step_writes
from airgraph.plan.tensors import Tensor
from airgraph.torch_types import TORCH_TYPES

# Products, and the attribute that says that the first factor is transposed.
PRODUCTS = {"MatMul": "transpose_x1", "MatMulV2": "transpose_x1", "BatchMatMul": "adj_x1"}
MULTIPLIED = ("float32", "float16", "bfloat16", "float64")  # types with a peak of their own


@dataclass(frozen=True)
class PlannedKernel:
    """A step of a plan: what it is for, what it moves and does."""

    name: str
    source: str = ""  # the user's line
    module: str = ""
    bytes: int | None = None  # read and written by a call; None where a size is symbolic
    flops: int | None = None  # of a product, convolution or attention
    dtype: str = "float32"  # of its first result
    parts: tuple[str, ...] = ()  # prologue, epilogue: what is timed beside it


@dataclass(frozen=True)
class MachineSpeed:
    """What a device can do, measured with PyTorch."""

    device: str  # cpu or cuda

    @property
    def bandwidth(self) -> float:
        """Bytes in a second, read and written."""
        return bandwidth(self.device)

    @property
    def peak(self) -> float:
        """Operations in a second, float32."""
        return self.peak_of("float32")

    def peak_of(self, dtype: str) -> float:
        return peak(self.device, dtype if dtype in MULTIPLIED else "float32")

    def seconds(self, kernel: PlannedKernel) -> float | None:
        """What it takes at least; None where a size is symbolic."""
        if kernel.bytes is None:
            return None
        done = kernel.flops / self.peak_of(kernel.dtype) if kernel.flops else 0.0
        return max(kernel.bytes / self.bandwidth, done)


@cache
def bandwidth(device: str) -> float:
    source = torch.empty(1 << (28 if device == "cuda" else 25), device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: copy.copy_(source), device)


@cache
def peak(device: str, dtype: str) -> float:
    side = 8192 if device == "cuda" else 768
    a = torch.rand(side, side, device=device).to(getattr(torch, dtype))
    return float(2 * side**3 / best(lambda: a @ a, device))


def best(run: Callable[[], Any], device: str) -> float:
    """The fastest of a few runs, in seconds."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


# -- the kernels of a plan -------------------------------------------------------------------------------------------
def planned_kernels(plan: Plan) -> Iterator[PlannedKernel]:
    for step in plan.steps:
        notes = notes_of(plan, nodes_of(plan, step))
        places = [plan.allocation(t) for t in (*step_reads(step), *step_writes(step))]
        moved = {t.id: t for t in ((place.alias or place).tensor for place in places)}.values()
        sizes = [size_of(t) for t in moved]
        yield PlannedKernel(
            title(plan, step),
            source=next((short(note.file) for note in reversed(notes) if note.file), ""),
            module=next((note.module for note in reversed(notes) if note.module), ""),
            bytes=None if None in sizes else sum(s for s in sizes if s is not None),
            flops=flops(step),
            dtype=next((type_name(t) for t in step_writes(step) if t.dtype in TORCH_TYPES), "float32"),
            parts=tuple(part for part in ("prologue", "epilogue") if getattr(step, part, None) is not None),
        )


def short(line: str) -> str:
    """`"/home/me/model.py", line 24, in forward    x = self.linear1(x)` → `model.py:24  x = self.linear1(x)`"""
    file, _, rest = line.removeprefix("File ").partition('", line ')
    number, _, code = rest.partition(",")
    return f"{Path(file.strip(chr(34))).name}:{number}  {code.partition('    ')[2].strip()}"


def size_of(t: Tensor) -> int | None:
    if t.dtype not in TORCH_TYPES or not all(isinstance(d, int) for d in t.shape):
        return None
    return math.prod(int(d) for d in t.shape) * TORCH_TYPES[t.dtype].itemsize


def type_name(t: Tensor) -> str:
    return str(TORCH_TYPES[t.dtype]).removeprefix("torch.")


def flops(step: Step) -> int | None:
    """Multiplications and additions of what is made of them; None for other steps and symbolic sizes."""
    match step:
        case GemmStep(sizes=sizes):
            found = 2 * math.prod(sizes if step.ends is None else sizes[1:])
        case AttentionStep(sizes=(b, h, _, rows, columns, d, width)):
            found = 2 * b * h * rows * columns * (d + width)
        case ConvStep(out=out, w=w):
            found = 2 * math.prod(out.shape) * math.prod(w.tensor.shape[1:])
        case CallStep(node=node) if node.op in PRODUCTS:
            shape = next(node.values()).type.shape or ()
            found = (
                2 * math.prod(node.output.type.shape or ()) * shape[-2 if attributes(node)[PRODUCTS[node.op]] else -1]
            )
        case _:
            return None
    return int(found) if isinstance(found, int) else None
