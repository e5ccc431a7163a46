"""A frame in memory: a copy of its image (image.py), connected to what it refers to, and bound to one set of sizes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch

from airgraph.engine.native import runtime
from airgraph.engine.native.binding import ROW
from airgraph.engine.native.image import (
    AS_BFLOAT16,
    BY_TAPS,
    IN_PANELS,
    ConvPack,
    FrameImage,
    OnceStep,
    Outside,
    Pack,
    SizesImage,
    TransposedCopy,
)
from airgraph.engine.native.kernels import bfloat16, blas, conv_bfloat16, conv_last, gemm, winograd
from airgraph.engine.native.kernels.products import TRANSPOSED
from airgraph.engine.native.kernels.shared_kernels import ConvLast, Gemm, kernel
from airgraph.engine.native.packing import SampledTag, Tag, WatchedTag, tag
from airgraph.engine.native.tables import (
    BindingWords,
    DefinitionWords,
    EntryWords,
    FrameWords,
    StepWords,
    TagWords,
    words,
)
from airgraph.engine.native.write_watch import sweeps
from airgraph.ir.symbols import evaluate
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import Sizes, Term

if TYPE_CHECKING:
    from airgraph.engine.native.frames import Shared
    from airgraph.plan.tensors import Tensor

TENSOR = 16  # bytes of a PyObject before what is behind a handle


@cache
def native_answer(name: str) -> Callable[[Sequence[int]], int]:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(kernel(name))
    return lambda dims: int(function((ctypes.c_int64 * len(dims))(*dims)))


@cache
def pack_weights(function: str = "ag_conv_pack") -> Callable[[int, Any, int], None]:
    """ag_conv_pack or ag_pack_conv_bf16."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(kernel(function))


@cache
def pack_bfloat16(form: str) -> Callable[[int, int, int, int, int], None]:
    """ag_pack_bf16_nt or ag_pack_bf16_nn."""
    i64, ptr = ctypes.c_int64, ctypes.c_void_p
    return ctypes.CFUNCTYPE(None, ptr, i64, i64, i64, ptr)(kernel(f"ag_pack_{form}"))


class BindingTable:
    """The words of a program's BindingWords (tables.py)."""

    def __init__(self, image: SizesImage) -> None:
        self.definitions, self.code = words(image.definitions), words(image.code)
        self.questions = words([kernel(name) for name in image.questions])
        self.words = words([0] * BindingWords.WORDS)
        for index, content in {
            BindingWords.DEFINITIONS: len(image.definitions) // DefinitionWords.WORDS,
            BindingWords.DEFINITION_TABLE: ctypes.addressof(self.definitions),
            BindingWords.OPERATIONS: len(image.code) // ROW,
            BindingWords.CODE: ctypes.addressof(self.code),
            BindingWords.SYMBOLS: image.symbols,
            BindingWords.QUESTIONS: ctypes.addressof(self.questions),
        }.items():
            self.words[index] = content

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)


class Outer(Protocol):
    """What frames need of the program they are of."""

    image: FrameImage
    functions: list[int]  # of the steps
    constants: dict[int, torch.Tensor]  # by slot
    fixed: list[torch.Tensor]
    binding: BindingTable
    callback: int  # the address of the Python function that does a library call
    copies: WeakValueDictionary[Any, Any]  # of weights, transposed or packed

    def interpreter(self, name: str) -> int:
        """A function of the interpreter of calls."""
        ...


