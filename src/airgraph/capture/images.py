"""Images that are saved for a backward graph, laid out as the kernels of an engine want them: with channels last.

    forward:  y = convolution(x, w)    →    y = convolution(x, w)
              return z, y                   return z, clone(y, memory_format=channels_last)
    backward: relu(y)                       relu(clone(y, memory_format=contiguous_format))

FX traces contiguous results whatever a plan makes of them, and memory that is saved has the strides that FX knows: without
this a plan that computes with channels last would transpose each saved image, and the backward plan would transpose it
back. Within a plan the copies are none: an image lies as it is computed or comes in. (The second one is for FX, whose
strides of gradients must not depend on what is done here.)

The strides of what is saved also tell an engine in which layout to compute, the same in both graphs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
# Whose results lie as their images do, beside those of pointwise ops.
KEEPS_LAYOUT = {
    operator.getitem,
    aten._native_batch_norm_legit_functional.default,
    aten._prelu_kernel.default,
    aten._to_copy.default,
    aten.cat.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.constant_pad_nd.default,
    aten.hardswish.default,
    aten.native_dropout.default,
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
}


@dataclass(frozen=True)
class ImagesLast:
    """Which convolutions an engine computes with channels last."""

    dtypes: tuple[torch.dtype, ...]
    groups: bool


ON_GPU, ON_CPU = ImagesLast(HALVES, groups=False), ImagesLast((torch.float32, *HALVES), groups=True)
IMAGES_LAST = {"cuda": ON_GPU, "cpu": ON_CPU}  # by the type of the device
GROUP_NORMS = {aten.native_group_norm.default, aten.native_group_norm_backward.default}


def save_images_last(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, count: int, layouts: ImagesLast
) -> None:
    """Rewrites both graphs as shown above. `count`: results of the forward graph that are not saved."""
    end = forward.graph.output_node()
    results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    last = images_of(forward.graph, layouts)
    taken = {node.target: node for node in backward.graph.nodes if node.op == "placeholder"}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for i, saved in enumerate(results[count:], count):
        if saved not in last or saved.name not in taken:
            continue
        if saved.meta["val"].is_contiguous(memory_format=torch.channels_last):
            continue
        results[i] = copied(saved, torch.channels_last, end)
        given = taken[saved.name]
        plain = copied(given, torch.contiguous_format, first)
        given.replace_all_uses_with(plain, delete_user_cb=lambda user, plain=plain: user is not plain)
        given.meta = {**given.meta, "val": results[i].meta["val"]}
    end.args = (tuple(results),)


def copied(x: torch.fx.Node, layout: torch.memory_format, before: torch.fx.Node) -> torch.fx.Node:
    with x.graph.inserting_before(before):
        copy = x.graph.call_function(aten.clone.default, (x,), {"memory_format": layout})
    copy.meta = {"val": x.meta["val"].clone(memory_format=layout)}
    return copy


def images_of(graph: torch.fx.Graph, layouts: ImagesLast) -> set[torch.fx.Node]:
    """What is computed with channels last where convolutions are. None in a graph with convolutions in groups, if these are
    faster with channels first, or with group norms, whose rows are no rows of such memory."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.target in GROUP_NORMS:
            return set()
        image = is_image(node)
        if node.target is aten.convolution.default and image and node.meta["val"].dtype in layouts.dtypes:
            if node.args[8] != 1 and not layouts.groups:
                return set()
            found.add(node)
        elif not found.isdisjoint(node.all_input_nodes) and (image or isinstance(node.meta.get("val"), tuple | list)):
            pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
            if pointwise or node.target in KEEPS_LAYOUT:
                found.add(node)
    return found


def is_image(node: torch.fx.Node) -> bool:
    """Four axes, whose sizes are known."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 4 and all(type(s) is int for s in value.shape)
