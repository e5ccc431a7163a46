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
    the rest    dies with the call, and is memory that all programs of the device share (arena.py).
    numbers     that only scale values are read from memory, others are part of the key, as sizes are.

So graphs of one step may run in any order: forward after forward, backward after any of them, the second half after a
break, nested ones, other models in between. That is the tree of npugraphs and cudagraphs without the tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler
from torch.multiprocessing.reductions import StorageWeakRef

from airgraph.config import Config
from airgraph.engine.native.address_watch import TensorWatch
from airgraph.engine.native.short_call import RecordedLaunch, ShortCall, is_available
from airgraph.engine.native.state_gather import StateGather
from airgraph.engine.protocol import Steps, Symbols
from airgraph.errors import ReplayError
from airgraph.ir.boundary import Boundary, Fresh, Number, NumberIn, OfInput, OfOutput, Plain, TensorIn
from airgraph.journal import Journal
from airgraph.runtime.arena import NOWHERE, Arena, TensorAddress
from airgraph.runtime.capture_log import FORCED, HELD, MOVED, limit_text, tell_capture, tell_captured, tell_found
from airgraph.runtime.handout import Handout
from airgraph.runtime.numbers import is_updatable, other_numbers
from airgraph.runtime.parts import PartRecorder
from airgraph.runtime.program import strided, to_host
from airgraph.runtime.recordable import RecordableProgram
from airgraph.runtime.recording import Recording, ResultLayout, hooks, tick
from airgraph.runtime.state_call import StateCall, reading_calls

MOVES = 8  # recordings for other addresses of the same sizes, before arguments are copied instead
CHANGES = 8  # values of a number, before the ops that read it are left out of the capture
REMEMBERED = 1024  # sets of sizes that were seen once
Key = tuple[Any, ...]


@dataclass
class SizeEntry:
    """All recordings for one set of sizes."""

    layouts: dict[int, ResultLayout]
    seen: list[TensorAddress]  # where the arguments were the first time
    recordings: list[Recording] = field(default_factory=list)
    copying: bool = False  # arguments moved too often: those that are no parameters are copied