class BoundFrame:
    """A frame with all the memory it points to."""

    def __init__(
        self, outer: Outer, sizes: Sizes, number: int, unchanging: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """`unchanging`: constants and arguments that keep their content, by slot."""
        image = self.image = outer.image
        self.sizes, self.number = sizes, number
        self.only: dict[int, int] = {}  # slot of an argument → the only address it may have in this frame
        self.tags: dict[int, Tag] = {}  # slot of an argument → what it was when it was packed
        self.packed_copies: dict[int, int] = {}  # bytes of packed weights, by their addresses
        self.in_panels: list[tuple[int, int]] = []  # of products, in order: where dimensions are, and the packed copy
        self.packing: list[Callable[[], None]] = []  # what fills packed copies, while it is made
        self.once = 0  # steps that ran when it was made
        self.by_squares = 0  # convolutions by Winograd's transformation (winograd.py)
        self.symbols: dict[Any, Any] = {}  # of the call that runs: those of its arguments, and what running could tell
        self.owner: Callable[[], Any] = lambda: None  # the executable, as long as it lives
        self.results: dict[int, Any] = {}  # what library calls made: (as PyTorch made it, contiguous)
        self.objects: list[Any] = [None] * image.objects
        self.shared: Shared | None = None  # where it was planned in this process
        self.copies = outer.copies
        self.kept: list[Any] = [outer.binding, outer.constants, outer.fixed]
        self.memory = (ctypes.c_int64 * len(image.words)).from_buffer_copy(image.words)
        self.words = self.part(0, FrameWords.WORDS)
        self.slots, self.handles, self.step_table, self.values, self.argument_table = (
            self.part(*image.tables[name]) for name in ("slots", "handles", "steps", "values", "arguments")
        )
        self.connect(outer)
        self.words[FrameWords.NUMBER] = number
        known = dict(unchanging or {})
        self.computed = self.run_once(known, outer)
        constant = {*outer.constants, *self.computed}
        for copied in image.transposes:
            if copied.slot in known:
                self.transpose(copied, known[copied.slot], copied.slot in constant)
        for pack in image.packs:
            if pack.slot in known:
                fill = self.pack_by_taps if pack.block == BY_TAPS else self.pack
                fill(pack, known[pack.slot], pack.slot in constant)
        self.link_panels()
        for conv in image.conv_packs:
            if conv.slot in known:
                self.pack_convolution(conv, known[conv.slot], conv.slot in constant)
        self.fill_packed()
        swept = self.sweep()
        for i, slot in self.weights():
            self.argument_table[i * EntryWords.WORDS + EntryWords.ADDRESS] = self.only[slot]
            if slot in self.tags:
                row = self.tag_row(self.tags[slot], slot in swept)
                self.argument_table[i * EntryWords.WORDS + EntryWords.TAG] = row

    def part(self, start: int, count: int) -> Any:
        return (ctypes.c_int64 * count).from_buffer(self.memory, 8 * start)

    def connect(self, outer: Outer) -> None:
        """Every word that is an address."""
        image, memory, base = self.image, self.memory, self.address
        numbers = iter(image.links)
        for at, to in zip(numbers, numbers):
            memory[at] = base + 8 * to
        found: dict[int, Callable[[int], int]] = {
            Outside.STEP: lambda n: outer.functions[n],
            Outside.DISPATCH: lambda n: outer.interpreter("dispatch"),
            Outside.LET_GO: lambda n: outer.interpreter("let_go"),
            Outside.OBJECTS: lambda n: id(self.objects),
            Outside.CALLBACK: lambda n: outer.callback,
            Outside.NONE: lambda n: id(None),
            Outside.TENSOR_TYPE: lambda n: id(torch.Tensor),
            Outside.PARAMETER_TYPE: lambda n: id(torch.nn.Parameter),
            Outside.BINDING: lambda n: outer.binding.address,
            Outside.CONSTANT: lambda n: outer.constants[n].data_ptr(),
            Outside.FIXED: lambda n: id(outer.fixed[n]) + TENSOR,
            Outside.STORAGE: lambda n: outer.fixed[n].untyped_storage().data_ptr(),
        }
        numbers = iter(image.outside)
        for at, kind, number in zip(numbers, numbers, numbers):
            memory[at] = found[kind](number)

    def run_once(self, known: dict[int, torch.Tensor], outer: Outer) -> set[int]:
        """Run the steps that depend only on what is `known`, by slot, and add what they compute to it; gives its slots.

        Whoever would read that from the arena reads it where it stays.
        """
        places: dict[int, Any] = {}
        for once in self.image.once:
            if any(slot not in known for slot in once.reads):
                continue
            given = [slot for slot in once.reads if slot not in places and slot not in outer.constants]
            if once.tagged and not all(self.tagged(slot, known[slot]) for slot in given):
                continue
            for slot, size, needed in once.writes:
                if slot not in places:
                    known[slot] = torch.empty(-(-size // 4))
                    places[slot] = words([known[slot].data_ptr()])
                    self.redirect(slot, places[slot])
                    self.kept += [places[slot], *([known[slot]] if needed else [])]
            for slot in once.reads:
                self.slots[slot] = known[slot].data_ptr()
            self.run_step(once, outer)
            self.once += 1
            for slot in given:
                self.only[slot] = known[slot].data_ptr()
                self.kept.append(known[slot])
                if type(known[slot]) is torch.Tensor and slot not in self.tags:
                    self.tags[slot] = SampledTag(known[slot])
        return {*places}

    def redirect(self, slot: int, place: Any) -> None:
        """Steps find this address where they would look for the slot's."""
        start, _ = self.image.tables["slots"]
        numbers = iter(self.image.links)
        for at, to in zip(numbers, numbers):
            if to == start + slot:
                self.memory[at] = ctypes.addressof(place)

    def run_step(self, once: OnceStep, outer: Outer) -> None:
        """All of it, in this thread; calls skip it from now on."""
        row = once.step * StepWords.WORDS
        args, sizes, jobs = (self.step_table[row + n] for n in (StepWords.ARGS, StepWords.SIZES, StepWords.JOBS))
        scratch = torch.empty(once.scratch + 64, dtype=torch.uint8)
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p)
        kind(outer.functions[once.step])(args, sizes, 0, jobs, scratch.data_ptr())
        self.step_table[row + StepWords.JOBS] = 0

    def transpose(self, copied: TransposedCopy, weight: torch.Tensor, constant: bool) -> None:
        """The product reads a transposed copy of its weight; equal copies are one."""
        sizes, args = self.part(copied.sizes, Gemm.WORDS), self.part(copied.args, 2)
        form, start, stride, n, k = (sizes[i] for i in (Gemm.FORM, Gemm.B_AT, Gemm.LDB, Gemm.N, Gemm.K))
        shape = (n, k) if gemm.FORMS[form] == "nt" else (k, n)
        key = (weight.data_ptr(), shape, stride, start)
        copy = self.copies.get(key)
        if copy is None:
            matrix = weight.detach().as_strided(shape, (stride, 1), weight.storage_offset() + start)
            copy = self.copies[key] = matrix.t().contiguous()
        place = words([copy.data_ptr()])
        self.kept += [copy, weight, place]  # while the weight lives, its address is nobody else's
        if not constant:
            self.only[copied.slot] = weight.data_ptr()
        sizes[Gemm.FORM], sizes[Gemm.LDB], sizes[Gemm.B_AT] = TRANSPOSED[form], shape[0], 0
        args[1] = ctypes.addressof(place)

    def pack(self, pack: Pack, weight: torch.Tensor, constant: bool) -> None:
        """The product reads a packed copy of its weight; equal copies are one."""
        sizes, args = self.part(pack.sizes, Gemm.WORDS), self.part(pack.args, 2)
        form, start, stride = (sizes[i] for i in (Gemm.FORM, Gemm.B_AT, Gemm.LDB))
        m, n, k = (sizes[i] for i in (Gemm.M, Gemm.N, Gemm.K))
        transposed = gemm.FORMS[form] in ("nt", "bf16_nt")
        rows, columns = (n, k) if transposed else (k, n)
        size_of = 2 if pack.block == AS_BFLOAT16 else 4
        if size_of * (start + (rows - 1) * stride + columns) > weight.nbytes:  # not the tensor it was compiled for
            return
        if pack.tagged and not self.tagged(pack.slot, weight):
            return
        content = self.tag_key(pack)
        copy: Any
        if pack.block == AS_BFLOAT16:
            copy = self.bfloat16_panels(weight, sizes, content)
            address, size, sizes[Gemm.B_AT], sizes[Gemm.PACKED] = copy.data_ptr(), copy.nbytes, 0, 1
        elif pack.block == IN_PANELS:
            copy = self.panels(weight, sizes[Gemm.PANELS], 4 * start, content)
            address, size, sizes[Gemm.PACKED] = copy.data_ptr(), copy.nbytes, kernel("step_panels")
            self.in_panels.append((sizes[Gemm.PANELS], address))
        else:
            key = (weight.data_ptr(), start, stride, form, m, n, k, pack.block, content)
            copy = self.copies.get(key)
            if copy is None:
                copy = self.copies[key] = blas.PackedWeight(m, n, k, pack.block)
                self.packing.append(partial(copy.fill, weight.data_ptr() + 4 * start, transposed, stride))
            address, size = copy.address, copy.bytes
            sizes[Gemm.BLOCK], sizes[Gemm.APART], sizes[Gemm.PACKED] = copy.block, copy.apart, blas.step()
        place = words([address])
        self.kept += [copy, place, *([] if pack.slot in self.computed else [weight])]
        self.packed_copies[address] = size
        if not constant:
            self.only[pack.slot] = weight.data_ptr()
        args[1] = ctypes.addressof(place)

    def link_panels(self) -> None:
        """Each product with panels is told of the next one's, which come nearer while it ends."""
        for (dims, _), (following, address) in pairwise(self.in_panels):
            now, others = ((ctypes.c_int64 * len(conv_last.DIMS)).from_address(at) for at in (dims, following))
            s, tile = ConvSizes(*others[: len(conv_last.SIZES)]), conv_last.these_tiles()[others[conv_last.TILE]]
            for i, word in enumerate(conv_last.following(s, tile, address), conv_last.FOLLOWING):
                now[i] = word

    def bfloat16_panels(self, weight: torch.Tensor, sizes: Sequence[int], content: Any) -> torch.Tensor:
        """A packed copy for the product in bfloat16 of these sizes."""
        form, start, stride, n, k = place = tuple(sizes[i] for i in (Gemm.FORM, Gemm.B_AT, Gemm.LDB, Gemm.N, Gemm.K))
        key = (weight.data_ptr(), *place, content)
        copy: torch.Tensor | None = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = torch.empty(bfloat16.packed_bytes(n, k), dtype=torch.uint8)
            given = (weight.data_ptr() + 2 * start, stride, n, k, copy.data_ptr())
            self.packing.append(partial(pack_bfloat16(gemm.FORMS[form]), *given))
        return copy

    def pack_by_taps(self, pack: Pack, weight: torch.Tensor, constant: bool) -> None:
        """The convolution in bfloat16 reads packed weights; equal copies are one."""
        sizes, args = self.part(pack.sizes, ConvLast.DIMS + len(conv_bfloat16.DIMS)), self.part(pack.args, 2)
        dims = sizes[ConvLast.DIMS :]
        start, shape = sizes[ConvLast.W_AT], conv_bfloat16.weight_shape(dims)
        if start + 2 * math.prod(shape) > weight.nbytes:  # not the tensor it was compiled for
            return
        if pack.tagged and not self.tagged(pack.slot, weight):
            return
        key = (weight.data_ptr(), start, shape, self.tag_key(pack))
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = torch.empty(conv_bfloat16.bytes_of_panels(shape), dtype=torch.uint8)
            now = (ctypes.c_int64 * len(dims))(*dims)
            self.packing.append(
                partial(pack_weights("ag_pack_conv_bf16"), weight.data_ptr() + start, now, copy.data_ptr())
            )
        self.take_copy(pack, weight, constant, args, copy)
        sizes[ConvLast.W_AT], sizes[ConvLast.DIMS + conv_bfloat16.PACKED] = 0, 1

    def take_copy(
        self, pack: Pack | ConvPack, weight: torch.Tensor, constant: bool, args: Any, copy: torch.Tensor
    ) -> None:
        """A step reads this packed copy of its weight, which stays while the frame does."""
        place = words([copy.data_ptr()])
        self.kept += [copy, place, *([] if pack.slot in self.computed else [weight])]
        self.packed_copies[copy.data_ptr()] = copy.nbytes
        if not constant:
            self.only[pack.slot] = weight.data_ptr()
        args[1] = ctypes.addressof(place)

    def pack_convolution(self, pack: ConvPack, weight: torch.Tensor, constant: bool) -> None:
        """The convolution reads packed weights; equal copies are one."""
        sizes, args = self.part(pack.sizes, ConvLast.DIMS + len(conv_last.DIMS)), self.part(pack.args, 2)
        dims = ConvSizes(*sizes[ConvLast.DIMS : ConvLast.DIMS + len(conv_last.SIZES)])
        if sizes[ConvLast.W_AT] // 4 + dims.o * dims.depth > weight.numel():  # not the tensor it was compiled for
            return
        if pack.tagged and not self.tagged(pack.slot, weight):
            return
        at = ctypes.addressof(sizes) + 8 * ConvLast.DIMS
        copy = self.panels(weight, at, sizes[ConvLast.W_AT], self.tag_key(pack))
        self.take_copy(pack, weight, constant, args, copy)
        sizes[ConvLast.W_AT], sizes[ConvLast.DIMS + conv_last.PREPACKED] = 0, 1
        self.by_squares += sizes[ConvLast.DIMS + conv_last.SQUARES] > 0

    def panels(self, weight: torch.Tensor, dims: int, start: int, content: Any) -> torch.Tensor:
        """A packed copy for the convolution, or the product as one, whose dimensions are at an address."""
        now = (ctypes.c_int64 * len(conv_last.DIMS)).from_buffer_copy(
            (ctypes.c_int64 * len(conv_last.DIMS)).from_address(dims)
        )  # which change when the copy has its place
        s, by_squares = ConvSizes(*now[: len(conv_last.SIZES)]), now[conv_last.SQUARES] > 0
        tile, shape = conv_last.these_tiles()[now[conv_last.TILE]], (s.o, s.c, s.groups, s.kh, s.kw)
        key = (weight.data_ptr(), start, conv_last.mode_of(s), by_squares, tile, shape, content)
        copy: torch.Tensor | None = self.copies.get(key)
        if copy is None:
            numbers = (winograd if by_squares else conv_last).packed_numbers(s, tile)
            copy = self.copies[key] = torch.empty(numbers)
            if by_squares:
                at = weight.storage_offset() + start // 4
                stored = weight.detach().as_strided((s.o, s.c, s.kh, s.kw), (s.depth, s.kh * s.kw, s.kw, 1), at)
                self.packing.append(partial(winograd.pack, stored, tile, copy))
            else:
                self.packing.append(partial(pack_weights(), weight.data_ptr() + start, now, copy.data_ptr()))
        return copy

    def fill_packed(self) -> None:
        """Every copy by one thread, several at a time. (Two cores of a Xeon, ms with one thread → with two: 24 weights of
        768×3072 250 → 165, 96 of 256×688 28 → 20.)"""
        threads = min(torch.get_num_threads(), len(self.packing))
        if threads < 2:
            for fill in self.packing:
                fill()
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="airgraph-pack") as pool:
                for done in [pool.submit(fill) for fill in self.packing]:
                    done.result()
        self.packing.clear()

    def tagged(self, slot: int, weight: torch.Tensor) -> bool:
        """Whether something made of the weight can be used: a tag tells when its content changes."""
        if slot not in self.tags:
            found = tag(weight)
            if found is None:
                return False
            self.tags[slot] = found
        return True

    def tag_key(self, pack: Pack | ConvPack) -> Any:
        """What a packed copy of a weight is kept under, besides its address: its content, where that may change."""
        if not pack.tagged:
            return self.number if pack.slot in self.computed else None
        return self.tags[pack.slot].key

    def tag_row(self, tag: Tag, swept: bool) -> int:
        row = tag.row()
        row[TagWords.SWEPT] = int(swept)
        self.kept.append(row)
        return ctypes.addressof(row)

    def sweep(self) -> set[int]:
        """Which slots' memory is asked for together with that of others."""
        watches = {slot: tag.watch for slot, tag in self.tags.items() if isinstance(tag, WatchedTag)}
        found = sweeps(dict.fromkeys(watches.values()))
        table = words([word for s in found for word in (s.file, ctypes.addressof(s.written))])
        self.kept += [found, table]
        self.words[FrameWords.SWEEPS], self.words[FrameWords.SWEEP_TABLE] = len(found), ctypes.addressof(table)
        together = {watch for s in found for watch in s.watches}
        return {slot for slot, watch in watches.items() if watch in together}

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    @property
    def packed(self) -> int:
        """Bytes of packed weights."""
        return sum(self.packed_copies.values())

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
        values = self.sizes.run({**symbols, self.sizes.symbols[0]: threads})
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
        """Whether the weights it has copies of are among the arguments, and are what was copied."""
        found = {slot: args[i] for i, slot in self.weights()}
        if not all(tag.fits(found.get(slot)) for slot, tag in self.tags.items()):
            return False
        return all(
            isinstance(t := found.get(slot), torch.Tensor) and t.data_ptr() == address
            for slot, address in self.only.items()
        )

    def weights(self) -> Iterator[tuple[int, int]]:
        """(argument, slot) of those that only one tensor fits."""
        if self.only:
            for i in range(len(self.argument_table) // EntryWords.WORDS):
                kind, slot = (
                    self.argument_table[i * EntryWords.WORDS + n] for n in (EntryWords.KIND, EntryWords.VALUE)
                )
                if kind == EntryWords.TENSOR and slot in self.only:
                    yield i, slot

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

    def made_by_dispatcher(self, t: Tensor) -> torch.Tensor:
        assert self.shared is not None
        return runtime.wrapped(self.handles[self.shared.table.made[t.id]])

    def by_python(self, number: int) -> bool:
        """Python does this step from now on. (It was not so before: the dispatcher could not do it.)"""
        at = number * StepWords.WORDS + StepWords.CALL
        before, self.step_table[at] = self.step_table[at], StepWords.PYTHON
        return bool(before != StepWords.PYTHON)
