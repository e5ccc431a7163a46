"""An `.airp` file: a model that carries everything it needs to run.

    manifest.json                  what is inside: entry points, their programs, the digest of every other member
    signature                      the manifest's, made with the key of this user's compilation cache
    weights.safetensors            parameters, buffers and constants of all entry points; mapped, not copied
    forward/graph.air              the graph of an entry point, a ge.proto.ModelDef without weights (docs/export.md)
    forward/plan.txt               its plan, for people
    forward/program.0              its program for one kind of CPU: engine/native/image.py, with how it is called
    objects/4fd1…                  object code that programs name, by the digest of its key in the compilation cache

Programs and object code are run only if the caller trusts the file, or if this user's own key made the signature. In every
other case, and on another kind of machine, the graph is checked and compiled again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from airgraph.disk_cache import open_cache
from airgraph.errors import AirgraphError, ExportError, VerifyError
from airgraph.store.archive import PAGE, Archive, ArchiveWriter
from airgraph.store.safetensors import mapped_tensors, safetensors_bytes

if TYPE_CHECKING:
    from airgraph.store.convention import StoredModel

FORMAT = "airp 1"
MANIFEST, SIGNATURE, WEIGHTS = "manifest.json", "signature", "weights.safetensors"
BROKEN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class ProgramRecord:
    """A program in the file. `made`: what it depends on (machine, sources, torch); `objects`: its object code's digests."""

    member: str
    made: dict[str, str]
    objects: list[str]


@dataclass(frozen=True)
class EntryRecord:
    """One entry point. `weights`: the names of its weights → theirs in the file; `sizes`: of the example, by symbol;
    `buckets`: the option it was saved with; `prepared`: sets of sizes that calls are padded to (docs/buckets.md)."""

    name: str
    graph: str
    weights: dict[str, str]
    plan: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, Any] = field(default_factory=dict)
    prepared: list[dict[str, int]] = field(default_factory=list)
    programs: list[ProgramRecord] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        programs = [{"member": p.member, "made": p.made, "objects": p.objects} for p in self.programs]
        held = {"graph": self.graph, "plan": self.plan, "weights": self.weights, "sizes": self.sizes}
        return {**held, "buckets": self.buckets, "prepared": self.prepared, "programs": programs}

    @classmethod
    def read(cls, name: str, data: Any) -> EntryRecord:
        match data:
            case {"graph": str(graph), "plan": str(plan), "weights": dict(), "sizes": dict(), "programs": list(listed)}:
                programs = [program_record(p) for p in listed]
                weights, sizes = texts(data["weights"]), numbers(data["sizes"])
                return cls(name, graph, weights, plan, sizes, *planned_sizes(data), programs)
        raise VerifyError(f"the entry point {name!r} is not described as one")


def planned_sizes(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, int]]]:
    buckets, prepared = data.get("buckets", {}), data.get("prepared", [])
    if not isinstance(buckets, dict) or not isinstance(prepared, list):
        raise VerifyError("its buckets are not described as such")
    if buckets:
        from airgraph.runtime.buckets import Buckets

        Buckets.make(buckets)  # which refuses what are none
    return buckets, [numbers(sizes) for sizes in prepared]


def program_record(data: Any) -> ProgramRecord:
    match data:
        case {"member": str(member), "made": dict(made), "objects": list(objects)}:
            if all(isinstance(digest, str) for digest in objects):
                return ProgramRecord(member, texts(made), objects)
    raise VerifyError("a program is not described as one")


def texts(data: Mapping[Any, Any]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in data.values()):
        raise VerifyError("a table of texts holds something else")
    return dict(data)


def numbers(data: Mapping[Any, Any]) -> dict[str, int]:
    if not all(type(value) is int for value in data.values()):
        raise VerifyError("a table of numbers holds something else")
    return dict(data)


