"""What users call the arguments of a graph: `layers.0.attn.q.weight` and `input`, not `arg0_1`.

Dynamo knows where each input of its graph comes from, torch.export the names of parameters. AOTAutograd gives its graphs
placeholders of its own and says of each which input it is. `tell` follows that back and leaves the name with the
placeholder, under `NAME`.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Mapping, Sequence

import torch

NAME = "airgraph_name"  # the key in a placeholder's `meta`
STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
FRAME = re.compile(r'File "(.+)", line (\d+), in (?:torch_dynamo_resume_in_)?forward(?:_at_\d+)?\b')


def names_of(gm: torch.fx.GraphModule) -> list[str]:
    """A name for each placeholder of Dynamo's graph; empty where it says nothing."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        found.append(readable(source.name, stack_of(node.meta)) if source is not None else "")
    return found


def readable(source: str, stack: str = "") -> str:
    """`L['self']._modules['layers']._modules['0']._parameters['weight']` → `layers.0.weight`; `L['x']` → `x`

    `stack` is the trace of where it is used: a `forward` may call its module something else than `self`."""
    text = plain(source)
    is_module = text.startswith(OWN) or (STEP.search(source) and text.startswith(f"{receiver(stack)}."))
    return text.partition(".")[2] if is_module else text


OWN = ("self.", "fn.")  # (Dynamo calls a module of torch's own `fn`)


@functools.lru_cache(maxsize=4096)
def plain(source: str) -> str:
    """`L['self']._modules['layers']` → `self.layers`"""
    text = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", STEP.sub(r".\1", source))
    return re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)


def receiver(stack: str) -> str:
    """What the `forward` that was compiled, the outermost frame, calls its module."""
    found = FRAME.match(stack.lstrip())
    if not found:
        return "self"
    file, line = found[1], int(found[2])
    inside = [(first, name) for first, last, name in forwards(file) if first <= line <= last]
    return max(inside)[1] if inside else "self"


@functools.lru_cache(maxsize=64)
def forwards(file: str) -> list[tuple[int, int, str]]:
    """The first and last line of each `forward` of a file, and the name of its first argument."""
    try:
        nodes = [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    except SyntaxError:  # a cell of a notebook with magic commands
        return []
    methods = (n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "forward" and n.args.args)
    return [(n.lineno, n.end_lineno or n.lineno, n.args.args[0].arg) for n in methods]


def stack_of(meta: Mapping[str, object]) -> str:
    return str(meta.get("stack_trace") or "")


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
    source = str([*stack.values()][-1][0])
    root, _, rest = plain(source).partition(".")
    if source.startswith("L[") and (f"{root}." in OWN or root == receiver(stack_of(meta))):
        return rest
    return plain(source)  # torch.export begins below the root
