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
the same graph. Constants stand where they are used; one with many elements is a file beside the dump (FileConstant),
named after its contents, so that equal constants share a file and reading the text gives the same name again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from airgraph.errors import AirgraphError, VerifyError
from airgraph.ir import attr as attrs_module
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Input, Node, Value
from airgraph.ir.ops import OPS, Op, row
from airgraph.ir.types import DataType, is_number

HEADER = """# -*- coding: utf-8 -*-
from torch import tensor
from torchair._ge_concrete_graph import ge_apis as ge
from torchair.ge._ge_graph import get_default_ge_graph
"""
SPECIAL = ("Const", "FileConstant", "Data", "NetOutput", "AtenCall", "Clone", "custom_op", "node")
INLINE_LIMIT = 1000  # elements of a constant that is still written inline


# -- printing -------------------------------------------------------------------------------------------------------
def to_py(graph: Graph, files: dict[str, np.ndarray] | None = None, *, notes: bool = True, names: bool = False) -> str:
    """The dump. Constants too large to write inline are put into `files`, by the name the text uses for them.

    `names`: a comment above each input says what users call it. TorchAir's dumps have none.
    """
    lines = [HEADER]
    printed = _Notes(graph, notes)
    for node in graph.nodes:
        if node.op == "Const":
            continue
        if node.op == "NetOutput":
            lines += [*printed.rest(), ""]
        else:
            lines += printed.up_to(node.note)
            lines += [f"# {one_line(graph.names[node.name])}"] if names and node.name in graph.names else []
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
                yield f"\n# File {one_line(note.file)}"
            yield f"## FX Code: {one_line(note.code)}"
        self.done = max(self.done, index + 1)

    def rest(self) -> Iterator[str]:
        return self.up_to(len(self.notes) - 1)


def one_line(text: str) -> str:
    return " ".join(text.splitlines())


def targets(node: Node) -> str:
    if not node.outputs:
        return "_"
    op = row(node)
    first = node.attrs.get("output_names", ("y",))[0] if op is None else op.outputs[0]
    one = isinstance(first, str) and "*" not in first
    names = ", ".join(v.variable for v in node.outputs)
    return names if one and len(node.outputs) == 1 else f"[{names}]"


def call_text(node: Node, files: dict[str, np.ndarray] | None = None) -> str:
    """The right-hand side of one line; also what errors show of a node."""
    op = row(node)
    match node.op:
        case _ if op is None:
            return custom_text(node, files)
        case "Data":
            t = node.output.type
            return (
                f"ge.Data(index={node.attrs['index']}, dtype={int(t.dtype)}, shape={t.printed_shape()}, "
                f'placement="{t.place}", node_name={attr_text(node.name)})'
            )
        case "NetOutput":
            waits = ", ".join(control_name(c) for c in node.control)
            return f"ge.NetOutput({input_text(node.inputs[0], files)}, dependencies=[{waits}])"
        case "Const":
            return const_text(node, files)
        case "AtenCall":
            return aten_text(node, files)
    plain = literals(op, node)
    parts = [input_text(entry, files, plain) for entry in node.inputs]
    parts += [f"{name}={attr_text(value)}" for name, value in node.attrs.items()]
    return f"ge.{node.op}({', '.join(parts + tail(node))})"


def literals(op: Op, node: Node) -> set[Value]:
    """Constants of a node that were written as plain numbers, and that reading would give the same type again."""
    constants = {v for v in node.values() if v.node.op == "Const" and v.node.attrs.get("literal")}

    def bare(entry: Input) -> Any:
        if isinstance(entry, tuple):
            return [bare(v) for v in entry]
        return entry.node.attrs["value"] if entry in constants and entry is not None else entry

    if not constants:
        return constants
    try:
        with ge.building(Graph()):
            again = ge.promote(op, [bare(entry) for entry in node.inputs])
    except VerifyError:
        return set()
    flat = [list(e) if isinstance(e, tuple) else [e] for e in again]
    pairs = zip(node.values(), (v for entry in flat for v in entry if v is not None))
    return {old for old, new in pairs if old in constants and old.type == new.type}


def aten_text(node: Node, files: dict[str, np.ndarray] | None) -> str:
    parts = [input_text(node.inputs[0], files)]
    parts += [f"{name}={attr_text(value)}" for name, value in node.attrs.items() if value or name in ("target", "args")]
    types = [[v.dtype, v.type.printed_shape(), v.type.place] for v in node.outputs]
    return f"ge.AtenCall({', '.join([*parts, f'types={attr_text(types)}', *tail(node)])})"


def custom_text(node: Node, files: dict[str, np.ndarray] | None) -> str:
    given = dict(zip(node.attrs.get("input_names", ()), node.inputs))
    inputs = ", ".join(f"{attr_text(name)}: {input_text(entry, files)}" for name, entry in given.items())
    values = {k: v for k, v in node.attrs.items() if k not in ("input_names", "output_names")}
    attrs = ", ".join(f"{attr_text(name)}: {attr_text(value)}" for name, value in values.items())
    outputs = attr_text(node.attrs.get("output_names", ()))
    parts = [attr_text(node.op), f"inputs={{{inputs}}}", f"outputs={outputs}", f"attrs={{{attrs}}}"]
    return f"ge.custom_op({', '.join(parts + tail(node))})"


def tail(node: Node) -> list[str]:
    """What its scope says of it, what it waits for, its name."""
    parts = [f"marks={attr_text(node.marks)}"] if node.marks else []
    if node.control:
        parts.append(f"dependencies=[{', '.join(control_name(c) for c in node.control)}]")
    return [*parts, f"node_name={attr_text(node.name)}"] if needs_name(node) else parts


