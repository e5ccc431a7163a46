"""Attention masks that hide nothing, taken out before PyTorch chooses a kernel.

    mask = (arange(n) >= 0)[None, None, :, None].expand(b, 1, n, n)
    scaled_dot_product_attention(q, k, v, attn_mask=mask)    →    scaled_dot_product_attention(q, k, v)

transformers' models make such a mask for inputs without padding while they are traced. None of PyTorch's fused kernels
takes one that is expanded along the keys, so attention would be written out: products and a softmax of every score in
float32, which training would keep for the backward pass as well. Of a mask only the bounds of its elements are known, which
hold whatever the sizes are. They are known where the graph makes it of constants, and nothing writes to what it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Bounds = tuple[float, float]  # of all elements; infinite: none is known
FALSE, TRUE, EITHER = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)
ATTENTION = "scaled_dot_product_attention"
HALVES = (torch.float16, torch.bfloat16)  # what the flash kernel takes
# Its arguments, by name or by place.
QUERY, VALUE, MASK, DROPOUT, CAUSAL = ("query", 0), ("value", 2), ("attn_mask", 3), ("dropout_p", 4), ("is_causal", 5)
# Other elements than those of the first argument are in no result of these.
MOVES = {"getitem", "expand", "expand_as", "unsqueeze", "squeeze", "view", "reshape", "flatten", "transpose", "permute"}
MOVES |= {"slice", "select", "alias", "detach", "clone", "contiguous", "repeat", "broadcast_to"}
CASTS = {"to", "type", "_to_copy", "bool", "float", "half", "bfloat16", "long", "int"}
FILLED = {"ones": 1.0, "ones_like": 1.0, "new_ones": 1.0, "zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0}


def drop_empty_masks(gm: GraphModule, device: str = "cuda") -> int:
    """Changes a graph of Dynamo's or torch.export's; gives how many masks it were."""
    found = calls_with_empty_masks(gm, device)
    for node in found:
        name, place = MASK
        if name in node.kwargs:
            node.kwargs = {**node.kwargs, name: None}
        else:
            node.args = (*node.args[:place], None, *node.args[place + 1 :])
    if found:
        gm.recompile()
    return len(found)


def calls_with_empty_masks(gm: GraphModule, device: str = "cuda") -> list[Node]:
    known: dict[Node, Bounds | None] = {}
    return [node for node in gm.graph.nodes if name_of(node) == ATTENTION and is_unmasked(node, device, known)]


def is_unmasked(node: Node, device: str, known: dict[Node, Bounds | None]) -> bool:
    """Its mask may go: nothing else depends on there being one."""
    mask = argument(node, MASK)
    tensors = [value(x) for x in (argument(node, QUERY), argument(node, VALUE), mask, node)]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return False
    q, v, made, result = tensors
    if q.device.type != device or q.dtype not in HALVES:
        return False
    if argument(node, DROPOUT) not in (None, 0.0) or argument(node, CAUSAL) not in (None, False):
        return False
    same = (*q.shape[:-1], v.shape[-1])
    if result.ndim != len(same) or not all(statically_known_true(a == b) for a, b in zip(result.shape, same)):
        return False  # a mask of a larger batch
    return bounds(mask, known) == (TRUE if made.dtype == torch.bool else FALSE) and unwritten(mask)


def argument(node: Node, which: tuple[str, int]) -> Any:
    name, place = which
    return node.kwargs[name] if name in node.kwargs else node.args[place] if len(node.args) > place else None


def value(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None


def name_of(node: Node) -> str:
    """What the op is called, by whichever of Python's, PyTorch's or ATen's functions."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", ""))


def unwritten(mask: Node) -> bool:
    """Everybody who reads the mask, or a tensor it is made of, is known to change nothing."""
    seen, waiting = {mask}, [mask]
    while waiting:
        node = waiting.pop()
        if any(name_of(user) not in PURE or "out" in user.kwargs for user in node.users):
            return False
        views = [user for user in node.users if name_of(user) in MOVES | CASTS]
        tensors = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
        waiting += [n for n in (*views, *tensors) if n not in seen]
        seen.update(waiting)
    return True


