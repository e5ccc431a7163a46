"""Scopes, and the order of work on streams: what `torchair` and `npugraph_ex` have in common.

    with AttributeScope({"_user_stream_label": "1"}):     torch.ops.air.scope_enter(["_user_stream_label"], ["1"])
        y = f(x)
                                                 torch.ops.air.scope_exit()

These are ops, so that they are part of what Dynamo traces, and so that a user's pass on the FX graph can put them where it
likes. They compute nothing: `airgraph.convert.scopes` reads them out of a graph, and outside torch.compile, where every
op is done before the next begins, there is nothing for them to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from airgraph.convert.registry import REGISTRY
from airgraph.convert.scopes import ROLES, Role
from airgraph.ir import ge
from airgraph.ir.graph import Value

AIR, EX = "air", "npugraph_ex"


def define(
    namespace: str,
    schema: str,
    role: Role,
    meaning: Callable[..., Any] = lambda *args, **named: None,
    fake: Callable[..., Any] | None = None,
) -> None:
    """An op that says something of others; `meaning` is what it does outside a graph."""
    name = schema.partition("(")[0]
    torch.library.define(f"{namespace}::{name}", schema[len(name) :])
    torch.library.impl(f"{namespace}::{name}", "CompositeExplicitAutograd")(meaning)
    torch.library.register_fake(f"{namespace}::{name}")(fake or meaning)
    op = getattr(getattr(torch.ops, namespace), name).default
    ROLES[op] = role
    if role != "record":  # a moment that nobody waits for is of no use
        torch.fx.node.has_side_effect(op)


def moment(*, device: torch.device | None = None) -> torch.Tensor:
    return torch.empty(0, device=device)


for _namespace in (AIR, EX):
    define(_namespace, "scope_enter(str[] keys, str[] values, bool need_execute=False) -> ()", "enter")
    define(_namespace, "scope_exit(bool need_execute=False) -> ()", "exit")
    define(_namespace, "record(*, Device? device=None) -> Tensor", "record", moment)
    define(_namespace, "wait(Tensor[] x) -> ()", "wait")


# -- a tensor that is there after another ---------------------------------------------------------------------------
def waited(x: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    return x.clone()


define(AIR, "wait_tensor(Tensor self, Tensor dependency) -> Tensor", "wait_tensor", waited, lambda x, y: x.clone())
torch.library.register_autograd("air::wait_tensor", lambda ctx, gradient: (gradient, None))


def convert_wait_tensor(self: Value, dependency: Value) -> Any:
    """wait_tensor(Tensor self, Tensor dependency) -> Tensor"""
    return ge.Identity(self)


REGISTRY.register(torch.ops.air.wait_tensor.default, convert_wait_tensor)


# -- scopes ---------------------------------------------------------------------------------------------------------
class AttributeScope:
    """`with AttributeScope({"_op_exec_never_timeout": "True"}):` the ops inside carry these attributes."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self.keys, self.values = list(attributes), list(attributes.values())

    def __enter__(self) -> None:
        torch.ops.air.scope_enter(self.keys, self.values)

    def __exit__(self, *error: object) -> None:
        torch.ops.air.scope_exit()


def limit_core_num(op_aicore_num: int, op_vectorcore_num: int, stream: Any = None) -> AttributeScope:
    """How many cores of an NPU the ops inside may use. There are none here: the journal says that it has no effect."""
    for name, count in (("op_aicore_num", op_aicore_num), ("op_vectorcore_num", op_vectorcore_num)):
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} of limit_core_num must be an int, got {type(count).__name__}")
        if count < 1:
            raise ValueError(f"{name} of limit_core_num must be at least 1, got {count}")
    return AttributeScope({"_op_aicore_num": str(op_aicore_num), "_op_vectorcore_num": str(op_vectorcore_num)})


# -- order ----------------------------------------------------------------------------------------------------------
def record() -> torch.Tensor:
    """This moment of the stream: `wait([record()])` on another one waits for what was done before."""
    return torch.ops.air.record()


def wait(tensors: Sequence[torch.Tensor]) -> None:
    """What follows on this stream begins when these tensors are there, or these moments are past."""
    if tensors is None or len(tensors) == 0:
        raise ValueError("torchair.ops.wait() requires at least one tensor input")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError("arguments of torchair.ops.wait() must be torch.Tensor")
    torch.ops.air.wait(list(tensors))
