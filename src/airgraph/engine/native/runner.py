"""Calls of a program that is native code: its frames, the blocks of memory they work in, and what Python has to put right.

    executable.call(args, symbols_of) → the graph's outputs

Two kinds of executables are run like this: one that was planned in this process (engine.py), and one that was read from
the compilation cache (stored.py).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from airgraph.engine.arguments import TakesArguments
from airgraph.engine.native import runtime, tables
from airgraph.engine.native.bound import BindingTable, BoundFrame
from airgraph.engine.native.builtin import METH_O, MethodDef, make_builtin
from airgraph.engine.native.image import FrameImage
from airgraph.engine.native.libtorch import last_error
from airgraph.engine.native.packing import can_be_tagged
from airgraph.engine.native.tables import word_property, words
from airgraph.engine.protocol import Env, Step, Symbols
from airgraph.errors import BadIndexError, EngineError
from airgraph.ir.boundary import Argument, NumberIn, SymbolSource
from airgraph.ir.graph import Graph
from airgraph.ir.symbols import evaluate
from airgraph.locks import Depth, held_at_fork

PACKED_SETS = 4  # sets of weights that have packed copies (a model and copies of it share one program)
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
            memory = torch.empty(-(-need // 64) * 64 + 64, dtype=torch.uint8)
            base = -(-memory.data_ptr() // 64) * 64
            block = (ctypes.c_int64 * tables.BlockWords.WORDS)(0, base, need)
            self.drop_smaller(need)
            block[tables.BlockWords.NEXT] = self.head[0]
            self.head[0] = ctypes.addressof(block)
            self.blocks.append((block, memory))

    def release(self) -> None:
        """Every block that no call uses goes."""
        with self.lock:
            self.drop_smaller(sys.maxsize)

    def fill(self, value: float) -> None:
        """For tests, while no call runs: a number in all memory of intermediates and scratch, padding included."""
        with self.lock:
            for _, memory in self.blocks:
                memory.view(torch.float32).fill_(value)

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
    its threads forever."""
    if len(_frames) > 0:
        POOL.head[tables.PoolWords.THREADS] = 1


def number_of_threads() -> int:
    return min(torch.get_num_threads(), POOL.head[tables.PoolWords.THREADS])


os.register_at_fork(after_in_child=one_thread_after_fork)


