"""What an op of torch_npu means, in plain PyTorch: one decorator, for ours and for yours.

    @airgraph.compat.torch_npu.reference("npu_silu_mul(Tensor x, Tensor y) -> Tensor")
    def npu_silu_mul(x, y):
        return torch.nn.functional.silu(x) * y

    torch_npu.npu_silu_mul(x, y)            torch.ops.npu.npu_silu_mul, one node in a compiled graph

The function is run on tensors of the npu and of the host, and on tensors without data to learn the result's shape: one
whose shapes follow from the arguments' shapes needs no fake function. A gradient is `torch.library.register_autograd`
with the name "npu::npu_silu_mul". With `opened=True` the op is not kept as a node: a compiled graph has what is inside
it, which is also how an op that writes into its arguments or returns a view of one is given.

With `ge="SiluMul x y -> z"` the node of a graph is a GE op of that type (graph_ops.py has the grammar), for those who read
dumps. Such an op may write into its arguments, too: a graph then has its functional twin, `npu_silu_mul_functional`,
which returns the new values after the op's own results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.capture.inlining import add_formula
from airgraph.compat.torch_npu.graph_ops import add_graph_op
from airgraph.errors import CompatError

NAMESPACE = "npu"
REFERENCES: dict[str, Any] = {}
FUNCTIONS: dict[str, Callable[..., Any]] = {}  # their meanings, for those who read them
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def reference(
    schema: str,
    *,
    opened: bool = False,
    random: bool = False,
    ge: str = "",
    collective: bool = False,
    formula: bool = True,
) -> Callable[[Callable[..., Any]], Any]:
    """Define `npu::name` by its schema, with the decorated function as its meaning; the op takes the function's place.

    `random`: it may draw random numbers, so two equal calls are not one. `ge`: the GE op it is in a graph. `collective`:
    other ranks wait for it, so it runs once and in the program's order. `formula`: a compiled program has the ops inside,
    fused with those around them; not where a pass of ours knows the GE op itself.
    """
    name, bracket, _ = schema.partition("(")
    if not bracket or "->" not in schema:
        raise CompatError(
            f"{schema!r} is not the schema of an op", hint='reference("npu_xxx(Tensor x, float scale=1.0) -> Tensor")'
        )
    if name in REFERENCES:
        raise CompatError(f"torch_npu.{name} has a reference already", hint="give yours another name")
    tags = (torch.Tag.nondeterministic_seeded,) if random else ()
    writes = "!)" in schema and bool(ge)

    def register(meaning: Callable[..., Any]) -> Any:
        torch.library.define(f"{NAMESPACE}::{name}", schema[len(name) :], tags=tags)
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, NAMESPACE), packet)
        REFERENCES[name] = getattr(op, overload) if overload else op
        FUNCTIONS[name] = meaning
        target = getattr(op, overload or "default")
        given = in_two_steps(target, schema, meaning, ge) if writes else meaning
        key = "CompositeImplicitAutograd" if opened or writes else "CompositeExplicitAutograd"
        torch.library.impl(f"{NAMESPACE}::{name}", key)(given)
        if ge and not writes:
            kinds = dict(reversed(pair) for pair in re.findall(r"(\w+(?:\[\d*\])?\??) (\w+)", schema))
            add_graph_op(target, kinds, ge, "call" if collective else "none")
        if formula and not (opened or writes or random or collective):
            add_formula(target, meaning)
        return REFERENCES[name]

    return register


def in_two_steps(op: Any, schema: str, meaning: Callable[..., Any], ge: str) -> Callable[..., Any]:
    """An op that writes into its arguments: as it is on plain tensors; while a graph is traced its functional twin, and
    copies of the new values. The twin has the name that torch_npu gives it."""
    name = schema.partition("(")[0]
    twin_name = name[:-1] if name.endswith("_") else f"{name}_functional"
    arguments = op._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in arguments]
    aliases = [r.alias_info for r in op._schema.returns]
    owners = [None if r is None else owner(arguments, written, r) for r in aliases]
    results = ", ".join(["Tensor"] * (owners.count(None) + len(written)))
    plain = re.sub(r"\(\w+!\)", "", schema[len(name) :]).partition(" -> ")[0]

    def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(names, args)), **kwargs}

    def functional(*args: Any, **kwargs: Any) -> Any:
        copies = {names[i]: split(args, kwargs)[names[i]].clone() for i in written}
        result = meaning(
            *(copies.get(n, a) for n, a in zip(names, args)), **{n: copies.get(n, v) for n, v in kwargs.items()}
        )
        given = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        new = [*(r for r, place in zip(given, owners) if place is None), *copies.values()]
        return new[0] if len(new) == 1 else tuple(new)

    twin = reference(f"{twin_name}{plain} -> {results if ',' not in results else f'({results})'}", ge=ge)(functional)

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = split(args, kwargs)
        if all(type(given[names[i]]) in (Tensor, torch.nn.Parameter) for i in written):
            return meaning(*args, **kwargs)
        fresh = twin(*args, **kwargs)
        fresh = [fresh] if isinstance(fresh, Tensor) else list(fresh)
        for i, new in zip(written, fresh[-len(written) :]):
            given[names[i]].copy_(new)
        rest = iter(fresh)
        back = [next(rest) if place is None else given[names[place]] for place in owners]
        return None if not back else back[0] if len(back) == 1 else tuple(back)

    return traced


def owner(arguments: Sequence[Any], written: Sequence[int], returned: Any) -> int:
    """The argument that a result is."""
    return next(i for i in written if arguments[i].alias_info.before_set == returned.before_set)


_WINDOWS = "it reads and writes windows of other chips' memory, by addresses that HCCL puts into its schedule_context"
REFUSED = dict.fromkeys(
    (
        "attention_worker_scheduler",
        "attention_worker_scheduler_",
        "ffn_worker_scheduler",
        "ffn_worker_scheduler_",
        "npu_attention_to_ffn",
        "npu_attention_worker_combine",
        "npu_ffn_to_attention",
        "npu_ffn_worker_batching",
    ),
    _WINDOWS,
)


def missing(name: str) -> AttributeError:
    if name in REFUSED:
        return AttributeError(f"torch_npu.{name} is not emulated: {REFUSED[name]}")
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


_PROBABILITIES = "how the probabilities of an attention in eight bits are rounded between its two products"
UNKNOWN = {
    **dict.fromkeys(
        ("dequant_scale_query", "dequant_scale_key_rope", "key_rope_antiquant_scale", "quant_scale_p"), _PROBABILITIES
    ),
    "comm_quant_mode": "how many values share a scale on the wire",
    "padding_mask": "what it adds to the scores",
}


def not_emulated(op: str, **arguments: object) -> None:
    """Arguments that exist, and whose effect is not there: none of them may be given."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        unknown = "; ".join(dict.fromkeys(UNKNOWN[name] for name in given if name in UNKNOWN))
        raise CompatError(
            f"{op}: {', '.join(given)} is not emulated",
            where={"the documents do not say": unknown} if unknown else {},
            hint="leave it out, or add a reference of your own under another name",
        )
