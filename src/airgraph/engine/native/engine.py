"""The native engine: plan, compile, and calls that are one native call.

    NativeEngine().load(request) → NativeExecutable
    executable.call(args) → the graph's outputs

What has no native step is a call of PyTorch from inside the native function: straight to its dispatcher (calls.py) or,
where that cannot be, by Python and the reference engine's meaning of the node.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from airgraph.convert.promote import TORCH_TYPES
from airgraph.engine.native import runtime, tables
from airgraph.engine.native.calls.words import plan_calls
from airgraph.engine.native.code import NativeStep, native_steps
from airgraph.engine.native.frames import DTYPE_NUMBER, BoundFrame, Given, Shared, Tuned, number_word, sized
from airgraph.engine.native.kernels.products import ProductShape
from airgraph.engine.native.kernels.tune import Tuner
from airgraph.engine.native.libtorch import last_error
from airgraph.engine.native.tables import EntryWords
from airgraph.engine.planned import THREADS, PlannedExecutable
from airgraph.engine.protocol import Request, Symbols
from airgraph.errors import BadIndexError, EngineError
from airgraph.ir.boundary import Argument, NumberIn, TensorIn
from airgraph.locks import Depth, held_at_fork
from airgraph.plan.sizes import Sizes
from airgraph.plan.steps import CallStep

FRAMES = 64  # that wait: each is for its own frozen weights, or was made for a call at the same time
_numbers = itertools.count(1)
_frames: weakref.WeakValueDictionary[int, BoundFrame] = weakref.WeakValueDictionary()  # executables keep them alive


class BlockPool:
    """Blocks for intermediates, for the whole process: a call takes one and gives it back, so all programs share them."""

    def __init__(self) -> None:
        self.head = (ctypes.c_int64 * tables.PoolWords.WORDS)(0, tables.MOST)
        self.blocks: list[tuple[Any, torch.Tensor]] = []
        self.lock = held_at_fork(threading.Lock(), Depth.POOL)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.head)

    def grow(self, need: int) -> None:
        """A block of this size; free ones that are smaller go. One that is outgrown gets a successor with some slack:
        sizes that grow from call to call are not to cost an allocation each time."""
        with self.lock:
            if any(need // 2 < block[tables.BlockWords.SIZE] < need for block, _ in self.blocks):
                need += need // 4
            memory = torch.empty(need + 64, dtype=torch.uint8)
            base = -(-memory.data_ptr() // 64) * 64
            block = (ctypes.c_int64 * tables.BlockWords.WORDS)(0, base, need)
            self.drop_smaller(need)
            block[tables.BlockWords.NEXT] = self.head[0]
            self.head[0] = ctypes.addressof(block)
            self.blocks.append((block, memory))

    def drop_smaller(self, need: int) -> None:
        kept, at = [], self.head[0]
        free: set[int] = set()
        while at:
            free.add(at)
            at = ctypes.c_int64.from_address(at).value
        self.head[0] = 0
        for block, memory in self.blocks:
            address = ctypes.addressof(block)
            if address in free and block[tables.BlockWords.SIZE] < need:
                continue
            kept.append((block, memory))
            if address in free:
                block[tables.BlockWords.NEXT] = self.head[0]
                self.head[0] = address
        self.blocks = kept


POOL = BlockPool()
_binding = held_at_fork(threading.Lock(), Depth.BINDING)  # lists of frames change


def one_thread_after_fork() -> None:
    """In a forked child of a process that ran programs: PyTorch's thread pool is not inherited, and OpenMP would wait for
    its threads for ever."""
    if len(_frames) > 0:
        POOL.head[tables.PoolWords.THREADS] = 1


def number_of_threads() -> int:
    return min(torch.get_num_threads(), POOL.head[tables.PoolWords.THREADS])


os.register_at_fork(after_in_child=one_thread_after_fork)


class NativeExecutable(PlannedExecutable):
    """A plan as native functions, and the frames in which it runs: one for each call at the same time."""

    def __init__(self, request: Request, tuner: Tuner | None = None) -> None:
        """`tuner`: matrix products are timed."""
        assert request.plan is not None
        plan = request.plan
        self.steps: list[NativeStep] = native_steps(plan)
        super().__init__(request, self.steps)
        self.frozen = self.unwritten_arguments() if request.frozen else frozenset()
        self.tapes = plan_calls(plan, self.reference)
        plan.notes += self.tapes.notes()
        self.by_python = bool(self.tapes.refused)  # some steps are done by Python
        self.tuner = tuner
        if tuner is not None:
            tuner.learn(self.products({}, symbolic=False).values())
        self.numbers: list[Any] = []  # expressions whose values `native` hands out behind the outputs
        self.program = (ctypes.c_int64 * tables.ProgramWords.WORDS)(0, POOL.address)
        self.method = MethodDef(b"airgraph_program", runtime.entry()["call"], METH_O, None)
        self.native = make_function(self.method, ctypes.addressof(self.program))
        self.frames: list[BoundFrame] = []
        self.shared: Shared | None = None

    # -- once -----------------------------------------------------------------------------------------------------------
    def products(self, symbols: Symbols, *, symbolic: bool) -> dict[NativeStep, ProductShape]:
        """The matrix products whose sizes are known when compiling, or, at these symbols, those whose sizes are not."""
        threads = number_of_threads()
        steps = [
            s for s in self.steps if s.kind == "gemm" and any(isinstance(x, sympy.Basic) for x in s.sizes) == symbolic
        ]
        sizes = Sizes(self.sizes.symbols)
        words = {s: [0, *(number_word(x, sizes) for x in s.sizes)] for s in steps}
        values = sizes.run(symbols)
        found: dict[NativeStep, ProductShape] = {}
        for step, terms in words.items():
            weight, bias = step.args[1], step.args[3]
            assert weight is not None
            slot = self.table.slot(weight)
            numbers = [sizes.value(x, values) for x in terms]
            found[step] = ProductShape.of(
                numbers, bias is not None, slot in self.constants or slot in self.frozen, threads
            )
        return found

    def prepare(self, symbols: Symbols) -> Shared:
        """What all frames share. Choices that are only good for some sizes are made for those of the first call."""
        tuned: dict[NativeStep, Tuned] = {}
        if self.tuner is not None:
            products = self.products(symbols, symbolic=False) | self.products(symbols, symbolic=True)
            for step, product in products.items():
                tuned[step] = Tuned(product, self.tuner.way(product, still=product.still))
        steps = [sized(step, self.sizes, tuned.get(step)) for step in self.steps]
        time = self.timeline(self.steps, [s.single == 1 for s in steps])
        return Shared(
            plan=self.plan,
            steps=self.steps,
            table=self.table,
            sizes=self.sizes,
            sources=self.sources,
            arguments=[self.argument(spec) for spec in self.boundary.arguments],
            numbers=self.numbers,
            constants=self.constants,
            callback=id(library_step),
            calls=self.tapes,
            released=self.releases(self.steps),
            sized=steps,
            tuned=tuned,
            time=time,
            memory=self.arrangement(time, {**symbols, THREADS: number_of_threads()}),
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

    # -- frames ---------------------------------------------------------------------------------------------------------
    def frame_for(self, args: Sequence[Any], symbols: Symbols) -> BoundFrame:
        """A frame for these arguments, ready to be found by the next call: one that waits, or a new one."""
        if self.shared is None and self.tuner is not None:
            self.tuner.learn(self.products(symbols, symbolic=True).values())
        with _binding:
            if self.shared is None:
                self.shared = self.prepare(symbols)
            waiting = [f for f in self.taken() if f in self.frames]
            frame = next((f for f in waiting if f.serves(args)), None)
            if frame is None:
                frame = self.new_frame(args, self.shared)
            try:
                frame.assign(symbols, number_of_threads())
            finally:
                others = [f for f in waiting if f is not frame][: FRAMES - 1]
                for f in reversed([frame, *others]):
                    runtime.put_frame(self.address, f.address)
                gone = [f for f in waiting if f is not frame][FRAMES - 1 :]
                self.frames = [f for f in self.frames if f not in gone]
        return frame

    @property
    def address(self) -> int:
        return ctypes.addressof(self.program)

    def taken(self) -> list[BoundFrame]:
        """All frames that wait, taken out of the program's list."""
        found = []
        while address := runtime.take_frame(self.address):
            found.append(address)
        frames = {f.address: f for f in self.frames}
        return [frames[address] for address in found]

    def new_frame(self, args: Sequence[Any], shared: Shared) -> BoundFrame:
        number = next(_numbers)
        still = {**self.constants, **self.parameters(args, shared)}
        frame = BoundFrame(shared, still=still, number=number)
        frame.owner = weakref.ref(self)
        _frames[number] = frame
        self.frames.append(frame)
        return frame

    def parameters(self, args: Sequence[Any], shared: Shared) -> dict[int, torch.Tensor]:
        """Those among the arguments that keep their content, by slot."""
        return {
            given.value: arg
            for arg, given in zip(args, shared.arguments)
            if isinstance(arg, torch.nn.Parameter)
            and given.kind == EntryWords.TENSOR
            and given.value in self.frozen
            and type(arg) is torch.nn.Parameter
            and list(given.strides) == list(arg.stride())
            and DTYPE_NUMBER[arg.dtype] == given.dtype
        }

    # -- every call -----------------------------------------------------------------------------------------------------
    def call(self, args: list[Any], symbols_of: Callable[[list[Any]], Symbols]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the arguments as they were used. `symbols_of` checks them and says what the symbols are."""
        given, frames = args, 0
        try:
            result = self.native(args)
            while type(result) is int:
                match result:
                    case tables.NO_FRAME:
                        frames += 1
                        if frames > FRAMES:  # each could have been taken by another thread, but not all of them
                            raise EngineError("no frame takes these arguments", where={"graph": self.graph.name})
                        frame = self.frame_for(args, symbols_of(args))
                        args = self.fitting(args, frame.value)
                    case tables.NO_BLOCK:
                        POOL.grow(max(f.need for f in self.frames))
                    case _:
                        self.fail(result)
                result = self.native(args)
        finally:
            self.finish()
        if args is not given:
            self.write_through(args, given)
        return result, args

    def fail(self, code: int) -> None:
        """Raises, if that is what the native call gave back; what a call has let go of, another one would not find."""
        if code == tables.TORCH_FAILED:
            raise EngineError(last_error(), where={"graph": self.graph.name})
        if code == tables.ZERO_DIVISION:  # the text is eager's
            hint = 'engine="reference" names the op and the line'
            raise EngineError("ZeroDivisionError", where={"graph": self.graph.name}, hint=hint)
        if code == tables.BAD_INDEX:
            raise BadIndexError(
                "index out of range in self",
                where={"graph": self.graph.name},
                hint='engine="reference" names the op and the line',
            )

    def finish(self) -> None:
        """What Python made during this call is no longer needed."""
        frame, self.local.frame = getattr(self.local, "frame", None), None
        if frame is not None:
            frame.forget()

    def run(
        self, inputs: Mapping[str, Any], symbols: Symbols
    ) -> tuple[Sequence[Any], Sequence[tuple[str, torch.Tensor]]]:
        """For tools: the arguments by name. The writes are done, so none are handed back."""
        outputs, _ = self.call([inputs[spec.name] for spec in self.boundary.arguments], lambda _: symbols)
        return outputs[: len(self.plan.outputs)], []

    # -- library calls --------------------------------------------------------------------------------------------------
    def library_step(self, frame: BoundFrame, number: int) -> None:
        step = self.steps[number].origin
        assert isinstance(step, CallStep)
        if getattr(self.local, "frame", None) is not frame:  # the first of this call
            frame.symbols = self.local.symbols = frame.bound()
            self.local.frame = frame
            frame.results.clear()
        self.library(frame, step, frame.shared.released[number].results)
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


def library_step(number: int, step: int) -> None:
    """Called by native code for a step that PyTorch does; what it raises, the native call raises."""
    frame = _frames[number]
    frame.owner().library_step(frame, step)


# -- a function of Python's ------------------------------------------------------------------------------------------
class MethodDef(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


METH_O = 8


def make_function(method: MethodDef, program: int) -> Callable[[list[Any]], Any]:
    """A builtin function of one argument: calling it costs 50 ns, where ctypes takes a microsecond."""
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return new(ctypes.addressof(method), program, None)
