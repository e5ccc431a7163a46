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
from airgraph.engine.native.frames import DTYPE_NUMBER, BoundFrame, Given, Layout, Released, Shared, step_words
from airgraph.engine.native.kernels.products import Product
from airgraph.engine.native.kernels.tune import Tuner
from airgraph.engine.native.libtorch import last_error, libtorch, torch_symbol
from airgraph.engine.native.tables import Entry, in_a_word
from airgraph.engine.protocol import Request, Symbols
from airgraph.engine.reference import ReferenceExecutable, as_tensor
from airgraph.engine.strides import copy_strided
from airgraph.errors import BadIndexError, EngineError, raise_from_op
from airgraph.ir.boundary import Argument, NumberIn, OfInput, TensorIn
from airgraph.ir.graph import Value
from airgraph.ir.symbols import evaluate
from airgraph.ir.verify import place as line_of
from airgraph.locks import Depth, held_at_fork
from airgraph.plan.overwrite import overwrites
from airgraph.plan.sizes import Sizes
from airgraph.plan.steps import CallStep, LoopStep, Plan, step_reads, step_writes
from airgraph.plan.tensors import Tensor

FRAMES = 8  # sets of sizes a program keeps ready
_numbers = itertools.count(1)
_frames: weakref.WeakValueDictionary[int, BoundFrame] = weakref.WeakValueDictionary()  # executables keep them alive


