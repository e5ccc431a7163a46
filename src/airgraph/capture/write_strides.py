"""Writes leave a tensor's strides as they are, also in a functional graph.

    y = x.t().abs(); y.masked_fill_(y < 1, 4)      AOTAutograd: y' = masked_fill(y, y < 1, 4), and y' is contiguous
                                                   here:        y'' = copy(y, y'), which lies as y does

AOTAutograd replaces a write by the op that makes a new tensor, and takes what that op returns for the tensor after the
write. Some ops return contiguous memory whatever they are given. So such a tensor, and all that is computed from it, would
have other strides than in eager. Worse, a view of an input that is written to would have other values: with symbolic
sizes, AOTAutograd's wrapper makes such a view by the strides that the graph's result has.
Seen with torch 2.13, in every backend that uses AOTAutograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._prims_common import is_contiguous_or_false
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

aten = torch.ops.aten
# Ops that return contiguous memory; each has a variant that writes, with the same overloads and arguments.
CONTIGUOUS = (
    *("addbmm", "addmm", "baddbmm", "cumprod", "cumsum", "index_add", "index_copy", "index_reduce", "masked_fill"),
    *("masked_scatter", "mvlgamma", "renorm", "scatter", "scatter_add", "scatter_reduce", "tril", "triu"),
)
# The op that writes → the one that makes a new tensor.
NEW_TENSOR: dict[Any, Any] = {
    getattr(getattr(aten, f"{name}_"), overload): getattr(getattr(aten, name), overload)
    for name in CONTIGUOUS
    for overload in getattr(aten, f"{name}_").overloads()
}


class WritesKeepStrides(TorchDispatchMode):
    """While AOTAutograd traces: writes to tensors that are not contiguous are copies of new tensors into them."""

    supports_higher_order_operators = True  # they are passed on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        new_tensor, named = NEW_TENSOR.get(func), kwargs or {}
        if new_tensor is None or args[0].layout != torch.strided or is_contiguous_or_false(args[0]):
            return func(*args, **named)
        return aten.copy_.default(args[0], new_tensor(*args, **named))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A compiler that AOTAutograd calls has nothing to do with tracing."""
        with _pop_mode_temporarily() if _get_current_dispatch_mode() is self else contextlib.nullcontext():
            yield
