"""One run of a graph with every address fixed, so that one call does it again.

replay   copy arguments in ─ parts ─ hand out results
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from airgraph.engine.native.address_watch import (
    AddressWatch,
    ArgumentLayout,
    LayoutWatch,
    TensorWatch,
    is_plain,
    unmoved_table,
)
from airgraph.engine.native.short_call import TICK, RecordedLaunch, free_table, without_allocation
from airgraph.engine.native.state_gather import StateGather
from airgraph.engine.native.tables import RecordingWords, word_property, words
from airgraph.engine.protocol import Env, Symbols
from airgraph.engine.strides import copy_strided
from airgraph.runtime.handout import Handout
from airgraph.runtime.parts import ProgramPart
from airgraph.runtime.program import Program
from airgraph.runtime.slots import Slot, reach, references

retains_graph = torch._C._autograd._get_current_graph_task_keep_graph  # True outside of a backward pass


def tick() -> int:
    """A number for each use of any recording."""
    TICK[0] += 1
    return int(TICK[0])


@dataclass(frozen=True)
class ResultLayout:
    """What a result looks like."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return reach(self.shape, self.strides) * self.dtype.itemsize


class Recording:
    """One run with every address fixed. `pinned` arguments are read where they are, `copied` ones from `buffers`."""

    hits = word_property(RecordingWords.HITS)
    used = word_property(RecordingWords.USED)
    version = word_property(RecordingWords.VERSION)  # of the slots, when `watched` was found

    def __init__(self, program: Program, symbols: Symbols, slots: dict[int, Slot], leased: bool) -> None:
        self.program: Any = weakref.proxy(program)  # else neither would be freed before the next collection
        self.symbols = symbols
        self.slots = slots
        self.owner = next((slot.owner for slot in slots.values()), None)
        self.leased = leased
        self.words = words([0, tick(), -1, 0])
        self.step = step_now()
        self.copied: list[int] = []
        self.buffers: list[torch.Tensor] = []
        self.pinned: list[int] = []
        self.addresses: list[int] = [0] * len(program.boundary.arguments)
        self.expected: list[tuple[int, torch.Size, torch.dtype, torch.device]] = []
        self.layouts: list[ArgumentLayout] = []  # of pinned arguments of a user's
        self.state: list[int] | None = None  # addresses of a model's state that are known to be those it reads
        self.rests: dict[int, tuple[AddressWatch, LayoutWatch]] = {}  # of the arguments behind so many of a state
        self.launches: dict[tuple[int, bool] | StateGather, RecordedLaunch] = {}
        self.cells: list[tuple[int, torch.Tensor]] = []
        self.back: list[tuple[int, torch.Tensor]] = []  # copied arguments that are written to
        self.templates: dict[int, torch.Tensor] = {}
        self.parts: list[ProgramPart] = []
        self.env: Env = {}
        self.whole = None
        self.simple = False  # a replay is its launch and nothing else
        self.results: Handout | None = None  # None: they depend on more than arguments and slots
        self.exposed = False  # results were handed out one by one, so each of its slots may be held
        self.overwrites: list[Slot] = []  # slots of another graph's results that its own results are laid over
        self.watched: list[tuple[int, int]] = []  # the slots that tell whether its results are held, and our references
        self.grown = 0  # bytes by which the arena grew for it

    @property
    def whole(self) -> Callable[[], None] | None:
        """The replay of the one CUDA graph this is, if it is one. `launching`: how to call it."""
        return self._whole

    @whole.setter
    def whole(self, replay: Callable[[], None] | None) -> None:
        self._whole, self.launching = replay, without_allocation(replay)

    # -- a call ---------------------------------------------------------------------------------------------------------
    @cached_property
    def watch(self) -> AddressWatch:
        return AddressWatch(len(self.addresses), self.addresses, self.pinned)

    @cached_property
    def fits(self) -> Callable[[list[Any]], Any]:
        """Called with arguments: whether those it copies are as, and the others where those were that it was made for."""
        return self.all_fit if self.expected else self.watch.same

    def all_fit(self, args: list[Any]) -> bool:
        return self.watch.same(args) and self.as_expected(args)

    def as_expected(self, args: Sequence[Any], start: int = 0) -> bool:
        """Whether what is copied fits into its buffers. The arguments are those from number `start` on."""
        for i, shape, dtype, device in self.expected:
            arg = args[i - start]
            if getattr(arg, "shape", None) != shape or arg.dtype is not dtype or arg.device != device:
                return False
        return True

    def laid_out(self, args: list[Any]) -> bool:
        """Whether arguments that fit have the right sizes, strides and types, too. Dynamo's guards see to that; nobody does
        for a model that was compiled ahead of time."""
        return not self.layouts or self.layout_watch.same(args)

    @cached_property
    def layout_watch(self) -> LayoutWatch:
        return LayoutWatch(self.layouts)

    def fits_behind(self, state: TensorWatch, args: list[Any]) -> bool:
        """As `fits` and `laid_out`, for the arguments behind a model's state, which has not moved."""
        if self.state is not state.addresses and not self.reads(state.addresses):
            return False
        watch, layouts = self.rest(len(state.addresses))
        if not watch.same(args) or not layouts.same(args):
            return False
        return not self.expected or self.as_expected(args, len(state.addresses))

    def unmoved(self, state: TensorWatch | None, args: list[Any]) -> Any:
        """Asked directly before a launch, of arguments that fit: finalizers may have moved them. It allocates nothing."""
        if state is None:
            return self.watch.same(args)
        return state.unmoved() and self.rests[len(state.addresses)][0].same(args)

    def reads(self, state: list[int]) -> bool:
        """Whether these are the addresses of the first arguments it was made for, all of them parameters."""
        count, others = len(state), (*self.copied, *(i for i, *_ in self.layouts))
        if any(i < count for i in others) or any(state[i] != self.addresses[i] for i in self.pinned if i < count):
            return False
        self.state = state
        return True

    def launch_reading(self, gather: StateGather, args: Sequence[Any]) -> RecordedLaunch | None:
        """As `launch`, for calls whose state is read from modules by `gather`; `args`: those that it was replayed with."""
        only = self.results.only if self.results is not None and self.simple and not self.overwrites else None
        if only is None or self.owner is None or gather in self.launches:
            return None if only is None else self.launches.get(gather)
        state = [(args[i], self.addresses[i]) for i in gather.state]
        if not set(self.pinned).issuperset(gather.state) or not all(is_plain(tensor) for tensor, _ in state):
            return None  # some of it is copied, or has to be asked for its address
        which = [i for i in self.pinned if i not in gather.state]
        watch = AddressWatch(len(self.addresses), self.addresses, which)
        self.launches[gather] = RecordedLaunch(self, watch, None, only, gather, unmoved_table(state))
        return self.launches[gather]

    def forget_launches(self, kept: Collection[StateGather]) -> None:
        """Of state that is read elsewhere by now."""
        for key in [key for key in self.launches if isinstance(key, StateGather) and key not in kept]:
            del self.launches[key]

    def rest(self, count: int) -> tuple[AddressWatch, LayoutWatch]:
        """Watches of the arguments behind the first `count` ones, which are parameters."""
        if count not in self.rests:
            which = [i - count for i in self.pinned if i >= count]
            watch = AddressWatch(len(self.addresses) - count, self.addresses[count:], which)
            self.rests[count] = watch, LayoutWatch([(i - count, *layout) for i, *layout in self.layouts])  # type: ignore[misc]
        return self.rests[count]

    def launch(self, count: int, guarded: bool) -> RecordedLaunch | None:
        """How native code replays it with the arguments behind the first `count` ones; None where there is more to do than
        to launch it. `guarded`: their sizes, strides and types have been checked."""
        only = self.results.only if self.results is not None and self.simple and not self.overwrites else None
        if only is None or self.owner is None:
            return None
        if (count, guarded) not in self.launches:
            watch, layouts = self.rest(count)
            checked = None if guarded or not self.layouts else layouts
            self.launches[count, guarded] = RecordedLaunch(self, watch, checked, only)
        return self.launches[count, guarded]

    def free(self) -> bool:
        """Whether its results may be written again."""
        owner = self.owner
        if owner is None or not self.leased:
            return True
        if self.version != owner.version:
            self.watched = [(slot.handle, slot.own) for slot in self.telling()]
            self.free_table = free_table(self.watched)
            self.words[RecordingWords.FREE] = ctypes.addressof(self.free_table)
            self.version = owner.version
        for handle, own in self.watched:
            if references(handle) != own:
                return self.given_up()
        if self.overwrites and not self.may_overwrite():
            return False
        if self.exposed:
            self.exposed, self.version = False, -1
        return True

    def may_overwrite(self) -> bool:
        """Nobody will read what was saved after this call (sharing.py)."""
        return not retains_graph() and not any(references(s.handle) != s.own for s in self.overwrites)

    def outlived(self) -> bool:
        """Gradients that are laid over its results are held."""
        return any(guest.held() for slot in self.slots.values() for guest in slot.guests)

    def telling(self) -> list[Slot]:
        """The slots to look at: all of them, with their tickets, if another recording or caller knows them one by one."""
        every = list(self.slots.values())
        if self.results is None or self.exposed or any(s.templates > 1 for s in every):
            return [*dict.fromkeys([*every, *(t for s in every for t in (*s.tickets, *s.guests))])]
        return [*self.results.visible, *dict.fromkeys(guest for s in every for guest in s.guests)]

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
        self.count()
        if self.program.config.output_policy == "error":
            self.step = step_now()

    def count(self) -> None:
        self.hits += 1
        self.used = tick()

    def settle(self) -> None:
        """After a call. On a CPU nothing inside has a fixed address, so nothing needs to be kept."""
        if self.whole is None and self.program.arena.device.type == "cpu":
            self.env = dict(self.program.executable.constants)

    def write_back(self, args: Sequence[Any]) -> None:
        torch._foreach_copy_([args[i] for i, _ in self.back], [buffer for _, buffer in self.back])

    def outputs(self, symbols: Symbols) -> list[Any]:
        """The computed outputs, ready to be handed out."""
        program = self.program
        prepared = self.results if self.results is not None and not hooks() else None
        if not self.exposed and prepared is None:
            self.exposed, self.version = True, -1
        given: list[Any] = []
        for index, key in enumerate(program.executable.outputs):
            template = self.templates.get(index)
            if template is None:
                given.append(self.env[key])
            elif prepared is not None and index in prepared.hidden:
                given.append(template)
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
        self.version = -1  # before what native code reads is gone
        for launch in self.launches.values():
            launch.drop()
        self.launches.clear()
        templates, self.templates = self.templates, {}
        for index in templates:
            self.slots[index].forget()
        templates.clear()
        self.results = None
        self.slots, self.overwrites, self.watched = {}, [], []
        vars(self).pop("fits", None)  # which may hold it
        self.parts, self.env, self.buffers, self.back, self.whole = [], {}, [], [], None

    __del__ = drop


def hooks() -> bool:
    """The user has hooks for what autograd saves, which may hold some of it and drop the rest."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# -- steps --------------------------------------------------------------------------------------------------------------
_marks = itertools.count(1)
_mark = 0


def mark_step_begin() -> None:
    """Mark the beginning of a step: results of earlier steps are no longer needed.

    `torch.compiler.cudagraph_mark_step_begin` has the same effect. Only output_policy="error" depends on it: the other
    policies never overwrite results that are alive."""
    global _mark
    _mark = next(_marks)


def step_now() -> int:
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return _mark - (trees.MarkStepBox.mark_step_counter if trees else 0)
