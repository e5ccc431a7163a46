"""The native engine: plan, compile, and calls that are one native call.

    NativeEngine().load(request) → NativeExecutable
    executable.call(args) → the graph's outputs

What has no native step is a call of PyTorch from inside the native function: straight to its dispatcher (calls.py) or,
where that cannot be, by Python and the reference engine's meaning of the node.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import sympy
import torch

from airgraph.engine.native import runtime
from airgraph.engine.native.bound import BindingTable, BoundFrame
from airgraph.engine.native.calls.words import plan_calls
from airgraph.engine.native.code import CompileKernels, NativeStep, native_steps
from airgraph.engine.native.frames import DTYPE_NUMBER, Given, Shared, Tuned, number_word, sized_steps
from airgraph.engine.native.image import OnceStep, ProgramImage
from airgraph.engine.native.kernels import bfloat16, conv_bfloat16, conv_last, winograd
from airgraph.engine.native.kernels.products import ProductShape
from airgraph.engine.native.kernels.shared_kernels import Gemm
from airgraph.engine.native.kernels.tune import Tuner
from airgraph.engine.native.once import can_be_compared, once_steps
from airgraph.engine.native.packing import PackingBudget, packs_parameters
from airgraph.engine.native.runner import FrameRunner, number_of_threads
from airgraph.engine.native.tables import EntryWords
from airgraph.engine.planned import THREADS, PlannedExecutable, bytes_of
from airgraph.engine.protocol import Request, Symbols
from airgraph.ir.boundary import Argument, NumberIn, TensorIn
from airgraph.plan.origins import title
from airgraph.plan.sizes import SizeOp, Sizes
from airgraph.plan.steps import CallStep, ConvStep, Plan
from airgraph.torch_types import TORCH_TYPES


class NativeExecutable(FrameRunner, PlannedExecutable):
    """A plan as native functions, and the frames in which it runs: one for each call at the same time.

    `kernels` are the native functions; for capture and replay, which see an executable as steps (protocol.Steps), all of
    them are one step.
    """

    def __init__(self, request: Request, tuner: Tuner | None = None, compile: CompileKernels | None = None) -> None:
        """`tuner`: matrix products are timed. `compile`: see code.native_steps."""
        assert request.plan is not None
        plan = request.plan
        self.kernels: list[NativeStep] = native_steps(plan, compile, tuned=tuner is not None)
        super().__init__(request, self.kernels)
        self.name = self.graph.name
        self.made, self.loose = [t is None for t in plan.outputs], bool(plan.loose)
        self.titles = [shown_title(plan, step) for step in self.kernels]
        self.frozen = self.unwritten_arguments() if request.frozen else frozenset()
        live = request.journal.phase == "inference" and packs_parameters()
        self.tagged = self.unwritten_arguments() if live else frozenset()
        self.once = once_steps(self.kernels, self.table, self.lasting_state(request.state))
        self.derived = frozenset(slot for i in self.once for slot in self.table.writes[i])
        self.journal, self.packed_bytes, self.ran_once = request.journal, 0, False  # what it was told of
        self.tapes = plan_calls(plan, self.reference)
        plan.notes += self.tapes.notes()
        self.by_python = bool(self.tapes.refused)  # some steps are done by Python
        self.tuner = tuner
        if tuner is not None:
            tuner.learn(self.products({}, symbolic=False).values())
        self.shared: Shared | None = None

    # -- once -----------------------------------------------------------------------------------------------------------
    def learn(self, symbols: Symbols) -> None:
        if self.shared is None and self.tuner is not None:
            self.tuner.learn(self.products(symbols, symbolic=True).values())

    def get_ready(self, symbols: Symbols) -> None:
        if self.shared is None:
            self.shared = self.prepare(symbols)
            self.image, self.fixed, self.copies = self.shared.image, self.shared.fixed, self.shared.copies
            self.binding = BindingTable(self.shared.sizes_image())

    @cached_property
    def functions(self) -> list[int]:  # type: ignore[override]
        """The first frame needs them; until then they may still be compiled."""
        return [step.address() for step in self.kernels]

    def interpreter(self, name: str) -> int:
        return self.tapes.function(name)

    def products(self, symbols: Symbols, *, symbolic: bool) -> dict[NativeStep, ProductShape]:
        """The matrix products whose sizes are known when compiling, or, at these symbols, those whose sizes are not."""
        threads = number_of_threads()
        steps = [
            s for s in self.kernels if s.kind == "gemm" and any(isinstance(x, sympy.Basic) for x in s.sizes) == symbolic
        ]
        sizes = Sizes(self.sizes.symbols)
        words = {s: [0, *(number_word(x, sizes) for x in s.sizes)] for s in steps}
        values = sizes.run(symbols)
        found: dict[NativeStep, ProductShape] = {}
        for step, terms in words.items():
            slot, numbers = self.weight_slot(step), [sizes.value(x, values) for x in terms]
            unchanging = slot in self.constants or slot in self.frozen
            found[step] = ProductShape.of(numbers, step.args[3] is not None, unchanging, threads)
        return found

    def prepare(self, symbols: Symbols) -> Shared:
        """What all frames share. Choices that are only good for some sizes are made for those of the first call."""
        tuned: dict[NativeStep, Tuned] = {}
        if self.tuner is not None:
            products = self.products(symbols, symbolic=False) | self.products(symbols, symbolic=True)
            for step, product in products.items():
                tuned[step] = Tuned(product, self.tuner.strategy(product, unchanging=product.unchanging))
        budget = PackingBudget()
        tuned |= self.packed_products(symbols, budget)
        packed, halves = self.packed_convolutions(budget), self.packed_halves(budget)
        steps = sized_steps(self.kernels, self.sizes, tuned, packed)
        time = self.timeline(self.kernels, [s.single == 1 for s in steps])
        return Shared(
            plan=self.plan,
            steps=self.kernels,
            table=self.table,
            sizes=self.sizes,
            sources=self.sources,
            arguments=[self.argument(spec) for spec in self.boundary.arguments],
            numbers=self.numbers,
            constants=self.constants,
            calls=self.tapes,
            released=self.releases(self.kernels),
            sized=steps,
            tuned=tuned,
            packed=packed,
            packed_halves=halves,
            once=self.once_table(
                {*packed, *halves, *(s for s, t in tuned.items() if t.strategy.packed or t.strategy.panels)}, budget
            ),
            frozen=self.frozen | self.derived,
            time=time,
            memory=self.arrangement(time, {**symbols, THREADS: number_of_threads()}),
        )

    def packed_products(self, symbols: Symbols, budget: PackingBudget) -> dict[NativeStep, Tuned]:
        """Those whose weight may be packed and whose sizes are known when compiling."""
        found = dict[NativeStep, Tuned]()
        for step, product in self.products(symbols, symbolic=False).items():
            if not self.may_be_packed(step):
                continue
            start = step.sizes[Gemm.B_AT - 1]  # (in words of a step, one for errors is in front of the sizes)
            strategy = budget.strategy(product, (self.weight_slot(step), start))
            if strategy is not None:
                found[step] = Tuned(product, strategy)
        return found

    def packed_convolutions(self, budget: PackingBudget) -> dict[NativeStep, int]:
        """Those whose weights may be packed: see Shared.packed."""
        tile, found, threads = conv_last.this_tile(), dict[NativeStep, int](), number_of_threads()
        for step in self.kernels:
            if step.kind == "conv" and self.may_be_packed(step):
                assert isinstance(step.origin, ConvStep)
                sizes = step.origin.sizes
                squares = winograd.block(sizes, tile) if winograd.pays(sizes, threads, tile) else 0
                numbers = (winograd if squares else conv_last).packed_numbers(sizes, tile)
                if budget.takes((self.weight_slot(step), sizes), 4 * numbers):
                    found[step] = squares
        return found

    def packed_halves(self, budget: PackingBudget) -> frozenset[NativeStep]:
        """Products in bfloat16 whose weight may be packed, for any number of rows, and convolutions."""
        found = set[NativeStep]()
        for step in self.kernels:
            if step.kind == "conv_bfloat16" and self.may_be_packed(step):
                assert isinstance(step.origin, ConvStep)
                sizes = step.origin.sizes
                if budget.takes((self.weight_slot(step), sizes), conv_bfloat16.packed_bytes(sizes)):
                    found.add(step)
            if step.kind == "bfloat16" and self.may_be_packed(step):
                names = (Gemm.FORM, Gemm.BATCH, Gemm.N, Gemm.K, Gemm.LDB, Gemm.B_AT)
                form, batch, n, k, *place = (step.sizes[i - 1] for i in names)
                known = all(isinstance(x, int) for x in (batch, n, k, *place))
                key = (self.weight_slot(step), form, n, k, *place)
                if known and batch == 1 and budget.takes(key, bfloat16.packed_bytes(n, k)):
                    found.add(step)
        return frozenset(found)

    def weight_slot(self, step: NativeStep) -> int:
        """Of the second operand."""
        assert step.args[1] is not None
        return self.table.slot(step.args[1])

    def may_be_packed(self, step: NativeStep) -> bool:
        """Its weight keeps its content, or can be tagged."""
        slot = self.weight_slot(step)
        return any(slot in known for known in (self.constants, self.frozen, self.derived, self.tagged))

    def lasting_state(self, state: frozenset[int]) -> set[int]:
        """Slots of constants, and of the parameters and buffers that are frozen or can be tagged."""
        names = [spec.name for i, spec in enumerate(self.boundary.arguments) if i in state]
        slots = {slot for name in names if (slot := self.table.argument(name)) is not None}
        return {*self.constants} | (slots & (self.frozen or self.tagged))

    def once_table(self, packed: Collection[NativeStep], budget: PackingBudget) -> list[OnceStep]:
        """The steps that frames run when they are made; `packed`: those that read a packed copy of their weight. What is
        kept beside parameters that are not frozen is part of the budget."""
        table, needed, found = self.table, set[int](), list[OnceStep]()
        for i, step in enumerate(self.kernels):
            if i not in self.once:
                rest = (a for j, a in enumerate(step.args) if a is not None and not (j == 1 and step in packed))
                needed |= {table.slot(a) for a in rest}
        for i in reversed(self.once):
            writes = tuple((slot, bytes_of(table.memory[slot]), slot in needed) for slot in sorted(table.writes[i]))
            if self.frozen or budget.takes(("once", i), sum(size for _, size, kept in writes if kept)):
                found.append(
                    OnceStep(i, self.kernels[i].scratch, tuple(sorted(table.reads[i])), writes, not self.frozen)
                )
            else:
                needed |= table.reads[i]
        return found[::-1]

    def as_image(self, symbols: Symbols) -> ProgramImage | str:
        """The program as plain data, or why it cannot be; `symbols`: for which its memory shall be laid out well."""
        if self.tuner is not None or self.frozen:
            return "its products are timed, or its parameters frozen"
        if self.tapes.refused:
            step, reason = next(iter(self.tapes.refused.items()))
            return f"Python does {step.node.op}: {reason}"
        self.get_ready(symbols)
        assert self.shared is not None
        if any(operation.op == SizeOp.SYMPY for operation in self.sizes.code):
            return "only sympy can compute one of its sizes"
        _ = self.functions  # compiled, so that the cache has them
        tensors = [*self.constants.values(), *self.fixed]
        if any(t.layout != torch.strided or t.is_quantized or not t.is_contiguous() for t in tensors):
            return "it has a constant that is not plain memory"
        return ProgramImage(
            self.image,
            self.shared.sizes_image(),
            [step.symbol for step in self.kernels],
            self.titles,
            self.made,
            self.loose,
            sorted(self.written),
            self.constants,
            self.fixed,
            self.plan.text(),
        )

    def argument(self, spec: Argument) -> Given:
        if isinstance(spec, NumberIn):
            slot = self.table.argument(spec.name)
            if slot is not None:
                return Given(EntryWords.FLOAT, slot)
            return Given(EntryWords.NOTHING, 0) if spec.kind is float else Given(EntryWords.WHOLE, spec.expr)
        if not isinstance(spec, TensorIn):
            return Given(EntryWords.NOTHING, 0)
        slot = self.table.argument(spec.name)
        dtype = DTYPE_NUMBER[TORCH_TYPES[spec.type.dtype]]
        kind = EntryWords.TOKEN if spec.type.shape == (0,) else EntryWords.TENSOR
        return Given(kind, self.table.count if slot is None else slot, dtype, spec.type.shape or (), spec.strides)

    def new_frame(self, args: Sequence[Any]) -> BoundFrame:
        frame = super().new_frame(args)
        frame.shared = self.shared
        if frame.once and not self.ran_once:
            self.ran_once = True
            self.journal.remark(f"{frame.once} steps depend on parameters only: they run once, not in every call")
        if frame.packed not in (0, self.packed_bytes):
            self.packed_bytes = frame.packed
            self.journal.remark(f"{frame.packed / 2**20:.1f} MiB of packed weights beside the parameters")
            if frame.by_squares:
                self.journal.remark(f"{frame.by_squares} convolutions by Winograd's F(2×2, 3×3) (AIRGRAPH_WINOGRAD)")
        return frame

    def unchanging(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Constants, and those among the arguments that keep their content or can be tagged, by slot."""
        assert self.shared is not None
        compared = {slot for once in self.shared.once for slot in once.reads} if runtime.version_function() else set()
        return dict(super().unchanging(args)) | {
            given.value: arg
            for arg, given in zip(args, self.shared.arguments)
            if given.kind == EntryWords.TENSOR
            and given.value in self.frozen
            and (type(arg) is torch.nn.Parameter or (given.value in compared and can_be_compared(arg)))
            and list(given.strides) == list(arg.stride())
            and DTYPE_NUMBER[arg.dtype] == given.dtype
        }

    # -- library calls --------------------------------------------------------------------------------------------------
    def library_step(self, frame: BoundFrame, number: int) -> None:
        step = self.kernels[number].origin
        assert isinstance(step, CallStep)
        if getattr(self.local, "frame", None) is not frame:  # the first of this call
            frame.symbols = self.local.symbols = frame.bound()
            self.local.frame = frame
            frame.results.clear()
        assert self.shared is not None
        self.library(frame, step, self.shared.released[number].results)
        if frame.by_python(number):  # the dispatcher made something else of it
            self.by_python = True
            step.by = f"Python: {step.by} does not give what was planned"

    def at_address(
        self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
        raw = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype).as_strided(list(shape), list(strides))


def shown_title(plan: Plan, step: NativeStep) -> str:
    """For profilers. The loops of a product are beside it: its bytes and operations are those of all three. The epilogue of
    a convolution has none: the convolution calls it, block by block, and its time is part of that one's."""
    if step.kind == "epilogue" and isinstance(step.origin, ConvStep):
        return ""
    found = title(plan, step.origin)
    return f"{found} ({step.kind})" if step.kind in ("prologue", "epilogue") else found
