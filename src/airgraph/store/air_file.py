"""An `.air` file as a protobuf message with a seal at its end.

    write_air(path, message)
    message = read_air(path)

The seal is the digest of everything before it, and is itself an attribute of the model: protobuf messages may be written
one after the other, so other readers of the format see one more attribute. A file that was cut short or changed is told
from one that another program wrote, and neither is looked into.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from airgraph.errors import ExportError
from airgraph.ir.proto import ModelDef
from airgraph.store.whole_files import refuse_holes, write_file

SEAL = "_airgraph_seal"
LARGEST_FILE = 2**31 - 1  # of a protobuf message


def write_air(path: Path, message: Any, mode: int = 0o640) -> None:
    write_file(path, [air_bytes(message)], mode)


def air_bytes(message: Any) -> bytes:
    body = message.SerializeToString(deterministic=True)
    return bytes(body + seal(body))


def seal(body: bytes) -> bytes:
    """The digest of a model as one more attribute of it."""
    message = ModelDef()
    message.attr[SEAL].s = f"sha256:{hashlib.sha256(body).hexdigest()}".encode()
    return bytes(message.SerializeToString())


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
    return parse_air(data, file)


def parse_air(data: bytes, file: Path) -> Any:
    """`file`: for messages."""
    body, end = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if not end.startswith(SEAL_START):
        raise ExportError(
            f"{file} is truncated (missing checksum), or another program wrote it",
            where={"size": f"{len(data)} bytes"},
            hint="export it again, with airgraph",
        )
    if end != seal(body):
        raise ExportError(
            f"{file} was changed since it was written: its contents do not match its checksum",
            hint="copy it again, or export it again",
        )
    try:
        return ModelDef.FromString(body)
    except DecodeError as error:
        raise ExportError(f"{file} is not a GE model (ge.proto.ModelDef)", where={"reason": str(error)}) from error
