"""How a stored model is called, as data: arguments, results, what aliases what, and what the export took for granted.

data = describe(stored, writer)                       JSON; an attribute of the model in its file
Description(data, reader).contract(...)               and back, checked: a file may hold anything
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from airgraph.errors import VerifyError
from airgraph.ir.boundary import (
    Argument,
    Boundary,
    Fresh,
    Layout,
    Number,
    NumberIn,
    ObjectIn,
    OfInput,
    OfOutput,
    Plain,
    Result,
    TensorIn,
)
from airgraph.ir.exact import DataReader, DataWriter, LazyTable, shown
from airgraph.ir.graph import Graph
from airgraph.ir.types import DataType, TensorType
from airgraph.runtime.loaded import Contract, is_structure, leaf_count

VERSION = 1
PLANNED = b"airgraph plan 3\n"  # begins the bytes of a program that is kept as its plan (planned_program.py)
TAPED = b"airgraph tape 1\n"  # and of one that is kept as its tape as well (taped_program.py)
SPREAD = 64  # places in memory for each element of a weight
NUMBERS = {"int": int, "float": float, "bool": bool}


def torch_functions() -> dict[str, Any]:
    """PyTorch's functions of sizes, by the name they are written with."""
    from torch.utils._sympy import functions

    names = [
        "FloorDiv",
        "ModularIndexing",
        "Where",
        "PythonMod",
        "Mod",
        "CleanDiv",
        "CeilToInt",
        "FloorToInt",
        "CeilDiv",
        "Max",
        "Min",
        "PowByNatural",
        "FloatPow",
        "FloatTrueDiv",
        "IntTrueDiv",
        "TruncToFloat",
        "TruncToInt",
        "RoundToInt",
        "RoundDecimal",
        "ToFloat",
        "Identity",
    ]
    return {f"torch.{name}": getattr(functions, name) for name in names if hasattr(functions, name)}


FUNCTIONS = LazyTable(torch_functions)


@dataclass
class StoredModel:
    """What a file holds. The first arguments of the boundary are the weights, in this order."""

    graph: Graph
    boundary: Boundary
    weights: dict[str, torch.Tensor]
    contract: Contract
    written: list[int] = field(default_factory=list)  # arguments that the graph writes to
    tied: dict[str, str] = field(default_factory=dict)  # other names of a weight → the name it is kept by
    stated: Graph | None = None  # of a file: the graph once more, which no pass changes

    @property
    def device(self) -> str:
        """Where it computes."""
        devices = [getattr(a, "device", "cpu") for a in self.boundary.arguments]
        return next((d for d in devices if d != "cpu"), "cpu")


def layout_refusal(shape: Sequence[int], strides: Sequence[Any]) -> str | None:
    """Why a weight cannot be laid out so again: its elements overlap, or lie far apart. (A dimension of stride 0 has all of
    its elements in one place: that is an expanded tensor.)"""
    steps = sorted((step, size) for step, size in zip(strides, shape) if size > 1)
    reach = 1
    for step, size in steps:
        if not isinstance(step, int) or (step < reach and step != 0):
            return f"of shape {list(shape)} overlaps itself: its strides are {list(strides)}"
        reach += step * (size - 1)
    if reach > SPREAD * max(1, math.prod(shape)) + 2**20:
        return f"of shape {list(shape)} lies in {reach} places: its strides are {list(strides)}"
    return None


def describe(stored: StoredModel, writer: DataWriter) -> dict[str, Any]:
    described = {
        "version": VERSION,
        "torch": torch.__version__,
        "arguments": [argument_data(a, writer) for a in stored.boundary.arguments],
        "results": [result_data(r, writer) for r in stored.boundary.results],
        **contract_data(stored.contract, writer),
        "written": stored.written,
        "tied": stored.tied,
    }
    return {**described, "symbols": writer.symbol_table()}  # last: the rest may have met more of them


