"""Ops that a script registers a kernel for on the device itself, in programs that run on the host.

    @torch.library.impl("mylib::scale", "PrivateUse1")
    def scale(x, by): ...                                  # is given npu tensors, whoever calls it

A compiled program works on host tensors. In it such an op is replaced by a *lent* one with the same schema, which has a
kernel on the host: it calls the op with npu tensors on the same memory.

    mylib.scale.default(npu)   in a program   npu_0.mylib__scale.default(host) → mylib.scale.default(npu)

The name of the lent op says the device, and the arguments that are tensors of the CPU in the user's program: on a CPU
host nothing else could tell them from the device's own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

from airgraph.compat.npu import dispatch, memory, state
from airgraph.compat.npu.memory import DEVICE_TYPE

# Kernels that PyTorch and the emulation have there: those work on the host's memory as they are.
_OURS = frozenset({"aten", "c10d", "fsdp"})
_lent: dict[tuple[OpOverload, int, tuple[str, ...]], OpOverload] = {}
_libraries: dict[str, torch.library.Library] = {}


def host_op(thing: Any, node: torch.fx.Node) -> Any:
    """What a program of host tensors has in place of an op, or of a sub-graph, that FX calls in `node`."""
    if isinstance(thing, torch.fx.GraphModule):
        return _host_module(thing) if _calls_the_scripts(thing) else thing
    if not isinstance(thing, OpOverload) or not _is_the_scripts(thing):
        return thing
    index = _device_of(node)
    return thing if index is None else _lend(thing, index, tuple(_on_cpu(thing, node)))


def to_host_ops(gm: torch.fx.GraphModule) -> None:
    """Every op of the graph that needs it is exchanged, in place."""
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            swap = functools.partial(host_op, node=node)
            node.args, node.kwargs = (torch.fx.node.map_aggregate(a, swap) for a in (node.args, node.kwargs))
        elif isinstance(node.target, OpOverload):
            node.target = host_op(node.target, node)


def _host_module(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    made = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    to_host_ops(made)
    for node in made.graph.nodes:
        if node.op == "get_attr" and isinstance(held := getattr(gm, node.target), torch.fx.GraphModule):
            setattr(made, node.target, _host_module(held))
    made.recompile()
    return made


def _calls_the_scripts(gm: torch.fx.GraphModule) -> bool:
    parts = [part for part in gm.modules() if isinstance(part, torch.fx.GraphModule)]
    targets = [leaf for part in parts for node in part.graph.nodes for leaf in (node.target, *node.args)]
    return any(isinstance(target, OpOverload) and _is_the_scripts(target) for target in targets)


@functools.cache
def _is_the_scripts(op: OpOverload) -> bool:
    name = op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")
    return op.namespace not in _OURS and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


def _device_of(node: torch.fx.Node) -> int | None:
    """The first npu among the arguments, then among the results."""
    for found in (*node.all_input_nodes, node):
        for leaf in torch.utils._pytree.tree_leaves(found.meta.get("val")):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == DEVICE_TYPE:
                return leaf.device.index or 0
    return None


def _on_cpu(op: OpOverload, node: torch.fx.Node) -> Iterable[str]:
    """The names of arguments that are tensors of the CPU."""
    names = [a.name for a in op._schema.arguments]
    given = {**(dict(zip(names, node.args)) if node.target is op else {}), **node.kwargs}
    for name in names:
        found = given.get(name)
        value = found.meta.get("val") if isinstance(found, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            yield name


def _lend(op: OpOverload, index: int, on_cpu: tuple[str, ...]) -> OpOverload:
    key = op, index, on_cpu
    if key not in _lent:
        space = f"{DEVICE_TYPE}_{index}"
        if space not in _libraries:
            _libraries[space] = torch.library.Library(space, "FRAGMENT")
        overload = "" if op._overloadname == "default" else f"__{op._overloadname}"
        name = f"{op.namespace}__{op._opname}{overload}{''.join(f'__cpu_{n}' for n in on_cpu)}"
        _define(_libraries[space], name, op, index, on_cpu)
        _lent[key] = getattr(getattr(torch.ops, space), name).default
    return _lent[key]


def _define(library: torch.library.Library, name: str, op: OpOverload, index: int, on_cpu: tuple[str, ...]) -> None:
    _, _, rest = str(op._schema).partition("(")
    library.define(f"{name}({rest}", tags=tuple(op.tags))
    for key in ("CPU", "CUDA"):
        library.impl(name, functools.partial(_run, op, index, frozenset(on_cpu)), key)
    torch.library.register_fake(f"{library.ns}::{name}", functools.partial(_fake, op), lib=library)


def _run(op: OpOverload, index: int, on_cpu: frozenset[str], *args: Any, **kwargs: Any) -> Any:
    signature = dispatch.signature_of(op)
    given = [value if name in on_cpu else _to_npu(value, index) for name, value in zip(signature.names, args)]
    named = {name: value if name in on_cpu else _to_npu(value, index) for name, value in kwargs.items()}
    results = op(*given, **named)
    several = len(signature.results) > 1
    back: list[Any] = []
    for what, value in zip(signature.results, results if several else (results,)):
        match what:
            case dispatch.Written(name):
                back.append(kwargs[name] if name in kwargs else args[signature.names.index(name)])
            case _:
                back.append(_to_host(value))
    return tuple(back) if several else back[0] if back else None


def _fake(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The op's own fake function; what it says is on npu is on the host here."""
    return torch.utils._pytree.tree_map_only(FakeTensor, _fake_on_host, op(*args, **kwargs))


def _fake_on_host(value: Any) -> Any:
    if value.device.type != DEVICE_TYPE:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=state.host_device())


def _to_npu(value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        return memory.from_host(value, index) if value.device.type == state.host_device().type else value
    return [_to_npu(item, index) for item in value] if isinstance(value, (list, tuple)) else value


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return memory.to_host(value, state.host_device()) if value.device.type == DEVICE_TYPE else value
    return [_to_host(item) for item in value] if isinstance(value, (list, tuple)) else value
