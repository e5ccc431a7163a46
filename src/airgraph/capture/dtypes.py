"""Types that FX's fake tensors record otherwise than PyTorch's CPU kernels produce them, corrected in the graph.

On a CPU, normalisations of bfloat16 or float16 tensors with float32 parameters (what autocast makes of a LayerNorm behind
a Linear) save float32 statistics, and their backward kernels accept no others; the fake tensors say bfloat16. Corrected
before the joint graph is partitioned, the forward and the backward graph agree with each other and with eager:

    %stats = native_layer_norm(x: bf16, [16], weight: f32, …)   (bf16, bf16, bf16) → (bf16, f32, f32)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode

aten = torch.ops.aten
LOW = (torch.bfloat16, torch.float16)
Types = list[torch.dtype | None]  # of a node's tensors; None: as recorded


def statistics(parameters: int) -> Callable[[Sequence[Any]], Types]:
    """The second and third output have the parameters' type. `parameters`: which arguments, after the input, are some."""

    def types(args: Sequence[Any]) -> Types:
        others = [a for a in args[1:] if a is None or isinstance(a, torch.Tensor)]
        given = [p.dtype for p in others[:parameters] if p is not None]
        mixed = args[0].dtype in LOW and torch.float32 in given
        return [None, torch.float32, torch.float32] if mixed else []

    return types


def gradient_of_input(args: Sequence[Any]) -> Types:
    """The gradient of an input has the input's type, whatever that of the statistics."""
    return [args[1].dtype]


def norm_of_weight(args: Sequence[Any]) -> Types:
    """The norms that a half-precision weight_norm saves."""
    return [None, torch.float32] if args[1].dtype in LOW else []


RULES: dict[Any, Callable[[Sequence[Any]], Types]] = {
    aten.native_layer_norm.default: statistics(2),
    aten.native_group_norm.default: statistics(2),
    aten.native_batch_norm.default: statistics(4),
    aten._native_batch_norm_legit.default: statistics(4),
    aten._native_batch_norm_legit.no_stats: statistics(2),
    aten._native_batch_norm_legit_functional.default: statistics(4),
    aten._batch_norm_with_update.default: statistics(4),
    aten._batch_norm_with_update_functional.default: statistics(4),
    aten.native_group_norm_backward.default: gradient_of_input,
    aten._weight_norm_interface.default: norm_of_weight,
}


def correct_dtypes(gm: torch.fx.GraphModule) -> None:
    """Corrects the recorded values in place: those of the ops above and of everything computed from them."""
    corrected: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "call_function" and (types := types_of(node, corrected)):
            value = node.meta["val"]
            values = list(value) if isinstance(value, list | tuple) else [value]
            new = [retyped(v, t) for v, t in zip(values, [*types, *[None] * len(values)])]
            if any(n is not v for n, v in zip(new, values)):
                node.meta["val"] = type(value)(new) if isinstance(value, list | tuple) else new[0]
                corrected.add(node)


def types_of(node: torch.fx.Node, corrected: set[torch.fx.Node]) -> Types:
    """The types of a node's outputs by its rule, or by those of its inputs if they were corrected."""
    rule = RULES.get(node.target)
    derived = not corrected.isdisjoint(node.all_input_nodes)
    ordinary = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    if rule is None and not (derived and ordinary):
        return []
    given: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = given
    if rule is not None:
        return rule(args) if args[0].device.type == "cpu" else []
    mode: Any = detect_fake_mode([n.meta["val"] for n in node.all_input_nodes])
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else nullcontext():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    results = result if isinstance(result, list | tuple) else [result]
    return [r.dtype if isinstance(r, torch.Tensor) else None for r in results]


def retyped(value: Any, dtype: torch.dtype | None) -> Any:
    """The same tensor with another type; the value itself where it has that type."""
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype == dtype:
        return value
    with detect_fake_mode([value]):  # type: ignore[union-attr]
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)
