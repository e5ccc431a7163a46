"""Programs that can be recorded: the memory of a recording, and its parts.

    bound         the memory: pinned arguments stay where they are, others have buffers; results lie in slots, those of a
                  backward graph over saved tensors where that is safe (sharing.py)
    record_parts  one run in which its parts (parts.py) are captured

When a recording is made, and for which calls it is replayed, is decided in replay.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from airgraph.config import Config
from airgraph.engine.protocol import PLACED, Env, Step, Steps, Symbols
from airgraph.engine.strides import apart
from airgraph.ir.boundary import Boundary
from airgraph.journal import Journal
from airgraph.runtime.arena import arena_of
from airgraph.runtime.handout import prepared, saved_only
from airgraph.runtime.numbers import free_numbers
from airgraph.runtime.parts import (
    BoundPart,
    CapturedPart,
    PartRecorder,
    ProgramPart,
    Work,
    in_order,
    split_text,
    steps_work,
    written_inputs,
)
from airgraph.runtime.program import Program, strided
from airgraph.runtime.recording import Recording, ResultLayout, retains_graph
from airgraph.runtime.sharing import SavedPiece, Wanted, shared_places
from airgraph.runtime.slots import Slot
from airgraph.torch_types import as_tensor


class RecordableProgram(Program):
    """A program whose runs can be recorded. `parameters` are the arguments that stay where they are; results from number
    `saved` on go to autograd only."""

    executable: Steps

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
        super().__init__(name, boundary, executable, journal)
        self.config, self.parameters, self.saved = config, parameters, saved
        self.arena = arena_of(executable.device)
        places = [executable.inputs.get(a.name) for a in boundary.arguments]
        self.keys = {i: key for i, key in enumerate(places) if key is not None}  # where arguments go in `env`
        names = written_inputs(executable)
        self.written = {i for i, a in enumerate(boundary.arguments) if a.name in names}
        self.numbers = free_numbers(boundary, executable)  # arguments whose value is read from memory
        self.sizes: set[Any] = set()
        self.refused: dict[Any, str] = {}  # nodes that are not captured, and why
        self.told: set[Any] = set()  # those the journal knows of
        shares = config.output_policy == "lease" and config.check is None  # see sharing.py
        self.spans = executable.spans() if shares else None
        self.lends = saved is not None and self.spans is not None

    def on_device(self, arg: Any) -> bool:
        return isinstance(arg, torch.Tensor) and arg.device == self.arena.device and strided(arg)

    def bound(
        self, layouts: dict[int, ResultLayout], given: Sequence[Any], symbols: Symbols, pinned: list[int], leased: bool
    ) -> Recording:
        """A recording with its memory, before anything has run."""
        slots, over = self.laid_over_saved(layouts, given, pinned) if leased else ({}, [])
        indices = [i for i in layouts if i not in slots]
        together: Collection[int] = ()
        if self.lends and leased and not self.arena.gradients_live():
            only = saved_only(self.boundary, self.saved)
            together = {n for n, i in enumerate(indices) if i in only}
        sizes = [layouts[i].nbytes for i in indices]
        taken = self.arena.slots.take(sizes, self.name if leased else None, together)
        slots |= dict(zip(indices, taken))
        recording = Recording(self, dict(symbols), {i: slots[i] for i in layouts}, leased)
        recording.pinned, recording.overwrites = pinned, over
        for slot in over:
            slot.lodgers.add(recording)
        for i, arg in enumerate(given):
            if i in self.numbers:
                recording.cells.append((i, as_tensor(arg).to(self.arena.device)))
            elif i in pinned:
                recording.addresses[i] = arg.data_ptr()
                if self.journal.phase == "inference" and i not in self.parameters:
                    recording.layouts.append((i, arg.shape, arg.stride(), arg.dtype))
            elif self.on_device(arg):
                recording.copied.append(i)
                recording.buffers.append(buffer_for(arg))
                recording.expected.append((i, arg.shape, arg.dtype, arg.device))
                if i in self.written:
                    recording.back.append((i, recording.buffers[-1]))
        for index, slot in recording.slots.items():
            layout = layouts[index]
            recording.templates[index] = slot.template(layout.shape, layout.strides, layout.dtype)
        if leased:
            recording.results = prepared(self, recording.templates, recording.slots, recording.symbols, self.saved)
        return recording

    def laid_over_saved(
        self, layouts: dict[int, ResultLayout], given: Sequence[Any], pinned: Sequence[int]
    ) -> tuple[dict[int, Slot], list[Slot]]:
        """Slots for results in the memory of saved tensors (sharing.py), and the slots that they overwrite."""
        if self.spans is None or self.journal.phase != "backward" or retains_graph():
            return {}, []
        last, first = self.spans
        reads: dict[int, int] = {}  # by address
        for i in pinned:
            address = given[i].untyped_storage().data_ptr()
            reads[address] = max(reads.get(address, -1), last.get(self.boundary.arguments[i].name, -1))
        lent = [s for s in self.arena.slots.slots if s.block is not None and s.user != self.name and not s.held()]
        pieces = [SavedPiece(s, reads[s.storage.data_ptr()]) for s in lent if s.storage.data_ptr() in reads]
        wanted = [Wanted(i, layout.nbytes, first[i]) for i, layout in layouts.items() if layout.nbytes]
        found: dict[int, Slot] = {}
        over: dict[Slot, None] = {}
        for i, place in shared_places(pieces, wanted).items():
            found[i] = self.arena.slots.piece(place.block, place.start, layouts[i].nbytes, self.name)
            over |= dict.fromkeys(place.over)
            for slot in place.over:
                slot.guests = {g for g in slot.guests if g.templates or g.held()} | {found[i]}
        if found:
            share = sum(s.nbytes for s in found.values()) / max(sum(w.nbytes for w in wanted), 1)
            self.journal.remark(f"{share:.0%} of the results of {self.name} lie in the memory of saved tensors")
        return found, list(over)

    def record_parts(self, recording: Recording, given: Sequence[Any], symbols: Symbols, keep: bool = False) -> None:
        if recording.buffers:
            torch._foreach_copy_(recording.buffers, [given[i] for i in recording.copied])
        env = recording.env
        env.update(self.executable.constants)
        self.fill(env, given, recording)
        if not keep and self.arena.device.type == "cuda":
            placed: dict[int, torch.Tensor] = {}
            for index, template in recording.templates.items():
                placed.setdefault(self.executable.outputs[index], template)
            env[PLACED] = placed
        recorder = PartRecorder(self.executable, self.sizes, self.refused)
        recording.parts = recorder.record(env, symbols, self.finish(recording), partial(self.capture, recording), keep)
        for node, reason in self.refused.items():
            if node not in self.told:
                self.told.add(node)
                self.journal.remark(split_text(self.executable.graph, node, reason))
        (only, *others) = recording.parts
        if not others and isinstance(only, CapturedPart):
            recording.whole = bare_replay(only.graph)
            more = recording.buffers or recording.cells or recording.back or self.config.output_policy == "error"
            recording.simple = not more
            if not keep:
                env.clear()  # its memory is the arena's again

    def fill(self, env: Env, given: Sequence[Any], recording: Recording) -> None:
        """The values of the arguments, as steps that are not captured read them."""
        for i, key in self.keys.items():
            arg = given[i]
            env[key] = arg if isinstance(arg, torch.Tensor) else as_tensor(arg)
        for i, buffer in zip(recording.copied, recording.buffers):
            if i in self.keys:
                env[self.keys[i]] = buffer
        for i, cell in recording.cells:
            if i in self.keys:
                env[self.keys[i]] = cell

    def finish(self, recording: Recording) -> Work:
        """Results to their slots, then writes to arguments: results must not see those."""
        keys, writes, names = self.executable.outputs, self.executable.writes, self.executable.inputs

        def work(env: Env, symbols: Symbols) -> None:
            copy_results([(template, env[keys[index]]) for index, template in recording.templates.items()])
            if writes:
                inputs = {name: env.get(key) for name, key in names.items()}
                self.write([(name, env[key]) for name, key in writes], inputs)

        return work

    def capture(self, recording: Recording, steps: Sequence[Step], finish: Work) -> ProgramPart:
        if self.arena.device.type != "cuda":
            steady = {self.keys[i] for i in (*recording.pinned, *recording.copied) if i in self.keys}
            steady |= self.executable.constants.keys()
            return BoundPart(self.executable, steps, finish, steady, self.arena.streams)
        config = self.config
        pool = self.arena.pool(config.use_graph_pool, config.reuse_graph_pool_in_same_fx)
        work = in_order(steps_work(self.executable, steps, self.arena.streams), finish)
        return CapturedPart(work, self.arena, pool, config.capture_error_mode)


def bare_replay(graph: Any) -> Callable[[], None]:
    """Without the Python method around PyTorch's own."""
    return super(type(graph), graph).replay if type(graph) is torch.cuda.CUDAGraph else graph.replay


def copy_results(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each result into its slot, unless it was made there; those of one type and layout by one kernel."""
    together: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for slot, value in pairs:
        if value.data_ptr() == slot.data_ptr() and value.stride() == slot.stride():
            continue
        if value.dtype == slot.dtype and value.stride() == slot.stride() and 0 not in slot.stride():
            together.setdefault(slot.dtype, []).append((slot, value))
        else:
            strides = slot.stride()
            apart(slot, strides).copy_(apart(value, strides))
    for same in together.values():
        if len(same) == 1:
            same[0][0].copy_(same[0][1])
            continue
        torch._foreach_copy_([slot for slot, _ in same], [value for _, value in same])


def buffer_for(arg: torch.Tensor) -> torch.Tensor:
    """Memory laid out as the argument; elements that share a place in it (expanded) get places of their own."""
    if any(s == 0 and n > 1 for s, n in zip(arg.stride(), arg.shape)):
        return torch.empty(arg.shape, dtype=arg.dtype, device=arg.device)
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