class FrameRunner(TakesArguments):
    """An executable as native functions, and the frames in which it runs: one for each call at the same time.

    For capture and replay (protocol.Steps) all functions are one step.
    """

    name: str
    graph: Graph
    image: FrameImage
    binding: BindingTable
    functions: list[int]  # of the steps; 0 for a call of PyTorch
    constants: dict[int, torch.Tensor]  # by slot
    fixed: list[torch.Tensor]
    copies: weakref.WeakValueDictionary[Any, Any]
    made: list[bool]  # for every output whether PyTorch makes it
    loose: bool
    titles: list[str]  # of the steps
    sources: list[SymbolSource]
    numbers: list[Any]  # expressions whose values `native` hands out behind the outputs
    device = torch.device("cpu")
    by_python = word_property(0)  # 1: Python does some of the steps

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.words = words([0])
        self.callback = id(library_step)
        self.program = (ctypes.c_int64 * tables.ProgramWords.WORDS)(0, POOL.address)
        self.method = MethodDef(b"airgraph_program", runtime.entry()["call"], METH_O, None)
        self.native = make_builtin(self.method, ctypes.addressof(self.program))
        self.frames: list[BoundFrame] = []
        self.numbers = []
        self.writes: list[tuple[str, int]] = []  # for capture: the one step has done them
        self.cells: set[int] = set()

    def spans(self) -> None:
        """It has one step."""

    # -- what the two kinds do in their own way -----------------------------------------------------------------------
    def learn(self, symbols: Symbols) -> None:
        """Before the first frame, outside of all locks."""

    def get_ready(self, symbols: Symbols) -> None:
        """Before any frame: `image` and what it refers to are there."""

    def unchanging(self, args: Sequence[Any]) -> Mapping[int, torch.Tensor]:
        """Constants, and arguments that keep their content or can be tagged (packing.py), by slot."""
        tagged = self.image.tagged() if runtime.version_function() else set()
        start, count = self.image.tables["arguments"]
        rows = [
            self.image.words[at : at + tables.EntryWords.WORDS]
            for at in range(start, start + count, tables.EntryWords.WORDS)
        ]
        return self.constants | {
            row[tables.EntryWords.VALUE]: arg
            for arg, row in zip(args, rows)
            if row[tables.EntryWords.KIND] == tables.EntryWords.TENSOR
            and row[tables.EntryWords.VALUE] in tagged
            and can_be_tagged(arg)
        }

    def interpreter(self, name: str) -> int:
        """The address of a function of the interpreter of calls."""
        raise NotImplementedError

    def library_step(self, frame: BoundFrame, number: int) -> None:
        """PyTorch does this step, from Python."""
        raise NotImplementedError

    # -- frames ---------------------------------------------------------------------------------------------------------
    def frame_for(self, args: Sequence[Any], symbols: Symbols) -> BoundFrame:
        """A frame for these arguments, ready to be found by the next call: one that waits, or a new one."""
        self.learn(symbols)
        with _binding:
            self.get_ready(symbols)
            waiting = [f for f in self.taken() if f in self.frames]
            frame = next((f for f in waiting if f.serves(args)), None)
            if frame is None:
                frame = self.new_frame(args)
            try:
                frame.assign(symbols, number_of_threads())
            finally:
                others = self.kept_waiting([f for f in waiting if f is not frame])
                for f in reversed([frame, *others]):
                    runtime.put_frame(self.address, f.address)
                gone = [f for f in waiting if f is not frame and f not in others]
                self.frames = [f for f in self.frames if f not in gone]
        return frame

    @property
    def address(self) -> int:
        return ctypes.addressof(self.program)

    def kept_waiting(self, frames: list[BoundFrame]) -> list[BoundFrame]:
        """Not those whose packed weights are of no use any more, nor more sets of packed weights than are wanted."""
        fresh = [f for f in frames if not any(tag.outdated() for tag in f.tags.values())]
        sets = list(dict.fromkeys(tuple(f.only.items()) for f in fresh if f.tags))[PACKED_SETS - 1 :]
        return [f for f in fresh if not f.tags or tuple(f.only.items()) not in sets][: FRAMES - 1]

    def taken(self) -> list[BoundFrame]:
        """All frames that wait, taken out of the program's list."""
        found = []
        while address := runtime.take_frame(self.address):
            found.append(address)
        frames = {f.address: f for f in self.frames}
        return [frames[address] for address in found]

    def new_frame(self, args: Sequence[Any]) -> BoundFrame:
        number = next(_numbers)
        frame = BoundFrame(self, self.sizes, number, self.unchanging(args))
        frame.owner = weakref.ref(self)
        _frames[number] = frame
        self.frames.append(frame)
        return frame

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
                            raise EngineError("no frame takes these arguments", where={"graph": self.name})
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
            raise EngineError(last_error(), where={"graph": self.name})
        if code == tables.ZERO_DIVISION:  # the text is eager's
            hint = 'engine="reference" names the op and the line'
            raise EngineError("ZeroDivisionError", where={"graph": self.name}, hint=hint)
        if code == tables.BAD_INDEX:
            raise BadIndexError(
                "index out of range in self",
                where={"graph": self.name},
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
        return outputs[: len(self.made)], []

    # -- for capture and replay -----------------------------------------------------------------------------------------
    @cached_property
    def inputs(self) -> dict[str, int]:
        return {node.name: id(node.output) for node in self.graph.inputs}

    @cached_property
    def outputs(self) -> list[int]:
        return [-1 - i for i in range(len(self.made))]

    @cached_property
    def steps(self) -> list[Step]:
        """The graph as one step. (Made when it is asked for: it keeps the executable alive until a garbage collection.)"""

        def given(spec: Argument, env: Env, symbols: Symbols) -> Any:
            if spec.name not in self.inputs:  # a size that only the symbols tell
                return evaluate(spec.expr, symbols) if isinstance(spec, NumberIn) else None
            value = env[self.inputs[spec.name]]
            return value.item() if isinstance(spec, NumberIn) and isinstance(value, torch.Tensor) else value

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            args = [given(spec, env, symbols) for spec in self.boundary.arguments]
            outputs, _ = self.call(args, lambda _: symbols)
            symbols.update(self.learned())
            return outputs[: len(self.outputs)]

        made = dict(zip(self.outputs, self.graph.net_output.values()))
        return [Step(tuple(self.graph.nodes), run, tuple(self.inputs.values()), made)]


def library_step(number: int, step: int) -> None:
    """Called by native code for a step that PyTorch does; what it raises, the native call raises."""
    frame = _frames[number]
    frame.owner().library_step(frame, step)
