"""Dynamo's guards on a model, which are looked at again only where something changed.

Before every call Dynamo asks whether all that it saw while tracing is as it was: for a BERT with four layers 1,450
questions about the model (its modules, their flags, 77 parameters, the configuration) and the functions it is made of, and
two about the arguments. They take 110 µs with warm caches and 275 µs between calls of the model; watched, 45.

    L['self'].training is True                             native: the 890 words and dictionaries
    L['self']._modules['0']._parameters['weight'] …          that were read are as they were
    L['x'] is a float32[32, 128]                           →  L['x'] is a float32[32, 128]

While Dynamo waits for the backend, the guards on modules and on global variables are taken from it. It gets one in return
for each of their roots: native code that compares what those guards read (guard_reads.py) with what was there when they
last held. Only where something is different are the guards themselves asked, which Dynamo has built as ever; if they hold,
what they read now is noted. So they hold and fail as before, and a failure has its reason in PyTorch's log. Guards whose
reads are not known stay where they are, as do all guards on arguments and on the state of PyTorch.

Buffers are also compared with all other tensors that a function is given: no two may be one. Those of one module are
watched, too, and arguments are compared with them by native code, after the module was.

It leans on the inside of Dynamo (torch_internals.py). `AIRGRAPH_GUARDS=off` leaves all guards to it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import install_no_tensor_aliasing_guard
from torch._dynamo.source import LocalSource
from torch._guards import Guard
from torch.utils._ordered_set import OrderedSet

from airgraph.capture.dead_compilations import release_guards
from airgraph.capture.guard_reads import GuardReader, GuardRecord, UnreadGuard
from airgraph.config import KNOBS
from airgraph.engine.native.object_watch import ObjectWatch, ObjectWatcher, OutsideWatch, is_available

GLOBALS, TENSOR = "G", "TENSOR_MATCH"
FEWEST = 8  # guards: fewer are checked as fast by Dynamo
MODELS = 256  # that share a function's code, of which is known what was read
LONGEST = 255  # checks in a row by Dynamo's guards before what they read is noted again


class WatchedModel(NamedTuple):
    """A root, and what was read of it (None: it is not known). `compared`: the addresses of its buffers."""

    watch: ObjectWatch | None
    compared: Collection[int]
    alive: Callable[[], Any]


class ModelGuards:
    """The guards on one root of a compiled function: an argument that is a module, or its global variables."""

    def __init__(self, name: str, source: Any, guards: Sequence[Guard], buffers: Sequence[Any] | None = None) -> None:
        """`buffers`: the sources of those that are compared with arguments; None: guards on these stay with Dynamo."""
        self.name, self.source, self.buffers = name, source, buffers or ()
        self.shares = buffers is not None
        self.records = [record(guard) for guard in guards]
        self.tensors = [each for each in self.records if each.kind == TENSOR and each.source in self.buffers]
        self.pending: Sequence[Guard] = guards  # until Dynamo builds them
        self.reasons = [f"airgraph: {len(guards)} guards on {name}"]  # what Dynamo's log says of a failure
        self.watcher, self.others = ObjectWatcher(None if name == GLOBALS else name), ObjectWatcher()
        self.known: dict[int, WatchedModel] = {}  # by the address of the root
        self.outside = OutsideWatch()
        self.holds: Callable[[Any], bool] = bool
        self.explain: Callable[[Any], Any] = bool
        self.manager: Callable[[], Any] = bool  # Dynamo's guards of the function
        self.wait = self.skipped = self.hits = 0
        self.asked = self.noted = 0  # how often Dynamo's guards were asked, and what they read was noted

    def install(self, builder: Any, guard: Guard) -> None:
        """Dynamo calls this where it builds its guards, once."""
        if not self.pending:
            raise AssertionError(f"the guards on {self.name} are built twice")
        manager = builder.check_fn_manager
        own, tree = manager.build_guards(
            sorted(self.pending, key=Guard.sort_key), OrderedSet(), builder.f_code, manager.output_graph, False
        )
        if own.object_aliasing_guard_codes:
            codes, verbose = map(list, zip(*own.object_aliasing_guard_codes))
            own.add_python_lambda_leaf_guard_to_root(codes, verbose)
        if len(own.no_tensor_aliasing_names) > 1:
            names = own.no_tensor_aliasing_names
            text = f"check_no_aliasing({', '.join(names)})"
            install_no_tensor_aliasing_guard(own.no_tensor_aliasing_guard_managers, names, [text], None)
        builder.code.extend(own.code)  # for PyTorch's log
        builder.argnames.extend(name for name in own.argnames if name not in builder.argnames)
        builder.id_matched_objs.update(own.id_matched_objs)
        self.pending, self.manager = (), weakref.ref(builder.guard_manager)
        WATCHING.add(self)
        self.holds, self.explain = tree.root.check, tree.root.check_verbose
        check = self.watcher.builtin(self.look)
        if self.name == GLOBALS:
            builder.get_global_guard_manager().add_lambda_guard(check, self.reasons, None)
        else:  # at the root, where guards come before all that are on arguments
            builder.guard_manager.root.add_lambda_guard(check, self.reasons, None)
        if self.buffers:
            builder.no_tensor_aliasing_guard_managers = ComparedTensors(
                self.outside.builtin(), builder.no_tensor_aliasing_guard_managers
            )

    def look(self, root: Any) -> bool:
        """Called by native code where what was noted last does not hold, or was of another root."""
        CHECKED.manager = self.manager()
        known = self.known.get(id(root))
        if known is not None and known.watch is not None and known.watch is not self.watcher.chosen:
            self.others.choose(known.watch)
            if self.others.builtin()(root):
                self.choose(known.watch, known.compared)
                return True
        scope = {} if self.name == GLOBALS else {self.name: root}
        self.asked += 1
        if not self.holds(scope):
            if sys._getframe(1).f_globals.get("__name__") == "torch._dynamo.guards":  # which wants to know why
                self.reasons[:] = self.explain(scope).verbose_code_parts or self.reasons
            return False
        if known is None:
            due = self.has_room()
        else:
            due = self.skipped >= self.wait
            self.skipped += 1
        if due and self.note(root):
            return True
        try:
            self.choose(None, self.read(root, self.tensors).compared)
        except UnreadGuard:  # what arguments are to be compared with is not known
            return False
        return True

    def read(self, root: Any, records: Iterable[GuardRecord]) -> GuardReader:
        reader = GuardReader(self.name, root, self.shares)
        for each in records:
            reader.read(each)
        return reader

    def choose(self, watch: ObjectWatch | None, compared: Collection[int]) -> None:
        self.watcher.choose(watch)
        self.outside.choose(compared)

    def has_room(self) -> bool:
        """For another root."""
        if len(self.known) >= MODELS:
            for key in [key for key, known in [*self.known.items()] if known.alive() is None]:
                del self.known[key]
        return len(self.known) < MODELS

    def note(self, root: Any) -> bool:
        """What the guards read now. State that changes all the time is noted more and more rarely: that takes
        milliseconds. False: it is not known."""
        hits = self.watcher.hits
        again = self.known.pop(id(root), None) is not None
        if again:
            self.wait = 0 if hits - self.hits > 8 * self.wait else min(2 * self.wait + 1, LONGEST)
            self.skipped, self.hits = 0, hits
        self.noted += 1
        watch, compared = None, list[int]()
        with suppress(UnreadGuard):  # this model has something that the first one had not
            reader = self.read(root, self.records)
            watch, compared = reader.reads.watch(root), [*reader.compared]
        alive = weakref.ref(root) if isinstance(root, torch.nn.Module) else lambda: root
        self.known[id(root)] = WatchedModel(watch, compared, alive)
        if watch is not None:
            self.choose(watch, compared)
        return watch is not None

    def is_unused(self) -> bool:
        """Whether no function has these guards, or none yet."""
        manager = self.manager()
        return manager is not None and getattr(manager, "cache_entry", None) is None


class ComparedTensors(list[Any]):
    """Dynamo's guards on the tensors that it compares with each other: each gets one more, that it is none of a model's
    buffers."""

    def __init__(self, outside: Callable[[Any], bool], managers: Iterable[Any]) -> None:
        super().__init__()
        self.outside = outside
        for manager in managers:
            self.append(manager)

    def append(self, manager: Any) -> None:
        manager.add_lambda_guard(self.outside, ["airgraph: no argument is a buffer of the model"], None)
        super().append(manager)


WATCHING: weakref.WeakSet[ModelGuards] = weakref.WeakSet()
# By thread, Dynamo's guards that it checked last: they must not be freed under Dynamo, which goes on with them when Python
# has been asked, although another thread may have let go of the function meanwhile.
CHECKED = threading.local()


def record(guard: Guard) -> GuardRecord:
    create = guard.create_fn
    given = {}
    if isinstance(create, functools.partial):
        if create.args:
            raise UnreadGuard("a guard with arguments")
        given = {key: value for key, value in create.keywords.items() if key != "value"}
    return GuardRecord(guard.create_fn_name(), guard.originating_source, given)


def watch_model(output: Any) -> list[ModelGuards]:
    """Takes guards from Dynamo, which waits for the backend; `output`: its graph in the making."""
    if KNOBS["AIRGRAPH_GUARDS"].get() == "off" or not is_available() or filters_guards():
        return []
    if any(each.is_unused() for each in WATCHING):
        release_guards()
    guards = output.tracing_context.guards_context.dynamo_guards
    taken: dict[str, list[Guard]] = {}
    readers: dict[str, tuple[Any, GuardReader]] = {}
    sharing = None  # the one root whose buffers are watched
    for guard in guards:
        root = root_of(guard.originating_source, output)
        if root is None:
            continue
        name, source, value = root
        sharing = sharing or (name if name != GLOBALS else None)
        _, reader = readers.setdefault(name, (source, GuardReader(name, value, name == sharing)))
        try:
            reader.read(record(guard))
        except UnreadGuard:
            continue
        taken.setdefault(name, []).append(guard)
    found = []
    for name, own in taken.items():
        own = without_last_tensor(own, guards)
        if len(own) >= FEWEST:
            source, reader = readers[name]
            tensors = {guard.originating_source for guard in own if is_tensor_match(guard)}
            buffers = [each for each in reader.compared.values() if each in tensors] if name == sharing else None
            found.append(ModelGuards(name, source, own, buffers))
            gone = set(map(id, own))
            guards.inner = OrderedSet(guard for guard in guards.inner if id(guard) not in gone)
    for each in found:
        guards.inner.add(Guard(each.source, each.install))
    return found


def without_last_tensor(own: list[Guard], guards: Iterable[Guard]) -> list[Guard]:
    """One tensor stays with Dynamo where no argument is one: its guards also see which dispatch keys a thread excludes."""
    taken = set(map(id, own))
    if any(is_tensor_match(guard) and id(guard) not in taken for guard in guards):
        return own
    last = next((guard for guard in own if is_tensor_match(guard)), None)
    return [guard for guard in own if guard is not last]


def is_tensor_match(guard: Guard) -> bool:
    return guard.create_fn_name() == TENSOR


def root_of(source: Any, output: Any) -> tuple[str, Any, Any] | None:
    """The name, the source and the value of what a guard begins with: an argument that is a module, or the globals."""
    while hasattr(source, "base"):
        source = source.base
    if type(source).__name__ == "GlobalSource":
        return GLOBALS, source, output.global_scope
    if type(source) is not LocalSource:
        return None
    value = output.local_scope.get(source.local_name)
    return (source.local_name, source, value) if isinstance(value, torch.nn.Module) else None


def filters_guards() -> bool:
    """Whether the user chooses which guards count: then all of them are shown, as Dynamo made them."""
    if torch._dynamo.config.caching_precompile:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        hooks = frame.f_locals.get("hooks") if frame.f_code.co_name == "_compile" else None
        if hooks is not None and hasattr(hooks, "guard_filter_fn"):
            return hooks.guard_filter_fn is not None
        frame = frame.f_back
    return True
