"""One program's place in the compilation cache: looking for it, compiling it only once at a time, and keeping it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.config import KNOBS, Config
from airgraph.convert import Registry
from airgraph.disk_cache import Cache, Key, open_cache
from airgraph.engine import ENGINES, candidates
from airgraph.engine.native.image import ProgramImage
from airgraph.errors import AirgraphError
from airgraph.ir.boundary import SymbolSource
from airgraph.runtime.programs import ProgramMaker
from airgraph.store.program_key import NotKept, graph_text, program_key
from airgraph.store.programs import KIND, KeptPrograms, Remembered

# Options whose result is more than a program, or that have each program compiled: nothing is kept with them.
REASONS: Mapping[str, str] = {
    "dump": "dump writes the graph at every stage",
    "node_dump": "node_dump has the reference engine write tensors",
    "summary": "summary lists what each op becomes",
    "fusion_result": "fusion_result lists what the passes do",
    "trace": "trace writes every stage",
    "verify": "verify checks the graph after every pass",
    "enable_shape_handling": "gears are chosen by an analysis of the graph",
    "autotune": "autotune times its products",
    "frozen_parameter": "frozen_parameter makes copies of its weights",
}
MATTER = (
    "mode",
    "engine",
    "strict",
    "fold_views",
    "passes_off",
    "pattern_fusion_pass",
    "node_order",
)  # what a kept program depends on


def not_kept(config: Config, device: torch.device) -> str | None:
    """Why programs with these options are compiled by every process; None if they are kept."""
    if KNOBS["AIRGRAPH_CACHE"].get() == "off":
        return "AIRGRAPH_CACHE is off"
    if config.buckets:
        return "buckets are chosen by an analysis of the graph"
    return not_stored(config, device)


def not_stored(config: Config, device: torch.device) -> str | None:
    """Why a program with these options cannot come from a file; None if it can."""
    found = next((reason for name, reason in REASONS.items() if getattr(config, name)), None)
    if found is not None:
        return found
    for knob in ("AIRGRAPH_VERIFY", "TORCH_COMPILE_DEBUG"):
        if KNOBS[knob].on():
            return f"{knob} is on"
    engine = next(candidates(config.engine, device, config.mode))
    return None if engine.name == "native" else f"the {engine.name} engine runs it, and only native programs are kept"


def facts_of(config: Config) -> dict[str, str]:
    """The options that matter, and the environment variables that do, as fields of a key."""
    fields = {f.name for f in dataclasses.fields(config)}
    assert fields.issuperset((*MATTER, *REASONS))
    options = {name: repr(getattr(config, name)) for name in MATTER}
    knobs = {name: KNOBS[name].get() for name in ("AIRGRAPH_CHIP", "AIRGRAPH_PACK", "AIRGRAPH_PACK_MB")}
    return {**options, "engines": " ".join(ENGINES), **knobs}


def entry_of(
    gm: torch.fx.GraphModule, registry: Registry, maker: ProgramMaker, device: torch.device, again: Callable[[], Any]
) -> ProgramEntry | str:
    """Where the program of this graph is in the cache, or why it cannot be there."""
    refusal = not_kept(maker.config, device)
    if refusal is not None:
        return refusal
    cache = open_cache()
    if cache.secret is None:
        return "the cache folder cannot be used"
    try:
        text = graph_text(gm, registry)
    except NotKept as reason:
        return str(reason)
    key = program_key(text, {**facts_of(maker.config), "phase": maker.journal.phase, "device": str(device)})
    return ProgramEntry(cache, key, text, maker, again)


@dataclass(frozen=True)
class ProgramEntry:
    """`text`: the graph, as the key has it. `maker` makes the program; its boundary is the entry's. `again` compiles it."""

    cache: Cache
    key: Key
    text: str
    maker: ProgramMaker
    again: Callable[[], Any]

    def find(self) -> tuple[Any, bool] | None:
        """The program, and whether its graph is static; None if it is not there."""
        from airgraph.engine.native import problem
        from airgraph.engine.native.stored import MissingCode, StoredExecutable

        if problem() is not None:
            return None
        kept = KeptPrograms(self.cache).find(self.key)
        if kept is None:
            return None
        name, journal = self.maker.name, self.maker.journal
        try:
            executable = StoredExecutable(name, kept.image, kept.boundary, self.again)
        except MissingCode:
            self.cache.note(f"the object code of the program {self.key.digest[:12]} is gone: it is compiled again")
            return None
        kept.tell(journal)
        journal.counters["program hits"] += 1
        return dataclasses.replace(self.maker, boundary=kept.boundary).direct(executable), kept.static

    @contextmanager
    def exclusive(self) -> Iterator[tuple[Any, bool] | None]:
        """While the program is compiled here, other processes that want it wait; gives what another one kept meanwhile."""
        if self.cache.mode != "on":
            self.missed()
            yield None
            return
        with self.cache.lock(KIND, self.key):
            found = None
            if self.cache.path(KIND, self.key).exists():
                with self.maker.journal.stage("cache") as stage, self.cache.watched(stage.notes):
                    found = self.find()
            if found is None:
                self.missed()
            yield found

    def missed(self) -> None:
        for watch in _watchers:
            watch(self)
        self.cache.counts[f"{KIND} misses"] += 1
        self.maker.journal.counters["program misses"] += 1

    def keep(self, program: Any, static: bool, inputs: Sequence[Any], before: Remembered) -> list[str]:
        """Keeps what was compiled; the notes say why not, if not."""
        from airgraph.engine.native.engine import NativeExecutable

        executable, journal = program.executable, program.journal
        if self.cache.mode != "on":
            return ["program not kept: AIRGRAPH_CACHE=read adds nothing"]
        if not isinstance(executable, NativeExecutable):
            reason: Any = "another engine runs it"
        else:
            reason = executable.as_image(hints(executable.sources, inputs))
        if not isinstance(reason, str) and not keep_objects(self.cache, reason):
            reason = "its object code is not in the cache"
        if not isinstance(reason, str):
            more = {"static": static, "said": before.since(journal), "text": self.text}
            try:
                if KeptPrograms(self.cache).keep(self.key, reason, program.boundary, more):
                    return [f"program kept ({self.key.digest[:12]})"]
                reason = "it cannot be written to the disk"
            except AirgraphError as error:
                reason = f"its boundary cannot be written down: {error}"
        journal.counters["programs not kept"] += 1
        return [f"program not kept: {reason}"]


def keep_objects(cache: Cache, image: ProgramImage) -> bool:
    """Whether the object code is there; what this process had compiled for another folder is added."""
    from airgraph.engine.native.llvm.jit import OBJECTS

    for digest in image.digests():
        key, code = Key.known(digest), OBJECTS.get(bytes.fromhex(digest))
        stored = cache.path("object", key).exists()
        if not stored and (code is None or not cache.put("object", key, code)):
            return False
    return True


# -- a tool's look at what is not there ---------------------------------------------------------------------------------
_watchers: list[Callable[[ProgramEntry], Any]] = []


@contextmanager
def watching_misses(watch: Callable[[ProgramEntry], Any]) -> Iterator[None]:
    """Meanwhile `watch` is shown every program that is looked for and not found."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def hints(sources: Sequence[SymbolSource], inputs: Sequence[Any]) -> dict[Any, int]:
    """The symbols at the sizes of the example; without those that only running can tell."""
    found = {}
    for source in sources:
        given = inputs[source.argument]
        if source.kind != "number":
            given = (given.shape if source.kind == "size" else given.stride())[source.axis]
        size = given if isinstance(given, int) else getattr(given, "node", given).hint
        if isinstance(size, int):
            found[source.symbol] = size // source.factor
    return found
