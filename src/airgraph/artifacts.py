"""Models that carry everything they need to run: `save` and `load` of `.airp` files (store/artifact.py).

fast = airgraph.compile(model, x)
airgraph.save(fast, "model.airp")
model = airgraph.load("model.airp")           here, or on another machine
y = model(x)

airgraph.save({"prefill": prefill, "decode": decode}, "llm.airp")     several entry points, which share their weights
llm = airgraph.load("llm.airp")
llm.prefill(tokens), llm.decode(token)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from airgraph.capture.model_call import ModelCall, as_model
from airgraph.engine.strides import with_strides
from airgraph.errors import ConfigError, ExportError
from airgraph.ir.boundary import symbol_sources
from airgraph.journal import get_logger
from airgraph.runtime.device import computing_device
from airgraph.runtime.loaded import LoadedModel
from airgraph.store.artifact import Artifact, EntryPoint, ProgramRecord, object_member, share_back, write_artifact
from airgraph.torch_types import weights_text

if TYPE_CHECKING:
    from airgraph.capture.compiled import CompiledModel
    from airgraph.capture.export import Exported
    from airgraph.config import Config
    from airgraph.store.convention import StoredModel

ONLY = "forward"  # the entry point of a file that has one


class LoadedArtifact(Mapping[str, LoadedModel]):
    """The entry points of an `.airp` file: `model(x)` calls the only one, `model.decode(x)` or `model["decode"](x)` one of
    several. `weights`: parameters and buffers, which the entry points share."""

    def __init__(self, artifact: Artifact, entries: dict[str, LoadedModel], trusted: bool) -> None:
        self.artifact, self.trusted = artifact, trusted
        self.entries = entries

    def __repr__(self) -> str:
        entries = ", ".join(f"{name}{model.signature()}" for name, model in self.entries.items())
        return f"LoadedArtifact({self.artifact.path}: {entries}; {weights_text(self.weights.values())})"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor for model in self.entries.values() for name, tensor in model.weights.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.entries) != 1:
            raise ConfigError(
                f"{self.artifact.path} has several entry points", where={"entry points": ", ".join(self.entries)}
            )
        return next(iter(self.entries.values()))(*args, **kwargs)

    def prepare(self) -> int:
        """Runs every entry point at each set of sizes that its calls are padded to, so that the first calls find memory
        laid out (CPU) or graphs captured (CUDA); gives how many sets there were. Buffers are as before."""
        records = [(self.entries[name], record) for name, record in self.artifact.entries.items()]
        planned = [(model, sizes) for model, record in records for sizes in record.prepared]
        for model, sizes in planned:
            model.prepare(sizes)
        return len(planned)

    def __getitem__(self, name: str) -> LoadedModel:
        return self.entries[name]

    def __getattr__(self, name: str) -> LoadedModel:
        if name.startswith("_") or name not in self.entries:
            raise AttributeError(f"{self.artifact.path} has the entry points {', '.join(self.entries)}, not {name!r}")
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


# -- saving -----------------------------------------------------------------------------------------------------------
def save(
    model: Any,
    path: str | Path,
    example_args: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Writes a model with everything it needs to run as one file: weights, graph, plan, and object code for this CPU.

        airgraph.save(airgraph.compile(model, x), "model.airp")
        airgraph.save(model, "model.airp", x)                                    the same
        airgraph.save({"prefill": prefill, "decode": decode}, "model.airp")      compiled models, several entry points
        airgraph.save(airgraph.load("model.airp", trust=True), "model.airp")     adds object code for this CPU

    A model that is not compiled is compiled for `example_args` as by `airgraph.compile`, with the same options.
    """
    from airgraph.api import make_config
    from airgraph.capture.export import export_model

    target = Path(path)
    model = as_model(model)
    if isinstance(model, LoadedArtifact):
        entries = {name: entry_again(model, name) for name in model}
    elif is_compiled(model) or isinstance(model, Mapping):
        if (
            example_args != ()
            or any(given is not None for given in (example_kwargs, dynamic_shapes, config))
            or options
        ):
            raise ConfigError("a compiled model has its examples and options", hint='airgraph.save(compiled, "m.airp")')
        named = dict(model) if isinstance(model, Mapping) else {ONLY: model}
        entries = {checked_name(name): entry_of(as_model(part)) for name, part in named.items()}
    elif isinstance(model, ModelCall):
        raise ConfigError("a model kept under a name has no graph here", hint="airgraph.save(model, path, example)")
    else:
        exported = export_model(model, example_args, example_kwargs, dynamic_shapes)
        entries = {ONLY: entry_point(exported, make_config(config, options))}
    if target.is_symlink():
        raise ExportError(f"{target} is a symbolic link, and saving does not write through one")
    write_artifact(target, entries, versions())
    return target


def versions() -> dict[str, str]:
    import airgraph

    return {"airgraph": airgraph.__version__, "torch": torch.__version__}