def contract_data(contract: Contract, writer: DataWriter) -> dict[str, Any]:
    return {
        "in": contract.in_spec,
        "out": contract.out_spec,
        "numbers": [[place, writer.data(value)] for place, value in contract.numbers],
        "guards": [writer.data(guard) for guard in contract.guards],
        "ranges": [[writer.data(symbol), *ends] for symbol, ends in contract.ranges.items()],
    }


def argument_data(argument: Argument, writer: DataWriter) -> dict[str, Any]:
    match argument:
        case TensorIn(name, _, strides, device):
            return {"tensor": name, "strides": writer.data(list(strides)), "device": device}
        case NumberIn(name, expr, kind):
            return {"number": name, "value": writer.data(expr), "kind": kind.__name__}
    return {"object": argument.name}


def result_data(result: Result, writer: DataWriter) -> dict[str, Any]:
    def layout(part: Layout | None) -> Any:
        return None if part is None else writer.data([list(part.shape), list(part.strides), part.offset])

    match result:
        case Fresh(index, part, device):
            return {"fresh": index, "layout": layout(part), "device": device}
        case OfInput(argument, part, dtype, itself):
            return {"of_input": argument, "layout": layout(part), "dtype": dtype, "itself": itself}
        case OfOutput(index, base, part, dtype, device):
            return {
                "of_output": index,
                "base": writer.data(list(base)),
                "layout": layout(part),
                "dtype": dtype,
                "device": device,
            }
        case Number(expr):
            return {"expr": writer.data(expr)}
    return {"plain": writer.data(result.value)}


