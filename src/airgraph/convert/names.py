"""What users call the arguments of a graph: `layers.0.attn.q.weight` and `input`, not `arg0_1`.

Dynamo knows where each input of its graph comes from, torch.export the names of parameters. AOTAutograd gives its graphs
placeholders of its own and says of each which input it is. `tell` follows that back and leaves the name with the
placeholder, under `NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

NAME = "airgraph_name"  # the key in a placeholder's `meta`
STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def names_of(gm: torch.fx.GraphModule) -> list[str]:
    """A name for each placeholder of Dynamo's graph; empty where it says nothing."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        found.append(readable(source.name) if source is not None else "")
    return found


def readable(source: str) -> str:
    """`L['self']._modules['layers']._modules['0']._parameters['weight']` → `layers.0.weight`; `L['x']` → `x`"""
    text = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", STEP.sub(r".\1", source))
    text = re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)
    return text.removeprefix("self.").removeprefix("fn.")  # (Dynamo calls a module of torch's own `fn`)


def tell(graph: torch.fx.GraphModule, names: Sequence[str]) -> None:
    """Leaves the names of the inputs of a traced module with the placeholders of a graph AOTAutograd made of it."""
    for node in graph.graph.find_nodes(op="placeholder"):
        index = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(index, int) and index < len(names) and names[index]:
            node.meta[NAME] = names[index]


def module_path(meta: Mapping[str, object]) -> str:
    """The path of the module a node comes from, `layers.0.attn`; the forward's for a node of the backward."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return ""
    path = readable(str([*stack.values()][-1][0]))
    return "" if path in ("self", "fn") else path
