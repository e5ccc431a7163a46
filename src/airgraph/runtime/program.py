"""A program: a graph made ready by an engine, with the boundary that makes it look like the PyTorch code it came from.

    arguments ─ check ─ bind symbols ─ unwrap emulated devices ─▶ run ─▶ own memory ─▶ writes to inputs ─▶ results

The order of the last three is what makes aliasing right: results that would share memory with an argument they are not a
view of get memory of their own, then the writes happen, then views of inputs are taken and see what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.autograd import profiler

from airgraph.engine.native.tables import word_property, words
from airgraph.engine.protocol import Executable, Symbols
from airgraph.engine.strides import copy_strided, same_layout
from airgraph.errors import BindError
from airgraph.ir.boundary import (
    Argument,
    Boundary,
    Fresh,
    Layout,
    Number,
    NumberIn,
    OfInput,
    OfOutput,
    Plain,
    TensorIn,
    symbol_sources,
)
from airgraph.ir.symbols import evaluate
from airgraph.ir.types import DataType
from airgraph.journal import OWN, Journal
from airgraph.runtime.device import adapter_for
from airgraph.torch_types import TORCH_TYPES

CACHED = 64  # combinations of sizes whose expressions are kept
NUMBER = {int: (int,), float: (int, float), bool: (bool, int)}


AGAIN = "compile again for these arguments, or mark the size as dynamic"


class Program:
    """Called with the arguments of the FX graph, as one list (PyTorch's boxed convention, which lets them be freed)."""

    _boxed_call = True
    short = False  # there may be a shorter way
    calls = word_property(0)

    def __init__(self, name: str, boundary: Boundary, executable: Executable, journal: Journal) -> None:
        self.name = name
        self.boundary = boundary
        self.executable = executable
        self.journal = journal
        self.words = words([0])
        self.log = journal.log
        self.event_level = self.log.event_level
        self.levels: dict[int, bool] = self.log._cache  # type: ignore[attr-defined]  # what logging knows of each level
        self.derived = list(derived_sizes(boundary))
        told = symbol_sources(boundary.arguments)
        self.sources = [s for s in told if s.kind == "stride" or (s.kind == "size" and not s.plain)]
        self._cache: dict[tuple[Any, ...], dict[Any, Any]] = {}
        fresh = [(r.index, r.layout) for r in boundary.results if isinstance(r, Fresh) and r.layout is not None]
        self.fixed = {index for index, layout in fresh if all(isinstance(s, int) for s in layout.shape)}

    def __call__(self, args: list[Any], *rest: Any) -> list[Any]:
        if self.short and not rest and type(args) is list:
            results = self.attempt(args)
            if results is not None:
                return results
        given = [*args, *rest] if isinstance(args, list | tuple) else [args, *rest]
        if isinstance(args, list):
            args.clear()
        with torch.autograd.profiler.record_function(self.title):
            self._log_values("runtime inputs", "input", given)
            results = self.run(given)
            self._log_values("runtime outputs", "output", results)
        self.calls += 1
        return results

    @property
    def title(self) -> str:
        """What torch.profiler shows a call as; for a TorchAir script as TorchAir does."""
        own = self.journal.log_name == OWN
        return f"airgraph {self.name} {self.journal.phase}" if own else "npu_fx_compiler inference"

    def attempt(self, args: list[Any]) -> list[Any] | None:
        """The results by a shorter way, if there is nothing else to do; None if not, and then nothing has been done."""
        return None

    def past(self, around: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
        """How to call the program past the wrapper PyTorch put around it, which has nothing to do for it but to count the
        versions of the arguments it writes to; `around` itself where that is no gain. The attribute `listed` of what is
        given takes the arguments as a list, which it may clear: hundreds of parameters need not be copied twice."""
        if not self.short:
            return around
        attempt, count = self.attempt, torch.autograd.graph.increment_version

        def call(*args: Any) -> Any:
            results = attempt([*args])
            if results is None:
                return around(*args)
            if written:
                count([args[i] for i in written])
            return results

        def listed(args: list[Any]) -> Any:
            changed = [args[i] for i in written] if written else None
            results = attempt(args)
            if results is None:
                return around(*args)
            if changed:
                count(changed)
            return results

        call.listed = listed  # type: ignore[attr-defined]
        return call

    def run(self, args: list[Any]) -> list[Any]:
        start = time.perf_counter()
        symbols = self.bind(args)
        bound = time.perf_counter()
        owned = self.compute(args, symbols)
        results = [self.result(r, args, owned, symbols) for r in self.boundary.results]
        self.log_run(start, bound)
        return results

    def compute(self, args: Sequence[Any], symbols: Symbols) -> list[Any]:
        """The computed outputs; writes to arguments are done."""
        inputs = {spec.name: to_host(arg) for spec, arg in zip(self.boundary.arguments, args)}
        outputs, writes = self.executable.run(inputs, symbols)
        owned = self.own(outputs, [*inputs.values()], symbols)
        self.write(writes, inputs)
        return owned

    def log_run(self, start: float, bound: float) -> None:
        log = self.journal.log
        if log.shows_events():
            micros = [int((b - a) * 1e6) for a, b in ((start, bound), (bound, time.perf_counter()))]
            text = "%s run at %s, process input: %sus, compile 0us, graph run: %sus"  # it was compiled before any call
            log.event(text, self.journal.log_name, int(time.time() * 1e6), *micros)

    # -- arguments --------------------------------------------------------------------------------------------------
    def bind(self, args: Sequence[Any]) -> Symbols:
        """Check every argument against what was compiled for, and give the symbols their values."""
        wanted = self.boundary.arguments
        if len(args) != len(wanted):
            raise BindError(f"{self.name} takes {len(wanted)} arguments, got {len(args)}")
        symbols: Symbols = {}
        for i, (spec, arg) in enumerate(zip(wanted, args)):
            match spec:
                case NumberIn():
                    self.bind_number(i, spec, arg, symbols)
                case TensorIn():
                    self.bind_tensor(i, spec, arg, symbols)
        for source in self.sources:
            given = args[source.argument]
            size = given.stride(source.axis) if source.kind == "stride" else given.shape[source.axis]
            symbols.setdefault(source.symbol, source.value(size))
        self.check_derived(args, symbols)
        return symbols

    def check_derived(self, args: Sequence[Any], symbols: Symbols) -> None:
        """Sizes that are expressions, once every symbol has its value."""
        for i, spec, axis, expr in self.derived:
            if self.size(expr, symbols) != args[i].shape[axis]:
                size = self.size(expr, symbols)
                wanted = f"have shape {list(spec.type.shape or ())} with {expr} = {size}"
                raise self.refuse(i, spec, wanted, str(list(args[i].shape)))

    def bind_number(self, i: int, spec: NumberIn, arg: Any, symbols: Symbols) -> None:
        if not isinstance(arg, NUMBER[spec.kind]) and not is_ragged(arg):
            raise self.refuse(i, spec, f"be a number ({spec.kind.__name__})", repr(arg), "compile again for this type")
        if getattr(spec.expr, "is_Symbol", False):
            symbols[spec.expr] = arg

    def bind_tensor(self, i: int, spec: TensorIn, arg: Any, symbols: Symbols) -> None:
        if arg is None and spec.type.shape == (0,):
            return  # PyTorch's token for the order of effects: an empty tensor in FX, None when it runs
        if not isinstance(arg, torch.Tensor):
            raise self.refuse(i, spec, "be a tensor", type(arg).__name__, "torch.as_tensor(...)")
        if arg.layout != torch.strided and self.journal.phase != "backward":
            raise self.refuse(i, spec, "be a dense tensor", str(arg.layout), "convert it: .to_dense()")
        dtype = TORCH_TYPES.get(spec.type.dtype, arg.dtype)
        if arg.dtype != dtype and self.journal.phase != "backward":
            # (the backward gets what PyTorch saved, and for half-precision norms FX has the type of that wrong)
            raise self.refuse(i, spec, f"be {dtype}", str(arg.dtype), f"convert it: .to({dtype}), or compile again")
        saved_scalar = self.journal.phase == "backward" and arg.ndim == 0  # a seed, kept on the host
        if str(arg.device) != spec.device and not saved_scalar:
            hint = f'move it: .to("{spec.device}"), or compile again'
            raise self.refuse(i, spec, f"be on {spec.device}", str(arg.device), hint)
        shape = spec.type.shape or ()
        if len(shape) != arg.ndim:
            raise self.refuse(i, spec, f"have shape {list(shape)}", str(list(arg.shape)))
        for size, actual in zip(shape, arg.shape):
            if isinstance(size, int):
                if size != actual:
                    raise self.refuse(i, spec, f"have shape {list(shape)}", str(list(arg.shape)))
            elif size.is_Symbol and symbols.setdefault(size, actual) != actual:
                wanted = f"have shape {list(shape)} with {size} = {symbols[size]}"
                raise self.refuse(i, spec, wanted, str(list(arg.shape)))

    def refuse(self, i: int, spec: Argument, wanted: str, got: str, hint: str = AGAIN) -> BindError:
        """By the user's name of the argument where that is known."""
        name = self.boundary.names.get(spec.name)
        label = f"argument {name!r}" if name else f"argument {i} ({spec.name}) of {self.name}"
        return BindError(f"{label} must {wanted}, got {got}", hint=hint)

    # -- results ----------------------------------------------------------------------------------------------------
    def own(
        self, outputs: Sequence[Any], inputs: Sequence[Any], symbols: Symbols, others: Collection[int] | None = None
    ) -> list[Any]:
        """The computed outputs, each laid out as FX recorded, none sharing memory with an argument or another output.
        `others`: by number those that need a look, if all but these are so already."""
        owned = list(outputs)
        looked_at = range(len(owned)) if others is None else others
        known = [*inputs, *(value for index, value in enumerate(owned) if index not in looked_at)]
        taken = {t.untyped_storage().data_ptr() for t in known if isinstance(t, torch.Tensor) and strided(t)}
        for index in looked_at:
            value = owned[index]
            if not isinstance(value, torch.Tensor) or not strided(value):
                continue
            strides = self.size(self.layouts.get(index), symbols)
            address = value.untyped_storage().data_ptr()
            if strides is None:
                # As PyTorch made it: a slice is of something larger in eager, too.
                value = value if address not in taken else copy_strided(value, value.stride())
            elif same_layout(value, strides) and address not in taken and compact(value):
                # The stride of a dimension of size 1 means nothing, but shows. (FX guesses it where sizes are symbolic.)
                other = index in self.fixed and value.stride() != tuple(strides)
                value = value.as_strided(value.shape, strides) if other else value
            else:
                value = copy_strided(value, strides)
            owned[index] = value
            taken.add(value.untyped_storage().data_ptr())
        return owned

    @cached_property
    def layouts(self) -> dict[int, tuple[Any, ...]]:
        """The strides each computed output must have."""
        found: dict[int, tuple[Any, ...]] = {}
        for result in self.boundary.results:
            if isinstance(result, Fresh) and result.layout is not None:
                found[result.index] = result.layout.strides
            elif isinstance(result, OfOutput):
                found[result.index] = result.base
        return found

    def write(self, writes: Sequence[tuple[str, torch.Tensor]], inputs: dict[str, Any]) -> None:
        """The values first, if one of them might be changed by the write of another; then all writes."""
        if len(writes) > 1:
            addresses = {inputs[name].untyped_storage().data_ptr() for name, _ in writes}
            writes = [(n, v.clone() if v.untyped_storage().data_ptr() in addresses else v) for n, v in writes]
        for name, value in writes:
            inputs[name].copy_(value)

    def result(self, result: Any, args: Sequence[Any], owned: Sequence[Any], symbols: Symbols) -> Any:
        match result:
            case Fresh(index, _, device):
                return from_host(owned[index], device)
            case OfInput(argument, itself=True):
                return args[argument]
            case OfInput(argument, layout, dtype):
                return self.view(args[argument], layout, dtype, symbols)
            case OfOutput(index, _, layout, dtype, device):
                return self.view(from_host(owned[index], device), layout, dtype, symbols)
            case Number(expr):
                return evaluate(expr, symbols)
            case Plain(value):
                return value
        raise AssertionError(result)

    def view(self, base: torch.Tensor, layout: Layout, dtype: int, symbols: Symbols) -> torch.Tensor:
        """A view of `base` with another layout, perhaps with its bytes read as another type."""
        shape, strides, offset = (self.size(part, symbols) for part in (layout.shape, layout.strides, layout.offset))
        wanted = TORCH_TYPES.get(DataType(dtype), base.dtype)
        if base.storage_offset() + offset < 0:  # only a file can say so
            raise BindError(f"a result begins {-offset} elements before the tensor that it is a view of")
        if wanted == base.dtype:
            return base.as_strided(shape, strides, base.storage_offset() + offset)
        host = to_host(base)
        start = host.storage_offset() * host.element_size() // wanted.itemsize + offset
        seen = torch.empty(0, dtype=wanted, device=host.device).set_(host.untyped_storage(), start, shape, strides)
        return from_host(seen, str(base.device))

    def size(self, expr: Any, symbols: Symbols) -> Any:
        """Expressions are evaluated once for each combination of sizes seen."""
        if expr is None or isinstance(expr, int):
            return expr
        key = tuple(symbols.values())
        if key not in self._cache and len(self._cache) >= CACHED:
            self._cache.clear()
        known = self._cache.setdefault(key, {})
        if expr not in known:
            known[expr] = evaluate(expr, symbols)
        return known[expr]

    def _log_values(self, title: str, word: str, values: Sequence[Any]) -> None:
        log = self.journal.log
        if log.isEnabledFor(10):
            log.debug(title)
            for i, value in enumerate(values):
                log.debug("  %s %s: %s", word, i, summary(value))


def derived_sizes(boundary: Boundary) -> Iterator[tuple[int, TensorIn, int, Any]]:
    """(index, argument, axis, expression) wherever a size is computed from symbols that other arguments tell."""
    told = {size for spec in boundary.arguments if isinstance(spec, TensorIn) for size in spec.type.shape or ()}
    told |= {spec.expr for spec in boundary.arguments if isinstance(spec, NumberIn)}
    for i, spec in enumerate(boundary.arguments):
        for axis, size in enumerate((spec.type.shape or ()) if isinstance(spec, TensorIn) else ()):
            if not isinstance(size, int) and not size.is_Symbol and size.free_symbols <= told:
                yield i, spec, axis, size  # type: ignore[misc]


def is_ragged(value: Any) -> bool:
    """The size of a jagged tensor's ragged dimension: a number only in name, handed on as it is."""
    return isinstance(value, torch.SymInt) and value.node.is_nested_int()


def summary(value: Any) -> str:
    """As TorchAir logs a runtime value."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value)}({value})"
    return (
        f"{type(value)}({value.size()}, {value.dtype}, contiguous={value.is_contiguous()}, data_ptr={value.data_ptr()})"
    )


def quiet(journal: Journal) -> bool:
    """Nobody wants to be told about this call: no log line, no profile."""
    log = journal.log
    return not (profiler._is_profiler_enabled or log.isEnabledFor(log.event_level))


def strided(x: torch.Tensor) -> bool:
    return x.layout == torch.strided


def compact(x: torch.Tensor) -> bool:
    """Its storage holds nothing else: a small slice must not keep a large result alive."""
    return x.untyped_storage().nbytes() <= 2 * x.numel() * x.element_size() + 64


def to_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    adapter = adapter_for(value.device)
    return adapter.to_host(value) if adapter else value


def from_host(value: Any, device: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wanted = torch.device(device)
    adapter = adapter_for(wanted)
    return adapter.from_host(value, wanted) if adapter else value


Runner = Callable[[list[Any]], list[Any]]
