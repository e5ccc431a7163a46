"""`torch_npu.distributed`: collectives whose parts have different sizes.

    torch_npu.distributed.all_gather_into_tensor_uneven(output, input, [2, 3])      rank 0 has 2 rows, rank 1 has 3

gloo knows equal parts only, so there is a broadcast, or a reduction, for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven"]


class SeveralWorks:
    """Several collectives under way, waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = [work for work in works if work is not None]

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def all_gather_into_tensor_uneven(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """The inputs of all ranks one after the other in `output`, which has `output_split_sizes[rank]` rows of each."""
    parts = _parts(output, output_split_sizes, group)
    own = parts[dist.get_rank(group)]
    if own.shape != input.shape:
        raise RuntimeError(f"input has shape {list(input.shape)}, and its part of output {list(own.shape)}")
    own.copy_(input)
    works = [dist.broadcast(part, _global(group, i), group, async_op=async_op) for i, part in enumerate(parts)]
    return SeveralWorks(works) if async_op else None


def reduce_scatter_tensor_uneven(
    output: torch.Tensor,
    input: torch.Tensor,
    input_split_sizes: Sequence[int] | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """The reduction of all inputs, of which each rank gets its `input_split_sizes[rank]` rows in `output`."""
    parts = [part.clone() for part in _parts(input, input_split_sizes, group)]
    own = parts[dist.get_rank(group)]
    if own.shape != output.shape:
        raise RuntimeError(f"output has shape {list(output.shape)}, and its part of input {list(own.shape)}")
    for i, part in enumerate(parts):
        dist.reduce(part, _global(group, i), op, group)
    output.copy_(own)
    return SeveralWorks([]) if async_op else None


def _parts(whole: torch.Tensor, sizes: Sequence[int] | None, group: Any) -> tuple[torch.Tensor, ...]:
    """A part for each rank, along the first axis; equal ones without sizes."""
    ranks, rows = dist.get_world_size(group), whole.shape[0]
    if sizes is None or len(sizes) == 0:
        if rows % ranks:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(int(size) for size in sizes) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    return torch.split(whole, [int(size) for size in sizes])


def _global(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
