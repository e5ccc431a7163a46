"""A call into PyTorch as plain data, so that it can be printed, compared and kept.

    aten.slice(x, 0, 1, s0)   ⇄   inputs [x, s0], args ["%0", 0, 1, "%1"]

"%n" is the n-th input, "@…" an object of PyTorch, a string that begins with one of these (or with a backslash) gets a
backslash in front. Sub-graphs of higher-order ops are kept by name in `graph.modules`.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from airgraph.ir.graph import Graph, Value

PYTHON = {"operator": operator, "math": math, "torch": torch, "builtins": builtins}


def target_name(target: Any, graph: Graph) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", "").lstrip("_")
    name = getattr(target, "__name__", "")
    if name and getattr(PYTHON.get(module), name, None) is target:
        return f"{module}.{name}"
    return keep(target, graph, "function")


def keep(thing: Any, graph: Graph, kind: str) -> str:
    """An object that cannot be written down: kept beside the graph, by name."""
    for name, held in graph.modules.items():
        if held is thing:
            return f"@kept:{name}"
    name = f"{kind}_{len(graph.modules)}"
    graph.modules[name] = thing
    return f"@kept:{name}"


def find_target(name: str, graph: Graph) -> Callable[..., Any]:
    if name.startswith("@kept:"):
        return graph.modules[name[len("@kept:") :]]
    namespace, _, rest = name.partition(".")
    if namespace == "higher_order":
        return getattr(torch.ops.higher_order, rest)
    if namespace in PYTHON:
        return getattr(PYTHON[namespace], rest)
    packet, _, overload = rest.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def encode(arg: Any, inputs: list[Value], graph: Graph) -> Any:
    """An argument (values, numbers, PyTorch objects, nested) as data; the values it uses are added to `inputs`."""
    match arg:
        case Value():
            if arg not in inputs:
                inputs.append(arg)
            return f"%{inputs.index(arg)}"
        case str():
            return "\\" + arg if arg[:1] in ("%", "@", "\\") else arg
        case bool() | int() | float() | None:
            return arg
        case list():
            return [encode(a, inputs, graph) for a in arg]
        case tuple():
            return ["@tuple", *(encode(a, inputs, graph) for a in arg)]
        case dict():
            return {key: encode(value, inputs, graph) for key, value in arg.items()}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return f"@{arg}"
        case torch.device():
            return f"@device:{arg}"
        case torch._ops.OpOverload():
            return f"@op:{arg}"
        case slice():
            return ["@slice", *(encode(a, inputs, graph) for a in (arg.start, arg.stop, arg.step))]
        case complex():
            return f"@complex:{arg.real!r}:{arg.imag!r}"
    return keep(arg, graph, "object")


def decode(data: Any, inputs: Sequence[Any], graph: Graph, device: Callable[[torch.device], torch.device]) -> Any:
    """The argument again, with `inputs` in place of values and devices mapped to where the work is done."""
    match data:
        case str() if data.startswith("%"):
            return inputs[int(data[1:])]
        case str() if data.startswith("\\"):
            return data[1:]
        case str() if data.startswith("@"):
            return decode_object(data[1:], graph, device)
        case ["@slice", *ends]:
            return slice(*(decode(e, inputs, graph, device) for e in ends))
        case ["@tuple", *items]:
            return tuple(decode(i, inputs, graph, device) for i in items)
        case list():
            return [decode(d, inputs, graph, device) for d in data]
        case dict():
            return {key: decode(value, inputs, graph, device) for key, value in data.items()}
    return data


def decoder(data: Any, graph: Graph, device: Callable[[torch.device], torch.device]) -> Callable[[Sequence[Any]], Any]:
    """`decode` for many calls: what is the same for all inputs is decoded now."""
    if not reads_inputs(data):
        value = decode(data, (), graph, device)
        return lambda inputs: value
    match data:
        case str():
            return operator.itemgetter(int(data[1:]))
        case ["@slice", *ends]:
            items = decoder(ends, graph, device)
            return lambda inputs: slice(*items(inputs))
        case ["@tuple", *given]:
            items = decoder(given, graph, device)
            return lambda inputs: tuple(items(inputs))
        case dict():
            names, items = list(data), decoder(list(data.values()), graph, device)
            return lambda inputs: dict(zip(names, items(inputs)))
    fixed = [None if reads_inputs(d) else decode(d, (), graph, device) for d in data]
    holes = [(i, decoder(d, graph, device)) for i, d in enumerate(data) if reads_inputs(d)]

    def filled(inputs: Sequence[Any]) -> list[Any]:
        found = fixed.copy()
        for i, hole in holes:
            found[i] = hole(inputs)
        return found

    return filled


def reads_inputs(data: Any) -> bool:
    if isinstance(data, str):
        return data.startswith("%")
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return any(map(reads_inputs, items))


def decode_object(text: str, graph: Graph, device: Callable[[torch.device], torch.device]) -> Any:
    kind, _, rest = text.partition(":")
    match kind:
        case "kept":
            return graph.modules[rest]
        case "device":
            return device(torch.device(rest))
        case "op":
            return find_target(rest, graph)
        case "complex":
            real, _, imag = rest.partition(":")
            return complex(float(real), float(imag))
    return getattr(torch, text.removeprefix("torch."))
