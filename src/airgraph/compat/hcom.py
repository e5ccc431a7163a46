"""Collectives as ops of a graph: GE's names for them, with the group and its ranks as attributes.

    torch.distributed.all_reduce(x)   ⟶   _c10d_functional.all_reduce(x, "sum", "0")
                                      ⟶   ge.HcomAllReduce(x, reduction="sum", group="0", ranklist=[0, 1])

Each is done when the graph goes on. What PyTorch would break a graph for is traced as well (`remap`): `broadcast`,
`all_to_all` of lists and `all_gather` of lists of different sizes as the functional collectives that do the same; `send`,
`recv` and torch_npu's functions for uneven parts as ops of their own (`npu_define::…`), whose meanings are below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.convert.registry import TensorSpec, UnsupportedConversion, register_converter
from airgraph.engine.meanings import MEANINGS
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.ops import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType
from airgraph.torch_types import TORCH_TYPES

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


def received(view: NodeView) -> list[TensorType]:
    return [TensorType(DataType(view.attr("dtype")), tuple(view.attr("shape")), view.attr("place"))]


def of_all(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    return view.result(view.dtype("x"), shape and (sum(view.attr("recv_counts")), *shape[1:]))


def own_part(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    return view.result(view.dtype("x"), shape and (view.attr("recv_count"), *shape[1:]))


def define_all() -> None:
    group: dict[str, Any] = {"group": "", "ranklist": REQUIRED}
    define("HcomAllReduce", "x", alike, effect="call", reduction="sum", fusion=1, fusion_id=-1, **group)
    define("HcomBroadcast", "x", alike, effect="call", root_rank=0, fusion=0, fusion_id=-1, **group)
    define("HcomAllGather", "x", gathered, effect="call", rank_size=1, **group)
    define("HcomReduceScatter", "x", scattered, effect="call", reduction="sum", rank_size=1, **group)
    define("HcomAllToAllV", "send_data", exchanged, effect="call", send_counts=REQUIRED, recv_counts=REQUIRED, **group)
    define("HcomSend", "x", lambda view: [], outputs="", effect="call", sr_tag=0, dest_rank=REQUIRED, **group)
    peer: dict[str, Any] = {"sr_tag": 0, "src_rank": REQUIRED, "shape": REQUIRED, "dtype": REQUIRED, "place": "NPU"}
    define("HcomReceive", "", received, effect="call", **peer, **group)
    define("HcomAllGatherV", "x", of_all, effect="call", send_count=REQUIRED, recv_counts=REQUIRED, **group)
    parts: dict[str, Any] = {"send_counts": REQUIRED, "recv_count": REQUIRED, "reduction": "sum"}
    define("HcomReduceScatterV", "x", own_part, effect="call", **parts, **group)


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


# -- ops of our own: what has no functional collective ----------------------------------------------------------------
def peers(group: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)  # type: ignore[arg-type]


def lent(x: Tensor, group: str) -> Tensor:
    """The same memory on the device that the group is for: a program holds tensors of the host."""
    from airgraph.compat.npu import collectives, memory, state

    if x.device.type == memory.DEVICE_TYPE or not collectives._only_npu(group):
        return x
    return memory.from_host(x, state.current_device())


def send(x: Tensor, dst: int, group: str, tag: int) -> None:
    torch.distributed.send(lent(x.contiguous(), group), group=peers(group), tag=tag, group_dst=dst)


def recv(like: Tensor, src: int, group: str, tag: int) -> Tensor:
    y = torch.empty_like(like, memory_format=torch.contiguous_format)
    torch.distributed.recv(lent(y, group), group=peers(group), tag=tag, group_src=src)
    return y


def gather_uneven(x: Tensor, counts: Sequence[int], group: str) -> Tensor:
    """gloo knows equal parts only, so there is a broadcast for each rank."""
    own = torch.distributed.get_rank(peers(group))
    parts = [x.contiguous() if i == own else x.new_empty(n, *x.shape[1:]) for i, n in enumerate(counts)]
    return torch.cat([functional.wait_tensor(functional.broadcast(part, i, group)) for i, part in enumerate(parts)])


def scatter_uneven(x: Tensor, counts: Sequence[int], reduce_op: str, group: str) -> Tensor:
    whole = functional.wait_tensor(functional.all_reduce(x.contiguous(), reduce_op, group))
    own: Tensor = whole.split(list(counts))[torch.distributed.get_rank(peers(group))]
    return own.clone()


def fake_scatter(x: Tensor, counts: Sequence[int], reduce_op: str, group: str) -> Tensor:
    return x.new_empty(counts[torch.distributed.get_rank(peers(group))], *x.shape[1:])


OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "_send": ("(Tensor x, int dst, str group_name, int tag) -> ()", send, lambda *args: None),
    "_recv": (
        "(Tensor like, int src, str group_name, int tag) -> Tensor",
        recv,
        lambda like, *args: torch.empty_like(like, memory_format=torch.contiguous_format),
    ),
    "allgather_in_tensor_uneven": (
        "(Tensor x, int[] recv_counts, str group_name) -> Tensor",
        gather_uneven,
        lambda x, counts, group: x.new_empty(sum(counts), *x.shape[1:]),
    ),
    "reduce_scatter_tensor_uneven": (
        "(Tensor x, int[] send_counts, str reduce_op, str group_name) -> Tensor",
        scatter_uneven,
        fake_scatter,
    ),
}


def define_ops() -> None:
    for name, (schema, kernel, fake) in OPS.items():
        torch.library.define(f"npu_define::{name}", schema)
        torch.library.impl(f"npu_define::{name}", "CompositeExplicitAutograd")(kernel)
        torch.library.register_fake(f"npu_define::{name}", fake)
        torch.fx.node.has_side_effect(getattr(torch.ops.npu_define, name).default)


MEANT: dict[str, Callable[..., Any]] = {
    "HcomSend": lambda x, *, sr_tag, dest_rank, group, ranklist: send(x, dest_rank, group, sr_tag),
    "HcomReceive": lambda *, sr_tag, src_rank, shape, dtype, device, group, ranklist: recv(
        torch.empty(shape, dtype=TORCH_TYPES[DataType(dtype)], device=device), src_rank, group, sr_tag
    ),
    "HcomAllGatherV": lambda x, *, send_count, recv_counts, group, ranklist: gather_uneven(x, recv_counts, group),
    "HcomReduceScatterV": lambda x, *, send_counts, recv_count, reduction, group, ranklist: scatter_uneven(
        x, send_counts, reduction, group
    ),
}


# -- converters -----------------------------------------------------------------------------------------------------
def of(group: Any) -> dict[str, Any]:
    """The group as attributes; an object in place of its name cannot be one."""
    if not isinstance(group, str):
        raise UnsupportedConversion("the group is given as an object, and a graph holds its name")
    return {"group": group, "ranklist": list(torch.distributed.get_process_group_ranks(peers(group)))}


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


def send_to(x: Value, dst: int, group_name: str, tag: int) -> None:
    ge.HcomSend(x, sr_tag=tag, dest_rank=dst, **of(group_name))


def receive(like: Value, src: int, group_name: str, tag: int, *, meta_outputs: TensorSpec) -> Any:
    shape = meta_outputs.symsize
    if not all(isinstance(n, int) for n in shape):
        raise UnsupportedConversion("its shape is symbolic")
    kind = {"dtype": int(meta_outputs.dtype), "place": like.type.place}
    return ge.HcomReceive(sr_tag=tag, src_rank=src, shape=list(shape), **kind, **of(group_name))


def all_gather_uneven(x: Value, recv_counts: Sequence[int], group_name: str) -> Any:
    rank = torch.distributed.get_rank(peers(group_name))
    return ge.HcomAllGatherV(x, send_count=recv_counts[rank], recv_counts=list(recv_counts), **of(group_name))


def reduce_scatter_uneven(x: Value, send_counts: Sequence[int], reduce_op: str, group_name: str) -> Any:
    count = send_counts[torch.distributed.get_rank(peers(group_name))]
    counts = {"send_counts": list(send_counts), "recv_count": count}
    return ge.HcomReduceScatterV(x, reduction=reduction(reduce_op), **counts, **of(group_name))


OWN_CONVERTERS: dict[str, Callable[..., Any]] = {
    "_send": send_to,
    "_recv": receive,
    "allgather_in_tensor_uneven": all_gather_uneven,
    "reduce_scatter_tensor_uneven": reduce_scatter_uneven,
}
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
    define_ops()
    MEANINGS.update(KERNELS)
    MEANINGS.update(MEANT)
    for owner, converters in ((functional, CONVERTERS), (torch.ops.npu_define, OWN_CONVERTERS)):
        for name, function in converters.items():
            register_converter(getattr(owner, name).default)(function)


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


def all_gather_lists_inplace(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> None:
    """In the place of `torch.distributed.all_gather`; parts of different sizes come by a broadcast for each rank."""
    from torch.distributed import _functional_collectives as collectives

    assert not async_op, "async_op=True cannot be part of a graph"
    if all(t.shape == tensor_list[0].shape for t in tensor_list):
        return collectives.all_gather_inplace(tensor_list, tensor, group)
    group = group or torch.distributed.group.WORLD
    rank = torch.distributed.get_rank(group)
    for i, output in enumerate(tensor_list):
        output.copy_(collectives.broadcast(tensor if i == rank else output, i, group))
    return None


def rank_in(group: Any, rank: int | None, of_group: int | None) -> int:
    if of_group is not None:
        return of_group
    assert rank is not None, "a graph needs to know who sends, and to whom"
    return rank if group is torch.distributed.group.WORLD else torch.distributed.get_group_rank(group, rank)


def send_inplace(
    tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """In the place of `torch.distributed.send`."""
    from airgraph.compat import hcom

    group = group or torch.distributed.group.WORLD
    torch.ops.npu_define._send(tensor, hcom.rank_in(group, dst, group_dst), group.group_name, tag)


def recv_inplace(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> int:
    """In the place of `torch.distributed.recv`."""
    from airgraph.compat import hcom

    group = group or torch.distributed.group.WORLD
    rank = hcom.rank_in(group, src, group_src)
    tensor.copy_(torch.ops.npu_define._recv(tensor, rank, group.group_name, tag))
    return rank if src is None else src


def sizes_of(whole: Tensor, sizes: Sequence[int] | None, group: Any) -> list[int]:
    ranks = torch.distributed.get_world_size(group)
    sizes = list(sizes) if sizes else [whole.shape[0] // ranks] * ranks
    assert len(sizes) == ranks, "Number of tensor splits not equal to group size"
    assert sum(sizes) == whole.shape[0], "Split sizes doesn't match total dim 0 size"
    return sizes


def all_gather_uneven_inplace(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """In the place of `torch_npu.distributed.all_gather_into_tensor_uneven`."""
    from airgraph.compat import hcom

    assert not async_op, "async_op=True cannot be part of a graph"
    group = group or torch.distributed.group.WORLD
    counts = hcom.sizes_of(output, output_split_sizes, group)
    output.copy_(torch.ops.npu_define.allgather_in_tensor_uneven(input, counts, group.group_name))


def reduce_scatter_uneven_inplace(
    output: Tensor,
    input: Tensor,
    input_split_sizes: Sequence[int] | None = None,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """In the place of `torch_npu.distributed.reduce_scatter_tensor_uneven`."""
    from torch.distributed._functional_collectives import REDUCE_OP_TO_STR

    from airgraph.compat import hcom

    assert not async_op, "async_op=True cannot be part of a graph"
    group = group or torch.distributed.group.WORLD
    counts = hcom.sizes_of(input, input_split_sizes, group)
    word = REDUCE_OP_TO_STR[op]
    output.copy_(torch.ops.npu_define.reduce_scatter_tensor_uneven(input, counts, word, group.group_name))


def remaps() -> dict[Any, Callable[..., Any]]:
    """What is called in a program, and what a graph has in its place."""
    from airgraph.compat.torch_npu import distributed as uneven

    return {
        torch.distributed.broadcast: broadcast_inplace,
        torch.distributed.all_to_all: all_to_all_lists_inplace,
        torch.distributed.all_gather: all_gather_lists_inplace,
        torch.distributed.send: send_inplace,
        torch.distributed.recv: recv_inplace,
        uneven.all_gather_into_tensor_uneven: all_gather_uneven_inplace,
        uneven.reduce_scatter_tensor_uneven: reduce_scatter_uneven_inplace,
    }


BEFORE: dict[Any, Any] = {}  # PyTorch's own entries


def remap() -> None:
    """Dynamo looks these up by name in PyTorch's own module, so they are put there."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import _functional_collectives as collectives

    known = collectives.traceable_collective_remaps
    for called, function in remaps().items():
        setattr(collectives, function.__name__, function)
        if known.get(called) is not function:
            BEFORE[called] = known.get(called)
        known[called] = function


def unmap() -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed import _functional_collectives as collectives

    for called, function in remaps().items():
        if vars(collectives).pop(function.__name__, None) is None:
            continue
        before = BEFORE.pop(called, None)
        if before is None:
            collectives.traceable_collective_remaps.pop(called, None)
        else:
            collectives.traceable_collective_remaps[called] = before


register()
