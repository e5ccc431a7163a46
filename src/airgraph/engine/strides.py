"""Bringing a tensor into a given layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def same_layout(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Strides of dimensions of size 1 say nothing; those of an empty tensor neither."""
    if x.numel() == 0:
        return True
    return all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides))


def restride(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """`x` itself if it lies so already, else a copy that does."""
    return x if same_layout(x, strides) else copy_strided(x, strides)


def with_strides(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """As `restride`, with exactly these strides, those of dimensions of size 1 included."""
    return x if x.numel() == 0 or x.stride() == tuple(strides) else copy_strided(x, strides)


def apart(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The elements of `x` that have places of their own where a dimension of stride 0 has all of its in one."""
    index = tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for s, n in zip(strides, x.shape))
    return x[index] if index else x


def loses_values(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a copy with these strides would have one value in place of several: they differ along a stride of 0."""
    kept = apart(x, strides)
    if kept.shape == x.shape:
        return False
    return not bool(((kept == x) | ((kept != kept) & (x != x))).all())


def copy_strided(x: torch.Tensor, strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A copy with these strides, so many elements into its memory."""
    part = apart(x, strides)
    out = torch.empty_strided(part.shape, tuple(strides), dtype=x.dtype, device=x.device)
    if offset:
        reach = offset + 1 + sum((n - 1) * s for n, s in zip(part.shape, strides))
        out = torch.empty(reach, dtype=x.dtype, device=x.device).as_strided(part.shape, tuple(strides), offset)
    out.copy_(part)
    return out.as_strided(x.shape, tuple(strides), offset) if part.shape != x.shape else out
