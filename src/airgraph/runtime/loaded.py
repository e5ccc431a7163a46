"""A model that was read from a file: called like the module it was exported from.

    model = airgraph.load_export("export_file/export.air")
    y = model(x)
    model.weights["linear.weight"]      its parameters and buffers; what the graph writes to them stays

Arguments are checked against what the export took for granted: structure, types, sizes, numbers that became part of the
graph, and what PyTorch assumed of symbolic sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from airgraph.engine.strides import copy_strided, loses_values, same_layout
from airgraph.errors import AirgraphError, BindError
from airgraph.ir.boundary import Argument, Boundary, NumberIn, TensorIn, symbol_sources
from airgraph.ir.symbols import evaluate
from airgraph.torch_types import TORCH_TYPES, tensor_text, weights_text

LEAF = "*"
PLAIN = (torch.Tensor, int, float, bool, str, type(None))  # no containers
CACHED = 1024  # combinations of sizes that are known to be right


class Record(dict[str, Any]):
    """Stands for a result whose class is the exporting program's own: `r.logits`, `r["logits"]` and `r[0]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this result has {', '.join(self)}, not {name!r}") from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)


# -- structures -----------------------------------------------------------------------------------------------------
def structure(spec: Any) -> Any:
    """What a tree of tuples, lists, dictionaries and other containers looks like, as plain data."""
    if spec.is_leaf():
        return LEAF
    below = [structure(child) for child in children(spec)]
    if spec.type in (tuple, list):
        return [spec.type.__name__, *below]
    if spec.type in (dict, OrderedDict):
        return ["dict", list(spec.context), *below]
    named = spec.context if isinstance(spec.context, type) else spec.type  # a namedtuple's class is its context
    return [f"{named.__module__}.{named.__qualname__}", keys_of(spec), *below]


def children(spec: Any) -> list[Any]:
    return list(spec.children()) if hasattr(spec, "children") else list(spec.children_specs)


def keys_of(spec: Any) -> list[str]:
    """The names of the parts of a class that is registered with pytree; its numbers where it has no names."""
    names = getattr(spec.context, "_fields", spec.context)
    count = len(children(spec))
    if isinstance(names, list | tuple) and len(names) == count and all(isinstance(n, str) for n in names):
        return list(names)
    return [str(i) for i in range(count)]


def is_structure(data: Any, depth: int = 0) -> bool:
    """It is one that `rebuilt` understands."""
    match data:
        case "*":
            return True
        case ["tuple" | "list", *below]:
            pass
        case [str(), list(keys), *below] if len(keys) == len(below):
            if not all(isinstance(k, str | int | float | bool | None) for k in keys):
                return False
        case _:
            return False
    return depth < 50 and all(is_structure(part, depth + 1) for part in below)


def leaf_count(data: Any) -> int:
    if data == LEAF:
        return 1
    return sum(leaf_count(part) for part in (data[1:] if data[0] in ("tuple", "list") else data[2:]))


def rebuilt(data: Any, leaves: Iterator[Any]) -> Any:
    """The tree again. No class is looked up by name: one of the exporting program's own becomes a Record."""
    if data == LEAF:
        return next(leaves)
    kind = data[0]
    if kind in ("tuple", "list"):
        parts = [rebuilt(part, leaves) for part in data[1:]]
        return tuple(parts) if kind == "tuple" else parts
    pairs = {key: rebuilt(part, leaves) for key, part in zip(data[1], data[2:])}
    return pairs if kind == "dict" else Record(pairs)


def reordered(kwargs: Mapping[str, Any], wanted: Any) -> dict[str, Any]:
    """Arguments by name may come in any order."""
    names = wanted[2][1] if len(wanted) == 3 and wanted[2][0] == "dict" else []
    return {n: kwargs[n] for n in names} if set(names) == kwargs.keys() else dict(kwargs)


# -- the model ------------------------------------------------------------------------------------------------------
@dataclass
class Contract:
    """What calls must agree to: the structures that come in and go out, and what the export took for granted."""

    in_spec: Any
    out_spec: Any
    numbers: list[tuple[int, Any]] = field(default_factory=list)  # (leaf, value): arguments that are part of the graph
    guards: list[Any] = field(default_factory=list)  # expressions that must be true
    ranges: dict[Any, tuple[int | None, int | None]] = field(default_factory=dict)


def free_symbols(argument: Argument) -> set[Any]:
    parts = [argument.expr] if isinstance(argument, NumberIn) else []
    if isinstance(argument, TensorIn):
        parts = [*(argument.type.shape or ()), *argument.strides]
    return {symbol for part in parts for symbol in getattr(part, "free_symbols", ())}


