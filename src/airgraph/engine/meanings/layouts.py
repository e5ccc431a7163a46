"""Inputs without gaps, for kernels that go by memory.

FX traces a copy where eager needs one (`contiguous()` before a group norm); strides do not count inside a graph, so here
the copy is none and the value may still be a view. Some kernels refuse that, and some read the memory in the wrong order
without a word. They get a copy now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.table import Meaning, Tensor


def dense(x: Tensor) -> Tensor:
    """Contiguous, or with channels last: the kernels know both."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if last is not None and x.is_contiguous(memory_format=last):
        return x
    return x.contiguous()


def empty_as(x: Tensor, size: Sequence[int]) -> Tensor:
    """Memory of this size, with channels last if an image x lies so: of all that a kernel gets PyTorch brings what lies
    otherwise into one layout."""
    last = x.ndim == len(size) == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty([*size], dtype=x.dtype, device=x.device, memory_format=layout)


def rows(x: Tensor) -> Tensor:
    """The last dimension without gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def on_dense(meaning: Meaning, layout: Meaning = dense) -> Meaning:
    """The meaning, of inputs so laid out."""

    def run(*inputs: Any, **attrs: Any) -> Any:
        return meaning(*(layout(x) if isinstance(x, Tensor) and x.ndim else x for x in inputs), **attrs)

    return run
