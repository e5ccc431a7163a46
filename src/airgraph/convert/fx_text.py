"""FX nodes as dumps and errors show them.

addmm: torch.float32[100, 64]npu:0 = torch.ops.aten.addmm.default(primals_2: torch.float32[64]npu:0, …)
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from airgraph.convert.names import module_path
from airgraph.ir.graph import Note
from airgraph.torch_types import SYMBOLIC

EMULATION = f'"{Path(__file__).parents[1] / "compat"}'


def note_of(node: torch.fx.Node) -> Note:
    return Note(source_line(node), node_code(node), module_path(node.meta))


def source_line(node: torch.fx.Node) -> str | None:
    """`"model.py", line 24, in forward    x = self.linear1(x)`: the innermost frame of the user's stack, where functions of
    the emulation (a scope, a print) are not his.

    Python 3.11 marks the expression with carets under the line; they mean nothing on one line and are dropped.
    """
    return innermost(node.stack_trace) if node.stack_trace else None


@lru_cache(512)  # equal layers have equal traces
def innermost(trace: str) -> str:
    _, *frames = re.split(r"(?:^|\s)File ", trace)  # a trace of one frame may begin with the word
    frame = next((f for f in reversed(frames) if not f.startswith(EMULATION)), (frames or [trace])[-1])
    lines = [line for line in frame.split("\n") if not re.fullmatch(r"[ ~^]*[~^][ ~^]*", line)]
    return "".join(lines).rstrip()


def node_code(node: torch.fx.Node) -> str:
    args = [argument(a) for a in node.args] + [f"{k}={argument(v)}" for k, v in node.kwargs.items()]
    return f"{typed(node)} = {target_text(node.target)}({', '.join(args)})"


def argument(arg: Any) -> str:
    if isinstance(arg, torch.fx.Node):
        return typed(arg)
    if isinstance(arg, list | tuple) and any(isinstance(a, torch.fx.Node) for a in arg):
        return f"[{', '.join(map(argument, arg))}]"
    return str(arg)


def typed(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{node.name}: {value.dtype}[{', '.join(map(str, value.shape))}]{value.device}"
    if isinstance(value, SYMBOLIC):
        return f'{node.name}: "Sym({value})"'
    return node.name


def target_text(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target}"
    module = getattr(target, "__module__", "").lstrip("_")
    return f"{module}.{target.__name__}" if hasattr(target, "__name__") else str(target)
