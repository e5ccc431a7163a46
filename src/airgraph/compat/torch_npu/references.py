"""What an op of torch_npu means, in plain PyTorch: one decorator, for ours and for yours.

    @airgraph.compat.torch_npu.reference("npu_silu_mul(Tensor x, Tensor y) -> Tensor")
    def npu_silu_mul(x, y):
        return torch.nn.functional.silu(x) * y

    torch_npu.npu_silu_mul(x, y)            torch.ops.npu.npu_silu_mul, one node in a compiled graph

The function is run on tensors of the npu and of the host, and on tensors without data to learn the result's shape: one
whose shapes follow from the arguments' shapes needs no fake function. A gradient is `torch.library.register_autograd`
with the name "npu::npu_silu_mul". With `opened=True` the op is not kept as a node: a compiled graph has what is inside
it, which is also how an op that writes into its arguments or returns a view of one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.errors import CompatError

NAMESPACE = "npu"
REFERENCES: dict[str, Any] = {}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def reference(schema: str, *, opened: bool = False, random: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Define `npu::name` by its schema, with the decorated function as its meaning; the op takes the function's place.

    `random`: it may draw random numbers, so two equal calls are not one.
    """
    name, bracket, _ = schema.partition("(")
    if not bracket or "->" not in schema:
        raise CompatError(
            f"{schema!r} is not the schema of an op", hint='reference("npu_xxx(Tensor x, float scale=1.0) -> Tensor")'
        )
    if name in REFERENCES:
        raise CompatError(f"torch_npu.{name} has a reference already", hint="give yours another name")
    key = "CompositeImplicitAutograd" if opened else "CompositeExplicitAutograd"
    tags = (torch.Tag.nondeterministic_seeded,) if random else ()

    def register(meaning: Callable[..., Any]) -> Any:
        torch.library.define(f"{NAMESPACE}::{name}", schema[len(name) :], tags=tags)
        torch.library.impl(f"{NAMESPACE}::{name}", key)(meaning)
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, NAMESPACE), packet)
        REFERENCES[name] = getattr(op, overload) if overload else op
        return REFERENCES[name]

    return register


def missing(name: str) -> AttributeError:
    return AttributeError(
        f"torch_npu.{name} has no reference in airgraph: docs/ascend.md lists the ops that have one\n"
        f'  try: @airgraph.compat.torch_npu.reference("{name}(Tensor x) -> Tensor") on a function that says in PyTorch '
        f"what it does, with the schema of the op"
    )


# What the meanings share.


def need(condition: bool, op: str, what: str, hint: str = "") -> None:
    """An argument the op's documents do not allow."""
    if not condition:
        raise CompatError(f"{op}: {what}", hint=hint)


def need_types(op: str, allowed: Sequence[torch.dtype], **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in allowed:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise CompatError(f"{op}: {name} is {tensor.dtype}, and has to be one of {known}")


def not_emulated(op: str, **arguments: object) -> None:
    """Arguments that exist, and whose effect is not there: none of them may be given."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise CompatError(
            f"{op}: {', '.join(given)} is not emulated",
            hint="leave it out, or add a reference of your own under another name",
        )