def argument_text(argument: Argument) -> str:
    """`float32[3, s0]` of a tensor, `int` of a number."""
    match argument:
        case TensorIn(_, type):
            return tensor_text(TORCH_TYPES[type.dtype], type.shape or ())
        case NumberIn(_, _, kind):
            return kind.__name__
    return "object"


def may_be_zero(stride: Any) -> bool:
    return stride == 0 if isinstance(stride, int) else not stride.is_nonzero


def zeros_for(argument: Argument, symbols: Mapping[Any, int]) -> Any:
    match argument:
        case TensorIn(_, type, strides, device):
            shape, steps = evaluate(type.shape or (), symbols), evaluate(strides, symbols)
            span = 1 + sum((n - 1) * s for n, s in zip(shape, steps)) if 0 not in shape else 0
            return torch.zeros(span, dtype=TORCH_TYPES[type.dtype], device=device).as_strided(shape, steps)
        case NumberIn(_, expr, kind):
            return kind(evaluate(expr, symbols))
    return None


class LoadedModel:
    """`by_memory`: arguments of which more than the values counts, so that they must lie as the exported one did.
    `rehearse` raises for sizes at which the graph is not what its file states."""

    def __init__(
        self,
        name: str,
        contract: Contract,
        boundary: Boundary,
        weights: dict[str, torch.Tensor],
        written: Sequence[int],
        by_memory: Collection[int],
        run: Callable[[list[Any]], list[Any]],
        rehearse: Callable[[Mapping[Any, Any]], None] | None = None,
    ) -> None:
        self.name = name
        self.contract = contract
        self.weights = weights
        self.run = run
        self.first = list(weights.values())
        self.arguments = boundary.arguments[len(weights) :]
        names = [boundary.names.get(argument.name, "") for argument in self.arguments]
        self.names = [name if name.isprintable() else ascii(name) for name in names]  # as the user knows them
        self.written = tuple(written)
        tensors = [(i, a) for i, a in enumerate(boundary.arguments) if isinstance(a, TensorIn)]
        self.laid = [(i, a) for i, a in tensors if i in by_memory or any(map(may_be_zero, a.strides))]
        known = {place for place, _ in contract.numbers}  # their types, too
        self.kinds = [(i, a.kind) for i, a in enumerate(self.arguments) if isinstance(a, NumberIn) and i not in known]
        self.rehearse = rehearse
        self.live: Callable[[], list[torch.Tensor]] | None = None  # where the weights are a module's: as they are now
        self.checks = bool(contract.guards or contract.ranges or rehearse)
        self.seen: set[tuple[Any, ...]] = set()
        count = leaf_count(contract.in_spec)
        self.flat = contract.in_spec == ["tuple", ["tuple", *[LEAF] * count], ["dict", []]]  # arguments in a row

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}{self.signature()}; {weights_text(self.first)})"

    def signature(self) -> str:
        """What it was exported for: `(x: float32[3, s0], scale: 2)`."""
        fixed = {place: repr(value) for place, value in self.contract.numbers}
        texts = [fixed[i] if i in fixed else argument_text(argument) for i, argument in enumerate(self.arguments)]
        return f"({', '.join(f'{name}: {text}' if name else text for name, text in zip(self.names, texts))})"

    def label(self, place: int) -> str:
        """An argument by the user's name where that is known."""
        return f"argument {self.names[place]!r}" if self.names[place] else f"argument {place} of {self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return rebuilt(self.contract.out_spec, iter(self.results(self.flatten(args, kwargs))))

    def results(self, leaves: Sequence[Any]) -> list[Any]:
        """Of arguments in a row."""
        self.check(leaves)
        given = [*(self.live() if self.live else self.first), *leaves]
        changed = [given[i] for i in self.written]
        with torch.no_grad():
            copies = self.lay_out(given)
            results = self.run(given)
            for original, copy in copies:
                original.copy_(copy)
        if changed:
            torch.autograd.graph.increment_version(changed)
        return results

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Runs it at these sizes, by the names of their symbols, with zeros as arguments. Twice, since a program of a GPU
        is captured at its second call. Buffers are as before."""
        spoken = {s for a in self.arguments for s in free_symbols(a)}
        symbols = {symbol: sizes[str(symbol)] for symbol in spoken if str(symbol) in sizes}
        self.check_symbols(symbols)
        try:
            leaves = [zeros_for(argument, symbols) for argument in self.arguments]
        except RuntimeError as error:
            shown = ", ".join(f"{symbol} = {size}" for symbol, size in symbols.items())
            raise BindError(f"{self.name} cannot be prepared for {shown}: {str(error).splitlines()[0]}") from error
        for place, value in self.contract.numbers:
            leaves[place] = value
        held = self.live() if self.live else self.first
        kept = [(held[i], held[i].clone()) for i in self.written if i < len(held)]
        try:
            for _ in range(2):
                self.results(leaves)
        finally:
            for tensor, before in kept:
                tensor.copy_(before)

    def lay_out(self, given: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Arguments whose place in memory counts, or that were expanded, and that lie in another way than the exported ones
        become copies that do not: (original, copy) of those that are written to."""
        copies = []
        for i, spec in self.laid:
            tensor = given[i]
            if not isinstance(tensor, torch.Tensor) or len(spec.strides) != tensor.ndim:
                continue  # the program says what is wrong with it
            strides = evaluate(spec.strides, self.symbols(given[len(self.first) :]))
            if not same_layout(tensor, strides):
                if loses_values(tensor, strides):
                    raise BindError(
                        f"argument {spec.name!r} was an expanded tensor when {self.name} was exported; now its elements "
                        "differ along that axis",
                        where={"strides": str(list(strides)), "given": str(list(tensor.stride()))},
                        hint="export it with an argument that is not expanded",
                    )
                given[i] = copy_strided(tensor, strides)
                if i in self.written:
                    copies.append((tensor, given[i]))
        return copies

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        wanted = self.contract.in_spec
        if self.flat and not kwargs and len(args) == len(self.arguments) and all(type(a) in PLAIN for a in args):
            return list(args)
        leaves, spec = pytree.tree_flatten((args, reordered(kwargs, wanted)))
        found = structure(spec)
        if found != wanted:
            raise BindError(
                f"{self.name} was exported for arguments with another structure",
                where={"exported": f"{self.signature()}, {wanted}", "called": str(found)},
                hint="positional and named arguments as in the example of the export",
            )
        return leaves

    def check(self, leaves: Sequence[Any]) -> None:
        for place, value in self.contract.numbers:
            leaf = leaves[place]
            if type(leaf) is not type(value) or leaf != value:
                raise BindError(
                    f"{self.label(place)} is part of the graph: it must be {value!r}, got {leaf!r}",
                    hint="export again with this value",
                )
        for place, kind in self.kinds:
            if type(leaves[place]) is not kind:
                what = f"{self.label(place)} must be a number ({kind.__name__}), got {leaves[place]!r}"
                raise BindError(what, hint="export again with an example of that type")
        if self.checks:
            symbols = self.symbols(leaves)
            key = tuple(symbols.values())
            if key not in self.seen:
                self.check_symbols(symbols)
                if len(self.seen) >= CACHED:
                    self.seen.clear()
                self.seen.add(key)

    def symbols(self, leaves: Sequence[Any]) -> dict[Any, Any]:
        """Sizes and numbers that are symbols of their own. (Whether the others fit is the program's to say.)"""
        found: dict[Any, Any] = {}
        for spec, leaf in zip(self.arguments, leaves):
            if isinstance(spec, NumberIn) and getattr(spec.expr, "is_Symbol", False):
                found[spec.expr] = leaf
            elif isinstance(spec, TensorIn) and isinstance(leaf, torch.Tensor):
                pairs = zip(spec.type.shape or (), leaf.shape)
                found |= {size: actual for size, actual in pairs if getattr(size, "is_Symbol", False)}
        return found

    def check_symbols(self, symbols: dict[Any, Any]) -> None:
        for symbol, (low, high) in self.contract.ranges.items():
            value = symbols.get(symbol)
            if isinstance(value, int) and not ((low is None or low <= value) and (high is None or value <= high)):
                ends = f"at least {low}" if high is None else f"at most {high}" if not low else f"{low} to {high}"
                raise BindError(f"{self.place_of(symbol)} must be {ends}, got {value}", hint=AGAIN)
        for guard in self.contract.guards:
            if guard.free_symbols <= symbols.keys() and not evaluate(guard, symbols):
                told = {s: v for s, v in symbols.items() if s in guard.free_symbols}
                values = " and ".join(f"{s} = {v}, {self.place_of(s)}" for s, v in told.items())
                raise BindError(f"{self.name} was exported for {guard}, got {values}", hint=AGAIN)
        if self.rehearse and symbols:
            self.check_graph(self.rehearse, symbols)

    def place_of(self, symbol: Any) -> str:
        """`dimension 0 of argument 'x'`; the symbol itself where no argument tells its value."""
        for source in symbol_sources(self.arguments):
            if source.symbol == symbol and source.kind != "stride":
                label = self.label(source.argument)
                return f"dimension {source.axis} of {label}" if source.kind == "size" else label
        return str(symbol)

    def check_graph(self, rehearse: Callable[[Mapping[Any, Any]], None], symbols: dict[Any, Any]) -> None:
        try:
            rehearse(symbols)
        except AirgraphError as error:
            values = ", ".join(f"{s} = {v}" for s, v in symbols.items())
            raise BindError(
                f"{self.name} states sizes that its ops do not have with {values}: {error.what}", where=error.where
            ) from error


AGAIN = "export again with an example of such sizes"
