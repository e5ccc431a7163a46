"""One plan at many sizes: what engines share that run a plan (plan/steps.py), whatever they generate for its steps.

    SlotTable            which slot the address of each tensor is in
    PlannedExecutable    constants, arguments, sizes, memory, and the steps that PyTorch does from Python

Everything that depends on sizes is a term (plan/sizes.py) of `PlannedExecutable.sizes`. An engine subclasses it and brings
its own frames: the tables of one call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import sympy
import torch

from airgraph.engine.arguments import TakesArguments
from airgraph.engine.protocol import Request, Symbols
from airgraph.engine.reference import ReferenceNodes
from airgraph.engine.strides import copy_strided
from airgraph.errors import EngineError, raise_from_op
from airgraph.ir.boundary import OfInput, TensorIn, symbol_sources
from airgraph.ir.graph import Value
from airgraph.ir.symbols import evaluate
from airgraph.ir.verify import place as line_of
from airgraph.plan.index import expand
from airgraph.plan.lifetimes import Access, Timeline, lifetimes, timeline
from airgraph.plan.memory import Arrangement, buffers, memory
from airgraph.plan.overwrite import overwrites
from airgraph.plan.sizes import Sizes
from airgraph.plan.steps import CallStep, GemmStep, LoopStep, Plan, Step, product_reads, step_reads, step_writes
from airgraph.plan.tensors import Tensor
from airgraph.torch_types import TORCH_TYPES, as_tensor

THREADS = sympy.Symbol("threads", integer=True, positive=True)  # the first symbol of every plan's sizes


class EngineStep(Protocol):
    """What an engine makes of a step of the plan, or of a part of one."""

    args: list[Tensor | None]

    @property
    def origin(self) -> Step: ...


class SlotTable:
    """Which slot each tensor's address is in. Slot 0 is null; an output has a second one for its handle.

    Tensors that PyTorch makes have two more words each, for handles: as it was made, and contiguous where that is not.
    """

    def __init__(self, plan: Plan, steps: Sequence[EngineStep]) -> None:
        self.plan = plan
        self.slots: dict[int, int] = {}
        self.count = 1
        for t in self.tensors(steps):
            self.slot(t)
        called = {id(v): t for s in plan.steps if isinstance(s, CallStep) for v, t in s.writes}
        self.made = {t.id: 2 * i for i, t in enumerate(called.values())}
        self.given = [called[id(v)] for v, t in zip(plan.output_values, plan.outputs) if t is None]
        self.reads = [frozenset(self.slot(t) for t in step_reads(s.origin)) for s in steps]
        self.writes = [frozenset(self.slot(t) for t in step_writes(s.origin)) for s in steps]
        places = [p for p in plan.allocations.values() if p.kind in ("arena", "output") and p.alias is None]
        self.memory = {self.slots[p.tensor.id]: p.tensor for p in places if p.tensor.id in self.slots}
        self.outputs = [s for s, t in self.memory.items() if plan.allocations[t.id].kind == "output"]

    def tensors(self, steps: Sequence[EngineStep]) -> list[Tensor]:
        plan, found = self.plan, dict[int, Tensor]()
        for place in plan.allocations.values():
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
        place = self.plan.allocations[t.id]
        if place.alias is not None:
            return self.slot(place.alias.tensor)
        if t.id not in self.slots:
            self.slots[t.id] = self.count
            self.count += 2 if place.kind == "output" else 1
        return self.slots[t.id]

    def argument(self, name: str) -> int | None:
        """The slot of an argument, if the plan reads or writes it."""
        places = (
            p for p in self.plan.allocations.values() if p.kind == "input" and p.source == name and p.alias is None
        )
        found = next(places, None)
        return self.slot(found.tensor) if found is not None else None


class Released(NamedTuple):
    """Memory that is let go before the end of a call: arguments by number, results of library calls by tensor."""

    arguments: list[int]
    results: list[int]


class CallFrame(Protocol):
    """What the steps that PyTorch does need of the tables of one call."""

    slots: Any  # addresses, by slot
    symbols: Symbols
    results: dict[int, Any]  # what library calls made: (as PyTorch made it, contiguous)
    objects: list[Any]

    def value(self, x: Any) -> int: ...

    def arguments(self) -> Sequence[Any]: ...

    def made_by_dispatcher(self, t: Tensor) -> torch.Tensor: ...


class PlannedExecutable(TakesArguments):
    """A plan made ready by an engine, whose steps are `steps`."""

    def __init__(self, request: Request, steps: Sequence[EngineStep]) -> None:
        assert request.plan is not None
        self.graph, self.boundary, self.device, self.plan = (
            request.graph,
            request.boundary,
            request.device,
            request.plan,
        )
        graph, plan, boundary = self.graph, self.plan, self.boundary
        self.reference = reference = ReferenceNodes(graph, request.device, request.map_device)
        self.written = frozenset(n.inputs[0].node.name for n in graph.of("Assign"))  # type: ignore[union-attr]
        self.table = SlotTable(plan, steps)
        self.sources = symbol_sources(boundary.arguments)
        self.sizes = Sizes([THREADS, *dict.fromkeys([s.symbol for s in self.sources])])
        for step in plan.steps:
            if isinstance(step, CallStep):  # Python may do it, with the symbols of this call
                node = step.node
                self.sizes.used |= symbols_in([*node.values(), *node.outputs, node.attrs], set(self.sizes.symbols))
        self.constants = self.constant_tensors()
        self.calls = {id(s): reference.step(s.node) for s in plan.steps if isinstance(s, CallStep)}
        self.read_by_loops = {t.id for s in plan.steps if not isinstance(s, CallStep) for t in step_reads(s)}
        given = self.table.given
        self.handed = {t.id: [i for i, g in enumerate(given) if g is t] for t in given}  # handed out as they are
        self.local = threading.local()

    # -- constants and arguments ----------------------------------------------------------------------------------------
    def constant_tensors(self) -> dict[int, torch.Tensor]:
        """By slot."""
        found: dict[int, torch.Tensor] = {}
        for place in self.plan.allocations.values():
            if place.kind == "const":
                tensor = self.reference.constants[id(place.source)]
                if isinstance(tensor, torch.Tensor):
                    if tensor.dtype != TORCH_TYPES[place.tensor.dtype] or not tensor.is_contiguous():
                        tensor = tensor.to(TORCH_TYPES[place.tensor.dtype]).contiguous()
                    self.reference.constants[id(place.source)] = tensor
                    found[self.table.slot(place.tensor)] = tensor
        return found

    def unwritten_arguments(self) -> frozenset[int]:
        """Slots of the arguments that this graph does not write to."""
        places = [p for p in self.plan.allocations.values() if p.kind == "input"]
        written = {p.source for p in places if p.alias is not None}
        return frozenset(self.table.slot(p.tensor) for p in places if p.source not in written)

    # -- memory ---------------------------------------------------------------------------------------------------------
    def timeline(self, steps: Sequence[EngineStep], single: Sequence[bool]) -> Timeline:
        """`single`: steps that one thread does, whatever the sizes."""
        table = zip(steps, self.table.reads, self.table.writes, single)
        return timeline([Access(r, w, s.origin, isinstance(s.origin, CallStep), one) for s, r, w, one in table])

    def arrangement(self, time: Timeline, symbols: Symbols) -> Arrangement:
        """Where intermediates lie, for any sizes; `symbols`: for which the arrangement shall be good."""
        table, term = self.table, self.sizes.term
        alive = lifetimes(time, table.memory, {s: self.overwrites(s) for s in self.plan.steps}, table.outputs)
        sizes = {slot: term(bytes_of(t)) for slot, t in table.memory.items()}
        values = self.sizes.run(symbols)
        now = {slot: self.sizes.value(size, values) for slot, size in sizes.items()}
        return memory(buffers(alive, now, sizes, table.outputs), sizes)

    def overwrites(self, step: Step) -> list[tuple[int, int]]:
        """The slots of (a result, what it may be written over). What the product of a prologue reads stays."""
        loop = step.prologue if isinstance(step, GemmStep) else step
        if not isinstance(loop, LoopStep):
            return []
        stays = {self.table.slot(t) for t in product_reads(step)} if isinstance(step, GemmStep) else set()
        pairs = [(self.table.slot(t), self.table.slot(x)) for t, x in overwrites(loop)]
        return [(t, x) for t, x in pairs if x not in stays]

    def releases(self, steps: Sequence[EngineStep]) -> dict[int, Released]:
        """For each library call what nothing reads from there on. (A result that is a view of an argument needs it.)"""
        last: dict[int, int] = {}  # slot → the last step that reads or writes it
        for i, step in enumerate(steps):
            for t in (*step_reads(step.origin), *step_writes(step.origin)):
                last[self.table.slot(t)] = i
        calls = [i for i, s in enumerate(steps) if isinstance(s.origin, CallStep)]
        found = {i: Released([], []) for i in calls}

        def at(slot: int | None) -> Released:
            done = last.get(slot, -1) if slot is not None else -1
            return next((found[i] for i in calls if i > done), Released([], []))

        viewed = {r.argument for r in self.boundary.results if isinstance(r, OfInput)}
        for i, spec in enumerate(self.boundary.arguments):
            if isinstance(spec, TensorIn) and i not in viewed and spec.name not in self.written:
                at(self.table.argument(spec.name)).arguments.append(i)
        for place in self.plan.allocations.values():
            if place.tensor.id in self.table.made and place.tensor not in self.table.given:
                at(self.table.slot(place.tensor)).results.append(place.tensor.id)
        return found

    # -- steps that PyTorch does ----------------------------------------------------------------------------------------
    def library(self, frame: CallFrame, step: CallStep, released: Iterable[int]) -> None:
        """From Python. `released`: ids of results that nothing reads any more."""
        for id_ in released:
            frame.results.pop(id_, None)
        env: dict[int, Any] = {}
        held: set[int] = set()
        for value, matrix, t in step.reads:
            tensor = self.seen(frame, matrix, t)
            env[id(value)] = tensor
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                held.add(tensor.untyped_storage().data_ptr())
        for value in step.node.values():
            if id(value) not in env:
                env[id(value)] = self.host_number(value, frame.symbols)
        try:
            outputs = self.calls[id(step)](env, frame.symbols)
        except Exception as error:
            raise_from_op(error, step.node.op, line_of(self.graph, step.node))
        for (_, t), result in zip(step.writes, outputs):
            self.keep(frame, t, result, held)

    def host_number(self, value: Value, symbols: Symbols) -> Any:
        if id(value) in self.reference.constants:
            return self.reference.constants[id(value)]
        if isinstance(value.known, tuple):
            return torch.tensor(evaluate(value.known, symbols), dtype=TORCH_TYPES[value.dtype])
        number = as_tensor(evaluate(value.known, symbols))
        return (
            number.to(TORCH_TYPES[value.dtype]) if isinstance(number, torch.Tensor) and value.dtype.is_int else number
        )

    def seen(self, frame: CallFrame, matrix: Any, t: Tensor) -> Any:
        """A tensor of the plan as one of PyTorch's: a view of the memory it lies in."""
        base = matrix.tensor
        place = self.plan.allocations[base.id]
        if place.kind == "call" and t is base:
            return frame.results[base.id][0] if base.id in frame.results else frame.made_by_dispatcher(base)
        if place.kind == "const" and t is base:
            return self.reference.constants[id(place.source)]
        if place.kind == "input":
            index = next(i for i, a in enumerate(self.boundary.arguments) if a.name == place.source)
            argument = frame.arguments()[index]
            if not isinstance(argument, torch.Tensor):
                return as_tensor(argument)
            if t is base:
                return argument
        dtype = TORCH_TYPES[t.dtype]
        address = frame.slots[self.table.slot(base)] + frame.value(matrix.offset) * dtype.itemsize
        return self.at_address(address, [*map(frame.value, t.shape)], [*map(frame.value, matrix.strides)], dtype)

    def at_address(
        self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Memory of the engine as a tensor, without a copy."""
        raise NotImplementedError

    def keep(self, frame: CallFrame, t: Tensor, result: Any, held: set[int]) -> None:
        """What PyTorch made stays alive for the rest of the call; the engine's steps read it contiguous."""
        if isinstance(result, torch.Tensor) and result.layout == torch.strided:
            if result.untyped_storage().data_ptr() in held and result.numel():
                offset = int(result.storage_offset()) if t.id in self.handed else 0
                result = copy_strided(result, result.stride(), offset)
            if t.id in self.read_by_loops and list(result.shape) != (wanted := [frame.value(s) for s in t.shape]):
                text = f"PyTorch made {list(result.shape)} where the graph says {wanted}"
                raise EngineError(text, where={"graph": self.graph.name}, hint='engine="reference" takes what is made')
            dense = result if result.is_contiguous() else result.contiguous()
            if dense.dtype != TORCH_TYPES.get(t.dtype, dense.dtype):
                dense = dense.to(TORCH_TYPES[t.dtype])
            frame.slots[self.table.slot(t)] = dense.data_ptr()
        else:
            dense = result
        frame.results[t.id] = (result, dense)
        for at in self.handed.get(t.id, ()):
            frame.objects[at] = result


def bytes_of(t: Tensor) -> Any:
    """The size of a contiguous tensor, in bytes."""
    size: Any = TORCH_TYPES[t.dtype].itemsize
    for d in t.shape:
        size = size * d
    return expand(size)


def symbols_in(thing: Any, all_symbols: set[Any]) -> set[Any]:
    """The symbols that a value, attribute or a collection of them depends on; all of them where that cannot be told."""
    match thing:
        case Value():
            return symbols_in([*(thing.type.shape or ()), thing.known], all_symbols)
        case list() | tuple():
            return {symbol for part in thing for symbol in symbols_in(part, all_symbols)}
        case dict():
            return symbols_in(list(thing.values()), all_symbols)
        case torch.nn.Module():  # the body of a branch or loop
            return all_symbols
    return set(getattr(thing, "free_symbols", ()))