def is_compiled(model: Any) -> bool:
    from airgraph.capture.compiled import CompiledModel

    return isinstance(model, CompiledModel)


def checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise ConfigError(f"{name!r} is no name of an entry point", hint="a name as of a Python function")
    return name


def entry_of(model: CompiledModel) -> EntryPoint:
    if not is_compiled(model):
        raise ConfigError(
            f"an entry point is a compiled model, and this is a {type(model).__name__}",
            hint="airgraph.compile(model, example)",
        )
    return entry_point(model.exported, model.config)


def entry_point(exported: Exported, config: Config) -> EntryPoint:
    from airgraph.capture.export import example_sizes

    stored = captured_graph(exported, config)
    entry, sizes = graph_entry(stored), example_sizes(exported.inputs)
    entry.sizes, entry.buckets = named_sizes(sizes), bucket_option(config)
    add_program(entry, stored, sizes, config)
    return entry


def named_sizes(sizes: Mapping[Any, int]) -> dict[str, int]:
    return {str(symbol): size for symbol, size in sizes.items()}


def bucket_option(config: Config) -> dict[str, Any]:
    """The buckets that are set, as a file has them."""
    if not config.buckets:
        return {}
    from airgraph.runtime.buckets import Buckets
    from airgraph.store.padding_data import bucket_data

    return bucket_data(Buckets.make(config.buckets))


def graph_entry(stored: StoredModel) -> EntryPoint:
    """Without a program."""
    from airgraph.store.air_file import air_bytes
    from airgraph.store.method_file import method_message

    return EntryPoint(air_bytes(method_message(stored, stored.weights, Path(), {})), dict(stored.weights))


def captured_graph(exported: Exported, config: Config) -> StoredModel:
    from airgraph.api import exported_graph, refuse_modes
    from airgraph.store.export import refuse_weights

    refuse_modes(config)
    stored = exported_graph(exported, config)
    stored.contract.ranges = as_compiled(stored.contract.ranges)
    refuse_weights(stored.weights)
    return stored


def as_compiled(ranges: Mapping[Any, tuple[int | None, int | None]]) -> dict[Any, tuple[int | None, int | None]]:
    """PyTorch traces every symbol as at least 2; as in a compiled model, that refuses no smaller size."""
    return {symbol: (low if low and low > 2 else 0, high) for symbol, (low, high) in ranges.items()}


def add_program(entry: EntryPoint, stored: StoredModel, sizes: Mapping[Any, int], config: Config) -> None:
    """The program for this machine; the log says why there is none, if so. Compiling changes the graph of `stored`."""
    from airgraph.api import compiled_stored
    from airgraph.runtime.buckets import BucketedProgram
    from airgraph.store.callable_program import callable_program, made_for
    from airgraph.store.load_export import by_memory
    from airgraph.store.program_entry import not_stored

    laid = sorted(by_memory(stored))
    device = computing_device(torch.device(stored.device))
    reason: Any = not_stored(config, device)
    if reason is None:
        program, static = compiled_stored(stored, config)
        if isinstance(program, BucketedProgram):
            entry.prepared = [named_sizes(found) for found in program.all_sizes(sizes)]
        reason = callable_program(stored, program, static, sizes, laid, config)
        if not isinstance(reason, str):
            objects = reason.objects()
            if objects is not None:
                entry.plan = reason.image.plan
                entry.programs.append((made_for(config, device), reason.to_bytes(), objects))
                return
            reason = "its object code is gone"
    get_logger(config.log).warning("save: no object code in the file, its graph is compiled when loaded: %s", reason)


def entry_again(model: LoadedArtifact, name: str) -> EntryPoint:
    """An entry point of a file that was loaded, with a program for this machine as well. Programs of a file that is not
    trusted are left out: the new file has this user's signature."""
    from airgraph.api import make_config

    artifact, record = model.artifact, model.artifact.entry(name)
    tensors = {record.weights[weight]: tensor for weight, tensor in model[name].weights.items()}
    stored = artifact.stored(name, tensors)
    entry = EntryPoint(artifact.member(record.graph), dict(stored.weights), sizes=record.sizes, buckets=record.buckets)
    if model.trusted:
        entry.plan = artifact.member(record.plan).decode(errors="replace")
        for program in record.programs:
            objects = {digest: artifact.member(object_member(digest)) for digest in program.objects}
            entry.programs.append((program.made, artifact.member(program.member), objects))
    config = make_config(None, {"buckets": record.buckets or None})
    new = EntryPoint(entry.graph, entry.weights)
    symbols = {source.symbol for source in symbol_sources(stored.boundary.arguments)}
    add_program(new, stored, {s: record.sizes[str(s)] for s in symbols if str(s) in record.sizes}, config)
    known = [made for made, _, _ in entry.programs]
    entry.programs += [program for program in new.programs if program[0] not in known]
    entry.plan, entry.prepared = entry.plan or new.plan, new.prepared or record.prepared
    return entry


