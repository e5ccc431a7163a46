"""Capture and replay: mode reduce-overhead.

A graph is run op by op the first time it sees its sizes, recorded the second time, and replayed from then on. What makes
a replay right is decided by four rules, each checked at every call by comparing addresses and counts, never by walking
through a history of calls:

    arguments   are copied into memory the recording reads, unless their address is part of the recording: parameters,
                arguments that are written to, results of other recordings (what a backward graph gets from its forward),
                and what was at the same address in the first two calls. Another address is another recording; the last
                kind is copied in it, the others (and copied back) after some recordings more.
    results     lie in slots (slots.py) that are written again only when nobody holds them. With every slot held, another
                recording is made on other slots; after `output_slots` of those, results are copied out.
    the rest    dies with the call, and is memory that all programs of the device share (recording.Arena).
    numbers     that only scale values are read from memory, others are part of the key, as sizes are.

So graphs of one step may run in any order: forward after forward, backward after any of them, the second half after a
break, nested ones, other models in between. That is the tree of npugraphs and cudagraphs without the tree.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from airgraph.config import Config
from airgraph.engine.protocol import Symbols
from airgraph.engine.reference import Env, ReferenceExecutable, as_tensor
from airgraph.engine.strides import apart, copy_strided
from airgraph.errors import ReplayError
from airgraph.ir.boundary import Boundary, Fresh, NumberIn, TensorIn
from airgraph.ir.verify import place
from airgraph.journal import Journal
from airgraph.runtime.numbers import free_numbers, other_numbers
from airgraph.runtime.program import Program, quiet, strided, to_host
from airgraph.runtime.recording import (
    NOWHERE,
    Arena,
    Bound,
    Captured,
    Part,
    Place,
    Recorder,
    Work,
    arena_of,
    arenas,
    split_text,
    written_inputs,
)
from airgraph.runtime.slots import Slot, reach, references

MOVES = 8  # recordings for other addresses of the same sizes, before arguments are copied instead
CHANGES = 8  # values of a number, before the ops that read it are left out of the capture
REMEMBERED = 1024  # sets of sizes that were seen once
_clock = itertools.count(1)
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Layout:
    """What a result looks like."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return reach(self.shape, self.strides) * self.dtype.itemsize