class Pool:
    """Blocks for intermediates, for the whole process: a call takes one and gives it back, so all programs share them."""

    def __init__(self) -> None:
        self.head = (ctypes.c_int64 * 1)(0)
        self.blocks: list[tuple[Any, torch.Tensor]] = []
        self.lock = held_at_fork(threading.Lock(), Depth.POOL)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.head)

    def grow(self, need: int) -> None:
        """A block of this size; free ones that are smaller go."""
        with self.lock:
            memory = torch.empty(need + 64, dtype=torch.uint8)
            base = -(-memory.data_ptr() // 64) * 64
            block = (ctypes.c_int64 * tables.Block.WORDS)(0, base, need)
            self.drop_smaller(need)
            block[tables.Block.NEXT] = self.head[0]
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
            if address in free and block[tables.Block.SIZE] < need:
                continue
            kept.append((block, memory))
            if address in free:
                block[tables.Block.NEXT] = self.head[0]
                self.head[0] = address
        self.blocks = kept


POOL = Pool()


class Threads:
    """How many threads a program uses. One in a forked child of a process that ran programs: PyTorch's thread pool is not
    inherited, and OpenMP would wait for its threads for ever."""

    def __init__(self) -> None:
        self.forked = False
        os.register_at_fork(after_in_child=self.after_fork)

    def after_fork(self) -> None:
        self.forked = self.forked or len(_frames) > 0
        for frame in list(_frames.values()):
            frame.words[tables.Frame.THREADS] = 1

    def count(self) -> int:
        return 1 if self.forked else torch.get_num_threads()


THREADS = Threads()
_binding = held_at_fork(threading.Lock(), Depth.BINDING)  # lists of frames change


class NativeExecutable:
    def __init__(self, request: Request, tuner: Tuner | None = None) -> None:
        """`tuner`: matrix products are timed."""
        assert request.plan is not None
        graph, self.boundary, self.device = request.graph, request.boundary, request.device
        self.graph = graph
        self.reference = reference = ReferenceExecutable(graph, request.device, request.map_device)
        self.written = {n.inputs[0].node.name for n in graph.of("Assign")}  # type: ignore[union-attr]
        self.plan: Plan = request.plan
        self.steps: list[NativeStep] = native_steps(self.plan)
        self.layout = Layout(self.plan, self.steps)
        constants = self.constants()
        self.tapes = plan_calls(self.plan, reference)
        self.plan.notes += self.tapes.notes()
        self.by_python = bool(self.tapes.refused)  # some steps are done by Python
        self.sizes = Sizes(sorted(self.plan.symbols, key=str))
        self.collect()
        self.calls = {id(s.origin): reference.step(s.origin.node) for s in self.steps if isinstance(s.origin, CallStep)}
        self.read_by_loops = {t.id for s in self.plan.steps if not isinstance(s, CallStep) for t in step_reads(s)}
        given = self.layout.given
        self.handed = {t.id: [i for i, g in enumerate(given) if g is t] for t in given}  # handed out as they are
        kept = self.kept_arguments() if request.frozen else frozenset()
        slot = self.layout.slot
        over = {
            step: [(slot(t), slot(x)) for t, x in overwrites(step)]
            for step in self.plan.steps
            if isinstance(step, LoopStep)
        }
        self.shared = Shared(
            self.plan,
            self.steps,
            self.layout,
            constants,
            kept,
            id(library_step),
            self.tapes,
            self.releases(),
            tuner,
            over,
        )
        if tuner is not None:
            tuner.learn(self.products(int, symbolic=False))
        self.program = (ctypes.c_int64 * tables.Program.WORDS)(0, POOL.address)
        self.method = MethodDef(b"airgraph_program", runtime.entry()["call"], METH_O, None)
        self.native = make_function(self.method, ctypes.addressof(self.program))
        self.frames: list[BoundFrame] = []
        self.local = threading.local()

    # -- once -----------------------------------------------------------------------------------------------------------
    def collect(self) -> None:
        """Every expression whose value a frame needs."""
        add = self.sizes.add
        for place in self.plan.places.values():
            for x in (*place.strides, place.offset, *place.tensor.shape):
                add(x)
        for step in self.steps:
            for x in (*step.sizes, step.jobs, step.cost):
                add(x)
        for v in self.plan.output_values:
            for x in v.type.shape or ():
                add(x)
        for tape in self.tapes.tapes.values():
            for x in tape.dims():
                add(x)
        for spec in self.boundary.arguments:
            if isinstance(spec, TensorIn):
                for x in (*(spec.type.shape or ()), *spec.strides):
                    add(x)

    def constants(self) -> dict[int, torch.Tensor]:
        """By slot."""
        found: dict[int, torch.Tensor] = {}
        for place in self.plan.places.values():
            if place.kind == "const":
                tensor = self.reference.constants[id(place.source)]
                if isinstance(tensor, torch.Tensor):
                    if tensor.dtype != TORCH_TYPES[place.tensor.dtype] or not tensor.is_contiguous():
                        tensor = tensor.to(TORCH_TYPES[place.tensor.dtype]).contiguous()
                    self.reference.constants[id(place.source)] = tensor
                    found[self.layout.slot(place.tensor)] = tensor
        return found

    def kept_arguments(self) -> frozenset[int]:
        """Slots of the arguments that this graph does not write to."""
        places = [p for p in self.plan.places.values() if p.kind == "input"]
        written = {p.source for p in places if p.alias is not None}
        return frozenset(self.layout.slot(p.tensor) for p in places if p.source not in written)

    def products(self, value: Callable[[Any], int], *, symbolic: bool) -> list[Product]:
        """The matrix products whose sizes are known when compiling, or those whose sizes are not."""
        threads = THREADS.count()
        steps = [
            s for s in self.steps if s.kind == "gemm" and any(isinstance(x, sympy.Basic) for x in s.sizes) == symbolic
        ]
        return [self.shared.product(s, step_words(s, value), threads) for s in steps]

    def releases(self) -> dict[int, Released]:
        """For each library call what nothing reads from there on. (A result that is a view of an argument needs it.)"""
        last: dict[int, int] = {}  # slot → the last step that reads or writes it
        for i, step in enumerate(self.steps):
            for t in (*step_reads(step.origin), *step_writes(step.origin)):
                last[self.layout.slot(t)] = i
        calls = [i for i, s in enumerate(self.steps) if s.kind == "call"]
        found = {i: Released([], []) for i in calls}

        def at(slot: int | None) -> Released:
            done = last.get(slot, -1) if slot is not None else -1
            return next((found[i] for i in calls if i > done), Released([], []))

        viewed = {r.argument for r in self.boundary.results if isinstance(r, OfInput)}
        for i, spec in enumerate(self.boundary.arguments):
            if isinstance(spec, TensorIn) and i not in viewed and spec.name not in self.written:
                at(self.argument_slot(spec.name)).arguments.append(i)
        for place in self.plan.places.values():
            if place.tensor.id in self.layout.made and place.tensor not in self.layout.given:
                at(self.layout.slot(place.tensor)).results.append(place.tensor.id)
        return found

    # -- for each set of sizes ------------------------------------------------------------------------------------------
    def bind(self, args: Sequence[Any], symbols: Symbols) -> BoundFrame:
        """A frame for these sizes, ready to be found by the next call."""
        value = self.sizes.values(symbols)
        number = next(_numbers)
        table = [self.argument(spec, arg, value) for spec, arg in zip(self.boundary.arguments, args)]
        if self.shared.tuner is not None and not self.frames:
            self.shared.tuner.learn(self.products(value, symbolic=True))
        still = {**self.shared.constants, **self.parameters(args, table, value)}
        frame = BoundFrame(self.shared, value, table, still=still, number=number, threads=THREADS.count())
        frame.bound, frame.owner = dict(symbols), weakref.ref(self)
        for given in table:
            if given.kind == Entry.FLOAT:
                cell = (ctypes.c_double * 1)()
                frame.kept.append(cell)
                frame.slots[given.value] = ctypes.addressof(cell)
        with _binding:
            _frames[number] = frame
            self.frames.append(frame)
            self.trim()
            frame.words[tables.Frame.NEXT] = self.program[0]
            self.program[0] = frame.address
        return frame

    def trim(self) -> None:
        """Not more than FRAMES that wait; one in use is not in the list and is let be."""
        waiting, at = [], self.program[0]
        while at:
            waiting.append(at)
            at = ctypes.c_int64.from_address(at).value
        if len(waiting) < FRAMES:
            return
        self.program[0] = 0
        for address in reversed(waiting[: FRAMES - 1]):
            ctypes.c_int64.from_address(address).value = self.program[0]
            self.program[0] = address
        gone = set(waiting[FRAMES - 1 :])
        for frame in [f for f in self.frames if f.address in gone]:
            self.frames.remove(frame)

    def argument(self, spec: Any, arg: Any, value: Callable[[Any], int]) -> Given:
        nothing = Given(Entry.NOTHING, 0)
        if isinstance(spec, NumberIn):
            node = next((n for n in self.graph.inputs if n.name == spec.name), None)
            slot = self.argument_slot(spec.name)
            if slot is not None:
                return Given(Entry.FLOAT, slot)
            unused = isinstance(arg, float) or (node is None and spec.expr is None)
            return nothing if unused else Given(Entry.WHOLE, in_a_word(int(arg)))
        if not isinstance(spec, TensorIn) or not isinstance(arg, torch.Tensor):
            return nothing
        slot = self.argument_slot(spec.name)
        shape = [value(s) for s in spec.type.shape or ()]
        strides = [-1 if size <= 1 or 0 in shape else value(s) for s, size in zip(spec.strides, shape)]
        dtype = DTYPE_NUMBER[TORCH_TYPES[spec.type.dtype]]
        return Given(Entry.TENSOR, self.layout.count if slot is None else slot, dtype, shape, strides)

    def parameters(
        self, args: Sequence[Any], table: Sequence[Given], value: Callable[[Any], int]
    ) -> dict[int, torch.Tensor]:
        """Those among the arguments that keep their content, by slot."""
        return {
            given.value: arg
            for spec, arg, given in zip(self.boundary.arguments, args, table)
            if isinstance(arg, torch.nn.Parameter)
            and given.kind == Entry.TENSOR
            and given.value in self.shared.frozen
            and fits(spec, arg, value)
        }

    def argument_slot(self, name: str) -> int | None:
        """Where the memory of an argument is noted, if the plan has a place for it."""
        places = (p for p in self.plan.places.values() if p.kind == "input" and p.source == name and p.alias is None)
        found = next(places, None)
        return self.layout.slot(found.tensor) if found is not None else None

    # -- every call -----------------------------------------------------------------------------------------------------
    def call(self, args: list[Any], symbols_of: Callable[[list[Any]], Symbols]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the arguments as they were used. `symbols_of` checks them and says what the symbols are."""
        given = args
        try:
            result = self.native(args)
            while type(result) is int:
                match result:
                    case tables.NO_FRAME:
                        args = self.fitting(args, self.bind(args, symbols_of(args)))
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
        return outputs, []

    def write_through(self, used: Sequence[Any], given: Sequence[Any]) -> None:
        """What the graph wrote into a copy of an argument belongs to the argument."""
        for spec, mine, theirs in zip(self.boundary.arguments, used, given):
            if spec.name in self.written and mine is not theirs and mine.data_ptr() != theirs.data_ptr():
                theirs.copy_(mine)

    def learned(self) -> Symbols:
        """Sizes that only running could tell, of this thread's last call."""
        return getattr(self.local, "symbols", {})

    def fitting(self, args: list[Any], frame: BoundFrame) -> list[Any]:
        """Arguments with the strides the graph was compiled for, in memory of the type it was compiled for."""
        result = list(args)
        for i, (spec, arg) in enumerate(zip(self.boundary.arguments, args)):
            if isinstance(spec, TensorIn) and isinstance(arg, torch.Tensor) and not fits(spec, arg, frame.value):
                plain = arg.detach().as_subclass(torch.Tensor).to(TORCH_TYPES[spec.type.dtype])
                strides = [frame.value(s) for s in spec.strides]
                result[i] = plain if lies_as(plain, strides) else copy_strided(plain, strides)
        return result

    # -- library calls --------------------------------------------------------------------------------------------------
    def library(self, frame: BoundFrame, number: int) -> None:
        step = self.steps[number].origin
        assert isinstance(step, CallStep)
        args = ctypes.cast(frame.words[tables.Frame.LIST], ctypes.py_object).value
        if getattr(self.local, "frame", None) is not frame:  # the first of this call
            frame.symbols = self.local.symbols = dict(frame.bound)
            self.local.frame = frame
            frame.results.clear()
        for id_ in self.shared.released[number].results:
            frame.results.pop(id_, None)
        env: dict[int, Any] = {}
        held: set[int] = set()
        for value, matrix, t in step.reads:
            tensor = self.seen(frame, matrix, t, args)
            env[id(value)] = tensor
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                held.add(tensor.untyped_storage().data_ptr())
        for value in step.node.values():
            if id(value) not in env:
                env[id(value)] = self.host_number(value, frame)
        try:
            outputs = self.calls[id(step)](env, frame.symbols)
        except Exception as error:
            raise_from_op(error, step.node.op, line_of(self.graph, step.node))
        for (_, t), result in zip(step.writes, outputs):
            self.keep(frame, t, result, held)
        if frame.by_python(number):  # the dispatcher made something else of it
            self.by_python = True
            step.by = f"Python: {step.by} does not give what was planned"

    def host_number(self, value: Value, frame: BoundFrame) -> Any:
        if id(value) in self.reference.constants:
            return self.reference.constants[id(value)]
        if isinstance(value.known, tuple):
            return torch.tensor(evaluate(value.known, frame.symbols), dtype=TORCH_TYPES[value.dtype])
        number = as_tensor(evaluate(value.known, frame.symbols))
        return (
            number.to(TORCH_TYPES[value.dtype]) if isinstance(number, torch.Tensor) and value.dtype.is_int else number
        )

    def seen(self, frame: BoundFrame, matrix: Any, t: Tensor, args: Sequence[Any]) -> Any:
        """A tensor of the plan as one of PyTorch's: a view of the memory it lies in."""
        base = matrix.tensor
        place = self.plan.places[base.id]
        results = frame.results
        if place.kind == "call" and t is base:
            return results[base.id][0] if base.id in results else wrapped(frame.handles[self.layout.made[base.id]])
        if place.kind == "const" and t is base:
            return self.reference.constants[id(place.source)]
        if place.kind == "input":
            index = next(i for i, a in enumerate(self.boundary.arguments) if a.name == place.source)
            argument = args[index]
            if not isinstance(argument, torch.Tensor):
                return as_tensor(argument)
            if t is base:
                return argument
        shape = [int(frame.value(s)) for s in t.shape]
        strides = [int(frame.value(s)) for s in matrix.strides]
        address = frame.slots[self.layout.slot(base)] + frame.value(matrix.offset) * TORCH_TYPES[t.dtype].itemsize
        return at_address(address, shape, strides, TORCH_TYPES[t.dtype])

    def keep(self, frame: BoundFrame, t: Tensor, result: Any, held: set[int]) -> None:
        """What PyTorch made stays alive for the rest of the call; native steps read it contiguous."""
        if isinstance(result, torch.Tensor) and result.layout == torch.strided:
            if result.untyped_storage().data_ptr() in held and result.numel():
                result = copy_strided(
                    result, result.stride(), int(result.storage_offset()) if t.id in self.handed else 0
                )
            if t.id in self.read_by_loops and list(result.shape) != (wanted := [frame.value(s) for s in t.shape]):
                text = f"PyTorch made {list(result.shape)} where the graph says {wanted}"
                raise EngineError(text, where={"graph": self.graph.name}, hint='engine="reference" takes what is made')
            dense = result if result.is_contiguous() else result.contiguous()
            if dense.dtype != TORCH_TYPES.get(t.dtype, dense.dtype):
                dense = dense.to(TORCH_TYPES[t.dtype])
            frame.slots[self.layout.slot(t)] = dense.data_ptr()
        else:
            dense = result
        frame.results[t.id] = (result, dense)
        for at in self.handed.get(t.id, ()):
            frame.objects[at] = result


def fits(spec: Argument, arg: torch.Tensor, value: Callable[[Any], int]) -> bool:
    """The native side can read it as it is."""
    if not isinstance(spec, TensorIn) or type(arg) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return arg.dtype == TORCH_TYPES[spec.type.dtype] and lies_as(arg, [value(s) for s in spec.strides])


def lies_as(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return 0 in tensor.shape or all(a == b or n <= 1 for a, b, n in zip(tensor.stride(), strides, tensor.shape))


def library_step(number: int, step: int) -> None:
    """Called by native code for a step that PyTorch does; what it raises, the native call raises."""
    frame = _frames[number]
    frame.owner().library(frame, step)


def wrapped(handle: int) -> torch.Tensor:
    """A tensor that native code holds by its handle, as one of Python's. (To wrap is to move: hence a second handle.)"""
    again = ctypes.c_void_p()
    torch_c = libtorch()
    if torch_c.aoti_torch_new_tensor_handle(ctypes.c_void_p(handle), ctypes.byref(again)):
        raise EngineError(last_error())
    wrap = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(torch_symbol(runtime.WRAP))
    tensor = wrap(again)
    torch_c.aoti_torch_delete_tensor_object(again)
    return tensor


def at_address(address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory as a tensor, without a copy."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    raw = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(list(shape), list(strides))


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
