"""What the log says about the conversion of an FX node at level DEBUG, in TorchAir's words.

target: aten.mul.Tensor
input 0: Pack(meta:FakeTensor(dtype=torch.float32, size=[2, 2] npu:Tensor(arg0_1:0, dtype=DT_FLOAT, size=[2, 2])))
input 1: 3
output Pack(meta:FakeTensor(dtype=torch.float32, size=[2, 2] npu:Tensor(Mul:0, dtype=DT_FLOAT, size=[2, 2])))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from airgraph.convert.views import PendingView
from airgraph.ir.graph import Value


@contextmanager
def logged(node: torch.fx.Node, became: Mapping[torch.fx.Node, Any], log: logging.Logger) -> Iterator[None]:
    """Around the conversion of a node; `became` is what earlier nodes, and afterwards this one, have become."""
    if not log.isEnabledFor(logging.DEBUG) or node.op == "output":
        yield
        return
    log.debug("-------------------")
    log.debug("target: %s", node.target)
    show: Callable[[Any], Any] = lambda n: NodeText(n, became.get(n))  # noqa: E731
    if node.op == "call_function":
        for name, value in (*enumerate(node.args), *node.kwargs.items()):
            log.debug("input %s: %s", name, torch.fx.map_arg(value, show))
    yield
    log.debug("output %s", NodeText(node, became.get(node)))


class NodeText:
    """An FX node and what it became, as text."""

    def __init__(self, node: torch.fx.Node, entry: Any) -> None:
        self.text = packed(node.meta.get("val"), entry)

    def __repr__(self) -> str:
        return self.text


def packed(meta: Any, entry: Any) -> str:
    if isinstance(meta, list | tuple) and isinstance(entry, list | tuple):
        return f"[{', '.join(map(packed, meta, entry))}]"
    if isinstance(meta, torch.Tensor):  # (the parentheses are TorchAir's)
        return f"Pack(meta:FakeTensor(dtype={meta.dtype}, size={list(meta.shape)} npu:{converted(entry)}))"
    return f"Pack(meta:{meta} npu:{converted(entry)})"


def converted(entry: Any) -> str:
    if isinstance(entry, PendingView):
        return f"View({converted(entry.base)})"
    if not isinstance(entry, Value):
        return str(entry)
    index = entry.node.outputs.index(entry)
    sizes = None if entry.type.shape is None else list(entry.type.shape)
    return f"Tensor({entry.node.name}:{index}, dtype={entry.dtype.name}, size={sizes})"