class ReplayProgram(RecordableProgram):
    """A program that is captured at the second call of its sizes and replayed from then on."""

    def __init__(
        self,
        name: str,
        boundary: Boundary,
        executable: Steps,
        journal: Journal,
        config: Config,
        parameters: frozenset[int],
        saved: int | None = None,
    ) -> None:
        super().__init__(name, boundary, executable, journal, config, parameters, saved)
        self.width = len(boundary.arguments)
        self.makers = {key: step for step in executable.steps for key in step.makes}
        self.changing = {i: n for i, n in other_numbers(boundary, executable).items() if i not in self.numbers}
        self.left: set[int] = set()  # those of them that are left to the ops that read them
        self.values: dict[int, set[Any]] = {i: set() for i in self.changing}  # seen
        for i in self.changing:
            if any(is_updatable(node) for node in self.changing[i]):
                self.leave(i)
        self.key_sources = [*self.find_key_sources()]
        self.entries: dict[Key, SizeEntry] = {}
        simple = [r.index for r in boundary.results if isinstance(r, Fresh)]
        self.plain = simple == list(range(len(boundary.results))) == list(range(len(executable.outputs)))
        careful = config.force_eager or config.force_recapture or config.check is not None
        self.fixed_results = all(map(is_fixed, boundary.results))
        self.short = not careful and not self.left and self.on_host()
        PROGRAMS.add(self)

    def on_host(self) -> bool:
        """No argument is of an emulated device."""
        devices = [torch.device(a.device) for a in self.boundary.arguments if isinstance(a, TensorIn)]
        return all(d == self.arena.device or d.type == "cpu" for d in devices)

    def find_key_sources(self) -> Sequence[tuple[int, int | None]]:
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
        found += [(s.argument, s.axis) for s in self.sources if s.kind == "size" and s.symbol not in seen]
        return found

    def key(self, args: Sequence[Any]) -> Key:
        return tuple([args[i] if axis is None else args[i].shape[axis] for i, axis in self.key_sources])

    # -- a call ---------------------------------------------------------------------------------------------------------
    def attempt(
        self, args: list[Any], state: TensorWatch | None = None, guarded: bool = False, short: ShortCall | None = None
    ) -> list[Any] | None:
        """`state`: the arguments in front of `args`. `guarded`: Dynamo has checked sizes, strides and types. `short` does
        the same without Python, and learns what it may replay."""
        # What is written out here are `quiet`, `find`, `Arena.ordered` and, for a recording that is one CUDA graph, its
        # replay and handout: within Dynamo's frame evaluation every function of Python costs some 0.3 µs more.
        if not self.short or profiler._is_profiler_enabled or (state is None and len(args) != self.width):
            return None
        if self.levels.get(self.event_level) is not False and self.log.isEnabledFor(self.event_level):
            return None
        entry = self.entries.get(self.key(whole(state, args)) if self.key_sources else ())
        if entry is None:
            return None
        arena = self.arena
        with arena.lock:
            stream = arena.current()
            if arena.busy or (stream and torch._C._cuda_isCurrentStreamCapturing()):
                return None
            for recording in entry.recordings:
                if state is not None:
                    fits = recording.fits_behind(state, args)
                else:
                    fits = recording.fits(args) and (guarded or recording.laid_out(args))
                if fits and recording.free():
                    break
            else:
                return None
            handout = recording.results
            if handout is None or (self.saved is not None and hooks()):
                if not self.fixed_results:
                    return None
                given = whole(state, args)
                outputs = self.replay(recording, given, dict(recording.symbols))
                results = [self.result(r, given, outputs, {}) for r in self.boundary.results]
            elif recording.simple:
                if stream != arena.last:
                    arena.ordered()
                launch, arguments = recording.launching
                arena.busy = True  # until there are results, nobody holds their memory
                try:
                    if not recording.unmoved(state, args):
                        return None
                    launch(*arguments)
                    recording.hits += 1
                    recording.used = tick()
                    results = handout(whole(state, args))
                finally:
                    arena.busy = False
                if short is not None:
                    short.launch(self.launches(state, guarded), state)
            else:
                given = whole(state, args)
                made = partial(handed_out, handout, given, torch.is_grad_enabled())
                results = self.repeat(recording, given, dict(recording.symbols), made)
        args.clear()
        self.calls += 1
        return results

    def launches(self, state: TensorWatch | None, guarded: bool) -> list[RecordedLaunch]:
        """What native code may replay, behind this state."""
        if self.key_sources or self.saved is not None:
            return []
        count = 0 if state is None else len(state.addresses)
        recordings = self.entries[()].recordings
        known = [r for r in recordings if state is None or r.state is state.addresses or r.reads(state.addresses)]
        return [launch for r in known if (launch := r.launch(count, guarded)) is not None]

    def launches_reading(
        self, rows: list[RecordedLaunch], gather: StateGather, args: Sequence[Any], models: Mapping[Any, StateGather]
    ) -> list[RecordedLaunch]:
        """What native code may replay where state is read from modules: `rows` before, and what was replayed last."""
        if self.key_sources or self.saved is not None:
            return []
        last = max(self.entries[()].recordings, key=lambda r: r.used)
        found = last.launch_reading(gather, args)
        if found is None or found in rows:
            return rows
        known = [*models.values()]
        last.forget_launches(known)
        return [*(row for row in rows if row.kept and row.gather in known), found]

    def past(self, around: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
        """As `Program.past`, for arguments that Dynamo has checked. Its attribute `behind` makes calls with a model's state
        in front of their arguments; `builtin`, where there is one, is the same call without a frame of Python."""
        if not self.short or not self.plain:
            return around
        attempt, count = self.attempt, torch.autograd.graph.increment_version
        short = ShortCall(self, self.width, written) if is_available() else None

        def call(*args: Any) -> Any:
            results = attempt([*args], None, True, short)
            if results is None:
                return around(*args)
            if written:
                count([args[i] for i in written])
            return results

        found: Any = partial(call)  # (a function with the builtin as its attribute would hold itself)
        found.behind = lambda: StateCall(self, around, written)
        if short is not None:
            found.builtin = short.builtin(call)
            found.reading = lambda arguments: reading_calls(self, around, written, arguments)
        return found

    def result(self, result: Any, args: Sequence[Any], owned: Sequence[Any], symbols: Symbols) -> Any:
        if self.short and isinstance(result, Fresh):
            return owned[result.index]  # on this device
        return super().result(result, args, owned, symbols)

    def find(self, entry: SizeEntry, args: list[Any]) -> Recording | None:
        if self.arena.busy or capturing(self.arena):
            return None
        for recording in entry.recordings:
            if recording.fits(args) and recording.laid_out(args) and recording.free():
                return recording
        return None

    def replay(self, recording: Recording, args: Sequence[Any], symbols: Symbols) -> list[Any]:
        """The computed outputs of a replay."""
        return self.repeat(recording, args, symbols, recording.outputs)

    def repeat(
        self, recording: Recording, args: Sequence[Any], symbols: Symbols, outputs: Callable[[Symbols], list[Any]]
    ) -> list[Any]:
        """A replay of any kind, and its `outputs`."""
        self.arena.ordered()
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self.arena.busy = True
        try:
            recording.replay(args, symbols)
            return outputs(symbols)
        finally:
            recording.settle()
            self.arena.busy = False
            torch._C._set_grad_enabled(grad)

    def run(self, args: list[Any]) -> list[Any]:
        """The long way: everything is checked, and what there is no recording for yet is run or recorded."""
        symbols = self.bind(args)
        self.sizes |= set(symbols)
        given = [to_host(a) for a in args]
        with self.arena.lock:
            outputs = self.outputs(args, given, symbols)
        return [self.result(r, args, outputs, symbols) for r in self.boundary.results]

    def outputs(self, args: list[Any], given: list[Any], symbols: Symbols) -> list[Any]:
        if self.config.force_eager or self.arena.busy or capturing(self.arena):
            return self.compute(args, symbols)
        key = self.key(given)
        entry = self.entries.get(key)
        if entry is None:
            self.leave_changing(given)
            return self.warm_up(args, given, symbols)
        forced = self.config.force_recapture and bool(entry.recordings)
        if forced:
            self.forget(entry.recordings)
        recording = self.find(entry, given)
        if recording is None:
            return self.record(entry, given, symbols, forced)
        tell_found(self.journal, key, recording)
        if self.config.check and recording.hits % self.config.check_every == 0:
            from airgraph.runtime.sample import checked  # it names nodes as dumps do

            return checked(self, recording, given, symbols)
        return self.replay(recording, given, symbols)

    def leave_changing(self, given: Sequence[Any]) -> None:
        """A number with yet another value is taken out of the key: the ops that read it run by themselves from now on."""
        for i in self.changing:
            self.values[i].add(given[i])
            if i not in self.left and len(self.values[i]) > CHANGES:
                self.leave(i)
                self.forget([r for e in self.entries.values() for r in e.recordings])
                self.entries.clear()
                self.key_sources, self.short = [*self.find_key_sources()], False

    def leave(self, i: int) -> None:
        self.left.add(i)
        why = f"its number {self.boundary.arguments[i].name} keeps changing"
        self.refused.update(dict.fromkeys(self.changing[i], why))

    def warm_up(self, args: list[Any], given: list[Any], symbols: Symbols) -> list[Any]:
        """Run op by op. Libraries make their workspaces now, which they cannot while a graph is captured; and what the
        results look like is known afterwards."""
        key, seen = self.key(given), [TensorAddress.of(a) for a in given]
        owned = self.spend(args, given, symbols) if self.spends() else self.compute(args, symbols)
        if self.journal.phase == "backward":
            tensors = [o for o in owned if isinstance(o, torch.Tensor) and strided(o)]
            self.arena.gradients[self.name] = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        if len(self.entries) > REMEMBERED:
            self.entries = {k: e for k, e in self.entries.items() if e.recordings}
        found = {
            i: ResultLayout(tuple(o.shape), o.stride(), o.dtype) for i, o in enumerate(owned) if self.slotted(i, o)
        }
        self.entries[key] = SizeEntry(found, seen)
        return owned

    def spends(self) -> bool:
        """Saved tensors need not outlive their last reader: no result is one of them, none is written to."""
        if self.spans is None or self.journal.phase != "backward" or self.written or self.executable.writes:
            return False
        inputs = set(self.executable.inputs.values())
        return all(map(is_made, self.boundary.results)) and inputs.isdisjoint(self.executable.outputs)

    def spend(self, args: list[Any], given: list[Any], symbols: Symbols) -> list[Any]:
        """As `compute`, with nobody but the steps holding the arguments."""

        def taken() -> dict[str, Any]:
            inputs = {spec.name: arg for spec, arg in zip(self.boundary.arguments, given)}
            args.clear()
            given.clear()
            return inputs

        outputs, _ = self.executable.run(taken(), symbols)
        return self.own(outputs, [], symbols)

    def slotted(self, index: int, output: Any) -> bool:
        """Whether an output has a slot: those of steps that are not captured, or on another device, have none."""
        if not isinstance(output, torch.Tensor) or not strided(output) or output.device != self.arena.device:
            return False
        step = self.makers.get(self.executable.outputs[index])
        return step is None or PartRecorder(self.executable, self.sizes, self.refused).why(step) is None

    # -- recording ------------------------------------------------------------------------------------------------------
    def record(self, entry: SizeEntry, given: list[Any], symbols: Symbols, forced: bool = False) -> list[Any]:
        """A new recording, and its results: recording runs the program once."""
        key = self.key(given)
        pinned = self.pinned(entry, given)
        known = [r for r in entry.recordings if r.fits(given) and r.laid_out(given)]
        leased = self.config.output_policy != "clone" and len(known) < self.config.output_slots
        if self.config.output_policy == "error" and known:
            self.refuse_overwriting(known[0])
        self.count(entry, known)
        if self.lends and any(r.outlived() for r in known):
            self.lends = False
            self.journal.remark(f"gradients are held over the next call of {self.name}: they get memory of their own")
            self.forget([r for r in known if r.outlived()])
        tell_capture(self.journal, key, FORCED if forced else HELD if known else MOVED if entry.recordings else None)
        self.arena.clear_caches()
        recording = self.bound(entry.layouts, given, symbols, pinned, leased)
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
        tell_captured(self.journal, key, recording, len(self.refused))
        self.make_room(recording, key)
        return outputs

    def count(self, entry: SizeEntry, known: Sequence[Recording]) -> None:
        """Journal: how often, and for what, graphs were captured."""
        counters = self.journal.counters
        counters["captured"] += 1
        if known:
            counters["captured because results were held"] += 1
        elif entry.recordings:
            counters["captured because arguments moved"] += 1

    def pinned(self, entry: SizeEntry, given: Sequence[Any]) -> list[int]:
        """The arguments that are read where they are."""
        if len(entry.recordings) >= MOVES and not entry.copying:
            entry.copying = True
            self.journal.remark(f"arguments of {self.name} keep moving: they are copied from now on, and copied back")
        found = []
        for i, arg in enumerate(given):
            if not self.on_device(arg):
                continue
            stayed = not entry.copying or any(r.addresses[i] == arg.data_ptr() for r in entry.recordings)
            steady = (i in self.parameters and stayed) or not self.config.clone_input
            if steady:
                self.arena.steady[arg.data_ptr()] = TensorAddress.of(arg)
            stays = not entry.recordings and entry.seen[i].holds(arg)
            if steady or (not entry.copying and (i in self.written or stays or self.lasting(arg))):
                found.append(i)
        return found

    def lasting(self, arg: torch.Tensor) -> bool:
        """Memory that will be there again: a result of another recording, or a parameter of another graph (which a
        backward graph gets among the saved tensors, where PyTorch does not say what is a parameter)."""
        known = self.arena.steady.get(arg.data_ptr(), NOWHERE)
        return known.holds(arg) or self.arena.slots.holds(arg.untyped_storage().data_ptr())

    # -- a budget -------------------------------------------------------------------------------------------------------
    def make_room(self, new: Recording, key: Key) -> None:
        """For a new recording: evict the least recently used of this graph, or of the device."""
        mine = [r for e in self.entries.values() for r in e.recordings if r is not new]
        if len(mine) >= self.config.capture_limit:
            self.evict(min(mine, key=lambda r: r.used), limit_text(self.journal, key, self.config.capture_limit))
        limit = self.config.capture_bytes
        while limit is not None:
            every = [r for p in programs_on(self.arena) for e in p.entries.values() for r in e.recordings]
            if sum(r.nbytes for r in every) <= limit or every == [new]:
                break
            oldest = min((r for r in every if r is not new), key=lambda r: r.used)
            why = f"the least recently used recording is evicted (capture_bytes is {limit})"
            oldest.program.evict(oldest, why)

    def evict(self, recording: Recording, why: str) -> None:
        self.journal.counters["evicted"] += 1
        self.journal.remark(why)
        self.forget([recording])

    def forget(self, recordings: Sequence[Recording]) -> None:
        gone = list(recordings)
        for entry in self.entries.values():
            entry.recordings = [r for r in entry.recordings if r not in gone]
        for recording in gone:
            lodgers = {lodger for slot in recording.slots.values() for lodger in slot.lodgers}
            recording.drop()
            for lodger in lodgers:  # it would never be called again: its arguments were the results of this one
                lodger.program.forget([lodger])

    def refuse_overwriting(self, recording: Recording) -> None:
        """Policy "error": a result of a former call is held. `mark_step_begin` says that it is not needed any more."""
        raise ReplayError(
            f"{self.name} would overwrite a result of a former call that is still alive",
            where={"held": ", ".join(f"result {i}" for i, s in recording.slots.items() if not s.free())},
            hint='drop it, clone it, or output_policy="lease"',
        )


def is_made(result: Any) -> bool:
    """It is no view of anything."""
    return isinstance(result, Fresh | Plain | Number)


def is_fixed(result: Any) -> bool:
    """It is the same in every call, but for the memory it is in: nothing of it depends on sizes."""
    if isinstance(result, OfInput) and result.itself:
        return True
    if isinstance(result, OfInput | OfOutput):
        layout = result.layout
        return all(isinstance(s, int) for s in (*layout.shape, *layout.strides, layout.offset))
    return isinstance(result, Fresh | Plain)


# -- small things -------------------------------------------------------------------------------------------------------
def capturing(arena: Arena) -> bool:
    """The user captures a graph of his own: our ops become part of that. (The default stream, 0, cannot be captured, and
    asking CUDA takes two microseconds.)"""
    return bool(arena.current()) and torch._C._cuda_isCurrentStreamCapturing()


def reserved(arena: Arena) -> int:
    return torch.cuda.memory_reserved(arena.device) if arena.device.type == "cuda" else 0


def handed_out(handout: Handout, args: Sequence[Any], grad: bool, symbols: Symbols) -> list[Any]:
    """The results of a replay, in the caller's grad mode."""
    torch._C._set_grad_enabled(grad)
    return handout(args)


def whole(state: TensorWatch | None, args: list[Any]) -> list[Any]:
    return args if state is None else [*state.tensors, *args]


# -- all programs -------------------------------------------------------------------------------------------------------
PROGRAMS: weakref.WeakSet[ReplayProgram] = weakref.WeakSet()


def programs_on(arena: Arena) -> list[ReplayProgram]:
    return [p for p in PROGRAMS if p.arena is arena]
