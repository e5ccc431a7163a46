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

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.capture.inlining import add_formula
from airgraph.compat.torch_npu.graph_ops import FROM_BYTES, HIFLOAT8_BYTE, add_graph_op
from airgraph.errors import CompatError

NAMESPACE = "npu"
REFERENCES: dict[str, Any] = {}
FUNCTIONS: dict[str, Callable[..., Any]] = {}  # their meanings, for those who read them
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HIFLOAT8 = 290  # torch_npu.hifloat8


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
        target = getattr(op, overload or "default")
        meaning = with_element_types(name, target, meaning)
        FUNCTIONS[name] = meaning
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


def with_element_types(name: str, op: torch._ops.OpOverload, meaning: Callable[..., Any]) -> Callable[..., Any]:
    """The meaning, called with element types that exist: where an argument says HiFloat8, the op is refused."""
    names = [a.name for a in op._schema.arguments]
    types = {n for n in names if n.endswith("dtype") or n in ("dst_type", "src_type")}
    if not types:
        return meaning

    @functools.wraps(meaning)
    def typed(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        known = {n: element_type(name, n, given[n]) for n in types if n in given}
        return meaning(
            *(known.get(n, value) for n, value in zip(names, args)), **{n: known.get(n, v) for n, v in kwargs.items()}
        )

    return typed


def element_type(op: str, name: str, value: Any) -> Any:
    """A type, or the number of one, as an op's argument says it."""
    if value in (HIFLOAT8, HIFLOAT8_BYTE):
        raise CompatError(
            f"{op}: {name} says HiFloat8 (torch_npu.hifloat8), which is not emulated",
            where={"because": "PyTorch has no such type: only ops written for its bytes could read or write them"},
            hint="torch.float8_e4m3fn or torch.float8_e5m2",
        )
    return FROM_BYTES.get(value, value) if isinstance(value, torch.dtype) else value


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


# What the documents do not say of an argument, and what to do instead where there is something.
_ROPE = "what it means: it is reserved, and has no effect in any version"
UNKNOWN = {
    "dequant_scale_key_rope": _ROPE,
    "key_rope_antiquant_scale": _ROPE,
    "comm_quant_mode": "how many values share a scale on the wire",
    "comm_quant_scale": "how many values share a scale on the wire",
    "comm_quant_dtype": "how many values share a scale on the wire",
    "padding_mask": "what it adds to the scores",
    "tp_world_size": "where the rows of each rank lie if the ranks of the second group have different counts",
    "tp_rank_id": "where the rows of each rank lie if the ranks of the second group have different counts",
    "expert_shard_type": "how experts and shared experts are placed other than on ranks of their own",
    "elastic_info": "how its rows name the ranks that are left",
    "performance_info": "what is measured: it counts clock cycles of the chip",
}
INSTEAD = {
    "comm_quant_mode": "0: values are sent as they are",
    "tp_world_size": "1, and torch.distributed.all_gather of the rows behind it",
    "tp_rank_id": "0, with tp_world_size=1",
    "expert_shard_type": "0",
}


def not_emulated(op: str, **arguments: object) -> None:
    """Arguments that exist, and whose effect is not there: none of them may be given."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        unknown = "; ".join(dict.fromkeys(UNKNOWN[name] for name in given if name in UNKNOWN))
        raise CompatError(
            f"{op}: {', '.join(given)} is not emulated",
            where={"the documents do not say": unknown} if unknown else {},
            hint="; ".join(f"{name}={INSTEAD[name]}" for name in given if name in INSTEAD)
            or "leave it out, or add a reference of your own under another name",
        )