def needs_name(node: Node) -> bool:
    """Nodes of several outputs carry no name in TorchAir's dumps; ours do where it is not the one they would get."""
    return len(node.outputs) == 1 or node.name != node.op


def control_name(node: Node) -> str:
    """A node without outputs has no variable; its name stands for it."""
    return node.outputs[0].variable if node.outputs else f"ge.node({attr_text(node.name)})"


def input_text(entry: Input, files: dict[str, np.ndarray] | None, plain: Collection[Value] = ()) -> str:
    if entry is None:
        return "None"
    if isinstance(entry, tuple):
        return f"[{', '.join(input_text(v, files, plain) for v in entry)}]"
    if entry in plain:
        return number_text(entry.node.attrs["value"])
    return const_text(entry.node, files) if entry.node.op == "Const" else entry.variable


def const_text(node: Node, files: dict[str, np.ndarray] | None) -> str:
    value, dtype = node.attrs["value"], node.output.dtype
    if not isinstance(value, np.ndarray):
        return f"ge.Const({number_text(value)}, dtype={int(dtype)})"
    if 0 in value.shape:
        return f"ge.Const([], dtype={int(dtype)}, shape={list(value.shape)})"
    if value.size > INLINE_LIMIT or (dtype.is_float and value.dtype.kind == "u" and dtype != DataType.DT_BF16):
        name = file_name(value)  # also the bits of a float8, for which there are no numbers to write
        if files is not None:
            files[name] = value
        return f'ge.FileConstant("{name}", dtype={int(dtype)})'
    return f"ge.Const({number_text(readable(value, dtype))}, dtype={int(dtype)})"


def file_name(array: np.ndarray) -> str:
    data = np.ascontiguousarray(array)
    digest = hashlib.sha256(f"{data.dtype.str}{data.shape}".encode())
    digest.update(data.tobytes())
    return f"const_{digest.hexdigest()[:16]}.npy"


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
    if isinstance(value, complex):  # repr((-0-1j)) means another number when read
        return f"complex({number_text(value.real)}, {number_text(value.imag)})"
    return attr_text(value) if isinstance(value, str) else repr(value)


def attr_text(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # JSON's escapes are also Python's
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(attr_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{attr_text(k)}: {attr_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, attrs_module.Attr):
        return f"ge.attr.{type(value).__name__}({attr_text(value.value)})"
    if isinstance(value, DataType):
        return str(int(value))
    if is_number(value) or value is None:
        return number_text(value)
    return "-1"  # a symbolic size


# -- reading --------------------------------------------------------------------------------------------------------
def from_py(text: str, folder: str | Path = ".", name: str = "graph") -> Graph:
    """The graph a dump describes. Only the forms that dumps use are understood; nothing is executed."""
    graph = Graph(name)
    reader = _Reader()
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, shown = getattr(error, "lineno", "?"), (getattr(error, "text", None) or "").strip()
        raise VerifyError("this is not Python", where={"line": str(line), "text": shown}) from error
    with ge.building(graph, folder):
        for statement in body:
            reader.read(statement)
    return graph


class _Reader:
    """Reads a graph's text statement by statement, with the builders of `ge`; nothing in it is evaluated."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def read(self, node: ast.stmt) -> None:
        """One line; whatever a builder says against it, the error shows the line."""
        try:
            self.statement(node)
        except AirgraphError as error:
            raise VerifyError(error.what, where={**place(node), **error.where}, hint=error.hint) from error
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise VerifyError(str(error), where=place(node)) from error
        except RecursionError as error:
            raise VerifyError("a line is nested too deeply", where={"line": str(node.lineno)}) from error

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
            for element, value in zip(target.elts, result):
                if not isinstance(element, ast.Name):
                    raise self.refuse(element)
                self.names[element.id] = value
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
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {self.value(k): self.value(v) for k, v in zip(keys, values) if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if is_number(value):
                return -value  # type: ignore[operator]
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))], keywords=[]):
                return float(text)
            case ast.Call(func=ast.Name(id="complex"), args=[real, imag], keywords=[]):
                return complex(self.value(real), self.value(imag))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ge"), attr=name), args=args, keywords=keywords):
                if any(k.arg is None for k in keywords):
                    raise self.refuse(node)
                given = {str(k.arg): self.value(k.value) for k in keywords}
                return self.builder(node, name)(*map(self.value, args), **given)
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="ge"), attr="attr"), attr=kind),
                args=[arg],
                keywords=[],
            ) if kind in attrs_module.KINDS:
                return attrs_module.KINDS[kind](self.value(arg))
        raise self.refuse(node)

    def builder(self, node: ast.AST, name: str) -> Any:
        if name not in OPS and name not in SPECIAL:
            raise self.refuse(node)
        return getattr(ge, name)

    def refuse(self, node: ast.AST) -> VerifyError:
        return VerifyError("this is not a line of a dump", where=place(node))


def place(node: ast.AST) -> dict[str, str]:
    return {"line": str(getattr(node, "lineno", "?")), "text": ast.unparse(node)}


def same_graph(a: Graph, b: Graph) -> bool:
    """Equal but for the notes: the same nodes, names, edges, attributes and constants."""
    return to_py(a, notes=False) == to_py(b, notes=False) and [_types(n) for n in a.nodes if n.op != "Const"] == [
        _types(n) for n in b.nodes if n.op != "Const"
    ]


def _types(node: Node) -> list[tuple[int, list[int]]]:
    return [(int(v.type.dtype), v.type.printed_shape()) for v in node.outputs if isinstance(v, Value)]
