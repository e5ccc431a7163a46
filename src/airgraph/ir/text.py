"""A graph as Python: `to_py` prints it, `from_py` reads it back without executing anything.

    # -*- coding: utf-8 -*-
    from torch import tensor
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge._ge_graph import get_default_ge_graph

    x_0 = ge.Data(index=0, dtype=0, shape=[2, -1], placement="NPU", node_name="x")

    # File "model.py", line 3, in forward    return x * 2
    ## FX Code: mul: torch.float32[2, s0]npu:0 = torch.ops.aten.mul.Tensor(x: torch.float32[2, s0]npu:0, 2)
    Mul_0 = ge.Mul(x_0, ge.Const(2, dtype=0), node_name="Mul")

    _ = ge.NetOutput([Mul_0], dependencies=[])

The text is printed from the graph, so it shows what the passes did, and it runs: executed with our `ge` builders it makes
the same graph. Constants stand where they are used; one with many elements is a file beside the dump (FileConstant).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from airgraph.errors import VerifyError
from airgraph.ir import attr as attrs_module
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Input, Node, Value
from airgraph.ir.ops import OPS
from airgraph.ir.types import DataType

HEADER = """# -*- coding: utf-8 -*-
from torch import tensor
from torchair._ge_concrete_graph import ge_apis as ge
from torchair.ge._ge_graph import get_default_ge_graph
"""
SPECIAL = ("Const", "FileConstant", "Empty", "Data", "NetOutput", "AtenCall", "Clone", "custom_op", "node")
INLINE_LIMIT = 1000  # elements of a constant that is still written inline


# -- printing -------------------------------------------------------------------------------------------------------
def to_py(graph: Graph, files: dict[str, np.ndarray] | None = None, *, notes: bool = True) -> str:
    """The dump. Constants too large to write inline are put into `files`, by the name the text uses for them."""
    lines = [HEADER]
    printed = _Notes(graph, notes)
    for node in graph.nodes:
        if node.op == "Const":
            continue
        if node.op == "NetOutput":
            lines += [*printed.rest(), ""]
        else:
            lines += printed.up_to(node.note)
        lines.append(f"{targets(node)} = {call_text(node, files)}")
    return "\n".join(lines) + "\n"


class _Notes:
    """The `# File` and `## FX Code` lines, each once, in order; a file line only where it differs from all before."""

    def __init__(self, graph: Graph, wanted: bool) -> None:
        self.notes = graph.notes if wanted else []
        self.done = 0
        self.files: set[str] = set()

    def up_to(self, index: int) -> Iterator[str]:
        for note in self.notes[self.done : index + 1]:
            if note.file is not None and note.file not in self.files:
                self.files.add(note.file)
                yield f"\n# File {note.file}"
            yield f"## FX Code: {note.code}"
        self.done = max(self.done, index + 1)

    def rest(self) -> Iterator[str]:
        return self.up_to(len(self.notes) - 1)


def targets(node: Node) -> str:
    op = OPS.get(node.op)
    if not node.outputs:
        return "_"
    several = len(node.outputs) > 1 or (op is not None and "*" in op.outputs[0])
    names = ", ".join(v.variable for v in node.outputs)
    return f"[{names}]" if several else names


def call_text(node: Node, files: dict[str, np.ndarray] | None = None) -> str:
    """The right-hand side of one line; also what errors show of a node."""
    match node.op:
        case "Data":
            t = node.output.type
            return (f"ge.Data(index={node.attrs['index']}, dtype={int(t.dtype)}, shape={t.printed_shape()}, "
                    f'placement="{t.place}", node_name="{node.name}")')  # fmt: skip
        case "NetOutput":
            waits = ", ".join(control_name(c) for c in node.control)
            return f"ge.NetOutput({input_text(node.inputs[0], files)}, dependencies=[{waits}])"
        case "Const":
            return const_text(node, files)
        case "AtenCall":
            return aten_text(node, files)
        case op if op not in OPS:
            return custom_text(node, files)
    parts = [input_text(entry, files) for entry in node.inputs]
    parts += [f"{name}={attr_text(value)}" for name, value in node.attrs.items()]
    return f"ge.{node.op}({', '.join(parts + tail(node))})"


def aten_text(node: Node, files: dict[str, np.ndarray] | None) -> str:
    parts = [input_text(node.inputs[0], files)]
    parts += [f"{name}={attr_text(value)}" for name, value in node.attrs.items() if value or name in ("target", "args")]
    types = [[v.dtype, v.type.printed_shape(), v.type.place] for v in node.outputs]
    return f"ge.AtenCall({', '.join([*parts, f'types={attr_text(types)}', *tail(node)])})"


def custom_text(node: Node, files: dict[str, np.ndarray] | None) -> str:
    given = dict(zip(node.attrs["input_names"], node.inputs))
    inputs = ", ".join(f'"{name}": {input_text(entry, files)}' for name, entry in given.items())
    values = {k: v for k, v in node.attrs.items() if k not in ("input_names", "output_names")}
    attrs = ", ".join(f'"{name}": {value!r}' for name, value in values.items())
    parts = [
        f'"{node.op}"',
        f"inputs={{{inputs}}}",
        f"outputs={list(node.attrs['output_names'])!r}",
        f"attrs={{{attrs}}}",
    ]
    return f"ge.custom_op({', '.join(parts + tail(node))})"


def tail(node: Node) -> list[str]:
    waits = [f"dependencies=[{', '.join(control_name(c) for c in node.control)}]"] if node.control else []
    return [*waits, f'node_name="{node.name}"'] if needs_name(node) else waits


def needs_name(node: Node) -> bool:
    """Nodes of several outputs carry no name in TorchAir's dumps; ours do where it is not the one they would get."""
    return len(node.outputs) == 1 or node.name != node.op


