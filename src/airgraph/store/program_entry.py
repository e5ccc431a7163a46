"""One program's place in the compilation cache: looking for it, compiling it only once at a time, and keeping it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from airgraph.config import KNOBS, Config
from airgraph.disk_cache import Cache, Key, open_cache
from airgraph.engine import ENGINES, candidates
from airgraph.engine.native.image import ProgramImage
from airgraph.engine.native.write_watch import can_watch
from airgraph.engine.protocol import StoredPlans
from airgraph.errors import AirgraphError
from airgraph.ir.boundary import Boundary, SymbolSource
from airgraph.runtime.programs import ProgramMaker
from airgraph.store.programs import KIND, KeptProgram, KeptPrograms, Remembered

if TYPE_CHECKING:
    from airgraph.convert import Registry
    from airgraph.store.planned_program import PlannedProgram
    from airgraph.store.taped_program import TapedProgram

# Options whose result is more than a program, or that have each program compiled: nothing is kept with them.
REASONS: Mapping[str, str] = {
    "dump": "dump writes the graph at every stage",
    "node_dump": "node_dump has the reference engine write tensors",
    "summary": "summary lists what each op becomes",
    "fusion_result": "fusion_result lists what the passes do",
    "trace": "trace writes every stage",
    "verify": "verify checks the graph after every pass",
    "enable_shape_handling": "gears are chosen by an analysis of the graph",
    "autotune": "autotune times its kernels",
    "frozen_parameter": "frozen_parameter makes copies of its weights",
}
BROKEN = (ValueError, KeyError, TypeError, AttributeError, LookupError, RuntimeError, AirgraphError)
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
    if engine.name == "native" or isinstance(engine, StoredPlans):
        return None
    return f"the {engine.name} engine runs it, whose programs are not kept"


def device_facts(device: torch.device) -> dict[str, str]:
    """What a program for a GPU depends on; nothing for the CPU, which is in every key."""
    if device.type != "cuda":
        return {}
    from airgraph.engine.cuda.cubins import triton_version

    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {"gpu": torch.cuda.get_device_name(device), "capability": capability, "triton": triton_version()}


def facts_of(config: Config, device: torch.device) -> dict[str, str]:
    """The options that matter, and the environment variables that do, as fields of a key."""
    fields = {f.name for f in dataclasses.fields(config)}
    assert fields.issuperset((*MATTER, *REASONS))
    options = {name: repr(getattr(config, name)) for name in MATTER}
    knobs = {
        name: KNOBS[name].get() for name in ("AIRGRAPH_CHIP", "AIRGRAPH_PACK", "AIRGRAPH_PACK_MB", "AIRGRAPH_WINOGRAD")
    }
    # Without watching, a CPU plans as with "frozen"; nothing is packed for a GPU, and finding out takes milliseconds.
    if knobs["AIRGRAPH_PACK"] == "watched" and device.type != "cuda" and not can_watch():
        knobs["AIRGRAPH_PACK"] = "frozen"
    return {**options, "engines": " ".join(ENGINES), **knobs}


def expect_programs(device: torch.device) -> None:
    """Programs of this device will be looked for: what reading them takes is imported with the other modules."""
    if device.type == "cuda":
        import airgraph.runtime.replay
        import airgraph.store.planned_program  # noqa: F401


def entry_of(
    gm: torch.fx.GraphModule, registry: Registry, maker: ProgramMaker, device: torch.device, again: Callable[[], Any]
) -> ProgramEntry | str:
    """Where the program of this graph is in the cache, or why it cannot be there."""
    from airgraph.store.program_key import NotKept, graph_text, program_key  # a start by name needs no graph

    refusal = not_kept(maker.config, device)
    if refusal is not None:
        return refusal
    cache = open_cache()
    if cache.secret is None:
        return cache.refused or "the cache folder has no key"
    try:
        text = graph_text(gm, registry)
    except NotKept as reason:
        return str(reason)
    facts = {
        **facts_of(maker.config, device),
        "phase": maker.journal.phase,
        "device": str(device),
        **device_facts(device),
    }
    return ProgramEntry(cache, program_key(text, facts), text, maker, again, device)


@dataclass(frozen=True)
class ProgramEntry:
    """`text`: the graph, as the key has it. `maker` makes the program; its boundary is the entry's. `again` compiles it."""

    cache: Cache
    key: Key
    text: str
    maker: ProgramMaker
    again: Callable[[], Any]
    device: torch.device = torch.device("cpu")

    def notes(self) -> list[str]:
        """What is in the key by its content."""
        count = len(re.findall(r" = constant (?!\{)", self.text))
        return [f"constants of the graph that are in the key by their content: {count}"] if count else []

    def find(self) -> tuple[Any, bool] | None:
        """The program, and whether its graph is static; None if it is not there."""
        kept = KeptPrograms(self.cache).find(self.key)
        program = None if kept is None else self.program(kept)
        if kept is None or program is None:
            return None
        kept.tell(self.maker.journal)
        self.maker.journal.counters["program hits"] += 1
        return program, kept.static

    def program(self, kept: KeptProgram) -> Any:
        maker = dataclasses.replace(self.maker, boundary=kept.boundary)
        if not isinstance(kept.image, ProgramImage):
            try:
                return kept.image.program(self.device, maker)
            except BROKEN as error:
                self.cache.note(f"the program {self.key.digest[:12]} cannot be used, and is compiled again: {error!r}")
                return None
        from airgraph.engine.native import problem
        from airgraph.engine.native.stored import MissingCode, StoredExecutable

        if problem() is not None:
            return None
        try:
            return maker.direct(StoredExecutable(maker.name, kept.image, kept.boundary, self.again))
        except MissingCode:
            self.cache.note(f"the object code of the program {self.key.digest[:12]} is gone: it is compiled again")
            return None

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
        if isinstance(executable, NativeExecutable):
            reason: Any = executable.as_image(hints(executable.sources, inputs))
        else:
            reason = planned_by(self.maker.config, self.device, executable, program.boundary)
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


def planned_by(config: Config, device: torch.device, executable: Any, boundary: Boundary) -> Any:
    """The program of an engine other than the native one, or why it is not kept."""
    from airgraph.store.planned_program import planned_program

    return planned_program(executable, next(candidates(config.engine, device, config.mode)).name, boundary)


def keep_objects(cache: Cache, image: ProgramImage | PlannedProgram | TapedProgram) -> bool:
    """Whether the object code is there; what this process had compiled for another folder is added. Kernels of other
    engines are not needed: where one is gone, it is compiled again."""
    from airgraph.engine.native.llvm.jit import OBJECTS

    if not isinstance(image, ProgramImage):
        return True
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
            found[source.symbol] = source.value(size)
    return found