class Description:
    """The calling convention out of its data. Anything that has not the expected form is a VerifyError."""

    def __init__(self, data: Mapping[str, Any], reader: DataReader) -> None:
        self.data, self.reader = data, reader

    def get(self, key: str, kind: type, where: Mapping[str, Any] | None = None) -> Any:
        held = self.data if where is None else where
        if not isinstance(held, dict) or not isinstance(held.get(key), kind) or isinstance(held[key], bool):
            raise VerifyError(
                f"{key!r} of its description is {shown(held.get(key) if isinstance(held, dict) else held)}"
            )
        return held[key]

    def index(self, key: str, where: Mapping[str, Any], count: int) -> int:
        found = self.get(key, int, where)
        if not 0 <= found < count:
            raise VerifyError(f"{key!r} of its description is {found}, and there are {count}")
        return int(found)

    def sizes(self, data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise VerifyError(f"{shown(data)} are not sizes")
        return tuple(self.reader.size(d) for d in data)

    def layout(self, data: Any) -> Layout:
        match data:
            case [shape, strides, offset]:
                parts = self.sizes(shape), self.sizes(strides)
                if len(parts[0]) == len(parts[1]):
                    return Layout(*parts, *self.sizes([offset]))
        raise VerifyError(f"{shown(data)} is not a layout")

    def dtype(self, where: Mapping[str, Any]) -> int:
        try:
            return int(DataType(self.get("dtype", int, where)))
        except ValueError as error:
            raise VerifyError(f"there is no element type {where['dtype']}") from error

    def argument(self, data: Any, graph: Graph) -> Argument:
        match data:
            case {"tensor": str(name), "strides": strides, "device": str(device)}:
                type_, steps = graph.node(name).output.type, self.sizes(strides)
                if type_.shape is None or len(type_.shape) != len(steps):
                    raise VerifyError(f"the argument {name} is {type_}, with {len(steps)} strides")
                return TensorIn(name, type_, steps, device)
            case {"number": str(name), "value": value, "kind": str(kind)} if kind in NUMBERS:
                return NumberIn(name, self.reader.known(value), NUMBERS[kind])
            case {"object": str(name)}:
                return ObjectIn(name)
        raise VerifyError(f"{shown(data)} is not an argument")

    def result(self, data: Any, arguments: Sequence[Argument], outputs: int) -> Result:
        match data:
            case {"fresh": int(), "layout": layout, "device": str(device)}:
                part = None if layout is None else self.layout(layout)
                return Fresh(self.index("fresh", data, outputs), part, device)
            case {"of_input": int(), "layout": layout}:
                place = self.index("of_input", data, len(arguments))
                if not isinstance(arguments[place], TensorIn):
                    raise VerifyError(f"a result is a view of argument {place}, which is not a tensor")
                return OfInput(place, self.layout(layout), self.dtype(data), data.get("itself") is True)
            case {"of_output": int(), "base": base, "layout": layout, "device": str(device)}:
                place = self.index("of_output", data, outputs)
                return OfOutput(place, self.sizes(base), self.layout(layout), self.dtype(data), device)
            case {"expr": expr}:
                return Number(self.reader.known(expr))
            case {"plain": value}:
                return Plain(self.reader.value(value))
        raise VerifyError(f"{shown(data)} is not a result")

    def contract(self, leaves: int, results: int) -> Contract:
        in_spec, out_spec = self.data.get("in"), self.data.get("out")
        for spec, count in ((in_spec, leaves), (out_spec, results)):
            if not is_structure(spec) or leaf_count(spec) > count:
                raise VerifyError(f"{shown(spec)} is not a structure of {count} values")
        if leaf_count(in_spec) != leaves:
            raise VerifyError(f"{shown(in_spec)} is not a structure of {leaves} values")
        numbers = [
            (self.index("place", {"place": place}, leaves), self.reader.value(value))
            for place, value in pairs(self.get("numbers", list), 2)
        ]
        guards = [self.expression(data) for data in self.get("guards", list)]
        ranges = {self.expression(symbol): (low, high) for symbol, low, high in pairs(self.get("ranges", list), 3)}
        if not all(end is None or isinstance(end, int) for ends in ranges.values() for end in ends):
            raise VerifyError("a range has an end that is no number")
        return Contract(in_spec, out_spec, numbers, [g for g in guards if g is not True], ranges)

    def expression(self, data: Any) -> Any:
        if not isinstance(data, dict) or "expr" not in data:
            raise VerifyError(f"{shown(data)} is no expression")
        found = self.reader.expression(data["expr"])
        return True if found is True or found == True else found  # noqa: E712  (sympy's true)


def pairs(data: list[Any], length: int) -> list[Any]:
    if not all(isinstance(entry, list) and len(entry) == length for entry in data):
        raise VerifyError(f"{shown(data)} is no list of lists of {length}")
    return data


# -- boundaries -----------------------------------------------------------------------------------------------------
def boundary_data(boundary: Boundary, writer: DataWriter) -> dict[str, Any]:
    return {
        "arguments": [{**argument_data(a, writer), **type_data(a, writer)} for a in boundary.arguments],
        "results": [result_data(r, writer) for r in boundary.results],
        "names": boundary.names,
    }


def type_data(argument: Argument, writer: DataWriter) -> dict[str, Any]:
    if not isinstance(argument, TensorIn):
        return {}
    t = argument.type
    return {"type": [int(t.dtype), None if t.shape is None else writer.data(list(t.shape)), t.place]}


def read_boundary(data: Mapping[str, Any], reader: DataReader, outputs: int) -> Boundary:
    described = Description(data, reader)
    arguments: list[Argument] = []
    for row in data["arguments"]:
        if "tensor" in row:
            dtype, shape, place = row["type"]
            type_ = TensorType(DataType(dtype), None if shape is None else described.sizes(shape), place)
            arguments.append(TensorIn(row["tensor"], type_, described.sizes(row["strides"]), row["device"]))
        else:
            arguments.append(described.argument(row, None))  # type: ignore[arg-type]
    results = [described.result(row, arguments, outputs) for row in data["results"]]
    return Boundary(arguments, results, dict(data["names"]))
