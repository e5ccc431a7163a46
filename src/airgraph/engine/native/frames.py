"""Frames: the tables that one call of a program works on (tables.py), at any sizes.

The image of a frame (image.py) is built once, from the plan. Words that are the same for all sizes are written then; a word
that depends on sizes is noted with its term (plan/sizes.py), and native code writes all of these whenever the sizes change
(binding.py). A program has as many frames (bound.py) as there were calls at the same time.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import sympy
import torch

from airgraph.engine.native.binding import code_words
from airgraph.engine.native.bound import native_answer
from airgraph.engine.native.calls.words import Calls, TapeWriter
from airgraph.engine.native.code import NativeStep, by_channel
from airgraph.engine.native.image import (
    AS_BFLOAT16,
    BY_TAPS,
    IN_PANELS,
    ConvPack,
    FrameImage,
    Link,
    OnceStep,
    Outside,
    Pack,
    Reference,
    SizesImage,
    TransposedCopy,
)
from airgraph.engine.native.kernels import bfloat16, conv_bfloat16, conv_last, gemm, winograd
from airgraph.engine.native.kernels.gemm import BANDS, BATCH, COLUMNS, ROWS
from airgraph.engine.native.kernels.panels import one_by_one, rows_of_band
from airgraph.engine.native.kernels.products import (
    SINGLE_THREADED,
    TRANSPOSED,
    ProductShape,
    ProductStrategy,
    jobs_of,
    rule_of_sizes,
    unit_of,
)
from airgraph.engine.native.kernels.shared_kernels import ConvLast, Gemm, kernel, name_of
from airgraph.engine.native.tables import DefinitionWords, EntryWords, FrameWords, LocationWords, StepWords, in_a_word
from airgraph.engine.planned import THREADS, Released, SlotTable
from airgraph.ir.boundary import SymbolSource
from airgraph.plan.lifetimes import Timeline
from airgraph.plan.memory import Arrangement, aligned
from airgraph.plan.sizes import Amount, Sizes, Term, as_int, both, ceil, choose, either, equal, less, maximum
from airgraph.plan.steps import CallStep, ConvStep, LoopStep, Plan, step_writes
from airgraph.plan.tensors import FROM_LAST, TO_LAST, Tensor
from airgraph.torch_types import TORCH_TYPES

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
    wait: Amount = 0  # 1 if threads wait for each other behind it, whatever memory is about (`barriers`)


class Tuned(NamedTuple):
    """The fastest strategy of a product at the sizes for which it was timed; its weight lies as that wants it at all."""

    product: ProductShape
    strategy: ProductStrategy


def sized_steps(
    steps: Sequence[NativeStep], sizes: Sizes, tuned: Mapping[NativeStep, Tuned], packed: Mapping[NativeStep, int]
) -> list[SizedStep]:
    """`packed`: see Shared."""
    found: list[SizedStep] = []
    for step in steps:
        if step.kind == "epilogue":
            found.append(sized_epilogue(step, found[-1], sizes))
        else:
            found.append(sized(step, sizes, tuned.get(step), packed.get(step, 0)))
        if len(found) > 1 and steps[len(found) - 2].kind == "prologue":
            found[-2] = sized_prologue(found[-2], found[-1])
    return found


def sized_prologue(loop: SizedStep, product: SizedStep) -> SizedStep:
    """Where threads divide the rows of the product, each makes its own; else they share the loop and meet behind it."""
    rows = equal(product.sizes[Gemm.SPLIT], ROWS)
    return loop._replace(
        unit=choose(rows, product.unit, loop.unit),
        single=choose(rows, product.single, loop.single),
        wait=choose(rows, 0, 1 - both(loop.single, product.single)),
    )


def sized_epilogue(step: NativeStep, product: SizedStep, sizes: Sizes) -> SizedStep:
    """Each thread goes on with its share of the product; nothing is left to do behind a convolution."""
    words = [0, *(number_word(s, sizes) for s in step.sizes)]
    if isinstance(step.origin, ConvStep):
        return product._replace(sizes=words, jobs=0, scratch=0)
    share = (product.sizes[i] for i in (Gemm.SPLIT, Gemm.BAND, Gemm.ACROSS))
    return product._replace(sizes=[*words, *share], scratch=0)


def sized(step: NativeStep, sizes: Sizes, tuned: Tuned | None, squares: int) -> SizedStep:
    """`tuned`: for a matrix product, if it was timed; `squares`: of a convolution (winograd.py)."""
    term, threads = sizes.term, sizes.term(THREADS)
    if step.kind == "call":
        return SizedStep([], 0, 1, 1, 0)
    words = [0, *(number_word(s, sizes) for s in step.sizes)]
    if step.kind == "bfloat16":
        return sized_bfloat16(words, threads)
    if step.kind in ("gemm", "grouped"):
        return sized_product(words, threads, tuned, of_batch=step.kind == "gemm")
    jobs, scratch = term(step.jobs), term(step.scratch)
    if step.kind == "attention":
        jobs, scratch = (ask(sizes, f"ag_attention_{what}", words[6:]) for what in ("jobs", "scratch"))
    elif step.kind == "conv":
        return sized_conv(step, words, threads, squares)
    elif step.kind == "conv_bfloat16":
        return sized_conv_bfloat16(step, words, threads)
    small = either(less(term(step.cost), SINGLE_THREADED), less(jobs, 2))
    return SizedStep(
        words, jobs, step.unit, 1 if getattr(step.origin, "sequential", False) else small, aligned(scratch)
    )


def sized_conv(step: NativeStep, words: list[Amount], threads: Amount, squares: int) -> SizedStep:
    assert isinstance(step.origin, ConvStep)
    tile, s = conv_last.this_tile(), step.origin.sizes
    by_panels = conv_last.split(s, threads, tile)
    jobs, scratch = conv_last.jobs(s, by_panels, tile), conv_last.scratch_bytes(s, by_panels, tile)
    dims = conv_last.words(s, by_panels, [as_int(x) for x in words[ConvLast.DIMS :]], tile)
    if squares:
        dims[conv_last.SQUARES] = squares
        scratch = maximum(scratch, conv_last.offsets(s, tile)["packed"] + winograd.scratch_bytes(s, tile, squares))
    small = either(less(as_int(step.cost), SINGLE_THREADED), less(jobs, 2))
    sizes = [*words[: ConvLast.DIMS], *dims]
    return SizedStep(sizes, jobs, 1, small, aligned(scratch))


def sized_conv_bfloat16(step: NativeStep, words: list[Amount], threads: Amount) -> SizedStep:
    assert isinstance(step.origin, ConvStep)
    s = step.origin.sizes
    by_panels = conv_bfloat16.split(s, threads)
    jobs = conv_bfloat16.jobs(s, by_panels)
    small = either(less(as_int(step.cost) // (bfloat16.SMALL // 4), SINGLE_THREADED), less(jobs, 2))
    sizes = [*words[: ConvLast.DIMS], *conv_bfloat16.words(s, by_panels)]
    return SizedStep(sizes, jobs, 1, small, aligned(conv_bfloat16.scratch_bytes(s)))


def sized_product(words: list[Amount], threads: Amount, tuned: Tuned | None, of_batch: bool) -> SizedStep:
    """`of_batch`: each member has all rows; else they are shared among the members."""
    dims = [words[Gemm.BATCH] if of_batch else 1, *(words[i] for i in (Gemm.M, Gemm.N, Gemm.K))]
    split, team = rule_of_sizes(dims, threads)
    form = words[Gemm.FORM]
    assert isinstance(form, int)
    if tuned is not None and tuned.strategy.panels:
        return sized_panels(words, threads, tuned, single=equal(team, 1))
    if tuned is not None:
        p, strategy = tuned
        known = zip((*dims, threads), (p.batch, p.m, p.n, p.k, p.threads))
        same = reduce(both, (equal(a, b) for a, b in known))
        split, team = choose(same, strategy.split, split), choose(same, strategy.threads, team)
    packed = tuned if tuned is not None and tuned.strategy.packed else None
    if packed is not None:
        split, team = COLUMNS, packed.strategy.threads
    words[Gemm.SPLIT] = split
    jobs = jobs_of(split, dims)
    forms = [form, *([TRANSPOSED[form]] if tuned is not None and tuned.strategy.transposed else [])]
    _, m, n, k = dims
    scratch = reduce(maximum, (gemm.scratch_bytes(gemm.FORMS[f], m, n, k) for f in forms))
    unit = unit_of(split, team, jobs, threads) if packed is None else packed.strategy.unit(packed.product)
    return SizedStep(words, jobs, unit, equal(team, 1), aligned(scratch))


def sized_panels(words: list[Amount], threads: Amount, tuned: Tuned, single: Amount) -> SizedStep:
    """A product whose weight is packed in panels."""
    p, tile = tuned.product, conv_last.these_tiles()[tuned.strategy.tile]
    s = one_by_one(p.m, p.n, p.k)
    by_panels = less(0, conv_last.split(s, threads, tile))
    band, across = rows_of_band(p, threads, tile), conv_last.panels(s, tile) * tile.panel
    by_bands = both(by_panels, less(band, p.m))
    words[Gemm.SPLIT] = choose(by_bands, BANDS, choose(by_panels, COLUMNS, ROWS))
    words[Gemm.BAND], words[Gemm.ACROSS] = band, across
    columns = choose(by_bands, ceil(p.m, band) * across, p.n)
    jobs, unit = choose(by_panels, columns, p.m), choose(by_panels, tile.panel, tile.rows[0])
    form = gemm.FORMS[p.form]
    scratch = max(conv_last.offsets(s, tile)["packed"], as_int(gemm.scratch_bytes(form, p.m, p.n, p.k)))
    return SizedStep(words, jobs, unit, single, aligned(scratch))


def sized_bfloat16(words: list[Amount], threads: Amount) -> SizedStep:
    """A product in bfloat16: threads divide the panels of columns, and bands of rows where these are few."""
    batch, m, n, k = (words[i] for i in (Gemm.BATCH, Gemm.M, Gemm.N, Gemm.K))
    form, (split, _) = words[Gemm.FORM], rule_of_sizes((1, m, n, k), threads)
    assert isinstance(form, int)
    split = choose(less(1, batch), BATCH, split)
    by_bands, by_rows = equal(split, COLUMNS), equal(split, ROWS)
    band, across = bfloat16.rows_of_band(m, n, threads), ceil(n, bfloat16.PANEL) * bfloat16.PANEL
    words[Gemm.SPLIT] = choose(by_bands, BANDS, split)
    words[Gemm.BAND], words[Gemm.ACROSS] = band, across
    jobs = choose(by_bands, ceil(m, band) * across, choose(by_rows, m, batch))
    small = either(less(batch * m * n * k // bfloat16.SMALL, SINGLE_THREADED), less(jobs, 2))
    scratch = aligned(bfloat16.scratch_bytes(gemm.FORMS[form], m, k))
    return SizedStep(words, jobs, choose(equal(split, BATCH), 1, bfloat16.PANEL), small, scratch)


def number_word(x: Any, sizes: Sizes) -> Amount:
    if x is None:
        return 0
    if isinstance(x, tuple):  # a float's bits
        return int(struct.unpack("<i", struct.pack("<f", x[1]))[0]) & 0xFFFFFFFF
    return sizes.term(x)


def ask(sizes: Sizes, name: str, dims: Sequence[Amount]) -> Amount:
    """What a native function says about these sizes."""
    return sizes.ask(native_answer(name), kernel(name), dims)


def barriers(time: Timeline, single: Sequence[Amount]) -> dict[int, Amount]:
    """Steps behind which threads wait for each other; not where one thread does everything before and behind."""
    ends = {start: i for i, start in enumerate(time.starts)}
    single_threaded = {start: reduce(both, single[start : ends[start] + 1]) for start in ends}
    return {i: 1 - both(single_threaded[time.starts[i]], single_threaded[time.starts[i + 1]]) for i in time.waits}


# -- frames -------------------------------------------------------------------------------------------------------------
class Given(NamedTuple):
    """One argument or output; see tables.EntryWords. Sizes and strides may be expressions."""

    kind: int
    value: Any  # a slot, or the number itself
    dtype: int = 0
    sizes: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    made: Link | None = None  # the address of a handle, for what PyTorch makes


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
    calls: Calls
    released: Mapping[int, Released]  # by the number of a call's step
    sized: Sequence[SizedStep]
    tuned: Mapping[NativeStep, Tuned]
    packed: Mapping[NativeStep, int]  # convolutions that read packed weights: squares of a block (winograd.py), or 0
    packed_halves: frozenset[NativeStep]  # products and convolutions in bfloat16 that read a packed weight
    once: Sequence[OnceStep]
    frozen: frozenset[int]  # slots of the arguments that never change, and of what is computed from these alone
    time: Timeline
    memory: Arrangement
    fixed: list[torch.Tensor] = field(default_factory=list)  # constants of calls
    copies: WeakValueDictionary[Any, Any] = field(
        default_factory=WeakValueDictionary
    )  # of weights, transposed or packed

    @cached_property
    def image(self) -> FrameImage:
        """The frame that all of them are copies of."""
        return FrameBuilder(self).image()

    def sizes_image(self) -> SizesImage:
        """When all terms are known."""
        index = {s: i for i, s in enumerate(self.sizes.symbols)}
        used = [s for s in self.sources if s.symbol in self.sizes.used]
        rows = [[index[s.symbol], s.argument, SOURCES[s.kind], s.axis, s.factor, s.offset] for s in used]
        questions = [name_of(address) for _, address in self.sizes.questions]
        return SizesImage(len(self.sizes.symbols), [n for row in rows for n in row], code_words(self.sizes), questions)


class FrameBuilder:
    """The image of a frame, from what all frames of a program share. Addresses are links and references."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.plan, self.native, self.table, self.calls = shared.plan, shared.steps, shared.table, shared.calls
        self.sizes = shared.sizes
        self.words: list[Any] = [0] * FrameWords.WORDS
        self.slots = self.row([0] * (self.table.count + 1))
        self.handles = self.row([0] * 2 * len(self.table.made))
        self.objects = 0
        self.fixed: list[torch.Tensor] = shared.fixed
        self.transposes: list[TransposedCopy] = []
        self.packs: list[Pack] = []
        self.conv_packs: list[ConvPack] = []

    def image(self) -> FrameImage:
        shared = self.shared
        for slot in shared.constants:
            self.words[self.slots.at + slot] = Reference(Outside.CONSTANT, slot)
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
        called = self.calls.code is not None
        self.argument_table = self.table_of([self.number_entry(a) or tensors.pop(0) for a in shared.arguments])
        for index, content in {
            FrameWords.ARGS: len(shared.arguments),
            FrameWords.ARG_TABLE: self.argument_table,
            FrameWords.OUTS: len(outs),
            FrameWords.OUT_TABLE: out_table,
            FrameWords.SLOTS: self.slots,
            FrameWords.PLACED: len(places) // LocationWords.WORDS,
            FrameWords.PLACE_TABLE: self.row(places),
            FrameWords.NEED: self.sizes.term(THREADS) * scratch + shared.memory.size,
            FrameWords.SCRATCH: scratch,
            FrameWords.STEPS: len(self.native),
            FrameWords.STEP_TABLE: self.step_table,
            FrameWords.ERRORS: len(errors),
            FrameWords.ERROR_TABLE: self.row(errors),
            FrameWords.OBJECTS: Reference(Outside.OBJECTS),
            FrameWords.CALLBACK: Reference(Outside.CALLBACK),
            FrameWords.NONE: Reference(Outside.NONE),
            FrameWords.TENSOR_TYPE: Reference(Outside.TENSOR_TYPE),
            FrameWords.PARAMETER_TYPE: Reference(Outside.PARAMETER_TYPE),
            FrameWords.MADE: 2 * len(self.table.made) if self.calls.tapes else 0,
            FrameWords.MADE_TABLE: self.handles,
            FrameWords.DISPATCH: Reference(Outside.DISPATCH) if called else 0,
            FrameWords.LET_GO: Reference(Outside.LET_GO) if called else 0,
            FrameWords.BINDING: Reference(Outside.BINDING),
        }.items():
            self.words[index] = content
        return self.assembled()

    def assembled(self) -> FrameImage:
        """The words as numbers; those that depend on sizes are listed in a table of (address, number of the value)."""
        values = self.row([0] * self.sizes.count)
        sized = [(Link(at), x.index) for at, x in enumerate(self.words) if isinstance(x, Term)]
        self.words[FrameWords.SIZED], self.words[FrameWords.WORD_TABLE] = len(sized), self.table_of(sized)
        self.words[FrameWords.VALUES] = values
        image = FrameImage(
            objects=self.objects,
            transposes=self.transposes,
            packs=self.packs,
            conv_packs=self.conv_packs,
            once=[*self.shared.once],
        )
        for at, x in enumerate(self.words):
            match x:
                case Link(to):
                    image.links.extend((at, to))
                case Reference(kind, number):
                    image.outside.extend((at, kind, number))
        image.words.extend(in_a_word(x) if isinstance(x, int) else 0 for x in self.words)
        image.tables = {
            "slots": (self.slots.at, self.table.count + 1),
            "handles": (self.handles.at, 2 * len(self.table.made)),
            "steps": (self.step_table.at, len(self.native) * StepWords.WORDS),
            "values": (values.at, self.sizes.count),
            "arguments": (self.argument_table.at, len(self.shared.arguments) * EntryWords.WORDS),
        }
        return image

    # -- words ----------------------------------------------------------------------------------------------------------
    def row(self, contents: Sequence[Any]) -> Link:
        """The address of words with these contents: numbers, expressions, terms, links or references."""
        start = Link(len(self.words))
        fixed = (int, Link, Reference)
        self.words += [x if isinstance(x, fixed) else self.sizes.term(x) for x in contents] or [0]
        return start

    def table_of(self, rows: Sequence[Sequence[Any]]) -> Link:
        return self.row([n for row in rows for n in row])

    def text(self, text: str) -> Link:
        raw = text.encode() + b"\0"
        return self.row(array("q", raw + bytes(-len(raw) % 8)))

    def entry(self, e: Given) -> list[Any]:
        row: list[Any] = [0] * EntryWords.WORDS
        row[EntryWords.KIND], row[EntryWords.DTYPE] = e.kind, e.dtype
        row[EntryWords.DIM], row[EntryWords.VALUE] = len(e.sizes), e.value
        row[EntryWords.SIZES], row[EntryWords.STRIDES] = self.row(e.sizes), e.made or self.row(e.strides)
        if e.kind == EntryWords.FLOAT:
            self.words[self.slots.at + e.value] = self.row([0])
        return row

    def number_entry(self, e: Given) -> list[Any]:
        """The entry of a whole number. (Nothing may depend on it, and it may be none: the size of a ragged dimension.)"""
        if e.kind != EntryWords.WHOLE:
            return []
        used = not isinstance(e.value, sympy.Symbol) or e.value in self.sizes.used
        return self.entry(e if used else Given(EntryWords.NOTHING, 0))

    def slot_address(self, t: Tensor) -> Link:
        return self.slots.behind(self.table.slot(t))

    def made(self, t: Tensor) -> Link:
        """The address of the two handles of a tensor."""
        return self.handles.behind(self.table.made[t.id])

    def outputs(self) -> list[Given]:
        """Their shapes are those of NetOutput's values, whatever the tensor that was computed looks like."""
        rows: list[Given] = []
        for number, (t, v) in enumerate(zip(self.plan.outputs, self.plan.output_values)):
            if t is None:
                made = self.made(self.table.given[self.objects])
                rows.append(Given(EntryWords.NOTHING, self.objects, made=made))
                self.objects += 1
                continue
            shape = v.type.shape or ()
            place = self.plan.allocation(t)
            same_rank = len(place.strides) == len(shape) and t.shape == v.type.shape
            strides: Sequence[Any] = place.strides
            if not same_rank or number in self.plan.last:
                sizes = [self.sizes.term(s) for s in shape]
                strides = contiguous_last(sizes) if number in self.plan.last else contiguous(sizes)
            rows.append(
                Given(EntryWords.TENSOR, self.table.slots[t.id], DTYPE_NUMBER[TORCH_TYPES[v.dtype]], shape, strides)
            )
        return rows

    # -- steps ----------------------------------------------------------------------------------------------------------
    def steps(self) -> list[Link]:
        """Their rows. Gives the sizes behind whose first word an error may be."""
        rows: list[list[Any]] = []
        errors: list[Link] = []
        writer = TapeWriter(self, self.calls.dense)
        for number, (step, numbers) in enumerate(zip(self.native, self.shared.sized)):
            row: list[Any] = [0] * StepWords.WORDS
            rows.append(row)
            row[StepWords.SINGLE], row[StepWords.SYNC] = numbers.single, numbers.wait
            if isinstance(step.origin, CallStep):
                tape = self.calls.tapes.get(step.origin)
                row[StepWords.CALL] = StepWords.PYTHON if tape is None else StepWords.DISPATCHER
                row[StepWords.TAPE] = writer.tape(tape, step_writes(step.origin)) if tape is not None else 0
                row[StepWords.RELEASE] = self.released(number)
                continue
            function = Reference(Outside.STEP, number)
            row[StepWords.FUNCTION], row[StepWords.JOBS], row[StepWords.UNIT] = function, numbers.jobs, numbers.unit
            row[StepWords.SIZES], row[StepWords.ARGS] = self.row(numbers.sizes), self.row(self.addresses(step))
            self.note_transpose(step, row[StepWords.SIZES], row[StepWords.ARGS])
            self.note_pack(step, row[StepWords.SIZES], row[StepWords.ARGS])
            if step.kind == "epilogue" and isinstance(step.origin, ConvStep):
                self.give_epilogue(rows[-2][StepWords.SIZES], step.origin.epilogue, row)
            if step.checks:
                errors.append(row[StepWords.SIZES])
        for i, wait in barriers(self.shared.time, [s.single for s in self.shared.sized]).items():
            rows[i][StepWords.SYNC] = wait
        end = len(rows)
        for i in reversed(range(len(rows))):
            rows[i][StepWords.END] = i + 1 if rows[i][StepWords.CALL] else end
            if rows[i][StepWords.CALL]:
                end = i
        self.step_table = self.table_of(rows)
        return errors

    def give_epilogue(self, sizes: Link, loop: LoopStep | None, row: Sequence[Any]) -> None:
        """A convolution, whose sizes these are, calls the step of this row, which is this loop."""
        assert loop is not None
        kind = conv_last.BY_CHANNEL if by_channel(loop) else conv_last.BY_ELEMENT
        words = (kind, *(row[i] for i in (StepWords.FUNCTION, StepWords.ARGS, StepWords.SIZES)))
        at = sizes.at + ConvLast.DIMS + conv_last.DIMS.index("epilogue")
        self.words[at : at + len(words)] = words

    def released(self, number: int) -> Link | int:
        """What native code lets go of before this call; see tables.ReleaseWords."""
        arguments, results = self.shared.released[number]
        handles = [self.handles.behind(self.table.made[id_]) for id_ in results] if self.calls.code else []
        if not arguments and not handles:
            return 0
        return self.row([len(arguments), len(handles), Reference(Outside.NONE), *arguments, *handles])

    def addresses(self, step: NativeStep) -> list[Link]:
        """Where the step finds the addresses of what it reads and writes."""
        slots = [self.table.slot(a) if a is not None else 0 for a in step.args]
        return [self.slots.behind(slot) for slot in slots]

    def note_pack(self, step: NativeStep, sizes: Link, args: Link) -> None:
        """A product with a packed weight, or a convolution; a frame has a packed copy if the weight keeps its content, or
        can be tagged."""
        tuned = self.shared.tuned.get(step)
        multiplies = tuned is not None and (tuned.strategy.packed or tuned.strategy.panels)
        if not multiplies and step not in self.shared.packed and step not in self.shared.packed_halves:
            return
        assert step.args[1] is not None
        slot = self.table.slot(step.args[1])
        tagged = slot not in self.shared.constants and slot not in self.shared.frozen
        if step in self.shared.packed_halves:
            block = BY_TAPS if step.kind == "conv_bfloat16" else AS_BFLOAT16
            self.packs.append(Pack(slot, sizes.at, args.at, block, tagged))
        elif tuned is not None and tuned.strategy.panels:
            self.words[sizes.at + Gemm.PANELS] = self.panels(tuned)
            kernel("step_panels")  # which a stored program needs, too
            self.packs.append(Pack(slot, sizes.at, args.at, IN_PANELS, tagged))
        elif tuned is not None:
            self.packs.append(Pack(slot, sizes.at, args.at, tuned.strategy.unit(tuned.product), tagged))
        else:
            self.conv_packs.append(ConvPack(slot, sizes.at, args.at, tagged))

    def panels(self, tuned: Tuned) -> Link:
        """The dimensions of a product as a convolution whose weights are packed."""
        p, tile = tuned.product, conv_last.these_tiles()[tuned.strategy.tile]
        dims = conv_last.words(one_by_one(p.m, p.n, p.k), 0, (0, 1, p.m * p.lda, p.lda), tile)
        dims[conv_last.PREPACKED] = 1
        return self.row(dims)

    def note_transpose(self, step: NativeStep, sizes: Link, args: Link) -> None:
        """A product that is faster with its weight transposed; a frame has such a copy if the weight keeps its content."""
        tuned = self.shared.tuned.get(step)
        if tuned is None or not tuned.strategy.transposed:
            return
        if all(isinstance(self.words[sizes.at + i], int) for i in (Gemm.FORM, Gemm.B_AT, Gemm.LDB, Gemm.N, Gemm.K)):
            assert step.args[1] is not None
            self.transposes.append(TransposedCopy(self.table.slot(step.args[1]), sizes.at, args.at))

    # -- constants of calls ---------------------------------------------------------------------------------------------
    def constant(self, tensor: torch.Tensor) -> int:
        """Its number."""
        known = next((i for i, t in enumerate(self.fixed) if t is tensor), None)
        if known is None:
            self.fixed.append(tensor)
        return len(self.fixed) - 1 if known is None else known


def contiguous(shape: Sequence[Amount]) -> list[Amount]:
    strides: list[Amount] = []
    step: Amount = 1
    for s in reversed(shape):
        strides.append(step)
        step = step * maximum(s, 1)
    return strides[::-1]


def contiguous_last(sizes: Sequence[Amount]) -> list[Amount]:
    """The strides of [n, c, h, w] with channels last."""
    inside = contiguous([sizes[i] for i in TO_LAST])
    return [inside[i] for i in FROM_LAST]
