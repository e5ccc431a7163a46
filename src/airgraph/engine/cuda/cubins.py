"""Compiled Triton kernels in the compilation cache, so that another process compiles none and need not import Triton.

binary = kept(key_of({"text": …, "capability": "90"}), lambda: build(variant, 90))
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache

from airgraph.disk_cache import Key, open_cache
from airgraph.engine.cuda.triton_build import Binary
from airgraph.source_hash import source_hash

KIND = "cubin"
_offered: dict[str, bytes] = {}  # by the digest of their keys, from files that are trusted


def kept(key: Key, make: Callable[[], Binary]) -> Binary:
    """What was offered, from the cache, or what `make` gives."""
    offered = _offered.get(key.digest)
    return Binary.from_bytes(offered or open_cache().made(KIND, key, lambda: make().to_bytes()))


def key_of(fields: Mapping[str, str]) -> Key:
    """`fields`: what a kernel depends on besides our sources and Triton."""
    return Key(sources=source_hash(), triton=triton_version(), **fields)


def found(digest: str) -> bytes | None:
    """What was offered or is in the cache, by the digest of its key."""
    return _offered.get(digest) or open_cache().get(KIND, Key.known(digest))


def offer(digest: str, code: bytes) -> None:
    """A kernel that need not be compiled, by the digest of its key."""
    _offered[digest] = code


@cache
def triton_version() -> str:
    """Of the package that is installed, without importing it."""
    for name in ("triton", "pytorch-triton"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
