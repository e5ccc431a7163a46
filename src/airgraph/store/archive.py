"""A zip file whose members are stored, not compressed, each beginning where a cache line or a page does.

    with ArchiveWriter(path) as archive:
        archive.add("manifest.json", [b"..."])
        archive.add("weights.safetensors", pieces, PAGE)
    archive = Archive.open(path)
    archive.bytes("manifest.json"), archive.mapping, archive.place("weights.safetensors")

Any zip tool opens it. The file is mapped into memory (copy on write: what is written there never reaches the disk), so a
member takes no time to read and no memory of its own. Nothing a file says is believed before it has been compared with
the size of the file; what is wrong is an ExportError.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from airgraph.disk_cache import temporary
from airgraph.errors import ExportError
from airgraph.store.whole_files import refuse_holes

LINE = 64
PAGE = 4096
PADDING = 0xD935  # the extra field by which other tools align members, too
HEADER = struct.Struct("<4s22xHH")  # of a member: magic, lengths of its name and of its extra field
MOST = 1 << 16  # members
ZIP64 = 20  # bytes of the extra field for sizes above 4 GiB


class MemberPlace(NamedTuple):
    """Where the bytes of a member are in the file."""

    start: int
    size: int


class ArchiveWriter:
    """Whole or not at all: what was there before stays until the new file is complete."""

    def __init__(self, path: Path, mode: int = 0o640) -> None:
        self.path, self.new = path, temporary(path)
        self.file = open(os.open(self.new, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b")  # noqa: SIM115
        self.zip = zipfile.ZipFile(self.file, "w", zipfile.ZIP_STORED)
        self.digests: dict[str, str] = {}

    def add(self, name: str, pieces: Iterable[bytes], align: int = LINE) -> None:
        info = zipfile.ZipInfo(name)
        info.external_attr = 0o640 << 16
        before = self.file.tell() + HEADER.size + len(name.encode()) + 4 + ZIP64
        gap = -before % align
        info.extra = struct.pack("<HH", PADDING, gap) + bytes(gap)
        digest = hashlib.sha256()
        with self.zip.open(info, "w", force_zip64=True) as member:
            for piece in pieces:
                digest.update(piece)
                member.write(piece)
        self.digests[name] = digest.hexdigest()

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.zip.close()
                self.file.flush()
                os.replace(self.new, self.path)
        finally:
            self.file.close()
            self.new.unlink(missing_ok=True)


@dataclass(frozen=True)
class Archive:
    path: Path
    mapping: mmap.mmap
    members: dict[str, MemberPlace]

    @classmethod
    def open(cls, path: str | Path) -> Archive:
        file = Path(path)
        try:
            refuse_holes(file)
            with open(file, "rb") as opened:
                mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                with zipfile.ZipFile(opened) as listed:
                    infos = listed.infolist()
        except ExportError:
            raise
        except (zipfile.BadZipFile, struct.error, NotImplementedError, EOFError, OverflowError, ValueError) as error:
            raise ExportError(
                f"{file} is not an .airp file, or is truncated",
                where={"reason": str(error) or type(error).__name__},
                hint="copy it again, or save it again",
            ) from error
        except OSError as error:
            raise ExportError(f"{file} cannot be read", where={"reason": str(error)}) from error
        return cls(file, mapping, {info.filename: place_of(mapping, info, file) for info in one_each(infos, file)})

    def place(self, name: str) -> MemberPlace:
        if name not in self.members:
            raise ExportError(f"{self.path} has no {name!r}", hint="save it again")
        return self.members[name]

    def bytes(self, name: str, digest: str | None = None) -> bytes:
        """A member; with the digest it must have."""
        start, size = self.place(name)
        found = self.mapping[start : start + size]
        if digest is not None and hashlib.sha256(found).hexdigest() != digest:
            raise self.changed(name)
        return found

    def check(self, name: str, digest: str) -> None:
        """As above, without a copy."""
        start, size = self.place(name)
        with memoryview(self.mapping) as view, view[start : start + size] as part:
            if hashlib.sha256(part).hexdigest() != digest:
                raise self.changed(name)

    def changed(self, name: str) -> ExportError:
        return ExportError(
            f"{self.path} was changed since it was written: {name!r} does not fit its digest",
            hint="copy it again, or save it again",
        )


def one_each(infos: list[zipfile.ZipInfo], file: Path) -> list[zipfile.ZipInfo]:
    names = [info.filename for info in infos]
    if len(set(names)) != len(names) or len(names) > MOST:
        raise ExportError(f"{file} has members of the same name, or too many of them")
    return infos


def place_of(mapping: mmap.mmap, info: zipfile.ZipInfo, file: Path) -> MemberPlace:
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
        raise ExportError(f"{file}: {info.filename!r} is compressed or encrypted, and nothing in an .airp file is")
    at = info.header_offset
    if not 0 <= at <= len(mapping) - HEADER.size:
        raise ExportError(f"{file}: {info.filename!r} extends beyond the file")
    magic, name, extra = HEADER.unpack(mapping[at : at + HEADER.size])
    start = at + HEADER.size + name + extra
    if magic != b"PK\x03\x04" or start + info.file_size > len(mapping):
        raise ExportError(f"{file}: {info.filename!r} is truncated or extends beyond the file")
    return MemberPlace(start, info.file_size)
