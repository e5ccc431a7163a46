"""Dimensions with a name: `mark_bucket(x, 0, "batch")` says which sizes the option `buckets` speaks of.

A mark is an attribute of the tensor, as PyTorch's own `mark_dynamic` is. Dynamo hands the very tensors of the call to a
backend, beside fake ones that know the symbol of each size: so from the mark to the symbol it is one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from airgraph.errors import ConfigError
from airgraph.torch_types import SYMBOLIC

MARK = "_airgraph_buckets"


def mark_bucket(tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """Mark dimension `dim` as dynamic and as padded to the buckets of that name. Returns the tensor.

    airgraph.mark_bucket(x, 0, "batch")
    torch.compile(model, backend="airgraph", options={"buckets": {"batch": [2, 4, 8]}})(x)
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"mark_bucket needs a tensor, got {type(tensor).__name__}")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a bucket's name is a word, got {name!r}", hint='mark_bucket(x, 0, "batch")')
    if not isinstance(dim, int) or isinstance(dim, bool) or not -tensor.ndim <= dim < tensor.ndim:
        raise ConfigError(f"mark_bucket: there is no dimension {dim!r} in {list(tensor.shape)}")
    marks = {**getattr(tensor, MARK, {}), dim % tensor.ndim: name}
    setattr(tensor, MARK, marks)
    torch._dynamo.mark_dynamic(tensor, dim % tensor.ndim)
    return tensor


def bucket_marks(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> dict[Any, str]:
    """Symbol → name, for the marks on the tensors a graph of Dynamo's is compiled for."""
    return {symbol: name for (symbol, name) in marked_symbols(gm, example_inputs, MARK) if symbol is not None}


def marked_symbols(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], mark: str) -> Iterator[tuple[Any, Any]]:
    """(symbol, what the mark says) for every marked dimension; None for the symbol of a size that is fixed."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, tensor in zip(placeholders, example_inputs):
        fake = node.meta.get("example_value")
        for dim, said in getattr(tensor, mark, {}).items() if isinstance(fake, torch.Tensor) else ():
            size = fake.shape[dim]
            yield (size.node.expr if isinstance(size, SYMBOLIC) and size.node.expr.is_Symbol else None), said
