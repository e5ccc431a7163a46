"""What FX knows of a value, in the words of the IR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from airgraph.errors import ConvertError
from airgraph.ir.boundary import Layout
from airgraph.ir.types import DataType, Dim, Place, TensorType, dim
from airgraph.torch_types import GE_TYPES, SYMBOLIC

aten = torch.ops.aten

# TorchAir gives a symbolic float the type float32; Python's floats are doubles, and eager computes with all their digits.
NUMBERS: dict[type, DataType] = {int: DataType.DT_INT64, float: DataType.DT_DOUBLE, bool: DataType.DT_BOOL}


def ge_type(dtype: torch.dtype) -> DataType:
    """The element type; UNDEFINED for one GE has no number for: only PyTorch's own ops can handle such a value."""
    return GE_TYPES.get(dtype, DataType.DT_UNDEFINED)


def place_of(device: torch.device) -> Place:
    return "CPU" if device.type == "cpu" else "NPU"


def size_of(value: Any) -> Dim:
    """An int, or the expression behind a SymInt."""
    return dim(value.node.expr) if isinstance(value, SYMBOLIC) else value


def python_type(value: Any) -> type:
    """int, float or bool: what a symbolic or plain number is in Python."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds.get(type(value), type(value))


def type_of(value: Any) -> TensorType:
    """The type of a fake tensor or of a number."""
    if isinstance(value, torch.Tensor):
        return TensorType(ge_type(value.dtype), tuple(map(size_of, value.shape)), place_of(value.device))
    kind = python_type(value)
    if kind in NUMBERS:
        return TensorType(NUMBERS[kind], (), "CPU")
    return TensorType(DataType.DT_RESOURCE, (), "CPU")


def strides_of(value: torch.Tensor) -> tuple[Dim, ...]:
    if value.layout != torch.strided:
        raise ConvertError(f"a {value.layout} tensor cannot enter or leave a graph", hint="only strided tensors do")
    return tuple(map(size_of, value.stride()))


def layout_of(
    value: torch.Tensor, base: torch.Tensor | None = None, offsets: Mapping[sympy.Symbol, sympy.Expr] = {}
) -> Layout:
    """The layout of a tensor, as a view of `base` if given. (Where `base` itself lies in its storage differs from call to
    call, and Dynamo does not guard on it; so only the distance between the two is kept.)"""
    offset: Dim = 0
    if base is not None:
        here, there = (sympy.sympify(size_of(t.storage_offset())).xreplace(dict(offsets)) for t in (value, base))
        offset = dim(here - there * base.element_size() // value.element_size())
    return Layout(tuple(map(size_of, value.shape)), strides_of(value), offset)


def unbacked_offsets(graph: torch.fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """Where views begin whose start only running can tell. Tracing has a fresh symbol for each, which no value of the
    graph has; here it is computed from the start, as PyTorch's kernels do."""
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for node in graph.nodes:
        for symbol, path in (node.meta.get("unbacked_bindings") or {}).items():
            if node.target not in (aten.slice.Tensor, aten.select.int) or [str(p) for p in path] != [
                ".storage_offset()"
            ]:
                continue
            base = node.args[0].meta["val"]
            axis, start = (size_of(a.meta["val"] if isinstance(a, torch.fx.Node) else a) for a in node.args[1:3])
            size = size_of(base.shape[axis])
            begin = start + sympy.Piecewise((size, start < 0), (0, True))
            if node.target is aten.slice.Tensor:
                begin = sympy.Max(0, sympy.Min(begin, size))
            offset = size_of(base.storage_offset()) + begin * size_of(base.stride(axis))
            found[symbol] = sympy.sympify(offset).xreplace(found)
    return found