class Recording:
    """One run with every address fixed. `pinned` arguments are read where they are, `copied` ones from `buffers`."""

    def __init__(self, program: ReplayProgram, symbols: Symbols, slots: dict[int, Slot], leased: bool) -> None:
        self.program: Any = weakref.proxy(program)  # else neither would be freed before the next collection
        self.symbols = symbols
        self.slots = slots
        self.leased = leased
        self.hits, self.used, self.step = 0, next(_clock), step_now()
        self.copied: list[int] = []
        self.buffers: list[torch.Tensor] = []
        self.pinned: list[int] = []
        self.addresses: list[int] = [0] * len(program.boundary.arguments)
        self.expected: list[tuple[int, torch.Size, torch.dtype, torch.device]] = []
        self.cells: list[tuple[int, torch.Tensor]] = []
        self.back: list[tuple[int, torch.Tensor]] = []  # copied arguments that are written to
        self.templates: dict[int, torch.Tensor] = {}
        self.parts: list[Part] = []
        self.env: Env = {}
        self.whole: Callable[[], None] | None = None  # the one CUDA graph this is, if it is one
        self.handed: list[torch.Tensor] = []  # the templates, if they are all there is to hand out
        self.grown = 0  # bytes by which the arena grew for it

    # -- a call ---------------------------------------------------------------------------------------------------------
    def fits(self, args: Sequence[Any]) -> bool:
        for i, shape, dtype, device in self.expected:
            arg = args[i]
            if arg.shape != shape or arg.dtype is not dtype or arg.device != device:
                return False
        return same_addresses(args, self.addresses, self.pinned)

    def free(self) -> bool:
        """Whether its results may be written again."""
        if self.leased:
            for slot in self.slots.values():
                if references(slot.handle) != slot.own:
                    return self.given_up()
        return True

    def given_up(self) -> bool:
        """Policy "error": the user has said that a new step begins, so what he holds of the last one may change."""
        return self.program.config.output_policy == "error" and self.step != step_now()

    def replay(self, args: Sequence[Any], symbols: Symbols) -> None:
        """`args`: tensors of the device that computes. Sizes that only running can tell are added to `symbols`."""
        if len(self.buffers) == 1:
            self.buffers[0].copy_(args[self.copied[0]], non_blocking=True)
        elif self.buffers:
            torch._foreach_copy_(self.buffers, [args[i] for i in self.copied], non_blocking=True)
        for i, cell in self.cells:
            cell.fill_(args[i])
        if self.whole is not None:
            self.whole()
        else:
            self.program.fill(self.env, args, self)
            for part in self.parts:
                part.run(self.env, symbols)
        if self.back:
            self.write_back(args)
        self.hits += 1
        self.used = next(_clock)
        if self.program.config.output_policy == "error":
            self.step = step_now()

    def settle(self) -> None:
        """After a call. On a CPU nothing inside has a fixed address, so nothing needs to be kept."""
        if self.whole is None and self.program.arena.device.type == "cpu":
            self.env = dict(self.program.reference.constants)

    def write_back(self, args: Sequence[Any]) -> None:
        torch._foreach_copy_([args[i] for i, _ in self.back], [buffer for _, buffer in self.back])

    def outputs(self, symbols: Symbols) -> list[Any]:
        """The computed outputs, ready to be handed out."""
        if self.handed:
            return [template.detach() for template in self.handed]
        program = self.program
        given: list[Any] = []
        for index, key in enumerate(program.reference.outputs):
            template = self.templates.get(index)
            if template is None:
                given.append(self.env[key])
            else:
                given.append(template.detach() if self.leased else copy_strided(template, template.stride()))
        return given if len(self.templates) == len(given) else self.loose(given, symbols)

    def loose(self, given: list[Any], symbols: Symbols) -> list[Any]:
        """Outputs of steps that are not captured are fresh already; they only must not be memory of ours."""
        owned = self.program.own(given, self.buffers, symbols)
        return [g if i in self.templates else o for i, (g, o) in enumerate(zip(given, owned))]

    # -- its cost -------------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Its buffers, what the arena grew by for it, and its share of slots that serve several recordings."""
        slots = sum(s.nbytes // max(s.templates, 1) for s in self.slots.values())
        return slots + self.grown + sum(b.untyped_storage().nbytes() for b in self.buffers)

    def drop(self) -> None:
        """Let go of everything; also when nobody asked, and the program is simply gone."""
        templates, self.templates = self.templates, {}
        for index in templates:
            self.slots[index].forget()
        templates.clear()
        self.handed = []
        self.parts, self.env, self.buffers, self.back, self.whole = [], {}, [], [], None

    __del__ = drop


@dataclass
class Entry:
    """All recordings for one set of sizes."""

    layouts: dict[int, Layout]
    seen: list[Place]  # where the arguments were the first time
    recordings: list[Recording] = field(default_factory=list)
    copying: bool = False  # arguments moved too often: those that are no parameters are copied


class ReplayProgram(Program):
    def __init__(self, name: str, boundary: Boundary, executable: ReferenceExecutable, journal: Journal, config: Config,
                 parameters: frozenset[int]) -> None:  # fmt: skip
        super().__init__(name, boundary, executable, journal)
        self.reference = executable
        self.config = config
        self.arena = arena_of(executable.device)
        self.parameters = parameters
        self.width = len(boundary.arguments)
        names = written_inputs(executable)
        self.written = {i for i, a in enumerate(boundary.arguments) if a.name in names}
        self.numbers = free_numbers(boundary, executable)  # arguments whose value is read from memory
        self.changing = {i: n for i, n in other_numbers(boundary, executable).items() if i not in self.numbers}
        self.left: set[int] = set()  # those of them that are left to the ops that read them
        self.values: dict[int, set[Any]] = {i: set() for i in self.changing}  # seen
        self.tellers = [*self.find_tellers()]
        self.sizes: set[Any] = set()
        self.entries: dict[Key, Entry] = {}
        self.refused: dict[Any, str] = {}  # nodes that are not captured, and why
        self.told: set[Any] = set()  # those the journal knows of
        self.direct = all(torch.device(a.device) == executable.device or torch.device(a.device).type == "cpu"
                          for a in boundary.arguments if isinstance(a, TensorIn))  # fmt: skip
        self.careful = config.force_eager or config.force_recapture or config.check is not None or not self.direct
        simple = [r.index for r in boundary.results if isinstance(r, Fresh)]
        self.plain = simple == list(range(len(boundary.results))) == list(range(len(executable.outputs)))
        _PROGRAMS.add(self)

    def find_tellers(self) -> Sequence[tuple[int, int | None]]:
        """Where the key of a call is read: (argument, axis), or (argument, None) for a number."""
        found: list[tuple[int, int | None]] = []
        seen: set[Any] = set()
        for i, spec in enumerate(self.boundary.arguments):
            if isinstance(spec, NumberIn) and i not in self.numbers and i not in self.left:
                found.append((i, None))
                seen.add(spec.expr)
        for i, spec in enumerate(self.boundary.arguments):
            for axis, size in enumerate((spec.type.shape or ()) if isinstance(spec, TensorIn) else ()):
                if getattr(size, "is_Symbol", False) and size not in seen:
                    found.append((i, axis))
                    seen.add(size)
        return found

    def key(self, args: Sequence[Any]) -> Key:
        return tuple([args[i] if axis is None else args[i].shape[axis] for i, axis in self.tellers])

    # -- a call ---------------------------------------------------------------------------------------------------------
    def __call__(self, args: list[Any], *rest: Any) -> list[Any]:
        results = self.attempt(args) if not rest and type(args) is list else None
        return super().__call__(args, *rest) if results is None else results

    def attempt(self, args: list[Any]) -> list[Any] | None:
        """The results, if there is a recording to replay and nothing else to do; None if not: nothing has been done."""
        if self.careful or not self.plain or len(args) != self.width or not quiet(self.journal):
            return None
        entry = self.entries.get(self.key(args))
        if entry is None:
            return None
        with self.arena.lock:
            recording = self.find(entry, args)
            if recording is None:
                return None
            results = self.replay(recording, args, dict(recording.symbols))
        args.clear()
        self.calls += 1
        return results

    def find(self, entry: Entry, args: Sequence[Any]) -> Recording | None:
        if self.arena.busy or capturing(self.arena):
            return None
        for recording in entry.recordings:
            if recording.fits(args) and recording.free():
                return recording
        return None

    def replay(self, recording: Recording, args: Sequence[Any], symbols: Symbols) -> list[Any]:
        """The computed outputs of a replay."""
        self.arena.ordered()
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self.arena.busy = True
        try:
            recording.replay(args, symbols)
            return recording.outputs(symbols)
        finally:
            recording.settle()
            self.arena.busy = False
            torch._C._set_grad_enabled(grad)

    def past(self, around: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
        if self.careful or not self.plain:
            return around
        attempt, count = self.attempt, torch.autograd.graph.increment_version

        def call(*args: Any) -> Any:
            results = attempt(list(args))
            if results is None:
                return around(*args)
            if written:
                count([args[i] for i in written])
            return results

        return call

    def run(self, args: list[Any]) -> list[Any]:
        """The long way: everything is checked, and what there is no recording for yet is run or recorded."""
        symbols = self.bind(args)
        self.sizes |= set(symbols)
        given = [to_host(a) for a in args]
        with self.arena.lock:
            outputs = self.outputs(args, given, symbols)
        return [self.result(r, args, outputs, symbols) for r in self.boundary.results]

    def outputs(self, args: Sequence[Any], given: Sequence[Any], symbols: Symbols) -> list[Any]:
        if self.config.force_eager or self.arena.busy or capturing(self.arena):
            return self.compute(args, symbols)
        key = self.key(given)
        entry = self.entries.get(key)
        if entry is None:
            self.leave_changing(given)
            return self.warm_up(args, symbols, self.key(given))
        if self.config.force_recapture:
            self.forget(entry.recordings)
        recording = self.find(entry, given)
        if recording is None:
            return self.record(entry, given, symbols)
        if self.config.check and recording.hits % self.config.check_every == 0:
            return self.checked(recording, given, symbols)
        return self.replay(recording, given, symbols)

    def leave_changing(self, given: Sequence[Any]) -> None:
        """A number with yet another value is taken out of the key: the ops that read it run by themselves from now on."""
        for i, nodes in self.changing.items():
            self.values[i].add(given[i])
            if i not in self.left and len(self.values[i]) > CHANGES:
                self.left.add(i)
                self.refused.update(
                    dict.fromkeys(nodes, f"its number {self.boundary.arguments[i].name} keeps changing")
                )
                self.forget([r for e in self.entries.values() for r in e.recordings])
                self.entries.clear()
                self.tellers, self.careful = [*self.find_tellers()], True

    def warm_up(self, args: Sequence[Any], symbols: Symbols, key: Key) -> list[Any]:
        """Run op by op. Libraries make their workspaces now, which they cannot while a graph is captured; and what the
        results look like is known afterwards."""
        owned = self.compute(args, symbols)
        if len(self.entries) > REMEMBERED:
            self.entries = {k: e for k, e in self.entries.items() if e.recordings}
        found = {i: Layout(tuple(o.shape), o.stride(), o.dtype) for i, o in enumerate(owned) if self.slotted(i, o)}
        self.entries[key] = Entry(found, [Place.of(to_host(a)) for a in args])
        return owned

    def slotted(self, index: int, output: Any) -> bool:
        """Whether an output has a slot: those of steps that are not captured, or on another device, have none."""
        if not isinstance(output, torch.Tensor) or not strided(output) or output.device != self.arena.device:
            return False
        value = [*self.reference.graph.net_output.values()][index]
        recorder = Recorder(self.reference, self.sizes, self.refused)
        return value.node.op in ("Data", "Const") or recorder.why(value.node) is None

    # -- recording ------------------------------------------------------------------------------------------------------
    def record(self, entry: Entry, given: Sequence[Any], symbols: Symbols) -> list[Any]:
        """A new recording, and its results: recording runs the program once."""
        pinned = self.pinned(entry, given)
        known = [r for r in entry.recordings if r.fits(given)]
        leased = self.config.output_policy != "clone" and len(known) < self.config.output_slots
        if self.config.output_policy == "error" and known:
            self.refuse_overwriting(known[0])
        self.count(entry, known)
        recording = self.bound(entry, given, symbols, pinned, leased)
        self.arena.busy = True
        self.arena.ordered()
        before = reserved(self.arena)
        try:
            with torch.no_grad():
                self.record_parts(recording, given, symbols)
                if recording.back:
                    recording.write_back(given)
                outputs = recording.outputs(symbols)
            recording.settle()
        except BaseException:
            recording.drop()
            raise
        finally:
            self.arena.busy = False
        recording.grown = reserved(self.arena) - before
        entry.recordings.append(recording)
        self.make_room(recording)
        return outputs

    def count(self, entry: Entry, known: Sequence[Recording]) -> None:
        """Journal: how often, and for what, graphs were captured."""
        counters = self.journal.counters
        counters["captured"] += 1
        if known:
            counters["captured because results were held"] += 1
        elif entry.recordings:
            counters["captured because arguments moved"] += 1

    def pinned(self, entry: Entry, given: Sequence[Any]) -> list[int]:
        """The arguments that are read where they are."""
        if len(entry.recordings) >= MOVES and not entry.copying:
            entry.copying = True
            self.journal.remark(f"arguments of {self.name} keep moving: they are copied from now on, and copied back")
        found = []
        for i, arg in enumerate(given):
            if not self.on_device(arg):
                continue
            steady = i in self.parameters or not self.config.clone_input
            if steady:
                self.arena.steady[arg.data_ptr()] = Place.of(arg)
            stays = not entry.recordings and entry.seen[i].still(arg)
            if steady or (not entry.copying and (i in self.written or stays or self.lasting(arg))):
                found.append(i)
        return found

    def lasting(self, arg: torch.Tensor) -> bool:
        """Memory that will be there again: a result of another recording, or a parameter of another graph (which a
        backward graph gets among the saved tensors, where PyTorch does not say what is a parameter)."""
        known = self.arena.steady.get(arg.data_ptr(), NOWHERE)
        return known.still(arg) or self.arena.slots.holds(arg.untyped_storage().data_ptr())

    def on_device(self, arg: Any) -> bool:
        return isinstance(arg, torch.Tensor) and arg.device == self.arena.device and strided(arg)

    def bound(self, entry: Entry, given: Sequence[Any], symbols: Symbols, pinned: list[int], leased: bool) -> Recording:
        """A recording with its memory, before anything has run."""
        indices = list(entry.layouts)
        slots = self.arena.slots.take([entry.layouts[i].nbytes for i in indices], self.name if leased else None)
        recording = Recording(self, dict(symbols), dict(zip(indices, slots)), leased)
        recording.pinned = pinned
        for i, arg in enumerate(given):
            if i in self.numbers:
                recording.cells.append((i, as_tensor(arg).to(self.arena.device)))
            elif i in pinned:
                recording.addresses[i] = arg.data_ptr()
            elif self.on_device(arg):
                recording.copied.append(i)
                recording.buffers.append(buffer_for(arg))
                recording.expected.append((i, arg.shape, arg.dtype, arg.device))
                if i in self.written:
                    recording.back.append((i, recording.buffers[-1]))
        for index, slot in recording.slots.items():
            layout = entry.layouts[index]
            recording.templates[index] = slot.template(layout.shape, layout.strides, layout.dtype)
        if leased and len(recording.templates) == len(self.reference.outputs):
            recording.handed = [recording.templates[i] for i in range(len(recording.templates))]
        return recording

    def record_parts(self, recording: Recording, given: Sequence[Any], symbols: Symbols, keep: bool = False) -> None:
        if recording.buffers:
            torch._foreach_copy_(recording.buffers, [given[i] for i in recording.copied])
        env = recording.env
        env.update(self.reference.constants)
        self.fill(env, given, recording)
        recorder = Recorder(self.reference, self.sizes, self.refused)
        recording.parts = recorder.record(env, symbols, self.finish(recording), self.capture, keep)
        for node, reason in self.refused.items():
            if node not in self.told:
                self.told.add(node)
                self.journal.remark(split_text(self.reference.graph, node, reason))
        (only, *others) = recording.parts
        if not others and isinstance(only, Captured):
            recording.whole = only.graph.replay
            if not keep:
                env.clear()  # its memory is the arena's again

    def fill(self, env: Env, given: Sequence[Any], recording: Recording) -> None:
        """The values of the arguments, as steps that are not captured read them."""
        held = dict(zip(recording.copied, recording.buffers))
        held.update(recording.cells)
        for i, spec in enumerate(self.boundary.arguments):
            key = self.reference.inputs.get(spec.name)
            if key is not None:
                env[key] = held.get(i, as_tensor(given[i]))

    def finish(self, recording: Recording) -> Work:
        """Results to their slots, then writes to arguments: results must not see those."""
        keys, writes, names = self.reference.outputs, self.reference.writes, self.reference.inputs

        def work(env: Env, symbols: Symbols) -> None:
            for index, template in recording.templates.items():
                strides = template.stride()
                apart(template, strides).copy_(apart(env[keys[index]], strides))
            self.write([(name, env[key]) for name, key in writes], {name: env.get(key) for name, key in names.items()})

        return work

    def capture(self, work: Work) -> Part:
        if self.arena.device.type != "cuda":
            return Bound(work)
        config = self.config
        pool = self.arena.pool(config.use_graph_pool, config.reuse_graph_pool_in_same_fx)
        return Captured(work, self.arena, pool, config.capture_error_mode)

    # -- a budget -------------------------------------------------------------------------------------------------------
    def make_room(self, new: Recording) -> None:
        """For a new recording: the coldest of this graph, or of the device, go."""
        mine = [r for e in self.entries.values() for r in e.recordings if r is not new]
        if len(mine) >= self.config.capture_limit:
            self.evict(min(mine, key=lambda r: r.used), f"capture_limit is {self.config.capture_limit}")
        limit = self.config.capture_bytes
        while limit is not None:
            every = [r for p in programs_on(self.arena) for e in p.entries.values() for r in e.recordings]
            if sum(r.nbytes for r in every) <= limit or every == [new]:
                break
            coldest = min((r for r in every if r is not new), key=lambda r: r.used)
            coldest.program.evict(coldest, f"capture_bytes is {limit}")

    def evict(self, recording: Recording, why: str) -> None:
        self.journal.counters["evicted"] += 1
        self.journal.remark(f"the recording used least lately is dropped ({why})")
        self.forget([recording])

    def forget(self, recordings: Sequence[Recording]) -> None:
        gone = list(recordings)
        for entry in self.entries.values():
            entry.recordings = [r for r in entry.recordings if r not in gone]
        for recording in gone:
            recording.drop()

    def refuse_overwriting(self, recording: Recording) -> None:
        """Policy "error": a result of a former call is held. `mark_step_begin` says that it is not needed any more."""
        raise ReplayError(
            f"{self.name} would overwrite a result of a former call that is still alive",
            where={"held": ", ".join(f"result {i}" for i, s in recording.slots.items() if not s.free())},
            hint='drop it, clone it, or output_policy="lease"',
        )

    # -- the safety net -------------------------------------------------------------------------------------------------
    def checked(self, recording: Recording, given: Sequence[Any], symbols: Symbols) -> list[Any]:
        """A replay, and the same call op by op on copies; a difference names the node."""
        copies = [copy_strided(a, a.stride()) if i in self.written else a for i, a in enumerate(given)]
        state = random_state(self.arena)
        expected = Program.compute(self, copies, dict(symbols))
        after = random_state(self.arena)
        set_random_state(self.arena, state)
        before = [a.clone() if i in self.written else a for i, a in enumerate(given)]
        outputs = self.replay(recording, given, symbols)
        set_random_state(self.arena, after)
        self.journal.counters["checked"] += 1
        pairs = [*zip(outputs, expected), *((given[i], copies[i]) for i in sorted(self.written))]
        if not all(alike(a, b) for a, b in pairs):
            raise self.difference(before, symbols, state)
        return outputs

    def difference(self, given: Sequence[Any], symbols: Symbols, state: Any) -> ReplayError:
        """The first node whose value differs between a recording that keeps all values and a run op by op."""
        seen: dict[int, Any] = {}

        def observe(node: Any, results: Sequence[Any]) -> Sequence[Any]:
            seen.update({id(v): r.clone() if isinstance(r, torch.Tensor) else r for v, r in zip(node.outputs, results)})
            return results

        set_random_state(self.arena, state)
        names = [a.name for a in self.boundary.arguments]
        self.reference.run(dict(zip(names, given)), dict(symbols), observe)
        entry = Entry({}, [])
        recording = self.bound(entry, given, symbols, [], leased=False)
        set_random_state(self.arena, state)
        self.record_parts(recording, given, symbols, keep=True)
        set_random_state(self.arena, state)
        recording.replay(given, dict(symbols))
        for step in self.reference.steps:
            for value in step.node.outputs:
                if id(value) in recording.env and not alike(recording.env[id(value)], seen.get(id(value))):
                    return ReplayError(
                        f"a replay of {self.name} differs from the same call op by op, first at {step.node.op}",
                        where=place(self.reference.graph, step.node),
                        hint="force_recapture=True, then force_eager=True tell whether capturing or memory is at fault",
                    )
        return ReplayError(f"a replay of {self.name} differs from the same call op by op, though none of its nodes does",
                           hint="force_recapture=True tells whether its memory was written to by others")  # fmt: skip


# -- addresses ----------------------------------------------------------------------------------------------------------
def compare_addresses(args: Sequence[Any], addresses: Sequence[int], which: Sequence[int]) -> bool:
    return all(args[i].data_ptr() == addresses[i] for i in which)


# PyTorch has the same in C++, in its CUDA builds.
same_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", compare_addresses)


# -- small things -------------------------------------------------------------------------------------------------------
def capturing(arena: Arena) -> bool:
    """The user captures a graph of his own: our ops become part of that."""
    return arena.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def reserved(arena: Arena) -> int:
    return torch.cuda.memory_reserved(arena.device) if arena.device.type == "cuda" else 0


def buffer_for(arg: torch.Tensor) -> torch.Tensor:
    """Memory laid out as the argument; elements that share a place in it (expanded) get places of their own."""
    if any(s == 0 and n > 1 for s, n in zip(arg.stride(), arg.shape)):
        return torch.empty(arg.shape, dtype=arg.dtype, device=arg.device)
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)


def random_state(arena: Arena) -> Any:
    return torch.cuda.get_rng_state(arena.device) if arena.device.type == "cuda" else torch.get_rng_state()


def set_random_state(arena: Arena, state: Any) -> None:
    torch.cuda.set_rng_state(state, arena.device) if arena.device.type == "cuda" else torch.set_rng_state(state)


def alike(a: Any, b: Any) -> bool:
    """Equal up to the rounding of kernels that may add in another order."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    step = torch.finfo(a.dtype).eps
    scale = b.abs().nan_to_num(0, 0, 0).max().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=16 * step, atol=16 * step * scale, equal_nan=True)


# -- steps --------------------------------------------------------------------------------------------------------------
_marks = itertools.count(1)
_mark = 0


def mark_step_begin() -> None:
    """A new step begins: results of earlier ones are not needed any more. (`torch.compiler.cudagraph_mark_step_begin` says
    the same.) It matters for output_policy="error" only: the others never write to what is held."""
    global _mark
    _mark = next(_marks)


def step_now() -> int:
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return _mark - (trees.MarkStepBox.mark_step_counter if trees else 0)


# -- all programs -------------------------------------------------------------------------------------------------------
_PROGRAMS: weakref.WeakSet[ReplayProgram] = weakref.WeakSet()


def programs_on(arena: Arena) -> list[ReplayProgram]:
    return [p for p in _PROGRAMS if p.arena is arena]


@dataclass(frozen=True)
class GraphInfo:
    """One captured program, as `airgraph.graphs()` lists it."""

    name: str
    phase: str
    device: str
    sizes: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    hits: int
    nbytes: int
    last_use: int  # a counter over all replays: the larger, the later
    leased: bool


def graphs() -> list[GraphInfo]:
    """The captured programs, the one used last first."""
    found = [info(r) for p in list(_PROGRAMS) for e in list(p.entries.values()) for r in list(e.recordings)]
    return sorted(found, key=lambda g: -g.last_use)


def info(r: Recording) -> GraphInfo:
    p = r.program
    shapes = tuple(tuple(p.size(s, dict(r.symbols)) for s in a.type.shape or ()) if isinstance(a, TensorIn) else ()
                   for a in p.boundary.arguments)  # fmt: skip
    sizes = {str(k): v for k, v in r.symbols.items()}
    return GraphInfo(p.name, p.journal.phase, str(p.arena.device), sizes, shapes, r.hits, r.nbytes, r.used, r.leased)


def release() -> int:
    """Drop every captured program and its memory; gives their number. Results that are held stay as they are."""
    count = 0
    for program in list(_PROGRAMS):
        with program.arena.lock:
            gone = [r for e in program.entries.values() for r in e.recordings]
            program.forget(gone)
            program.entries.clear()
            count += len(gone)
    for arena in arenas():
        with arena.lock:
            arena.reset()
    return count
