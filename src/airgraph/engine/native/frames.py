"""Frames: a plan at concrete sizes, as the tables the native side reads (runtime.py).

Everything here happens once for each set of sizes: expressions get their values, steps are marked for one thread or
all and for the barriers between them, and intermediates are laid into one block so that those alive at the same time do
not overlap.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from airgraph.convert.promote import TORCH_TYPES
from airgraph.engine.native.calls.words import Calls, Writer
from airgraph.engine.native.code import NativeStep
from airgraph.engine.native.kernels import conv, gemm
from airgraph.engine.native.kernels.products import ALONE, TURNED, Product, Way, rule
from airgraph.engine.native.kernels.shared_kernels import Gemm, kernels
from airgraph.engine.native.kernels.tune import Tuner
from airgraph.engine.native.tables import Entry, Frame, Step, words
from airgraph.plan.memory import BLOCK, Unit, aligned, arrange
from airgraph.plan.steps import CallStep, Plan, step_reads, step_writes
from airgraph.plan.tensors import Tensor

DTYPE_NUMBER = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
    torch.float8_e8m0fnu: 44,
}


class Layout:
    """Which slot each tensor's address is in. Slot 0 is null; an output has a second one for its handle.

    Tensors that PyTorch makes have two more words each, for handles: as it was made, and contiguous where that is not.
    """

    def __init__(self, plan: Plan, steps: Sequence[NativeStep]) -> None:
        self.plan = plan
        self.slots: dict[int, int] = {}
        self.count = 1
        for t in self.tensors(steps):
            self.slot(t)
        called = {id(v): t for s in plan.steps if isinstance(s, CallStep) for v, t in s.writes}
        self.made = {t.id: 2 * i for i, t in enumerate(called.values())}
        self.given = [called[id(v)] for v, t in zip(plan.output_values, plan.outputs) if t is None]
        self.reads = [{self.slot(t) for t in step_reads(s.origin)} for s in steps]
        self.writes = [{self.slot(t) for t in step_writes(s.origin)} for s in steps]
        places = [p for p in plan.places.values() if p.kind in ("arena", "output") and p.alias is None]
        self.memory = {self.slots[p.tensor.id]: p.tensor for p in places if p.tensor.id in self.slots}

    def tensors(self, steps: Sequence[NativeStep]) -> list[Tensor]:
        plan, found = self.plan, dict[int, Tensor]()
        for place in plan.places.values():
            if place.kind in ("input", "const", "call"):
                found[place.tensor.id] = place.tensor
        for t in plan.outputs:
            if t is not None:
                found[t.id] = t
        for step in plan.steps:
            for t in (*step_writes(step), *step_reads(step)):
                found[t.id] = t
        for native in steps:
            for arg in native.args:
                if arg is not None:
                    found[arg.id] = arg
        return list(found.values())

    def slot(self, t: Tensor) -> int:
        place = self.plan.places[t.id]
        if place.alias is not None:
            return self.slot(place.alias.tensor)
        if t.id not in self.slots:
            self.slots[t.id] = self.count
            self.count += 2 if place.kind == "output" else 1
        return self.slots[t.id]


Span = tuple[int, int]  # the first step and the last


class Use(NamedTuple):
    """A step that reads or writes some memory, between `first` and `last`."""

    first: int
    last: int
    origin: Any


class Given(NamedTuple):
    """One argument or output; see runtime.Entry."""

    kind: int
    value: int  # a slot, or the number itself
    dtype: int = 0
    sizes: Sequence[int] = ()
    strides: Sequence[int] = ()
    made: int = 0  # the address of a handle, for what PyTorch makes


class Released(NamedTuple):
    """Memory that is let go before the end of a call: arguments by number, results of library calls by tensor."""

    arguments: list[int]
    results: list[int]


@dataclass(frozen=True)
class Shared:
    """What all frames of a program have in common."""

    plan: Plan
    steps: Sequence[NativeStep]
    layout: Layout
    constants: dict[int, torch.Tensor]  # by slot
    frozen: frozenset[int]  # slots of arguments that keep their content, if they are parameters
    callback: int  # the address of the Python function that does a library call
    calls: Calls
    released: Mapping[int, Released]  # by the number of a call's step
    tuner: Tuner | None  # matrix products are timed
    overwrites: Mapping[Any, Sequence[tuple[int, int]]]  # step → slots of (a result, what it may be written over)
    copies: WeakValueDictionary[Any, torch.Tensor] = field(default_factory=WeakValueDictionary)  # of weights, turned

    def product(self, step: NativeStep, sizes: Sequence[int], threads: int) -> Product:
        weight, bias = step.args[1], step.args[3]
        assert weight is not None
        slot = self.layout.slot(weight)
        return Product.of(sizes, bias is not None, slot in self.constants or slot in self.frozen, threads)


class BoundFrame:
    """A frame with all the memory it points to."""

    def __init__(
        self,
        shared: Shared,
        value: Callable[[Any], int],
        args: Sequence[Given],
        *,
        still: Mapping[int, torch.Tensor],
        number: int,
        threads: int,
    ) -> None:
        """`still`: constants and arguments that keep their content, by slot."""
        self.shared = shared
        self.plan, self.native, self.layout, self.calls = shared.plan, shared.steps, shared.layout, shared.calls
        self.still = still
        self.only: dict[int, int] = {}  # slot of an argument → the only address it may have in this frame
        self.kept: list[Any] = []
        self.number, self.threads = number, threads
        self.bound: dict[Any, Any] = {}  # the symbols this frame is for
        self.symbols: dict[Any, Any] = {}  # these, and what running could tell
        self.owner: Callable[[], Any] = lambda: None  # the executable, as long as it lives
        self.results: dict[int, Any] = {}  # what library calls made: (as PyTorch made it, contiguous)
        self.value = value
        self.slots = words([0] * (self.layout.count + 1))
        self.handles = words([0] * 2 * len(self.layout.made))
        for slot, tensor in shared.constants.items():
            self.slots[slot] = tensor.data_ptr()
        self.scratch = 0  # bytes for each thread: what its most demanding step needs
        self.rows, errors = self.steps()
        regions = self.barriers(self.rows)
        self.units = self.shared_memory(self.spans(regions))
        self.spots, self.arena = arrange(self.units)  # slot → place, and the bytes of intermediates
        scratch = threads * self.scratch
        self.need = scratch + self.arena
        placed = [(slot, scratch + spot.offset) for slot, spot in self.spots.items() if spot.home == BLOCK]
        lent = [(slot, *spot) for slot, spot in self.spots.items() if spot.home not in (BLOCK, slot)]
        self.objects: list[Any] = []
        outs = self.outputs()
        self.step_table = words([n for row in self.rows for n in row])
        self.words = words([0] * Frame.WORDS)
        for index, content in {
            Frame.ARGS: len(args),
            Frame.ARG_TABLE: self.table([self.entry(a) for a in args]),
            Frame.OUTS: len(outs),
            Frame.OUT_TABLE: self.table([self.entry(o) for o in outs]),
            Frame.SLOTS: ctypes.addressof(self.slots),
            Frame.PLACED: len(placed),
            Frame.PLACE_TABLE: self.table(placed),
            Frame.LENT: len(lent),
            Frame.LENT_TABLE: self.table(lent),
            Frame.NEED: self.need,
            Frame.NUMBER: number,
            Frame.THREADS: threads,
            Frame.SCRATCH: self.scratch,
            Frame.STEPS: len(self.rows),
            Frame.STEP_TABLE: ctypes.addressof(self.step_table),
            Frame.ERRORS: len(errors),
            Frame.ERROR_TABLE: self.keep(words(errors)),
            Frame.OBJECTS: id(self.objects),
            Frame.CALLBACK: shared.callback,
            Frame.TENSOR_TYPE: id(torch.Tensor),
            Frame.PARAMETER_TYPE: id(torch.nn.Parameter),
            Frame.MADE: 2 * len(self.layout.made) if self.calls.tapes else 0,
            Frame.MADE_TABLE: ctypes.addressof(self.handles),
            Frame.DISPATCH: self.calls.function("dispatch"),
            Frame.LET_GO: self.calls.function("let_go"),
        }.items():
            self.words[index] = content

    def forget(self) -> None:
        """What library calls made is no longer needed."""
        self.results.clear()
        for i in range(len(self.objects)):
            self.objects[i] = None

    # -- what PyTorch makes ---------------------------------------------------------------------------------------------
    def slot_address(self, t: Tensor) -> int:
        return ctypes.addressof(self.slots) + 8 * self.layout.slot(t)

    def made(self, t: Tensor) -> int:
        """The address of the two handles of a tensor."""
        return ctypes.addressof(self.handles) + 8 * self.layout.made[t.id]

    def by_python(self, number: int) -> bool:
        """Python does this step from now on. (It was not so before: the dispatcher could not do it.)"""
        at = number * Step.WORDS + Step.CALL
        before, self.step_table[at] = self.step_table[at], Step.PYTHON
        return bool(before != Step.PYTHON)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    def keep(self, array: Any) -> int:
        self.kept.append(array)
        return ctypes.addressof(array)

    def table(self, rows: Sequence[Sequence[int]]) -> int:
        return self.keep(words([n for row in rows for n in row]))

    def entry(self, e: Given) -> list[int]:
        row = [0] * Entry.WORDS
        row[Entry.KIND], row[Entry.DTYPE], row[Entry.DIM], row[Entry.VALUE] = e.kind, e.dtype, len(e.sizes), e.value
        row[Entry.SIZES], row[Entry.STRIDES] = self.keep(words(e.sizes)), e.made or self.keep(words(e.strides))
        row[Entry.ADDRESS] = self.only.get(e.value, 0) if e.kind == Entry.TENSOR else 0
        return row

    def outputs(self) -> list[Given]:
        """Their shapes are those of NetOutput's values, whatever the tensor that was computed looks like."""
        rows: list[Given] = []
        for t, v in zip(self.plan.outputs, self.plan.output_values):
            if t is None:
                made = self.made(self.layout.given[len(self.objects)])
                rows.append(Given(Entry.NOTHING, len(self.objects), made=made))
                self.objects.append(None)
                continue
            shape = [self.value(s) for s in v.type.shape or ()]
            place = self.plan.place(t)
            same_rank = len(place.strides) == len(shape) and t.shape == v.type.shape
            strides = [self.value(s) for s in place.strides] if same_rank else contiguous(shape)
            dtype = DTYPE_NUMBER[TORCH_TYPES[v.dtype]]
            rows.append(Given(Entry.TENSOR, self.layout.slots[t.id], dtype, shape, strides))
        return rows

    # -- steps --------------------------------------------------------------------------------------------------------
    def steps(self) -> tuple[list[list[int]], list[int]]:
        """(their rows, the sizes behind whose first word an error may be)"""
        rows: list[list[int]] = []
        errors: list[int] = []
        writer = Writer(self, self.calls.dense)
        for step in self.native:
            row = [0] * Step.WORDS
            rows.append(row)
            if isinstance(step.origin, CallStep):
                tape = self.calls.tapes.get(step.origin)
                row[Step.CALL] = Step.PYTHON if tape is None else Step.DISPATCHER
                row[Step.TAPE] = writer.tape(tape, step_writes(step.origin)) if tape is not None else 0
                row[Step.ALONE], row[Step.RELEASE] = 1, self.released(len(rows) - 1)
                continue
            sizes, args = step_words(step, self.value), self.addresses(step)
            if step.kind == "gemm":
                jobs, unit, single = self.product(step, sizes, args)
            else:
                jobs, unit = (self.value(step.jobs), step.unit) if step.kind == "loop" else (jobs_of(step, sizes), 1)
                small = self.value(step.cost) < ALONE or jobs < 2 or self.threads < 2
                single = small or getattr(step.origin, "alone", False)
            self.scratch = max(self.scratch, aligned(scratch_of(step, sizes)))
            held = self.keep(words(sizes))
            if step.checks:
                errors.append(held)
            row[Step.FUNCTION], row[Step.SIZES], row[Step.JOBS], row[Step.UNIT] = step.function, held, jobs, unit
            row[Step.ARGS], row[Step.ALONE] = self.keep(words(args)), int(single)
        return rows, errors

    def released(self, number: int) -> int:
        """What native code lets go of before this call; see runtime.Release."""
        arguments, results = self.shared.released[number]
        handles = (
            [ctypes.addressof(self.handles) + 8 * self.layout.made[id_] for id_ in results] if self.calls.code else []
        )
        if not arguments and not handles:
            return 0
        return self.keep(words([len(arguments), len(handles), id(None), *arguments, *handles]))

    def addresses(self, step: NativeStep) -> list[int]:
        """Where the step finds the addresses of what it reads and writes."""
        slots = [self.layout.slot(a) if a is not None else 0 for a in step.args]
        return [ctypes.addressof(self.slots) + 8 * slot for slot in slots]

    def product(self, step: NativeStep, sizes: list[int], args: list[int]) -> tuple[int, int, bool]:
        """(jobs, unit, for one thread) of a matrix product, the way that is the best for it; `sizes` are made to fit."""
        product, weight = self.shared.product(step, sizes, self.threads), step.args[1]
        assert weight is not None
        slot = self.layout.slot(weight)
        tuner = self.shared.tuner
        way: Way = rule(product) if tuner is None else tuner.way(product, still=slot in self.still)
        sizes[Gemm.SPLIT] = way.split
        if way.turned:
            args[1] = self.keep(words([self.turned(slot, sizes)]))
        return way.jobs(product), way.unit(product), way.threads == 1

    def turned(self, slot: int, sizes: list[int]) -> int:
        """The address of a turned copy of a weight, with the sizes changed for it; equal copies are one."""
        weight, form, start, stride = self.still[slot], sizes[Gemm.FORM], sizes[Gemm.B_AT], sizes[Gemm.LDB]
        n, k = sizes[Gemm.N], sizes[Gemm.K]
        shape = (n, k) if gemm.FORMS[form] == "nt" else (k, n)
        key = (weight.data_ptr(), shape, stride, start)
        copy = self.shared.copies.get(key)
        if copy is None:
            matrix = weight.detach().as_strided(shape, (stride, 1), weight.storage_offset() + start)
            copy = self.shared.copies[key] = matrix.t().contiguous()
        self.kept += [copy, weight]  # while the weight lives, its address is nobody else's
        if slot not in self.shared.constants:
            self.only[slot] = weight.data_ptr()
        sizes[Gemm.FORM], sizes[Gemm.LDB], sizes[Gemm.B_AT] = TURNED[form], shape[0], 0
        return copy.data_ptr()

    def barriers(self, rows: list[list[int]]) -> list[int]:
        """A barrier where a step meets memory another thread may still be at. Gives the first step behind the barrier
        before, for each."""
        steps, alone = self.native, [row[Step.ALONE] for row in rows]
        reads, writes = self.layout.reads, self.layout.writes
        regions: list[int] = []
        since = 0
        for i, step in enumerate(steps):
            conflict = any(
                steps[j].origin is not step.origin
                and not (alone[i] and alone[j])
                and (reads[i] & writes[j] or writes[i] & (writes[j] | reads[j]))
                for j in range(since, i)
            )
            if step.kind == "call" or (i and steps[i - 1].kind == "call") or conflict:
                if conflict:
                    rows[i - 1][Step.SYNC] = 1
                since = i
            regions.append(since)
        end = len(steps)
        for i in reversed(range(len(steps))):
            rows[i][Step.END] = i + 1 if rows[i][Step.CALL] else end
            if rows[i][Step.CALL]:
                end = i
        return regions

    # -- memory -------------------------------------------------------------------------------------------------------
    def spans(self, regions: Sequence[int]) -> list[Span]:
        """When each step may be at work, counted in steps. One that is for one thread: in its turn, as one thread does all
        of these in order. Another: at any time between two barriers, as threads come to it when they are done with others.
        """
        ends = {start: i for i, start in enumerate(regions)}
        return [
            (i, i) if row[Step.ALONE] else (start, ends[start])
            for i, (row, start) in enumerate(zip(self.rows, regions))
        ]

    def shared_memory(self, spans: Sequence[Span]) -> list[Unit]:
        """The memory of intermediates and outputs, with those that are written over each other as one."""
        uses: dict[int, list[Use]] = {}
        own: dict[Any, Span] = {}
        for (first, last), step, reads, writes in zip(spans, self.native, self.layout.reads, self.layout.writes):
            begin, end = own.get(step.origin, (first, last))
            own[step.origin] = min(begin, first), max(end, last)
            for slot in reads | writes:
                if slot in self.layout.memory:
                    uses.setdefault(slot, []).append(Use(first, last, step.origin))
        units = {slot: self.unit(slot, times) for slot, times in uses.items()}
        for origin, pairs in self.shared.overwrites.items():
            first, last = own[origin]
            for t, x in pairs:
                if t in units and x in units and units[x].slots[-1] == x and self.fits_over(units[t], units[x]):
                    dies = all(use.origin is origin or use.last < first for use in uses[x])
                    born = all(use.origin is origin or use.first > last for use in uses[t])
                    if dies and born:
                        units[x].take(units[t])
                        units[t] = units[x]
        return list(dict.fromkeys(units.values()))

    @staticmethod
    def fits_over(t: Unit, x: Unit) -> bool:
        return t is not x and t.size == x.size and x.home == BLOCK and len(t.slots) == 1

    def unit(self, slot: int, uses: Sequence[Use]) -> Unit:
        t = self.layout.memory[slot]
        size = element_size(t) * math.prod(self.value(s) for s in t.shape)
        first, last = min(use.first for use in uses), max(use.last for use in uses)
        if self.plan.places[t.id].kind == "output":
            return Unit([slot], size, first, len(self.native), slot)
        return Unit([slot], size, first, last)


def step_words(step: NativeStep, value: Callable[[Any], int]) -> list[int]:
    """The sizes of a step, behind the word for errors."""
    return [0, *(number_word(s, value) for s in step.sizes)]


def number_word(x: Any, value: Callable[[Any], int]) -> int:
    if x is None:
        return 0
    if isinstance(x, tuple):  # a float's bits
        return int(struct.unpack("<i", struct.pack("<f", x[1]))[0]) & 0xFFFFFFFF
    return value(x)


def jobs_of(step: NativeStep, sizes: list[int]) -> int:
    """How many pieces an attention or a convolution can be shared out in."""
    return ask("ag_attention_jobs", sizes[6:]) if step.kind == "attention" else ask("ag_conv2d_jobs", sizes[4:])


def scratch_of(step: NativeStep, sizes: list[int]) -> int:
    """The bytes each thread needs for this step."""
    match step.kind:
        case "gemm":
            form, m, n, k = (sizes[i] for i in (Gemm.FORM, Gemm.M, Gemm.N, Gemm.K))
            return gemm.scratch_bytes(gemm.FORMS[form], m, n, k)
        case "conv":
            return conv.scratch_bytes(sizes[4:])
        case "attention":
            return ask("ag_attention_scratch", sizes[6:])
    return step.scratch


def ask(name: str, dims: Sequence[int]) -> int:
    """What a native function says about these sizes."""
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(kernels()[name])
    return int(function((ctypes.c_int64 * len(dims))(*dims)))


def element_size(t: Tensor) -> int:
    return TORCH_TYPES[t.dtype].itemsize


def contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for s in reversed(shape):
        strides.append(step)
        step *= max(s, 1)
    return strides[::-1]
