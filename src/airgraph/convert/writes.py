"""Ops that write to an argument. An FX graph of AOTAutograd has hardly any: it is functional.

In our graph a value never changes. Two nodes that compute the same become one, a copy that nobody needs is none, and a
tensor is read when its turn comes. So an op such as `masked_fill_` on something the graph computed would reach whoever
shares that tensor: `clone(x)` may be `x` itself, and the caller's x be damaged. Its writes are seen in no order. Such an op
has no right place in a graph: no converter could give it one, and PyTorch cannot run it there either.

What may write: `copy_` to an argument (the graph's own way to say that it changes an input), ops that write to nothing but
arguments, and those that work on the storage itself, which AOTAutograd leaves where they stand for a purpose.
"""

from __future__ import annotations

from typing import Any

import torch

# Overloads of TorchAir's list that are left out for that reason.
aten = torch.ops.aten
WRITES = (
    aten.masked_fill_.Scalar,
    aten.bitwise_right_shift_.Tensor,
    aten.expm1.out,
    aten.mish.out,
    aten.nan_to_num.out,
    aten.log_sigmoid_forward.output,
    aten.log_sigmoid_backward.grad_input,
    aten._native_batch_norm_legit.default,
)
OF_STORAGE = ("set_", "resize_", "resize_storage_bytes_")


def stray_writes(node: torch.fx.Node) -> list[str]:
    """The names of the arguments that a node writes to although the graph computed them."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    if target._schema.name.rpartition("::")[2] in OF_STORAGE:
        return []
    given = {**{a.name: v for a, v in zip(target._schema.arguments, node.args)}, **node.kwargs}
    written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [name for name in written if not all(n.op == "placeholder" for n in nodes(given.get(name)))]


def nodes(arg: Any) -> list[torch.fx.Node]:
    return [n for n in torch.utils._pytree.tree_leaves(arg) if isinstance(n, torch.fx.Node)]
