"""Attention that PyTorch wrote out, as PyTorch's flash kernel.

    q32, k32, v32 = float32(q, k, v)
    bmm(_safe_softmax(bmm(q32 · √s, k32ᵀ · √s) + mask), v32)    →    _scaled_dot_product_flash_attention(q, k, v)

F.scaled_dot_product_attention of halves is written out so where no fused kernel takes the mask: one that is expanded along
the keys, say. If the graph makes that mask by itself and it hides nothing, as transformers' models make one for inputs
without padding, the flash kernel computes the same. Only in inference: a backward graph reads the probabilities.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
MOVES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default}
HALVES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # what the flash kernel takes
LARGEST_MASK = 1 << 26  # elements that are computed to see whether they hide anything


@dataclass(frozen=True)
class Found:
    q: Node
    k: Node
    v: Node
    scale: float
    out: Node  # the result, in q's type again


def flash_attention(gm: GraphModule, device: str = "cuda") -> int:
    """Replaces what it finds on a kind of device; gives how many it were."""
    softmaxes = gm.graph.find_nodes(op="call_function", target=aten._safe_softmax.default)
    here = [node for node in softmaxes if node.meta["val"].device.type == device]
    found = [attention for node in here if (attention := attention_around(node)) is not None]
    for attention in found:
        replace(gm.graph, attention)
    if found:
        gm.graph.eliminate_dead_code()
    return len(found)


def replace(graph: Graph, found: Found) -> None:
    values = [n.meta["val"] for n in (found.q, found.k, found.v)]
    flash = aten._scaled_dot_product_flash_attention.default
    with graph.inserting_before(found.out):
        made = graph.call_function(flash, (found.q, found.k, found.v), {"scale": found.scale})
        first = graph.call_function(operator.getitem, (made, 0))
        copy = graph.call_function(aten.clone.default, (first,), {"memory_format": torch.contiguous_format})
    with values[0].fake_mode:
        made.meta["val"] = flash(*values, scale=found.scale)
    first.meta["val"] = made.meta["val"][0]
    copy.meta = dict(found.out.meta)
    found.out.replace_all_uses_with(copy)


def attention_around(softmax: Node) -> Found | None:
    if softmax.meta["val"].ndim != 4 or softmax.args[1] not in (-1, 3) or len(softmax.args) > 2:
        return None
    scores = unmasked(softmax.args[0])
    product = only_reader(softmax)
    if scores is None or product is None or behind(product.args[0]) is not softmax:
        return None
    (q, scale_q), (k, scale_k) = scaled(scores.args[0]), scaled(scores.args[1])
    if k is None or k.target is not aten.transpose.int or {*k.args[1:]} not in ({-2, -1}, {2, 3}):
        return None
    q, k, v = widened(q), widened(k.args[0]), widened(behind(product.args[1]))
    out = only_reader(product, aten._to_copy.default)
    if q is None or k is None or v is None or out is None or not fits(q, k, v, softmax, out):
        return None
    return Found(q, k, v, scale_q * scale_k, out)


def behind(node: Any) -> Any:
    """What a node is a view or a copy of."""
    while isinstance(node, Node) and node.target in MOVES:
        node = node.args[0]
    return node


def only_reader(node: Node, target: Any = aten.bmm.default) -> Node | None:
    """The one node that reads this one, behind views and copies."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in MOVES:
            return node if node.target is target else None
    return None


def unmasked(scores: Any) -> Node | None:
    """The product of queries and keys, where no mask hides any of it."""
    if isinstance(scores, Node) and scores.target is aten.add.Tensor and len(scores.args) == 2 and not scores.kwargs:
        scores, mask = scores.args
        if not isinstance(mask, Node) or not hides_nothing(mask):
            return None
    product = behind(scores)
    return product if isinstance(product, Node) and product.target is aten.bmm.default else None


def scaled(operand: Any) -> tuple[Node | None, float]:
    """A factor of the product without its scale."""
    node = behind(operand)
    if isinstance(node, Node) and node.target is aten.mul.Scalar and isinstance(node.args[1], float | int):
        return node.args[0], float(node.args[1])  # type: ignore[return-value]
    return None, 1.0


def widened(node: Any) -> Node | None:
    """What was converted from half precision to float32."""
    if (
        not isinstance(node, Node)
        or node.target is not aten._to_copy.default
        or node.meta["val"].dtype != torch.float32
    ):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and source.meta["val"].dtype in HALVES else None


def fits(q: Node, k: Node, v: Node, softmax: Node, out: Node) -> bool:
    """The shapes are those of attention without anything repeated, and the flash kernel takes them."""
    a, b, c, y = (n.meta["val"] for n in (q, k, v, out))
    if not all(isinstance(size, int) for t in (a, b, c) for size in t.shape):
        return False
    rows, size, columns = a.shape[2], a.shape[3], b.shape[2]
    same = a.dtype == b.dtype == c.dtype == y.dtype and a.shape == y.shape and b.shape == c.shape
    scores = (*a.shape[:2], rows, columns) == tuple(softmax.meta["val"].shape)
    return (
        same and scores and b.shape[3] == size and size % 8 == 0 and size <= LARGEST_HEAD and rows > 0 and columns > 0
    )


def hides_nothing(mask: Node) -> bool:
    """Every element of what is added to the scores is 0, and the graph makes it from no argument."""
    if mask.meta["val"].numel() > LARGEST_MASK:
        return False
    made_of = ancestors(mask)
    if not all(map(is_constant, made_of)):
        return False
    values: dict[Node, Any] = {}
    with unset_fake_temporarily():
        for node in made_of:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            place = {"device": "cpu"} if "device" in kwargs else {}
            values[node] = node.target(*args, **{**kwargs, **place})  # type: ignore[operator]
        return bool((values[mask] == 0).all())


def ancestors(node: Node) -> list[Node]:
    """The node and all it is computed from, in the order of the graph."""
    found: set[Node] = set()
    open_nodes = [node]
    while open_nodes:
        one = open_nodes.pop()
        if one not in found:
            found.add(one)
            open_nodes += one.all_input_nodes
    return [n for n in node.graph.nodes if n in found]


def is_constant(node: Node) -> bool:
    """One op of PyTorch's on tensors, which draws no random numbers and writes to nothing."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable
