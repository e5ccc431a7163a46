"""Frames: the tables that one call of a program works on (tables.py), at any sizes.

A frame is built once, by Python. Words that are the same for all sizes are written then; a word that depends on sizes is
noted with its term (plan/sizes.py), and native code writes all of these whenever the sizes change (binding.py). A program
has as many frames as there were calls at the same time.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import sympy
import torch

from airgraph.convert.promote import TORCH_TYPES
from airgraph.engine.native import runtime
from airgraph.engine.native.binding import code_words
from airgraph.engine.native.calls.words import Calls, TapeWriter
from airgraph.engine.native.code import NativeStep
from airgraph.engine.native.kernels import conv, conv_last, gemm
from airgraph.engine.native.kernels.products import ALONE, TURNED, ProductShape, Way, jobs_of, strategy, unit_of
from airgraph.engine.native.kernels.shared_kernels import ConvLast, Gemm, kernels
from airgraph.engine.native.tables import (
    BindingWords,
    DefinitionWords,
    EntryWords,
    FrameWords,
    LocationWords,
    StepWords,
    in_a_word,
    words,
)
from airgraph.engine.planned import THREADS, Released, SlotTable
from airgraph.ir.boundary import SymbolSource
from airgraph.ir.symbols import evaluate
from airgraph.plan.lifetimes import Timeline
from airgraph.plan.memory import Arrangement, aligned
from airgraph.plan.sizes import Amount, Sizes, Term, as_int, both, choose, either, equal, less, maximum
from airgraph.plan.steps import CallStep, ConvStep, Plan, step_writes
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
SOURCES = {"size": DefinitionWords.SIZE, "stride": DefinitionWords.STRIDE, "number": DefinitionWords.NUMBER}


# -- steps at any sizes -------------------------------------------------------------------------------------------------
class SizedStep(NamedTuple):
    """The numbers of a step. `sizes` begin with the word for errors; `single`: 1 if one thread does it."""

    sizes: list[Amount]
    jobs: Amount
    unit: Amount
    single: Amount
    scratch: Amount  # bytes for each thread


class Tuned(NamedTuple):
    """The fastest way of a product at the sizes for which it was timed; its weight lies as that way wants it at all."""

    product: ProductShape
    way: Way


def sized(step: NativeStep, sizes: Sizes, tuned: Tuned | None) -> SizedStep:
    """`tuned`: for a matrix product, if it was timed."""
    term, threads = sizes.term, sizes.term(THREADS)
    if step.kind == "call":
        return SizedStep([], 0, 1, 1, 0)
    words = [0, *(number_word(s, sizes) for s in step.sizes)]
    if step.kind == "gemm":
        return sized_product(words, threads, tuned)
    jobs, scratch = term(step.jobs), term(step.scratch)
    if step.kind == "attention":
        jobs, scratch = (ask(sizes, f"ag_attention_{what}", words[6:]) for what in ("jobs", "scratch"))
    elif isinstance(step.origin, ConvStep) and step.origin.last:
        return sized_conv(step, words, threads)
    elif step.kind == "conv":
        jobs, scratch = ask(sizes, "ag_conv2d_jobs", words[4:]), conv.scratch_bytes(words[4:])
    small = either(less(term(step.cost), ALONE), less(jobs, 2))
    return SizedStep(words, jobs, step.unit, 1 if getattr(step.origin, "alone", False) else small, aligned(scratch))


def sized_conv(step: NativeStep, words: list[Amount], threads: Amount) -> SizedStep:
    """With channels last."""
    assert isinstance(step.origin, ConvStep)
    tile, s = conv_last.this_tile(), step.origin.sizes
    assert tile is not None
    by_panels = conv_last.split(s, threads, tile)
    jobs, scratch = conv_last.jobs(s, by_panels, tile), conv_last.scratch_bytes(s, by_panels, tile)
    dims = conv_last.words(s, by_panels, [as_int(x) for x in words[ConvLast.DIMS :]], tile)
    small = either(less(as_int(step.cost), ALONE), less(jobs, 2))
    sizes = [*words[: ConvLast.DIMS], *dims]
    return SizedStep(sizes, jobs, conv_last.unit(by_panels, tile), small, aligned(scratch))


def sized_product(words: list[Amount], threads: Amount, tuned: Tuned | None) -> SizedStep:
    dims = [words[i] for i in (Gemm.BATCH, Gemm.M, Gemm.N, Gemm.K)]
    split, team = strategy(dims, threads)
    form = words[Gemm.FORM]
    assert isinstance(form, int)
    if tuned is not None:
        p, way = tuned
        known = zip((*dims, threads), (p.batch, p.m, p.n, p.k, p.threads))
        same = reduce(both, (equal(a, b) for a, b in known))
        split, team = choose(same, way.split, split), choose(same, way.threads, team)
    words[Gemm.SPLIT] = split
    jobs = jobs_of(split, dims)
    forms = [form, *([TURNED[form]] if tuned is not None and tuned.way.turned else [])]
    _, m, n, k = dims
    scratch = reduce(maximum, (gemm.scratch_bytes(gemm.FORMS[f], m, n, k) for f in forms))
    return SizedStep(words, jobs, unit_of(split, team, jobs, threads), equal(team, 1), aligned(scratch))


def number_word(x: Any, sizes: Sizes) -> Amount:
    if x is None:
        return 0
    if isinstance(x, tuple):  # a float's bits
        return int(struct.unpack("<i", struct.pack("<f", x[1]))[0]) & 0xFFFFFFFF
    return sizes.term(x)


def ask(sizes: Sizes, name: str, dims: Sequence[Amount]) -> Amount:
    """What a native function says about these sizes."""
    return sizes.ask(native_answer(name), kernels()[name], dims)


@cache
def native_answer(name: str) -> Callable[[Sequence[int]], int]:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(kernels()[name])
    return lambda dims: int(function((ctypes.c_int64 * len(dims))(*dims)))


def barriers(time: Timeline, single: Sequence[Amount]) -> dict[int, Amount]:
    """Steps behind which threads wait for each other; not where one thread does everything before and behind."""
    ends = {start: i for i, start in enumerate(time.starts)}
    alone = {start: reduce(both, single[start : ends[start] + 1]) for start in ends}
    return {i: 1 - both(alone[time.starts[i]], alone[time.starts[i + 1]]) for i in time.waits}


# -- frames -------------------------------------------------------------------------------------------------------------
class Given(NamedTuple):
    """One argument or output; see tables.EntryWords. Sizes and strides may be expressions."""

    kind: int
    value: Any  # a slot, or the number itself
    dtype: int = 0
    sizes: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    made: int = 0  # the address of a handle, for what PyTorch makes


@dataclass(frozen=True)
class Shared:
    """What all frames of a program have in common."""

    plan: Plan
    steps: Sequence[NativeStep]
    table: SlotTable
    sizes: Sizes
    sources: Sequence[SymbolSource]
    arguments: Sequence[Given]
    numbers: Sequence[Any]  # expressions whose values are handed out behind the outputs
    constants: dict[int, torch.Tensor]  # by slot
    callback: int  # the address of the Python function that does a library call
    calls: Calls
    released: Mapping[int, Released]  # by the number of a call's step
    sized: Sequence[SizedStep]
    tuned: Mapping[NativeStep, Tuned]
    time: Timeline
    memory: Arrangement
    copies: WeakValueDictionary[Any, torch.Tensor] = field(default_factory=WeakValueDictionary)  # of weights, turned
    kept: list[Any] = field(default_factory=list)

    def binding(self) -> int:
        """The address of the program's BindingWords, when all of its terms are known."""
        if not self.kept:
            index = {s: i for i, s in enumerate(self.sizes.symbols)}
            used = [s for s in self.sources if s.symbol in self.sizes.used]
            rows = [[index[s.symbol], s.argument, SOURCES[s.kind], s.axis, s.factor] for s in used]
            definitions = words([n for row in rows for n in row])
            code = words(code_words(self.sizes))
            questions = words([address for _, address in self.sizes.questions])
            binding = words([0] * BindingWords.WORDS)
            binding[BindingWords.DEFINITIONS], binding[BindingWords.DEFINITION_TABLE] = (
                len(rows),
                ctypes.addressof(definitions),
            )
            binding[BindingWords.OPERATIONS], binding[BindingWords.CODE] = len(self.sizes.code), ctypes.addressof(code)
            binding[BindingWords.SYMBOLS] = len(self.sizes.symbols)
            binding[BindingWords.QUESTIONS] = ctypes.addressof(questions)
            self.kept.extend((binding, definitions, code, questions))
        return ctypes.addressof(self.kept[0])


class BoundFrame:
    """A frame with all the memory it points to."""

    def __init__(self, shared: Shared, *, still: Mapping[int, torch.Tensor], number: int) -> None:
        """`still`: constants and arguments that keep their content, by slot."""
        self.shared = shared
        self.plan, self.native, self.table, self.calls = shared.plan, shared.steps, shared.table, shared.calls
        self.sizes, self.still, self.number = shared.sizes, still, number
        self.only: dict[int, int] = {}  # slot of an argument → the only address it may have in this frame
        self.kept: list[Any] = []
        self.sized: list[tuple[int, int]] = []  # (address of a word, number of its value)
        self.symbols: dict[Any, Any] = {}  # of the call that runs: those of its arguments, and what running could tell
        self.owner: Callable[[], Any] = lambda: None  # the executable, as long as it lives
        self.results: dict[int, Any] = {}  # what library calls made: (as PyTorch made it, contiguous)
        self.slots = words([0] * (self.table.count + 1))
        self.handles = words([0] * 2 * len(self.table.made))
        for slot, tensor in shared.constants.items():
            self.slots[slot] = tensor.data_ptr()
        self.objects: list[Any] = []
        self.words = words([0] * FrameWords.WORDS)
        errors = self.steps()
        outs = [*self.outputs(), *(Given(EntryWords.NUMBER, x) for x in shared.numbers)]
        places = [
            n for slot, (home, offset) in shared.memory.locations.items() if home != slot for n in (slot, home, offset)
        ]
        scratch: Amount = 0
        for step in shared.sized:
            scratch = maximum(scratch, step.scratch)
        out_table = self.table_of([self.entry(o) for o in outs])
        tensors = [self.entry(a) for a in shared.arguments if a.kind != EntryWords.WHOLE]
        for index, content in {
            FrameWords.ARGS: len(shared.arguments),
            FrameWords.ARG_TABLE: self.table_of([self.number_entry(a) or tensors.pop(0) for a in shared.arguments]),
            FrameWords.OUTS: len(outs),
            FrameWords.OUT_TABLE: out_table,
            FrameWords.SLOTS: ctypes.addressof(self.slots),
            FrameWords.PLACED: len(places) // LocationWords.WORDS,
            FrameWords.PLACE_TABLE: self.row(places),
            FrameWords.NEED: self.sizes.term(THREADS) * scratch + shared.memory.size,
            FrameWords.NUMBER: number,
            FrameWords.SCRATCH: scratch,
            FrameWords.STEPS: len(self.native),
            FrameWords.STEP_TABLE: ctypes.addressof(self.step_table),
            FrameWords.ERRORS: len(errors),
            FrameWords.ERROR_TABLE: self.row(errors),
            FrameWords.OBJECTS: id(self.objects),
            FrameWords.CALLBACK: shared.callback,
            FrameWords.NONE: id(None),
            FrameWords.TENSOR_TYPE: id(torch.Tensor),
            FrameWords.PARAMETER_TYPE: id(torch.nn.Parameter),
            FrameWords.MADE: 2 * len(self.table.made) if self.calls.tapes else 0,
            FrameWords.MADE_TABLE: ctypes.addressof(self.handles),
            FrameWords.DISPATCH: self.calls.function("dispatch"),
            FrameWords.LET_GO: self.calls.function("let_go"),
        }.items():
            self.set(self.words, index, content)
        self.values = words([0] * self.sizes.count)
        self.words[FrameWords.SIZED], self.words[FrameWords.WORD_TABLE] = len(self.sized), self.table_of(self.sized)
        self.words[FrameWords.VALUES] = ctypes.addressof(self.values)
        self.words[FrameWords.BINDING] = shared.binding()

    # -- words ----------------------------------------------------------------------------------------------------------
    def set(self, row: Any, index: int, content: Amount) -> None:
        """A number now, or for each set of sizes."""
        if isinstance(content, Term):
            self.sized.append((ctypes.addressof(row) + 8 * index, content.index))
        else:
            row[index] = in_a_word(content)

    def row(self, contents: Sequence[Any]) -> int:
        """The address of words with these contents: numbers, expressions or terms."""
        row = words([0] * len(contents))
        for index, content in enumerate(contents):
            self.set(row, index, self.sizes.term(content))
        return self.keep(row)

    def table_of(self, rows: Sequence[Sequence[Any]]) -> int:
        return self.row([n for row in rows for n in row])

    def keep(self, row: Any) -> int:
        self.kept.append(row)
        return ctypes.addressof(row)

    def entry(self, e: Given) -> list[Any]:
        row: list[Any] = [0] * EntryWords.WORDS
        row[EntryWords.KIND], row[EntryWords.DTYPE], row[EntryWords.DIM], row[EntryWords.VALUE] = (
            e.kind,
            e.dtype,
            len(e.sizes),
            e.value,
        )
        row[EntryWords.SIZES], row[EntryWords.STRIDES] = self.row(e.sizes), e.made or self.row(e.strides)
        row[EntryWords.ADDRESS] = self.only.get(e.value, 0) if e.kind == EntryWords.TENSOR else 0
        if e.kind == EntryWords.FLOAT:
            self.slots[e.value] = self.row([0])
        return row

    def number_entry(self, e: Given) -> list[Any]:
        """The entry of a whole number. (Nothing may depend on it, and it may be none: the size of a ragged dimension.)"""
        if e.kind != EntryWords.WHOLE:
            return []
        used = not isinstance(e.value, sympy.Symbol) or e.value in self.sizes.used
        return self.entry(e if used else Given(EntryWords.NOTHING, 0))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    @property
    def threads(self) -> int:
        return int(self.words[FrameWords.THREADS])

    @property
    def scratch(self) -> int:
        """Bytes for each thread: what its most demanding step needs."""
        return int(self.words[FrameWords.SCRATCH])

    @property
    def need(self) -> int:
        """Bytes of the block it needs."""
        return int(self.words[FrameWords.NEED])

    @property
    def arena(self) -> int:
        """Bytes of intermediates, without those in outputs."""
        return self.need - self.threads * self.scratch

    # -- for one set of sizes -------------------------------------------------------------------------------------------
    def assign(self, symbols: Mapping[Any, Any], threads: int) -> None:
        """Make it a frame for these symbols, where native code cannot: a value that only sympy can compute."""
        values = self.sizes.run({**symbols, THREADS: threads})
        self.values[:] = words(values[: len(self.values)])
        runtime.write(self.address)
        self.words[FrameWords.THREADS] = threads

    def bound(self) -> dict[Any, Any]:
        """The symbols it is for."""
        return dict(zip(self.sizes.symbols, self.values))

    def value(self, x: Any) -> int:
        """Of an expression, at the sizes the frame is for."""
        term = self.sizes.find(x)
        if isinstance(term, Term) and term.index < len(self.values):
            return int(self.values[term.index])
        return term if isinstance(term, int) else int(evaluate(x, self.symbols or self.bound()))

    def serves(self, args: Sequence[Any]) -> bool:
        """Whether the weights it has copies of are among the arguments."""
        addresses = {
            g.value: a.data_ptr()
            for g, a in zip(self.shared.arguments, args)
            if g.kind == EntryWords.TENSOR and g.value in self.only and isinstance(a, torch.Tensor)
        }
        return all(addresses.get(slot) == address for slot, address in self.only.items())

    def arguments(self) -> Sequence[Any]:
        """Of the call that runs."""
        found: Sequence[Any] = ctypes.cast(self.words[FrameWords.LIST], ctypes.py_object).value
        return found

    def forget(self) -> None:
        """What library calls made is no longer needed."""
        self.results.clear()
        self.symbols = {}
        for i in range(len(self.objects)):
            self.objects[i] = None

    # -- what PyTorch makes ---------------------------------------------------------------------------------------------
    def slot_address(self, t: Tensor) -> int:
        return ctypes.addressof(self.slots) + 8 * self.table.slot(t)

    def made(self, t: Tensor) -> int:
        """The address of the two handles of a tensor."""
        return ctypes.addressof(self.handles) + 8 * self.table.made[t.id]

    def made_by_dispatcher(self, t: Tensor) -> torch.Tensor:
        return runtime.wrapped(self.handles[self.table.made[t.id]])

    def by_python(self, number: int) -> bool:
        """Python does this step from now on. (It was not so before: the dispatcher could not do it.)"""
        at = number * StepWords.WORDS + StepWords.CALL
        before, self.step_table[at] = self.step_table[at], StepWords.PYTHON
        return bool(before != StepWords.PYTHON)

    def outputs(self) -> list[Given]:
        """Their shapes are those of NetOutput's values, whatever the tensor that was computed looks like."""
        rows: list[Given] = []
        for t, v in zip(self.plan.outputs, self.plan.output_values):
            if t is None:
                made = self.made(self.table.given[len(self.objects)])
                rows.append(Given(EntryWords.NOTHING, len(self.objects), made=made))
                self.objects.append(None)
                continue
            shape = v.type.shape or ()
            place = self.plan.place(t)
            same_rank = len(place.strides) == len(shape) and t.shape == v.type.shape
            strides = place.strides if same_rank else contiguous([self.sizes.term(s) for s in shape])
            rows.append(
                Given(EntryWords.TENSOR, self.table.slots[t.id], DTYPE_NUMBER[TORCH_TYPES[v.dtype]], shape, strides)
            )
        return rows

    # -- steps ----------------------------------------------------------------------------------------------------------
    def steps(self) -> list[int]:
        """Their rows. Gives the sizes behind whose first word an error may be."""
        rows: list[list[Any]] = []
        errors: list[int] = []
        writer = TapeWriter(self, self.calls.dense)
        for number, (step, numbers) in enumerate(zip(self.native, self.shared.sized)):
            row: list[Any] = [0] * StepWords.WORDS
            rows.append(row)
            row[StepWords.ALONE] = numbers.single
            if isinstance(step.origin, CallStep):
                tape = self.calls.tapes.get(step.origin)
                row[StepWords.CALL] = StepWords.PYTHON if tape is None else StepWords.DISPATCHER
                row[StepWords.TAPE] = writer.tape(tape, step_writes(step.origin)) if tape is not None else 0
                row[StepWords.RELEASE] = self.released(number)
                continue
            sizes, args = list(numbers.sizes), self.addresses(step)
            tuned = self.shared.tuned.get(step)
            if tuned is not None and tuned.way.turned:
                self.turn(step, sizes, args)
            row[StepWords.FUNCTION], row[StepWords.JOBS], row[StepWords.UNIT] = (
                step.function,
                numbers.jobs,
                numbers.unit,
            )
            row[StepWords.SIZES], row[StepWords.ARGS] = self.row(sizes), self.row(args)
            if step.checks:
                errors.append(row[StepWords.SIZES])
        for i, wait in barriers(self.shared.time, [s.single for s in self.shared.sized]).items():
            rows[i][StepWords.SYNC] = wait
        end = len(rows)
        for i in reversed(range(len(rows))):
            rows[i][StepWords.END] = i + 1 if rows[i][StepWords.CALL] else end
            if rows[i][StepWords.CALL]:
                end = i
        self.table_of(rows)
        self.step_table = self.kept[-1]
        return errors

    def released(self, number: int) -> int:
        """What native code lets go of before this call; see tables.ReleaseWords."""
        arguments, results = self.shared.released[number]
        handles = (
            [ctypes.addressof(self.handles) + 8 * self.table.made[id_] for id_ in results] if self.calls.code else []
        )
        if not arguments and not handles:
            return 0
        return self.row([len(arguments), len(handles), id(None), *arguments, *handles])

    def addresses(self, step: NativeStep) -> list[int]:
        """Where the step finds the addresses of what it reads and writes."""
        slots = [self.table.slot(a) if a is not None else 0 for a in step.args]
        return [ctypes.addressof(self.slots) + 8 * slot for slot in slots]

    def turn(self, step: NativeStep, sizes: list[Any], args: list[int]) -> None:
        """The product reads a turned copy of its weight, if that keeps its content; equal copies are one."""
        assert step.args[1] is not None
        slot = self.table.slot(step.args[1])
        numbers = [sizes[i] for i in (Gemm.FORM, Gemm.B_AT, Gemm.LDB, Gemm.N, Gemm.K)]
        if slot not in self.still or not all(isinstance(x, int) for x in numbers):
            return
        weight, (form, start, stride, n, k) = self.still[slot], numbers
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
        args[1] = self.row([copy.data_ptr()])


def contiguous(shape: Sequence[Amount]) -> list[Amount]:
    strides: list[Amount] = []
    step: Amount = 1
    for s in reversed(shape):
        strides.append(step)
        step = step * maximum(s, 1)
    return strides[::-1]
