"""Few sizes instead of many: arguments are padded to a bucket, results are cut back.

    (3, 10)  ─ choose (4, 12) ─ pad arguments ─▶ program ─▶ cut results to (3, 10)

A program that is captured for each set of sizes would be captured for every length there is. With buckets it is captured
for some, and a call takes the smallest that fits. Whether a size may be padded at all is `analysis.padding`'s to say, for
each size by itself: what may be padded in either of two sizes, whatever the other one is, may be padded in both.

    Buckets.make({"batch": [1, 2, 4, 8], "seq": "auto"})

"auto" rounds a size up to a few significant bits. Three bits where one size is "auto": 1 to 8 each, then 10, 12, 14, 16,
20, 24, 28, 32, 40, … four buckets from one power of two to the next. Of lengths that are as likely one as the other 8 % is
then padding. Two sizes multiply, so each gets four bits where there are several: eight buckets in an octave, 4 % of
padding. In both cases less than a tenth of what is computed is padding, with as few buckets as that takes.

A bucket must be a size the graph was traced for: what PyTorch guards on (`s0 <= 512`) is asked for the bucket too.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch

from airgraph.analysis.padding.facts import has
from airgraph.analysis.padding.proof import Padding, PaddingRefusal, padding_of
from airgraph.config import Config
from airgraph.engine.strides import copy_strided
from airgraph.errors import AirgraphError, BindError, ConfigError
from airgraph.gears import gears_of
from airgraph.ir.boundary import Boundary, Fresh, Layout, NumberIn, OfInput, OfOutput, TensorIn
from airgraph.ir.boundary import Number as NumberOut
from airgraph.ir.graph import Graph
from airgraph.ir.symbols import evaluate
from airgraph.journal import Journal
from airgraph.runtime.loaded import Contract
from airgraph.runtime.program import compact

AUTO = "auto"
Sizes = tuple[int, ...] | Literal["auto"]
ALLOWED = f'a list of whole numbers from 1 on, or "{AUTO}"'
MOST_SETS = 64  # of sizes that are prepared ahead of calls
DIMENSIONS = {"batch": 0, "seq": 1}  # where these are looked for if nothing is marked


# -- which sizes ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Buckets:
    """The sizes of each named dimension."""

    sizes: Mapping[str, Sizes]

    @classmethod
    def make(cls, given: Mapping[str, Any]) -> Buckets:
        return cls({name_of(name): sizes_of(name, sizes) for name, sizes in given.items()})

    def choose(self, name: str, size: int, fits: Callable[[int], bool] = lambda bucket: True) -> int | None:
        """The smallest bucket that is large enough and that the graph allows."""
        sizes = self.sizes[name]
        found = auto_buckets(size, self.bits) if isinstance(sizes, str) else (s for s in sizes if s >= size)
        return next((bucket for bucket in found if fits(bucket)), None)

    @property
    def bits(self) -> int:
        """How fine "auto" is."""
        return 3 if sum(isinstance(sizes, str) for sizes in self.sizes.values()) < 2 else 4

    def largest(self, name: str) -> int | None:
        """None: there is no largest."""
        sizes = self.sizes[name]
        return None if isinstance(sizes, str) else sizes[-1]

    def text(self, name: str) -> str:
        sizes = self.sizes[name]
        return AUTO if sizes == AUTO else ", ".join(map(str, sizes))


def name_of(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"buckets: {name!r} is not the name of a dimension", hint='{"batch": [1, 2, 4, 8]}')
    return name


def sizes_of(name: str, sizes: Any) -> Sizes:
    if isinstance(sizes, str) and sizes == AUTO:
        return "auto"
    whole = isinstance(sizes, list | tuple) and all(isinstance(s, int) and not isinstance(s, bool) for s in sizes)
    if not whole or not sizes or min(sizes) < 1:
        raise ConfigError(f"buckets[{name!r}] cannot be {sizes!r}", where={"allowed": ALLOWED})
    return tuple(sorted(set(sizes)))


def auto_bucket(size: int, bits: int) -> int:
    """`size` rounded up to so many significant bits."""
    step = 1 << max((size - 1).bit_length() - bits, 0)
    return -(-size // step) * step


def auto_buckets(size: int, bits: int) -> Iterable[int]:
    """The bucket of a size and the next two: a guard may forbid the first."""
    bucket = auto_bucket(size, bits)
    for _ in range(3):
        yield bucket
        bucket = auto_bucket(bucket + 1, bits)


def symbols_by_name(boundary: Boundary, names: Iterable[str], marks: Mapping[Any, str]) -> dict[str, list[Any]]:
    """The symbols each name speaks of: what is marked so, else the sizes at dimension 0 ("batch") and 1 ("seq").

    A size at both (the length of `positions[s]` and of `x[b, s]`) is the length, if it is first only in lists.
    """
    found: dict[str, list[Any]] = {name: [s for s, said in marks.items() if said == name] for name in names}
    shapes = [spec.type.shape or () for spec in boundary.arguments if isinstance(spec, TensorIn)]
    firsts = {s[0] for s in shapes if len(s) > 1}
    seconds = {s[1] for s in shapes if len(s) > 1}
    lists = {s[0] for s in shapes if len(s) == 1} - seconds
    usual = {"batch": (firsts | lists) - seconds, "seq": seconds - firsts}
    for name in found:
        if not found[name] and name in DIMENSIONS and name not in marks.values():
            free = [d for d in usual[name] if isinstance(d, sympy.Symbol) and d not in marks]
            found[name] = sorted(free, key=str)
    return found


# -- what the graph was traced for ----------------------------------------------------------------------------------
class Limits:
    """What PyTorch took for granted of the sizes when it traced the graph. `rehearse` raises for sizes at which a graph
    from a file is not what the file states."""

    def __init__(
        self,
        guards: Sequence[Any],
        ranges: Mapping[Any, tuple[Any, Any]],
        rehearse: Callable[[Mapping[Any, Any]], None] | None = None,
    ) -> None:
        self.guards, self.ranges, self.rehearse = guards, ranges, rehearse
        self._cache: dict[tuple[Any, ...], bool] = {}

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Limits:
        """From the shape environment of the example inputs."""
        sizes = [s for i in inputs for s in (i.shape if isinstance(i, torch.Tensor) else [i])]
        env = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)
        if env is None:
            return cls([], {})
        ranges = {symbol: (r.lower, r.upper) for symbol, r in env.var_to_range.items()}
        return cls([env.replace(guard.expr) for guard in env.guards], ranges)

    @classmethod
    def of_contract(cls, contract: Contract, rehearse: Callable[[Mapping[Any, Any]], None] | None = None) -> Limits:
        """Of a model that was stored."""
        ends = contract.ranges.items()
        ranges = {s: (low or 0, sympy.oo if high is None else high) for s, (low, high) in ends}
        return cls(contract.guards, ranges, rehearse)

    def allow(self, symbols: Mapping[Any, int]) -> bool:
        key = tuple(symbols.items())
        if key not in self._cache:
            if len(self._cache) > 4096:
                self._cache.clear()
            self._cache[key] = self._allow(symbols)
        return self._cache[key]

    def _allow(self, symbols: Mapping[Any, int]) -> bool:
        inside = all(self.ranges[s][0] <= n <= self.ranges[s][1] for s, n in symbols.items() if s in self.ranges)
        numbers = {s: sympy.Integer(n) for s, n in symbols.items()}
        right = inside and all(holds(g.xreplace(numbers)) for g in self.guards if g.free_symbols & numbers.keys())
        return right and self.rehearsed(symbols)

    def rehearsed(self, symbols: Mapping[Any, int]) -> bool:
        try:
            if self.rehearse:
                self.rehearse(symbols)
        except AirgraphError:
            return False
        return True


def holds(guard: Any) -> bool:
    """A guard that still has other symbols in it is one on numbers nobody gave: it is not known to hold."""
    return bool(guard == sympy.true) or guard is True


# -- padding and cutting --------------------------------------------------------------------------------------------
Fill = bool | int | float | None  # None: the last row once more


def pad(
    tensor: torch.Tensor,
    sizes: Mapping[int, tuple[int, Fill]],
    out: torch.Tensor | None = None,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """`tensor` made longer at the end of some axes, each to a size and with a number, or (None) with its last row.

    `out` is memory to do it in; without it there is new memory, with `strides` if they are given.
    """
    shape = [sizes.get(i, (n, None))[0] for i, n in enumerate(tensor.shape)]
    if out is None:
        out = empty(shape, strides, tensor)
    cut(out, dict(enumerate(tensor.shape))).copy_(tensor)
    done = list(tensor.shape)
    for axis, (size, number) in sizes.items():
        here = cut(out, {i: n for i, n in enumerate(done) if i != axis})
        added = here.narrow(axis, tensor.shape[axis], size - tensor.shape[axis])
        if number is not None:
            added.fill_(number)
        elif added.numel():
            added.copy_(here.narrow(axis, tensor.shape[axis] - 1, 1).expand_as(added))
        done[axis] = size
    return out


def empty(shape: Sequence[int], strides: Sequence[int] | None, like: torch.Tensor) -> torch.Tensor:
    try:
        if strides is None or 0 in strides:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
    except torch.OutOfMemoryError:  # of a GPU: programs expect that type
        raise
    except RuntimeError as error:
        raise BindError(f"no memory for an argument padded to {list(shape)}", hint="smaller buckets") from error


def cut(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    for axis, size in sizes.items():
        tensor = tensor.narrow(axis, 0, size)
    return tensor


def settled(value: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """A part of a result, laid out as the whole would have been at this size."""
    if strides is None:
        return value if value.is_contiguous() and compact(value) else value.clone()
    return value if value.stride() == tuple(strides) and compact(value) else copy_strided(value, strides)


# -- the program ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Dimension:
    """A named size that may be padded, and how."""

    name: str
    padding: Padding

    @property
    def symbol(self) -> Any:
        return self.padding.symbol


@dataclass
class Counts:
    """What padding did, for reports."""

    calls: int = 0
    padded: int = 0  # calls that were
    split: int = 0  # calls that were, because they were larger than the largest bucket
    above: int = 0  # calls that ran at their own size for the same reason
    true_elements: int = 0  # products of the padded sizes: tokens, where these are batch and length
    run_elements: int = 0
    buckets: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def waste(self) -> float:
        """The share of elements that are padding."""
        return 1 - self.true_elements / self.run_elements if self.run_elements else 0.0


class BucketedProgram:
    """A program that is only called at sizes of buckets. Nothing of a call is kept, so threads may share it."""

    _boxed_call = True

    def __init__(
        self,
        inner: Any,
        boundary: Boundary,
        dimensions: Sequence[Dimension],
        buckets: Buckets,
        limits: Limits,
        journal: Journal,
    ) -> None:
        self.inner, self.boundary, self.journal = inner, boundary, journal
        self.name = getattr(inner, "name", journal.graph)
        self.dimensions, self.buckets, self.limits = list(dimensions), buckets, limits
        self.symbols = [d.symbol for d in dimensions]
        one = {d.name: d.symbol for d in reversed(self.dimensions)}  # sizes of one name (tokens, mask) count once
        self.names, self.counted = list(one)[::-1], list(one.values())[::-1]
        self.counts = Counts()
        self._lock = threading.Lock()
        self._places = {i: self.fills(i) for i in range(len(boundary.arguments)) if self.fills(i)}

    def fills(self, i: int) -> dict[int, tuple[Any, Fill]]:
        """Of an argument: axis → (symbol, what it is padded with)."""
        spec = self.boundary.arguments[i]
        return {
            axis: (d.symbol, d.padding.masks.get(spec.name))
            for d in self.dimensions
            for axis in d.padding.inputs.get(spec.name, ())
        }

    @property
    def executable(self) -> Any:
        return self.inner.executable

    def bind(self, args: Sequence[Any]) -> Any:
        return self.inner.bind(args)

    def __call__(self, args: list[Any], *rest: Any) -> list[Any]:
        given = [*args, *rest] if isinstance(args, list | tuple) else [args, *rest]
        if isinstance(args, list):
            args.clear()
        with self._lock:
            self.counts.calls += 1
        return self.run(given)

    def run(self, args: list[Any]) -> list[Any]:
        sizes = self.sizes(args)
        for dimension in self.dimensions:
            largest = self.buckets.largest(dimension.name)
            if largest is not None and sizes[dimension.symbol] > largest:
                return self.run_above(args, sizes, dimension, largest)
        wanted = self.bucket(sizes)
        self.count(sizes, wanted)
        if wanted == sizes:
            return list(self.inner(args))
        results = self.inner(self.padded(args, wanted))
        return [self.result(r, spec, args, sizes) for r, spec in zip(results, self.boundary.results)]

    # -- sizes ------------------------------------------------------------------------------------------------------
    def all_sizes(self, example: Mapping[Any, int]) -> list[dict[Any, int]]:
        """Every set of sizes that calls are padded to, the other sizes as in the example; none where they cannot be listed
        or are too many."""
        listed = [self.buckets.sizes[d.name] for d in self.dimensions]
        if "auto" in listed or math.prod(map(len, listed)) > MOST_SETS:
            return []
        found = [{**example, **dict(zip(self.symbols, sizes))} for sizes in itertools.product(*listed)]
        return [sizes for sizes in found if self.limits.allow(sizes)]

    def sizes(self, args: Sequence[Any]) -> dict[Any, int]:
        """Every symbol the arguments tell."""
        found: dict[Any, int] = {}
        for spec, arg in zip(self.boundary.arguments, args):
            if isinstance(spec, TensorIn) and arg is not None:
                found |= {s: n for s, n in zip(spec.type.shape or (), arg.shape) if isinstance(s, sympy.Symbol)}
            elif isinstance(spec, NumberIn) and isinstance(spec.expr, sympy.Symbol):
                found[spec.expr] = arg
        return found

    def bucket(self, sizes: dict[Any, int]) -> dict[Any, int]:
        """The sizes to run at; a size for which there is no bucket stays."""
        wanted = dict(sizes)
        for d in self.dimensions:
            fits = lambda size, symbol=d.symbol: self.limits.allow({**wanted, symbol: size})  # noqa: E731
            wanted[d.symbol] = self.buckets.choose(d.name, sizes[d.symbol], fits) or sizes[d.symbol]
        return wanted

    def count(self, sizes: Mapping[Any, int], wanted: Mapping[Any, int]) -> None:
        true, run = (tuple(s[symbol] for symbol in self.counted) for s in (sizes, wanted))
        words = " ".join(f"{name}={size}" for name, size in zip(self.names, run))
        with self._lock:
            counts = self.counts
            counts.padded += sizes != wanted
            counts.true_elements += product(true)
            counts.run_elements += product(run)
            counts.buckets[run] = counts.buckets.get(run, 0) + 1
            self.journal.counters["padded calls"] += sizes != wanted
            self.journal.counters[f"bucket {words}"] += 1

    # -- arguments and results --------------------------------------------------------------------------------------
    def padded(self, args: Sequence[Any], wanted: Mapping[Any, int]) -> list[Any]:
        return [self.padded_one(i, arg, wanted) for i, arg in enumerate(args)]

    def depends(self, expr: Any) -> bool:
        return any(has(expr, symbol) for symbol in self.symbols)

    def padded_one(self, i: int, arg: Any, wanted: Mapping[Any, int]) -> Any:
        spec = self.boundary.arguments[i]
        if isinstance(spec, NumberIn) and self.depends(spec.expr):
            return evaluate(spec.expr, wanted)
        if i not in self._places or not isinstance(spec, TensorIn):
            return arg
        sizes = {axis: (wanted[symbol], number) for axis, (symbol, number) in self._places[i].items()}
        return pad(arg, sizes, strides=evaluate(spec.strides, wanted))

    def result(self, value: Any, spec: Any, args: Sequence[Any], sizes: Mapping[Any, int]) -> Any:
        match spec:
            case Fresh(index, layout, _):
                axes = {
                    a: evaluate(size, sizes) for d in self.dimensions for a, size in d.padding.outputs[index].items()
                }
                strides = None if layout is None else evaluate(layout.strides, sizes)
                return settled(cut(value, axes), strides) if axes else value
            case OfInput(argument, itself=True):
                return args[argument]
            case OfInput(argument, layout, _) if argument in self._places:
                return view(args[argument], layout, sizes)
            case NumberOut(expr) if self.depends(expr):
                return evaluate(expr, sizes)
        return value

    # -- larger than the largest ------------------------------------------------------------------------------------
    def run_above(self, args: list[Any], sizes: dict[Any, int], dimension: Dimension, largest: int) -> list[Any]:
        symbol, total = dimension.symbol, sizes[dimension.symbol]
        chunks = [(at, min(largest, total - at)) for at in range(0, total, largest)]
        if not self.may_split(dimension, sizes, chunks):
            with self._lock:
                self.counts.above += 1
                self.journal.counters["calls above the largest bucket"] += 1
            return list(self.inner(args))
        with self._lock:
            self.counts.split += 1
            self.journal.counters["split calls"] += 1
        parts = [self.run(self.chunk(args, symbol, at, {**sizes, symbol: n})) for at, n in chunks]
        specs = self.boundary.results
        return [self.joined([p[i] for p in parts], spec, args, sizes, dimension) for i, spec in enumerate(specs)]

    def may_split(self, dimension: Dimension, sizes: dict[Any, int], chunks: Sequence[tuple[int, int]]) -> bool:
        """Rows must not need each other, and every part must be a size the graph can run at."""
        if not dimension.padding.splits:
            return False
        return all(self.limits.allow(self.bucket({**sizes, dimension.symbol: n})) for _, n in chunks)

    def chunk(self, args: Sequence[Any], symbol: Any, at: int, sizes: Mapping[Any, int]) -> list[Any]:
        return [self.chunk_one(i, arg, symbol, at, sizes) for i, arg in enumerate(args)]

    def chunk_one(self, i: int, arg: Any, symbol: Any, at: int, sizes: Mapping[Any, int]) -> Any:
        spec = self.boundary.arguments[i]
        if isinstance(spec, NumberIn) and has(spec.expr, symbol):
            return evaluate(spec.expr, sizes)
        axes = [axis for axis, (s, _) in self._places.get(i, {}).items() if s == symbol]
        for axis in axes:
            arg = arg.narrow(axis, at, sizes[symbol])
        if not axes or not isinstance(spec, TensorIn):
            return arg
        strides = evaluate(spec.strides, sizes)
        return arg if arg.stride() == strides or 0 in strides else copy_strided(arg, strides)

    def joined(
        self, parts: Sequence[Any], spec: Any, args: Sequence[Any], sizes: Mapping[Any, int], dimension: Dimension
    ) -> Any:
        match spec:
            case Fresh(index, _, _) if dimension.padding.outputs[index]:
                (axis,) = dimension.padding.outputs[index]
                return torch.cat(list(parts), axis)
            case OfInput(argument, itself=True):
                return args[argument]
            case OfInput(argument, layout, _) if argument in self._places:
                return view(args[argument], layout, sizes)
            case NumberOut(expr) if self.depends(expr):
                return evaluate(expr, sizes)
        return parts[0]


def product(numbers: Iterable[int]) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


def view(base: torch.Tensor, layout: Layout, sizes: Mapping[Any, int]) -> torch.Tensor:
    shape, strides, offset = (evaluate(part, sizes) for part in (layout.shape, layout.strides, layout.offset))
    return base.as_strided(shape, strides, base.storage_offset() + offset)


@dataclass(frozen=True)
class Padded:
    """The buckets of one graph: which of its sizes are padded, and to what."""

    boundary: Boundary
    dimensions: Sequence[Dimension]
    buckets: Buckets
    limits: Limits
    journal: Journal

    @classmethod
    def of(
        cls,
        graph: Graph,
        boundary: Boundary,
        buckets: Buckets,
        marks: Mapping[Any, str],
        limits: Limits,
        journal: Journal,
    ) -> Padded | None:
        """None where no size can be padded; `graph`: with GE ops, which the analysis knows."""
        dimensions = padded_dimensions(graph, boundary, buckets, marks, journal)
        return cls(boundary, dimensions, buckets, limits, journal) if dimensions else None

    def around(self, inner: Any) -> BucketedProgram:
        return BucketedProgram(inner, self.boundary, self.dimensions, self.buckets, self.limits, self.journal)


def wanted_buckets(config: Config, journal: Journal) -> Buckets | None:
    """The buckets that are set, for graphs of inference."""
    gears = gears_of(config)
    if config.buckets is None and not gears:
        return None
    if journal.phase != "inference":
        journal.remark(f"buckets: a {journal.phase} graph runs at its true sizes; only inference is padded")
        return None
    return Buckets.make({**(config.buckets or {}), **{g.type: g.gears for g in gears}})


def padded_dimensions(
    graph: Graph, boundary: Boundary, buckets: Buckets, marks: Mapping[Any, str], journal: Journal
) -> list[Dimension]:
    """The sizes that can be padded, with the reasons why others are not in the journal.

    `graph` and `boundary` are those of the same FX graph, made with all converters: the analysis knows these ops.
    """
    dimensions: list[Dimension] = []
    for name, symbols in symbols_by_name(boundary, buckets.sizes, marks).items():
        if not symbols:
            journal.remark(
                f"buckets: no dynamic size is {name!r} here: airgraph.mark_bucket(tensor, dim, {name!r}) says "
                "which one it is"
            )
        for symbol in symbols:
            found = outlet(boundary, symbol) or padding_of(graph, symbol)
            if isinstance(found, PaddingRefusal):
                journal.counters["unpadded sizes"] += 1
                journal.remark(f"buckets: {name} ({symbol}) is not padded: {found.text()}")
            else:
                journal.remark(f"buckets: {name} ({symbol}) is padded to {buckets.text(name)}")
                dimensions.append(Dimension(name, found))
    return dimensions


def outlet(boundary: Boundary, symbol: Any) -> PaddingRefusal | None:
    """Results that share memory in a way that padding would change."""
    for result in boundary.results:
        if isinstance(result, OfOutput) and has((*result.layout.shape, *result.layout.strides), symbol):
            return PaddingRefusal("a result", f"of size {symbol} shares memory with another result")
        if isinstance(result, OfInput):
            spec = boundary.arguments[result.argument]
            padded = isinstance(spec, TensorIn) and has(spec.type.shape, symbol)
            if padded and isinstance(spec, TensorIn) and int(spec.type.dtype) != result.dtype:
                return PaddingRefusal("a result", f"of size {symbol} is an argument seen as another type")
    return None