# -- bounds -------------------------------------------------------------------------------------------------------------
def bounds(x: Any, known: dict[Node, Bounds | None]) -> Bounds | None:
    """Between which numbers all elements of a node are, or a constant is; None where that cannot be told."""
    if isinstance(x, bool | int | float):
        return None if math.isnan(x) else (float(x), float(x))
    if not isinstance(x, Node):
        return None
    if x not in known:
        found = node_bounds(x, known)
        known[x] = None if found is None or any(map(math.isnan, found)) else cast(found, value(x))
    return known[x]


def node_bounds(node: Node, known: dict[Node, Bounds | None]) -> Bounds | None:
    name = name_of(node)
    if name in FILLED:
        return FILLED[name], FILLED[name]
    match name:
        case "arange":
            return arange(node)
        case "full":
            return bounds(node.args[1] if len(node.args) > 1 else node.kwargs.get("fill_value"), known)
        case "scalar_tensor" | "tensor":
            return bounds(node.args[0], known) if node.args else None
    given = [bounds(a, known) for a in node.args]
    if not given or given[0] is None:
        return None
    if name in MOVES | CASTS:
        return given[0]
    rule, count = RULES.get(name, (None, 0))
    if rule is None or len(given) != count or None in given or node.kwargs:
        return None
    return rule(*given)


def arange(node: Node) -> Bounds | None:
    """Whole numbers from the first on; where they end does not matter."""
    args: tuple[Any, ...] = node.args
    if not args or {"start", "end", "step"} & node.kwargs.keys():
        return None
    start, step = args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1
    whole = type(start) is int and type(step) is int and step > 0
    return (float(start), math.inf) if whole else None


def cast(x: Bounds, made: Any) -> Bounds | None:
    """As elements of this type. Rounding keeps the order, and leaves small whole numbers as they are; what is narrower than
    int64 may wrap around."""
    dtype = getattr(made, "dtype", None)
    if dtype == torch.bool:
        return FALSE if x == FALSE else TRUE if x[0] > 0 or x[1] < 0 else EITHER
    exact = all(math.isinf(end) or (end.is_integer() and abs(end) <= 128) for end in x)
    wide = dtype is not None and (dtype.is_floating_point or dtype == torch.int64)
    return x if exact and wide else None


def at_least(a: Bounds, b: Bounds) -> Bounds:
    return TRUE if a[0] >= b[1] else FALSE if a[1] < b[0] else EITHER


def above(a: Bounds, b: Bounds) -> Bounds:
    return TRUE if a[0] > b[1] else FALSE if a[1] <= b[0] else EITHER


def inverted(a: Bounds) -> Bounds | None:
    return (1 - a[1], 1 - a[0]) if is_truth(a) else None


def both(a: Bounds, b: Bounds) -> Bounds | None:
    return (min(a[0], b[0]), min(a[1], b[1])) if is_truth(a) and is_truth(b) else None


def either(a: Bounds, b: Bounds) -> Bounds | None:
    return (max(a[0], b[0]), max(a[1], b[1])) if is_truth(a) and is_truth(b) else None


def is_truth(a: Bounds) -> bool:
    """A truth value, not bits of a larger number."""
    return a in (FALSE, TRUE, EITHER)


def chosen(where: Bounds, a: Bounds, b: Bounds) -> Bounds:
    return a if where == TRUE else b if where == FALSE else (min(a[0], b[0]), max(a[1], b[1]))


Rule = tuple[Callable[..., Bounds | None], int]
RULES: dict[str, Rule] = {
    "add": (lambda a, b: (a[0] + b[0], a[1] + b[1]), 2),
    "sub": (lambda a, b: (a[0] - b[1], a[1] - b[0]), 2),
    "ge": (at_least, 2),
    "gt": (above, 2),
    "le": (lambda a, b: at_least(b, a), 2),
    "lt": (lambda a, b: above(b, a), 2),
    "where": (chosen, 3),
    "masked_fill": (lambda x, where, fill: chosen(where, fill, x), 3),
    **dict.fromkeys(("and_", "bitwise_and", "logical_and"), (both, 2)),
    **dict.fromkeys(("or_", "bitwise_or", "logical_or"), (either, 2)),
    **dict.fromkeys(("invert", "bitwise_not", "logical_not"), (inverted, 1)),
}
PURE = {ATTENTION, "arange", "full", "size", "dim", *FILLED, *MOVES, *CASTS, *RULES}
