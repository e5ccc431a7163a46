"""Collectives as ops of a graph: GE's names for them, with the group and its ranks as attributes.

    torch.distributed.all_reduce(x)   ⟶   _c10d_functional.all_reduce(x, "sum", "0")
                                      ⟶   ge.HcomAllReduce(x, reduction="sum", group="0", ranklist=[0, 1])

Each is done when the graph goes on. What PyTorch would break a graph for, `broadcast` and `all_to_all` of lists, is
traced as the functional collectives that do the same (`remap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.convert.registry import UnsupportedConversion, register_converter
from airgraph.engine.meanings import MEANINGS
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.ops import REQUIRED, NodeView, define
from airgraph.ir.types import TensorType

functional = torch.ops._c10d_functional


# -- the ops --------------------------------------------------------------------------------------------------------
def alike(view: NodeView) -> list[TensorType]:
    return view.result(view.dtype("x"), view.shape("x"))


def gathered(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    return view.result(view.dtype("x"), shape and (shape[0] * view.attr("rank_size"), *shape[1:]))


def scattered(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    return view.result(view.dtype("x"), shape and (shape[0] // view.attr("rank_size"), *shape[1:]))


def exchanged(view: NodeView) -> list[TensorType]:
    shape = view.shape("send_data")
    return view.result(view.dtype("send_data"), shape and (sum(view.attr("recv_counts")), *shape[1:]))


def define_all() -> None:
    group: dict[str, Any] = {"group": "", "ranklist": REQUIRED}
    define("HcomAllReduce", "x", alike, effect="call", reduction="sum", fusion=1, fusion_id=-1, **group)
    define("HcomBroadcast", "x", alike, effect="call", root_rank=0, fusion=0, fusion_id=-1, **group)
    define("HcomAllGather", "x", gathered, effect="call", rank_size=1, **group)
    define("HcomReduceScatter", "x", scattered, effect="call", reduction="sum", rank_size=1, **group)
    define("HcomAllToAllV", "send_data", exchanged, effect="call", send_counts=REQUIRED, recv_counts=REQUIRED, **group)


def meaning(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *, group: str, ranklist: Sequence[int], **attrs: Any) -> Tensor:
        done: Tensor = functional.wait_tensor.default(call(x, group, attrs))
        return done

    return run


KERNELS: dict[str, Callable[..., Tensor]] = {
    "HcomAllReduce": meaning(lambda x, group, a: functional.all_reduce.default(x, a["reduction"], group)),
    "HcomBroadcast": meaning(lambda x, group, a: functional.broadcast.default(x, a["root_rank"], group)),
    "HcomAllGather": meaning(
        lambda x, group, a: functional.all_gather_into_tensor.default(x.contiguous(), a["rank_size"], group)
    ),
    "HcomReduceScatter": meaning(
        lambda x, group, a: functional.reduce_scatter_tensor.default(
            x.contiguous(), a["reduction"], a["rank_size"], group
        )
    ),
    "HcomAllToAllV": meaning(
        lambda x, group, a: functional.all_to_all_single.default(
            x.contiguous(), list(a["recv_counts"]), list(a["send_counts"]), group
        )
    ),
}


# -- converters -----------------------------------------------------------------------------------------------------
def of(group: Any) -> dict[str, Any]:
    """The group as attributes; an object in place of its name cannot be one."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    if not isinstance(group, str):
        raise UnsupportedConversion("the group is given as an object, and a graph holds its name")
    ranks = torch.distributed.get_process_group_ranks(_resolve_process_group(group))  # type: ignore[arg-type]
    return {"group": group, "ranklist": list(ranks)}


def all_reduce(x: Value, reduce_op: str, group_name: Any) -> Any:
    return ge.HcomAllReduce(x, reduction=reduction(reduce_op), **of(group_name))


def broadcast(x: Value, src: int, group_name: Any) -> Any:
    return ge.HcomBroadcast(x, root_rank=src, **of(group_name))


def all_gather(x: Value, group_size: int, group_name: Any) -> Any:
    return ge.HcomAllGather(x, rank_size=group_size, **of(group_name))


def reduce_scatter(x: Value, reduce_op: str, group_size: int, group_name: Any) -> Any:
    return ge.HcomReduceScatter(x, reduction=reduction(reduce_op), rank_size=group_size, **of(group_name))


def all_to_all(x: Value, output_split_sizes: Any, input_split_sizes: Any, group_name: Any) -> Any:
    """Counts of rows. (GE's are of elements, and tensors.)"""
    counts = [output_split_sizes, input_split_sizes]
    if not all(isinstance(c, list | tuple) and all(isinstance(n, int) for n in c) for c in counts):
        raise UnsupportedConversion("its counts are symbolic")
    received, sent = map(list, counts)
    return ge.HcomAllToAllV(x, send_counts=sent, recv_counts=received, **of(group_name))


def reduction(word: str) -> str:
    if word not in ("sum", "prod", "product", "min", "max"):
        raise UnsupportedConversion(f"GE has no reduction {word!r}")
    return word


def wait_tensor(x: Value) -> Any:
    """A collective of a graph is done when the graph goes on."""
    return ge.Identity(x)


CONVERTERS: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "all_to_all_single": all_to_all,
    "wait_tensor": wait_tensor,
}


def register() -> None:
    """Once a process; without torch.distributed there is nothing to register."""
    if not torch.distributed.is_available() or "HcomAllReduce" in MEANINGS:
        return
    define_all()
    MEANINGS.update(KERNELS)
    for name, function in CONVERTERS.items():
        register_converter(getattr(functional, name).default)(function)


# -- what PyTorch does not trace ------------------------------------------------------------------------------------
def broadcast_inplace(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Tensor:
    """In the place of `torch.distributed.broadcast` while a graph is traced; a functional one counts ranks in the group."""
    from torch.distributed import _functional_collectives as collectives

    assert not async_op, "async_op=True cannot be part of a graph"
    if group is None:
        return tensor.copy_(collectives.broadcast(tensor, src, torch.distributed.group.WORLD))
    return tensor.copy_(collectives.broadcast(tensor, torch.distributed.get_group_rank(group, src), group))


def all_to_all_lists_inplace(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None, async_op: bool = False
) -> None:
    """In the place of `torch.distributed.all_to_all`: all tensors, one after another."""
    from torch.distributed import _functional_collectives as collectives

    assert not async_op, "async_op=True cannot be part of a graph"
    sizes = [[t.numel() for t in tensors] for tensors in (output_tensor_list, input_tensor_list)]
    sent = torch.cat([t.reshape(-1) for t in input_tensor_list])
    got = collectives.all_to_all_single(sent, sizes[0], sizes[1], group or torch.distributed.group.WORLD)
    for output, part in zip(output_tensor_list, got.split(sizes[0])):
        output.copy_(part.view(output.shape))


REMAPS: dict[str, Callable[..., Any]] = {"broadcast": broadcast_inplace, "all_to_all": all_to_all_lists_inplace}


def remap() -> None:
    """Dynamo looks these up by name in PyTorch's own module, so they are put there."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import _functional_collectives as collectives

    for name, function in REMAPS.items():
        setattr(collectives, function.__name__, function)
        collectives.traceable_collective_remaps.setdefault(getattr(torch.distributed, name), function)


def unmap() -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed import _functional_collectives as collectives

    for name, function in REMAPS.items():
        if vars(collectives).pop(function.__name__, None) is not None:
            collectives.traceable_collective_remaps.pop(getattr(torch.distributed, name), None)


register()