# -- loading ----------------------------------------------------------------------------------------------------------
def load(
    path: str | Path, *, trust: bool = False, device: str | None = None, config: Config | None = None, **options: Any
) -> LoadedArtifact:
    """Load the model of an `.airp` file. Its weights are memory-mapped: they take no memory until they are read.

        model = airgraph.load("model.airp")
        y = model(x)

    Object code in the file runs only where this user saved it or `trust` says that it may, and on the kind of CPU it was
    compiled for; otherwise the graph is checked and compiled again, which the journal says. With `trust` the weights are
    not compared with their digest, so that only what is used is read. `device` and options: as of `load_export`; without
    the option `buckets` those of the file are used.
    """
    from airgraph.config import Config

    given = Config.make(config, **options)
    artifact = Artifact.open(path)
    trusted = trust or artifact.own
    tensors = artifact.tensors(check=not trust)
    entries = {}
    for name, entry in artifact.entries.items():
        chosen = given if given.buckets is not None else replace(given, buckets=entry.buckets or None)
        record = program_for(artifact, name, chosen, device) if trusted else UNTRUSTED
        if isinstance(record, str):
            entries[name] = compiled_again(artifact, name, tensors, record, trust, device, chosen)
        else:
            entries[name] = started(artifact, name, tensors, record, chosen)
    return LoadedArtifact(artifact, entries, trusted)


UNTRUSTED = "its object code is only run with trust=True, or if this user saved it"


def program_for(artifact: Artifact, name: str, config: Config, wanted: str | None) -> ProgramRecord | str:
    """The program of an entry point for this machine, or why there is none. `wanted`: the device, if it matters."""
    from airgraph.engine.native import problem
    from airgraph.store.callable_program import made_for
    from airgraph.store.program_entry import not_stored

    made = {program.made.get("device", "cpu") for program in artifact.entry(name).programs}
    device = torch.device(wanted or ("cuda" if "cuda" in made and torch.cuda.is_available() else "cpu"))
    if device.type not in made or device.index:
        return f"it has no object code for {device}"
    if bucket_option(config) != artifact.entry(name).buckets:
        return "its object code is for other buckets"
    reason = not_stored(config, device) or (problem() if device.type == "cpu" else None)
    return reason or artifact.program(name, made_for(config, device))


def compiled_again(
    artifact: Artifact,
    name: str,
    tensors: dict[str, torch.Tensor],
    reason: str,
    trust: bool,
    device: str | None,
    config: Config,
) -> LoadedModel:
    from airgraph.api import begin_loading, loaded_model
    from airgraph.store.load_export import moved

    c = begin_loading(config)
    c.journal.remark(f"{artifact.path}: {name} is compiled from its graph: {reason}")
    with c.journal.stage("read"):
        stored = moved(artifact.stored(name, tensors), device, c.journal.remark)
        share_back(artifact.entry(name), stored.weights, tensors)
    return loaded_model(c, stored, artifact.path, trust or artifact.own)


def started(
    artifact: Artifact, name: str, tensors: dict[str, torch.Tensor], record: ProgramRecord, config: Config
) -> LoadedModel:
    """The program of the file, with its object code."""
    from airgraph.journal import open_journal
    from airgraph.store.callable_program import CallableProgram, offer_objects

    journal = open_journal(f"{artifact.path.name}:{name}", "inference", config.log)
    with journal.stage("read"):
        kept, _ = CallableProgram.from_bytes(artifact.member(record.member))
        find = object_finder(artifact)
        offer_objects(kept, record.objects, find)
        again = recompiler(artifact, name, tensors, config)
        program = kept.program(journal.graph, journal, config, again, find)
        state = artifact.state(artifact.entry(name), tensors)
        weights = laid_weights(kept, state)
        share_back(artifact.entry(name), weights, tensors)
    journal.counters["program hits"] += 1
    title = str(artifact.path)
    return LoadedModel(title, kept.contract, kept.boundary, weights, kept.written, kept.laid, program)


def object_finder(artifact: Artifact) -> Callable[[str], bytes | None]:
    def find(digest: str) -> bytes | None:
        member = object_member(digest)
        return artifact.member(member) if member in artifact.digests else None

    return find


def laid_weights(kept: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    specs = zip(kept.weights, kept.boundary.arguments)
    return {name: with_strides(state[name].to(spec.device), spec.strides) for name, spec in specs}


def recompiler(artifact: Artifact, name: str, tensors: Mapping[str, torch.Tensor], config: Config) -> Callable[[], Any]:
    """For what only a plan can do (engine/native/stored.py)."""

    def again() -> Any:
        from airgraph.api import compiled_stored

        return compiled_stored(artifact.stored(name, dict(tensors)), config)[0].executable

    return again
