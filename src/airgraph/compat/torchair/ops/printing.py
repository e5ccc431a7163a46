"""`torchair.ops.npu_print`: a print that is part of the graph.

    torchair.ops.npu_print("x =", x, summarize_size=2)        x = [[1 2 ... 7 8] …]

It is an op, so it runs each time the graph runs, in its place among the others; in a graph it becomes StringFormat and
PrintV2. Outside torch.compile it prints at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.convert.registry import REGISTRY
from airgraph.engine.printing import format_string
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

PLACEHOLDER = "{}"

torch.library.define("air::print", "(Tensor[] x, str template, int summarize_size) -> ()")


@torch.library.impl("air::print", ("CPU", "CUDA"))
def print_tensors(x: Sequence[torch.Tensor], template: str, summarize_size: int) -> None:
    print(format_string(list(x), template, PLACEHOLDER, summarize_size), flush=True)


@torch.library.register_fake("air::print")
def _(x: Sequence[torch.Tensor], template: str, summarize_size: int) -> None:
    return None


torch.fx.node.has_side_effect(torch.ops.air.print.default)


def convert_print(x: list[Value], template: str, summarize_size: int) -> None:
    """print(Tensor[] x, str template, int summarize_size) -> ()"""
    shown = [ge.Cast(v, dst_type=int(DataType.DT_FLOAT)) if v.dtype == DataType.DT_BF16 else v for v in x]
    text = ge.StringFormat(shown, template=template, placeholder=PLACEHOLDER, summarize=summarize_size)
    ge.PrintV2(text, output_stream="stdout")


REGISTRY.register(torch.ops.air.print.default, convert_print)


def npu_print(*args: Any, summarize_size: int = 3, tensor_detail: bool = False) -> None:
    """Print tensors and plain values, separated by blanks, when the graph reaches this place.

    `summarize_size`: how many elements at either end of a dimension are shown; -1 shows all.
    `tensor_detail`: `tensor([1 2 3], shape=[3], dtype=torch.int64)` instead of the elements alone.
    """
    check_print(args, summarize_size, tensor_detail)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    torch.ops.air.print(tensors, " ".join(piece(a, tensor_detail) for a in args), summarize_size)


def check_print(args: Sequence[Any], summarize_size: int = 3, tensor_detail: bool = False) -> None:
    if type(summarize_size) is not int or (summarize_size != -1 and summarize_size < 1):
        raise ValueError(f"summarize_size must be -1 or a positive int, got {summarize_size!r}")
    if not isinstance(tensor_detail, bool):
        raise TypeError(f"tensor_detail must be a bool, got {type(tensor_detail).__name__}")
    if not any(isinstance(a, torch.Tensor) for a in args):
        raise ValueError("npu_print needs at least one tensor")
    for arg in args:
        if not isinstance(arg, torch.Tensor | str | bool | int | float):
            raise TypeError(f"npu_print takes tensors, strings, bools, ints and floats, got {type(arg).__name__}")


def piece(arg: Any, detail: bool) -> str:
    if isinstance(arg, torch.Tensor):
        shape = ", ".join(map(str, arg.shape))
        return f"tensor({PLACEHOLDER}, shape=[{shape}], dtype={arg.dtype})" if detail else PLACEHOLDER
    return str(arg)
