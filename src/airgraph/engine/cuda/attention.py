"""Attention of one token (target.py says of which) by a kernel of our own.

PyTorch's kernels give each query head to one program, which walks through the whole cache, and want a copy of the cache
with each head repeated for the queries that share it. Here the cache is read where it is, by as many programs as fill the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from airgraph.engine.cuda.functions import SIGNATURE
from airgraph.engine.cuda.tiles import PROGRAMS, power_of_two
from airgraph.ir.types import Dim
from airgraph.plan.steps import AttentionStep
from airgraph.plan.tensors import Tensor

BLOCK = 32
SPLITS = 32  # stretches of a cache at most
NAMES = (
    "q_at q_batch q_head k_at k_batch k_head k_slot v_at v_batch v_head v_slot mask_at mask_batch mask_head mask_slot"
)


@dataclass(frozen=True, eq=False)
class AttentionSource:
    """The kernel of one step (as render.Source); scratch memory and counters come behind the tensors of the plan."""

    step: AttentionStep
    text = "airgraph.engine.cuda.attention_kernel:kernel"
    checks = False
    warps = 4

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        step = self.step
        mask = step.mask.tensor if step.mask is not None else step.q.tensor
        return (step.q.tensor, step.k.tensor, step.v.tensor, mask, step.out)

    @property
    def rows(self) -> int:
        return max(16, power_of_two(self.group))

    @property
    def group(self) -> int:
        _, h, hk, *_ = self.step.sizes
        return int(h // hk)

    @property
    def signature(self) -> dict[str, str]:
        pointers = dict(zip(("q", "k", "v", "mask", "out"), (f"*{SIGNATURE[t.dtype]}" for t in self.tensors)))
        numbers = [*NAMES.split(), "length", "heads", "splits"]
        return {**pointers, "part": "*fp32", "stat": "*fp32", "count": "*i32", **dict.fromkeys(numbers, "i64")}

    @property
    def constants(self) -> dict[str, Any]:
        step = self.step
        depth = step.sizes[5]
        return {
            "SCALE": float(step.scale),
            "GROUP": self.group,
            "ROWS": self.rows,
            "DEPTH": depth,
            "BLOCK": BLOCK,
            "MASK": int(step.mask_kind),
            "SPLITS": SPLITS,
            "COLUMNS": columns(self.group * depth),
        }

    @property
    def sizes(self) -> tuple[Dim, ...]:
        step = self.step
        q, k, v, mask = step.q, step.k, step.v, step.mask
        masked = (mask.offset, *mask.strides[:2], mask.strides[3]) if mask is not None else (0, 0, 0, 0)
        return (
            *(q.offset, *q.strides[:2]),
            *(k.offset, *k.strides[:3]),
            *(v.offset, *v.strides[:3]),
            *masked,
            step.sizes[4],
            step.sizes[2],
        )

    @property
    def elements(self) -> tuple[Dim, ...]:
        return ()

    def splits(self, value: Callable[[Dim], int]) -> int:
        b, _, hk, _, length, *_ = (value(n) for n in self.step.sizes)
        return max(1, min(-(-length // BLOCK), -(-PROGRAMS // (b * hk)), SPLITS))

    def numbers(self, value: Callable[[Dim], int]) -> list[int]:
        return [*(value(s) for s in self.sizes), self.splits(value)]

    def pairs(self, value: Callable[[Dim], int]) -> int:
        return value(self.step.sizes[0]) * value(self.step.sizes[2])

    def grid(self, value: Callable[[Dim], int]) -> int:
        return self.pairs(value) * self.splits(value)

    def scratch(self, value: Callable[[Dim], int]) -> Sequence[int]:
        """Floats of `part` and `stat`, and the number of counters."""
        programs = self.grid(value)
        depth = value(self.step.sizes[5])
        return programs * self.group * depth, programs * 2 * self.group, self.pairs(value)


def columns(count: int) -> int:
    """The largest power of two up to 256 that divides it: what is combined at a time."""
    return min(256, count & -count)