def control_name(node: Node) -> str:
    """A node without outputs has no variable; its name stands for it."""
    return node.outputs[0].variable if node.outputs else f'ge.node("{node.name}")'


def input_text(entry: Input, files: dict[str, np.ndarray] | None) -> str:
    if entry is None:
        return "None"
    if isinstance(entry, tuple):
        return f"[{', '.join(input_text(v, files) for v in entry)}]"
    return const_text(entry.node, files) if entry.node.op == "Const" else entry.variable


def const_text(node: Node, files: dict[str, np.ndarray] | None) -> str:
    value, dtype = node.attrs["value"], int(node.output.dtype)
    if isinstance(value, np.ndarray) and value.size > INLINE_LIMIT:
        name = f"{node.name}.npy"
        if files is not None:
            files[name] = value
        return f'ge.FileConstant("{name}", dtype={dtype})'
    if isinstance(value, np.ndarray):
        if 0 in value.shape:
            return f"ge.Empty({list(value.shape)}, dtype={dtype})"
        return f"ge.Const({number_text(readable(value, node.output.dtype))}, dtype={dtype})"
    return number_text(value) if node.attrs["literal"] else f"ge.Const({number_text(value)}, dtype={dtype})"


def readable(value: np.ndarray, dtype: DataType) -> Any:
    """bfloat16 is kept as its bits (NumPy has no such type); a float32 with the same upper half has the same value."""
    if dtype == DataType.DT_BF16 and value.dtype == np.uint16:
        value = (value.astype(np.uint32) << 16).view(np.float32)
    return value.tolist()


def number_text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(number_text, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def attr_text(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(attr_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{attr_text(k)}: {attr_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, DataType):
        return str(int(value))
    if isinstance(value, bool | int | float | type(None)):
        return number_text(value)
    return "-1"  # a symbolic size


# -- reading --------------------------------------------------------------------------------------------------------
def from_py(text: str, folder: str | Path = ".", name: str = "graph") -> Graph:
    """The graph a dump describes. Only the forms that dumps use are understood; nothing is executed."""
    graph = Graph(name)
    reader = _Reader()
    with ge.building(graph, folder):
        for statement in ast.parse(text).body:
            reader.statement(statement)
    return graph


class _Reader:
    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom | ast.Import):
            return
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            raise self.refuse(node)
        result = self.value(node.value)
        target = node.targets[0]
        if isinstance(target, ast.Name):
            self.names[target.id] = result
        elif isinstance(target, ast.List) and isinstance(result, list) and len(target.elts) == len(result):
            self.names.update({e.id: v for e, v in zip(target.elts, result) if isinstance(e, ast.Name)})
        else:
            raise self.refuse(node)

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                return {self.value(k): self.value(v) for k, v in zip(keys, values) if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):  # complex numbers: (1-2j)
                a, b = self.value(left), self.value(right)
                return a + b if isinstance(op, ast.Add) else a - b
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=text)]):
                return float(text)  # type: ignore[arg-type]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ge"), attr=name), args=args, keywords=keywords):
                return self.builder(node, name)(
                    *map(self.value, args), **{k.arg: self.value(k.value) for k in keywords if k.arg}
                )
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="ge"), attr="attr"), attr=kind), args=[arg]
            ) if kind in attrs_module.KINDS:
                return attrs_module.KINDS[kind](self.value(arg))
        raise self.refuse(node)

    def builder(self, node: ast.AST, name: str) -> Any:
        if name not in OPS and name not in SPECIAL:
            raise self.refuse(node)
        return getattr(ge, name)

    def refuse(self, node: ast.AST) -> VerifyError:
        return VerifyError(
            "this is not a line of a dump", where={"line": f"{getattr(node, 'lineno', '?')}", "text": ast.unparse(node)}
        )


def same_graph(a: Graph, b: Graph) -> bool:
    """Equal but for the notes: the same nodes, names, edges, attributes and constants."""
    return to_py(a, notes=False) == to_py(b, notes=False) and [_types(n) for n in a.nodes if n.op != "Const"] == [
        _types(n) for n in b.nodes if n.op != "Const"
    ]


def _types(node: Node) -> list[tuple[int, list[int]]]:
    return [(int(v.type.dtype), v.type.printed_shape()) for v in node.outputs if isinstance(v, Value)]
