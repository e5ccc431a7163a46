"""What tracing writes to real tensors, undone: a model's state after compiling it is what it was before.

    with UndoneWrites():
        torch.export.export(model, args)

torch.export traces parameters and buffers as tensors without data. A tensor that is neither, a counter in a cache for
example, is taken as it is: an op that writes to it and has no other tensors is executed while it is traced. If it has
one element, PyTorch keeps its value with the tensor without data, and AOTAutograd executes the op once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


class UndoneWrites(TorchDispatchMode):
    """Ops that reach real tensors come here; the former values are put back at the end, the latest first."""

    def __init__(self) -> None:
        super().__init__()
        self.former: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else named.get(argument.name)
                for tensor in given if isinstance(given, list | tuple) else [given]:
                    if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                        with no_dispatch():  # a copy, not a node of the graph that is traced
                            self.former.append((tensor, tensor.detach().clone()))
        return func(*args, **named)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        put_back(reversed(self.former))
        self.former.clear()


@contextlib.contextmanager
def with_numbers_kept(state: Iterable[torch.Tensor]) -> Iterator[None]:
    """Those of the tensors that have one element, as they were."""
    former = [(tensor, tensor.detach().clone()) for tensor in state if tensor.numel() == 1]
    try:
        yield
    finally:
        put_back(pair for pair in former if pair[0].item() != pair[1].item())


def put_back(former: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, values in former:
            tensor.copy_(values)
