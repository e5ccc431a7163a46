"""Frames: a plan at concrete sizes, as the tables the native side reads (runtime.py).

Everything here happens once for each set of sizes: expressions get their values, steps are marked for one thread or
all and for the barriers between them, and intermediates are laid into one block so that those alive at the same time do
not overlap.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from airgraph.convert.promote import TORCH_TYPES
from airgraph.engine.native import conv, gemm
from airgraph.engine.native.calls import Calls, Writer
from airgraph.engine.native.code import NativeStep
from airgraph.engine.native.products import ALONE, TURNED, Product, Way, rule
from airgraph.engine.native.runtime import Entry, Frame, Gemm, Step, kernels
from airgraph.engine.native.tune import Tuner
from airgraph.plan.steps import CallStep, Plan, step_reads, step_writes
from airgraph.plan.tensors import Tensor

ALIGN = 64
DTYPE_NUMBER = {torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
                torch.float32: 6, torch.float64: 7, torch.complex32: 8, torch.complex64: 9, torch.complex128: 10,
                torch.bool: 11, torch.bfloat16: 15}  # fmt: skip


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


def words(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


class Given(NamedTuple):
    """One argument or output; see runtime.Entry."""

    kind: int
    value: int  # a slot, or the number itself
    dtype: int = 0
    sizes: Sequence[int] = ()
    strides: Sequence[int] = ()
    made: int = 0  # the address of a handle, for what PyTorch makes


@dataclass(frozen=True)
class Shared:
    """What all frames of a program have in common."""

    plan: Plan
    steps: Sequence[NativeStep]
    layout: Layout
    constants: dict[int, torch.Tensor]  # by slot
    frozen: frozenset[int]  # slots of arguments that keep their content, if they are parameters
    callback: int  # the address of what does a library call
    calls: Calls
    tuner: Tuner | None  # matrix products are timed
    copies: WeakValueDictionary[Any, torch.Tensor] = field(default_factory=WeakValueDictionary)  # of weights, turned

    def product(self, step: NativeStep, sizes: Sequence[int], threads: int) -> Product:
        weight, bias = step.args[1], step.args[3]
        assert weight is not None
        slot = self.layout.slot(weight)
        return Product.of(sizes, bias is not None, slot in self.constants or slot in self.frozen, threads)


class BoundFrame:
    """A frame with all the memory it points to."""

    def __init__(
        self, shared: Shared, value: Callable[[Any], int], args: Sequence[Given], *, still: Mapping[int, torch.Tensor],
        number: int, threads: int,
    ) -> None:  # fmt: skip
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
        rows, groups, errors = self.steps()
        places, size = self.arrange(groups)
        scratch = threads * self.scratch
        self.need = scratch + size
        self.placed = [n for slot, at in places for n in (slot, scratch + at)]
        self.objects: list[Any] = []
        outs = self.outputs()
        self.rows = words([n for row in rows for n in row])
        self.words = words([0] * Frame.WORDS)
        for index, content in {
            Frame.ARGS: len(args), Frame.ARG_TABLE: self.table([self.entry(a) for a in args]),
            Frame.OUTS: len(outs), Frame.OUT_TABLE: self.table([self.entry(o) for o in outs]),
            Frame.SLOTS: ctypes.addressof(self.slots), Frame.PLACED: len(places),
            Frame.PLACE_TABLE: self.keep(words(self.placed)),
            Frame.NEED: self.need, Frame.NUMBER: number, Frame.STEPS: len(rows),
            Frame.STEP_TABLE: ctypes.addressof(self.rows),
            Frame.THREADS: threads, Frame.ERRORS: len(errors), Frame.ERROR_TABLE: self.keep(words(errors)),
            Frame.OBJECTS: id(self.objects), Frame.CALLBACK: shared.callback, Frame.TENSOR_TYPE: id(torch.Tensor),
            Frame.PARAMETER_TYPE: id(torch.nn.Parameter), Frame.SCRATCH: self.scratch,
            Frame.MADE: 2 * len(self.layout.made) if self.calls.tapes else 0,
            Frame.MADE_TABLE: ctypes.addressof(self.handles), Frame.DISPATCH: self.calls.function("dispatch"),
            Frame.LET_GO: self.calls.function("let_go")}.items():  # fmt: skip
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
        before, self.rows[at] = self.rows[at], Step.PYTHON
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
    def steps(self) -> tuple[list[list[int]], list[int], list[int]]:
        """(their rows, the group of each, the sizes behind whose first word an error may be)"""
        rows: list[list[int]] = []
        errors: list[int] = []
        alone: list[bool] = []
        writer = Writer(self, self.calls.dense)
        for step in self.native:
            row = [0] * Step.WORDS
            rows.append(row)
            if isinstance(step.origin, CallStep):
                tape = self.calls.tapes.get(step.origin)
                row[Step.CALL] = Step.PYTHON if tape is None else Step.DISPATCHER
                row[Step.TAPE] = writer.tape(tape, step_writes(step.origin)) if tape is not None else 0
                alone.append(True)
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
            alone.append(single)
            row[Step.FUNCTION], row[Step.SIZES], row[Step.JOBS], row[Step.UNIT] = step.function, held, jobs, unit
            row[Step.ARGS], row[Step.ALONE] = self.keep(words(args)), int(single)
        return rows, self.barriers(rows, alone), errors

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

    def barriers(self, rows: list[list[int]], alone: list[bool]) -> list[int]:
        """A barrier where a step meets memory another thread may still be at; steps without one between are a group."""
        steps, slot = self.native, self.layout.slot
        reads = [{slot(t) for t in step_reads(s.origin)} for s in steps]
        writes = [{slot(t) for t in step_writes(s.origin)} for s in steps]
        groups: list[int] = []
        group, since = 0, 0
        for i, step in enumerate(steps):
            before = range(since, i)
            single = all(alone[j] for j in before)  # one thread has done all since the last barrier, in order
            conflict = any(
                steps[j].origin is not step.origin and not (alone[i] and alone[j])
                and (reads[i] & writes[j] or writes[i] & (writes[j] | reads[j]))
                for j in before
            )  # fmt: skip
            if before and single and not alone[i] and groups[i - 1] > groups[since]:
                conflict = True  # what that thread has used up may be anybody's memory now
            if step.kind == "call" or (i and steps[i - 1].kind == "call") or conflict:
                if conflict:
                    rows[i - 1][Step.SYNC] = 1
                group, since = group + 1, i
            elif before and single and alone[i]:
                group += 1  # memory may be used again at once
            groups.append(group)
        end = len(steps)
        for i in reversed(range(len(steps))):
            rows[i][Step.END] = i + 1 if rows[i][Step.CALL] else end
            if rows[i][Step.CALL]:
                end = i
        return groups

    # -- memory -------------------------------------------------------------------------------------------------------
    def arrange(self, groups: list[int]) -> tuple[list[tuple[int, int]], int]:
        """(slot, offset) of every intermediate: the smallest gap that is free from its first group to its last."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        tensors: dict[int, Tensor] = {}
        for group, step in zip(groups, self.native):
            for t in (*step_writes(step.origin), *step_reads(step.origin)):
                place = self.plan.places[t.id]
                t = place.alias.tensor if place.alias is not None else t
                if place.kind == "arena":
                    tensors[t.id] = t
                    first.setdefault(t.id, group)
                    last[t.id] = group
        gaps: list[tuple[int, int]] = []  # (offset, size), by offset
        top = 0
        placed: dict[int, tuple[int, int]] = {}
        for group in sorted({*first.values(), *last.values()}):
            for id_ in [i for i, g in first.items() if g == group]:
                t = tensors[id_]
                size = element_size(t)
                for s in t.shape:
                    size *= self.value(s)
                size = aligned(max(size, 1))
                fitting = [g for g in gaps if g[1] >= size]
                if fitting:
                    gap = min(fitting, key=lambda g: g[1])
                    gaps.remove(gap)
                    if gap[1] > size:
                        gaps.append((gap[0] + size, gap[1] - size))
                    placed[id_] = (gap[0], size)
                else:
                    tail = next((g for g in gaps if g[0] + g[1] == top), None)
                    start = tail[0] if tail else top
                    if tail:
                        gaps.remove(tail)
                    placed[id_] = (start, size)
                    top = start + size
            for id_ in [i for i, g in last.items() if g == group]:
                gaps = merged([*gaps, placed[id_]])
        return [(self.layout.slots[i], at) for i, (at, _) in placed.items()], top


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


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def merged(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for at, size in sorted(gaps):
        if result and result[-1][0] + result[-1][1] == at:
            result[-1] = (result[-1][0], result[-1][1] + size)
        else:
            result.append((at, size))
    return result


def element_size(t: Tensor) -> int:
    return TORCH_TYPES[t.dtype].itemsize


def contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for s in reversed(shape):
        strides.append(step)
        step *= max(s, 1)
    return strides[::-1]
