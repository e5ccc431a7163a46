"""An `.air` file as a protobuf message with a seal at its end.

    write_air(path, message)
    message = read_air(path)

The seal is the digest of everything before it, and is itself an attribute of the model: protobuf messages may be written
one after the other, so other readers of the format see one more attribute. A file that was cut short or changed is told
from one that another program wrote, and neither is looked into.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from airgraph.errors import ExportError
from airgraph.ir.proto import ModelDef

SEAL = "_airgraph_seal"
LARGEST_FILE = 2**31 - 1  # of a protobuf message


def write_air(path: Path, message: Any, mode: int = 0o640) -> None:
    body = message.SerializeToString(deterministic=True)
    write_file(path, [body, seal(body)], mode)


def write_file(path: Path, pieces: Iterable[bytes], mode: int = 0o640) -> None:
    """Whole or not at all: what was there before stays until the new file is complete."""
    new = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), "wb") as file:
            for piece in pieces:
                file.write(piece)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def seal(body: bytes) -> bytes:
    """The digest of a model as one more attribute of it."""
    message = ModelDef()
    message.attr[SEAL].s = f"sha256:{hashlib.sha256(body).hexdigest()}".encode()
    return bytes(message.SerializeToString())


def refuse_holes(path: Path) -> None:
    """A sparse file of a few bytes may claim to have gigabytes. (Some file systems compress, but weights not so well.)"""
    found = path.stat()
    if found.st_size > 2**20 and getattr(found, "st_blocks", found.st_size) * 512 * 16 < found.st_size:
        raise ExportError(f"{path} is sparse: it has {found.st_size:,} bytes and {found.st_blocks * 512:,} on disk")


SEAL_BYTES = len(seal(b""))
SEAL_START = seal(b"").split(b"sha256:")[0] + b"sha256:"


def read_air(file: Path) -> Any:
    try:
        size = file.stat().st_size
        if not file.is_file() or size > LARGEST_FILE:
            reason = f"it has {size} bytes, more than a protobuf message" if file.is_file() else "it is no file"
            raise ExportError(f"{file} cannot be read: {reason}", hint="the .air file of an export")
        refuse_holes(file)
        data = file.read_bytes()
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(f"{file} cannot be read", where={"reason": str(error)}) from error
    body, end = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if not end.startswith(SEAL_START):
        raise ExportError(
            f"{file} has no seal at its end: it was cut short, or another program wrote it",
            where={"size": f"{len(data)} bytes"},
            hint="export it again, with airgraph",
        )
    if end != seal(body):
        raise ExportError(
            f"{file} was changed since it was written: its contents do not fit its seal",
            hint="copy it again, or export it again",
        )
    try:
        return ModelDef.FromString(body)
    except DecodeError as error:
        raise ExportError(f"{file} is no GE model (ge.proto.ModelDef)", where={"reason": str(error)}) from error
