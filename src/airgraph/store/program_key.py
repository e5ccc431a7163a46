"""What a program depends on: the key of its entry in the compilation cache.

    key = program_key(gm, facts)        raises NotKept with the reason where something cannot be written down

The graph stands there as text, one line for each node of FX: the op, its arguments, and what FX knows of the result.
Nodes and symbols are numbered in the order in which they appear, and nothing names a source line or the content of an
argument, so the same model gives the same text in every process, whatever its weights are. A constant that is part of the
graph stands there by the hash of its content, a user's converter by the hash of the file it is in.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from airgraph.convert.names import NAME
from airgraph.convert.outputs import storage_key
from airgraph.convert.registry import Registry
from airgraph.disk_cache import Key
from airgraph.engine.native.llvm.machine import machine
from airgraph.errors import Unsupported
from airgraph.ir.exact import assumptions
from airgraph.source_hash import source_hash
from airgraph.store.model_key import code_digest
from airgraph.torch_types import SYMBOLIC

PLAIN = (bool, int, float, complex, str, type(None))
WORDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
MODULES = {m.__name__ for m in (builtins, math, operator)} | {"_operator"}
LARGEST = 64 << 20  # bytes of a constant


class NotKept(Unsupported):
    """Why a program is not kept in the compilation cache."""


def program_key(text: str, facts: Mapping[str, str]) -> Key:
    """`text`: the graph (graph_text); `facts`: options and whatever else the program depends on, by name."""
    return Key(graph=text, **facts, torch=torch.__version__, sources=source_hash(), **machine())


def graph_text(gm: torch.fx.GraphModule, registry: Registry) -> str:
    return "\n".join(GraphText(registry).lines(gm))


class GraphText:
    """Writes an FX graph as text in which equal programs are equal: symbols and storages are numbered as they are met."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.symbols: dict[Any, Any] = {}  # as they are called in the text
        self.storages: dict[int, int] = {}
        self.known: dict[Any, str] = {}  # expressions
        self.nodes: dict[int, tuple[Any, str]] = {}  # the same by the object: PyTorch simplifies it each time
        self.layouts: dict[tuple[Any, ...], str] = {}  # of tensors of fixed sizes
        self.words: dict[Any, str] = {}  # element types and devices
        self.targets: dict[Any, str] = {}
        self.converters: dict[Any, str] = {}

    def lines(self, gm: torch.fx.GraphModule) -> list[str]:
        names: dict[torch.fx.Node, str] = {}
        found = []
        for node in gm.graph.nodes:
            names[node] = f"%{len(names)}"
            found.append(f"{names[node]} = {self.line(gm, node, names)}")
        return found

    def line(self, gm: torch.fx.GraphModule, node: torch.fx.Node, names: Mapping[torch.fx.Node, str]) -> str:
        value = self.value(node.meta.get("val"))
        match node.op:
            case "placeholder":
                name = node.meta.get(NAME)
                return f"argument {name or ''}: {value}"
            case "get_attr":
                return f"constant {self.constant(gm, str(node.target))}: {value}"
            case "output":
                return f"return {self.shown(node.args, names)}"
            case "call_function":
                words = [self.shown(a, names) for a in node.args]
                words += [f"{key}={self.shown(a, names)}" for key, a in node.kwargs.items()]
                target = self.targets.get(node.target)
                if target is None:
                    target = self.targets[node.target] = self.target(node.target)
                return f"{target}({', '.join(words)}): {value}"
        raise NotKept(f"it has a node of the kind {node.op}")

    # -- what is called -----------------------------------------------------------------------------------------------
    def target(self, target: Any) -> str:
        converter = self.registry.find(target)
        by = self.converter(converter.function) if converter is not None and converter.user else ""
        if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            return f"{target}{by}"
        module = getattr(target, "__module__", None) or ""
        if module in MODULES or module.partition(".")[0] == "torch":
            return f"{module}.{getattr(target, '__qualname__', target)}{by}"
        raise NotKept(f"it calls {target}, a function of the program's own")

    def converter(self, function: Callable[..., Any]) -> str:
        """A user's converter: its name, its code, and the hash of the file it is in."""
        if function not in self.converters:
            plain = inspect.unwrap(function)
            path = inspect.getsourcefile(plain) if inspect.isfunction(plain) else None
            if path is None or not Path(path).is_file():
                raise NotKept(f"the source of the converter {function!r} is not known")
            if plain.__closure__:
                raise NotKept(f"the converter {plain.__qualname__} depends on variables of the function around it")
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            given = (plain.__defaults__, plain.__kwdefaults__)
            # (A file may have several functions of one name: lambdas, `def _`, one inside an `if`.)
            self.converters[function] = f" by {plain.__qualname__} {code_digest(plain.__code__)} {given} {digest}"
        return self.converters[function]

    # -- arguments ----------------------------------------------------------------------------------------------------
    def shown(self, arg: Any, names: Mapping[torch.fx.Node, str]) -> str:
        if type(arg) in PLAIN:
            return repr(arg)
        match arg:
            case torch.fx.Node():
                return names[arg]
            case list() | tuple():
                return f"[{', '.join([self.shown(a, names) for a in arg])}]"
            case dict():
                return f"{{{', '.join([f'{key!r}: {self.shown(a, names)}' for key, a in arg.items()])}}}"
            case slice():
                return f"slice{self.shown((arg.start, arg.stop, arg.step), names)}"
            case torch._ops.OpOverload() | torch._ops.HigherOrderOperator():
                return str(arg)
        if isinstance(arg, WORDS):
            return str(arg)
        if isinstance(arg, SYMBOLIC):
            return self.size(arg)
        raise NotKept(f"an argument is of the type {type(arg).__name__}")

    def constant(self, gm: torch.fx.GraphModule, path: str) -> str:
        value: Any = gm
        for name in path.split("."):
            value = getattr(value, name)
        if isinstance(value, torch.fx.GraphModule):
            return "{" + "; ".join(self.lines(value)) + "}"
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            raise NotKept(f"it has a constant of the type {type(value).__name__}")
        if value.numel() * value.element_size() > LARGEST:
            raise NotKept(f"a constant has {value.numel() * value.element_size()} bytes")
        flat = value.detach().cpu().contiguous().flatten()
        content = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"

    # -- what FX knows ------------------------------------------------------------------------------------------------
    def value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, SYMBOLIC):
            return f"{type(value).__name__} {self.size(value)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join([self.value(v) for v in value])}]"
        return repr(value) if type(value) in PLAIN else type(value).__name__

    def tensor(self, value: torch.Tensor) -> str:
        if value.layout != torch.strided:
            return f"{value.dtype} {self.sizes(value.shape)} {value.device} {value.layout}"
        storage = self.storages.setdefault(storage_key(value), len(self.storages))
        if value._has_symbolic_sizes_strides:
            return self.symbolic(value, storage)
        layout = (value.dtype, value.shape, value.device, value.stride())
        text = self.layouts.get(layout)
        if text is None:
            dtype, shape, device, strides = layout
            text = self.layouts[layout] = f"{dtype} {self.sizes(shape)} {device} {self.sizes(strides)}"
        start = value.storage_offset()
        return f"{text} in {storage}+{start}" if start else f"{text} in {storage}"

    def symbolic(self, value: torch.Tensor, storage: int) -> str:
        head = f"{self.word(value.dtype)} {self.sizes(value.shape)} {self.word(value.device)}"
        start = value.storage_offset()
        where = "" if type(start) is int and start == 0 else f"+{self.size(start)}"
        return f"{head} {self.sizes(value.stride())} in {storage}{where}"

    def word(self, thing: torch.dtype | torch.device) -> str:
        found = self.words.get(thing)
        if found is None:
            found = self.words[thing] = str(thing)
        return found

    def sizes(self, sizes: Sequence[Any]) -> str:
        return f"[{','.join([str(s) if type(s) is int else self.size(s) for s in sizes])}]"

    def size(self, size: Any) -> str:
        """An expression with the symbols numbered; at their first appearance with what is assumed of them."""
        if not isinstance(size, SYMBOLIC):
            return str(size)
        node = size.node
        given = getattr(node, "_expr", node)  # many nodes hold the same expression
        found = self.nodes.get(id(given))
        if found is not None:
            return found[1]
        expr = node.expr
        text = self.expression(expr)
        self.nodes[id(given)] = (given, self.known[expr])
        return text

    def expression(self, expr: Any) -> str:
        if expr not in self.known:
            new = ""
            for symbol in sorted(expr.free_symbols - self.symbols.keys(), key=str):
                assumed = assumptions(symbol)
                self.symbols[symbol] = type(symbol)(f"n{len(self.symbols)}", **assumed)
                new += f" {self.symbols[symbol]}: {' '.join(assumed)};"
            self.known[expr] = str(expr.xreplace(self.symbols))
            return self.known[expr] + new
        return self.known[expr]