# -- reading ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Artifact:
    """An `.airp` file that was opened. Whatever is wrong with it raises an ExportError."""

    archive: Archive
    about: dict[str, str]  # versions
    entries: dict[str, EntryRecord]
    digests: dict[str, str]  # of the members
    own: bool  # this user saved it

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        archive = Archive.open(path)
        manifest = archive.bytes(MANIFEST)
        try:
            data = json.loads(manifest)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise VerifyError(f"it is not in the format {FORMAT!r}", hint="save it with this version of airgraph")
            entries = {name: EntryRecord.read(name, entry) for name, entry in data["entries"].items()}
            about, digests = texts(data["about"]), texts(data["digests"])
        except (AirgraphError, RecursionError, *BROKEN) as error:
            raise unreadable(archive.path, error) from error
        if not entries:
            raise ExportError(f"{path} has no entry point")
        made = signature(manifest)
        own = bool(made) and SIGNATURE in archive.members and hmac.compare_digest(archive.bytes(SIGNATURE), made)
        return cls(archive, about, entries, digests, own)

    @property
    def path(self) -> Path:
        return self.archive.path

    def entry(self, name: str) -> EntryRecord:
        if name not in self.entries:
            raise ExportError(f"{self.path} has no entry point {name!r}", where={"it has": ", ".join(self.entries)})
        return self.entries[name]

    def member(self, name: str) -> bytes:
        """A member as it was when the manifest was written."""
        if name not in self.digests:
            raise ExportError(f"the manifest of {self.path} does not list {name!r}")
        return self.archive.bytes(name, self.digests[name])

    def tensors(self, *, check: bool = True) -> dict[str, torch.Tensor]:
        """The weights, mapped. `check`: their digest, which reads all of them."""
        if WEIGHTS not in self.archive.members:
            return {}
        if check:
            self.archive.check(WEIGHTS, self.digests.get(WEIGHTS, ""))
        try:
            return mapped_tensors(self.archive.mapping, *self.archive.place(WEIGHTS), check=check)
        except (AirgraphError, *BROKEN) as error:
            raise unreadable(self.path, error) from error

    def stored(self, name: str, tensors: dict[str, torch.Tensor] | None) -> StoredModel:
        """The checked graph of an entry point with these weights, which are laid out as it needs them; None: without."""
        from airgraph.store.air_file import parse_air
        from airgraph.store.load_export import read_message

        entry = self.entry(name)
        message = parse_air(self.member(entry.graph), self.path)
        if tensors is None:
            return read_message(message, self.path, weights=False)
        stored = read_message(message, self.path, state=self.state(entry, tensors), stay=False)
        share_back(entry, stored.weights, tensors)
        return stored

    def state(self, entry: EntryRecord, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of an entry point by its own names."""
        missing = next((held for held in entry.weights.values() if held not in tensors), None)
        if missing is not None:
            raise ExportError(f"{self.path} does not have the weight {missing!r}")
        return {name: tensors[held] for name, held in entry.weights.items()}

    def program(self, name: str, made: Mapping[str, str]) -> ProgramRecord | str:
        """The program for such a machine, or why there is none."""
        programs = self.entry(name).programs
        found = next((p for p in programs if p.made == made), None)
        if found is not None:
            return found
        if not programs:
            return "it has no object code"
        other = programs[0].made
        field = next((key for key in sorted({*made, *other}) if made.get(key) != other.get(key)), "")
        return f"its object code is for another {FIELDS.get(field, field)}"

    @property
    def size(self) -> int:
        return len(self.archive.mapping)


FIELDS = {"cpu": "CPU", "features": "CPU", "system": "system", "sources": "version of airgraph", "torch": "torch"}


def share_back(entry: EntryRecord, laid: Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """A weight that had to be laid out in another way, or moved, is so for the other entry points, too: they share it."""
    tensors.update({entry.weights[name]: tensor for name, tensor in laid.items() if name in entry.weights})


def unreadable(path: Path, error: BaseException) -> ExportError:
    reason = error.what if isinstance(error, AirgraphError) else repr(error)
    return ExportError(f"{path} is not a model that can be read: {reason}", hint="save it again")


def signature(manifest: bytes) -> bytes:
    """Made with the key of this user's compilation cache; empty where there is none."""
    secret = open_cache().secret
    return hmac.new(secret, b"airp\n" + manifest, hashlib.sha256).hexdigest().encode() if secret else b""


# -- writing ----------------------------------------------------------------------------------------------------------
@dataclass
class EntryPoint:
    """What is written of one entry point. `programs`: (what it depends on, its bytes, its object code by digest)."""

    graph: bytes
    weights: dict[str, torch.Tensor]
    plan: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, Any] = field(default_factory=dict)
    prepared: list[dict[str, int]] = field(default_factory=list)
    programs: list[tuple[dict[str, str], bytes, dict[str, bytes]]] = field(default_factory=list)


def write_artifact(path: Path, entries: Mapping[str, EntryPoint], about: Mapping[str, str], mode: int = 0o640) -> None:
    """All entry points in one file; tensors that are the same memory are written once."""
    tensors, names = gathered(entries)
    try:
        with ArchiveWriter(path, mode) as archive:
            if tensors:
                archive.add(WEIGHTS, safetensors_bytes(tensors), PAGE)
            records = {name: add_entry(archive, name, entry, names[name]) for name, entry in entries.items()}
            listed = {name: record.data() for name, record in records.items()}
            manifest = {"format": FORMAT, "about": dict(about), "entries": listed, "digests": archive.digests}
            data = json.dumps(manifest, indent=1).encode()
            archive.add(MANIFEST, [data])
            archive.add(SIGNATURE, [signature(data)])
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(f"{path} could not be written", where={"reason": str(error)}) from error


def add_entry(archive: ArchiveWriter, name: str, entry: EntryPoint, weights: dict[str, str]) -> EntryRecord:
    graph, plan = f"{name}/graph.air", f"{name}/plan.txt"
    archive.add(graph, [entry.graph])
    archive.add(plan, [entry.plan.encode()])
    programs = []
    for number, (made, data, objects) in enumerate(entry.programs):
        archive.add(f"{name}/program.{number}", [data])
        for digest, code in objects.items():
            if object_member(digest) not in archive.digests:
                archive.add(object_member(digest), [code])
        programs.append(ProgramRecord(f"{name}/program.{number}", made, [*objects]))
    return EntryRecord(name, graph, weights, plan, entry.sizes, entry.buckets, entry.prepared, programs)


def object_member(digest: str) -> str:
    return f"objects/{digest}"


def gathered(entries: Mapping[str, EntryPoint]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, str]]]:
    """The tensors of the file by name, and for every entry point its names → those. A name that two entry points have for
    different tensors is the second's with the entry point before it."""
    tensors: dict[str, torch.Tensor] = {}
    places: dict[Any, str] = {}
    names: dict[str, dict[str, str]] = {}
    for entry, weight, tensor in every_weight(entries):
        place = memory_of(tensor)
        if place not in places:
            places[place] = weight if weight not in tensors else f"{entry}/{weight}"
            tensors[places[place]] = tensor
        names.setdefault(entry, {})[weight] = places[place]
    return tensors, {entry: names.get(entry, {}) for entry in entries}


def every_weight(entries: Mapping[str, EntryPoint]) -> Iterable[tuple[str, str, torch.Tensor]]:
    return ((entry, weight, tensor) for entry, e in entries.items() for weight, tensor in e.weights.items())


def memory_of(tensor: torch.Tensor) -> Any:
    if not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, str(tensor.device)
