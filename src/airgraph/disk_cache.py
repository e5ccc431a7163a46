"""What is expensive to make, kept on disk for the next process.

    cache = open_cache()
    code = cache.made("object", Key(text=text, cpu="neoverse-n1"), lambda: compile(text))

A folder holds entries of several kinds, each a file named after the digest of its key. An entry is a header (the fields of
the key, as JSON) and the data, under a message authentication code made with a key of this folder that only its user can
read: what others wrote, what was cut short and what was changed is not used. Nothing here raises because of the disk: a
cache that cannot be used is as good as an empty one, and `cache.notes` says why.

    FOLDER/key                        32 random bytes, mode 0600
    FOLDER/object/4f/4fd1…            an entry; the time of its last use is its modification time (LRU eviction)
    FOLDER/hits/object-4fd1…          as many bytes as the entry was used times
    FOLDER/locks/object-4f            held by the process that makes an entry, so that others wait for it

Files appear by an atomic rename. Locks are those of the operating system and end with their owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from airgraph.config import KNOBS
from airgraph.errors import ConfigError
from airgraph.locks import Depth, held_at_fork

MAGIC = b"airgraph cache 1\n"
SCAN_EVERY = 64  # new entries between two looks at the size of the folder
KEPT = 0.8  # of the limit, after an eviction
WAIT_S = 60.0  # for another process that makes the same entry
POLL_S = 0.02
MOST_HITS = 1 << 16  # that are counted
STALE_S = 3600.0  # a file that is still being written after this is nobody's

Mode = Literal["on", "read", "off"]


class Key:
    """What an entry depends on: named fields, compared by their digest. Long texts stand as digests of their own."""

    def __init__(self, /, **fields: str) -> None:
        self.fields = {name: short(value) for name, value in fields.items()}
        self.digest = hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()

    @classmethod
    def known(cls, digest: str) -> Key:
        """One of which only the digest is known: enough to find an entry."""
        key = cls.__new__(cls)
        key.fields, key.digest = {}, digest
        return key


def short(text: str) -> str:
    return text if len(text) <= 400 else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def temporary(path: Path) -> Path:
    """Where a file is written before it is renamed: a name that nobody else has. (In a folder that several machines or
    containers share, the number of a process is not one.)"""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def default_folder() -> Path:
    """AIRGRAPH_CACHE_DIR, or the place of the platform for what can be made again."""
    given = KNOBS["AIRGRAPH_CACHE_DIR"].get()
    if given:
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "airgraph"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "airgraph" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airgraph"


def hits_of(path: Path) -> Path:
    """The counter of an entry."""
    return path.parent.parent.parent / "hits" / f"{path.parent.parent.name}-{path.name}"


_caches: dict[tuple[str, str], Cache] = {}
_opening = held_at_fork(threading.Lock(), Depth.CACHE)


def open_cache() -> Cache:
    """The cache that the environment asks for; one for each folder in a process."""
    mode = KNOBS["AIRGRAPH_CACHE"].get()
    try:
        folder = default_folder()
    except RuntimeError:  # no home
        folder, mode = Path(), "off"
    with _opening:
        place = (str(folder), mode)
        if place not in _caches:
            _caches[place] = Cache(folder, mode, limit=largest())  # type: ignore[arg-type]
        return _caches[place]


def largest() -> int:
    """Bytes, from AIRGRAPH_CACHE_MB."""
    given = KNOBS["AIRGRAPH_CACHE_MB"].get()
    if not given.isdecimal():
        raise ConfigError(f"AIRGRAPH_CACHE_MB cannot be {given!r}", hint="a whole number of MiB")
    return int(given) * 2**20


@dataclass(frozen=True)
class CacheEntry:
    """One file of a cache, for people."""

    path: Path
    kind: str
    size: int
    used: float  # the time of its last use

    @property
    def hits(self) -> int:
        """How often it was used."""
        try:
            return hits_of(self.path).stat().st_size
        except OSError:
            return 0

    def remove(self) -> None:
        self.path.unlink()
        hits_of(self.path).unlink(missing_ok=True)

    def fields(self) -> dict[str, str]:
        """Those of its key; not authenticated, and empty if they cannot be read."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(len(MAGIC) + 32 + 8)
                found = json.loads(file.read(min(int.from_bytes(head[-8:], "little"), 2**20)))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass
class Cache:
    """A folder of entries, used by any number of processes and threads at once.

        cache.made("object", key, make)      the entry, or what `make()` gives, kept for the next process
        cache.get("object", key)             the data, or None

    With the mode "read" nothing is written, with "off" nothing is read either. `limit`: bytes of all entries together.
    """

    folder: Path
    mode: Mode = "on"
    limit: int = 2**30
    counts: Counter[str] = field(default_factory=Counter)  # "object hits", "object misses", "object discarded"
    notes: list[str] = field(default_factory=list)  # what was wrong with the disk
    refused: str = ""  # why the folder is not used
    _put: int = 0

    # -- using it ---------------------------------------------------------------------------------------------------
    def made(self, kind: str, key: Key, make: Callable[[], bytes]) -> bytes:
        """The entry, or what `make` gives, which is kept. Of several processes that want it, one makes it."""
        found = self.get(kind, key)
        if found is not None:
            return found
        if self.mode != "on" or self.secret is None:
            self.counts[f"{kind} misses"] += 1
            return make()
        with self.lock(kind, key):
            found = self.get(kind, key)  # somebody else may have made it meanwhile
            if found is None:
                self.counts[f"{kind} misses"] += 1
                found = make()
                self.put(kind, key, found)
            return found

    def get(self, kind: str, key: Key) -> bytes | None:
        """The data of an entry; None if there is none, or none that can be trusted."""
        if self.mode == "off" or self.secret is None:
            return None
        path = self.path(kind, key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note(f"{path} cannot be read: {error}")
            return None
        found = self.opened(kind, key, content)
        if found is None:
            self.discard(kind, path)
            return None
        self.counts[f"{kind} hits"] += 1
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path)
            if self.mode == "on":
                self.count_hit(path)
        return found

    def has(self, kind: str, key: Key) -> bool:
        """Whether there is an entry, usable or not."""
        return self.mode != "off" and self.path(kind, key).exists()

    def count_hit(self, path: Path) -> None:
        """A file beside the entries grows by a byte: several processes can do that at the same time."""
        counter = hits_of(path)
        counter.parent.mkdir(exist_ok=True, mode=0o700)
        handle = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            if os.fstat(handle).st_size < MOST_HITS:
                os.write(handle, b".")
        finally:
            os.close(handle)

    def put(self, kind: str, key: Key, data: bytes) -> bool:
        """Whether it is there now."""
        if self.mode != "on" or self.secret is None:
            return False
        path = self.path(kind, key)
        new = temporary(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            try:
                with open(os.open(new, flags, 0o600), "wb") as file:
                    file.write(self.sealed(kind, key, data))
                os.replace(new, path)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            self.note(f"{path} cannot be written: {error}")
            return False
        self._put += 1
        if self._put % SCAN_EVERY == 1:
            self.prune()
        return True

    @contextlib.contextmanager
    def lock(self, kind: str, key: Key) -> Iterator[None]:
        """Held while this process makes an entry. After WAIT_S seconds, or where there are no locks, everybody makes
        their own. Nobody waits for a cache that nothing is added to."""
        if self.mode != "on":
            yield
            return
        try:
            import fcntl

            folder = self.folder / "locks"
            folder.mkdir(exist_ok=True, mode=0o700)
            handle = os.open(folder / f"{kind}-{key.digest[:2]}", os.O_RDWR | os.O_CREAT, 0o600)
        except (ImportError, OSError):
            yield
            return
        try:
            wait_for(fcntl, handle)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where this process was forked meanwhile
            os.close(handle)

    @contextlib.contextmanager
    def watched(self, notes: list[str]) -> Iterator[None]:
        """What happens meanwhile, added to `notes`: `cache: 6 object hits`, and what was discarded or is wrong."""
        before, seen = Counter(self.counts), len(self.notes)
        try:
            yield
        finally:
            happened = sorted((self.counts - before).items())
            notes += [f"cache: {count} {what}" for what, count in happened] + self.notes[seen:]

    # -- entries ----------------------------------------------------------------------------------------------------
    def path(self, kind: str, key: Key) -> Path:
        return self.folder / kind / key.digest[:2] / key.digest

    def sealed(self, kind: str, key: Key, data: bytes) -> bytes:
        header = json.dumps(key.fields, sort_keys=True).encode()
        body = len(header).to_bytes(8, "little") + header + data
        return MAGIC + self.code(kind, key, body) + body

    def opened(self, kind: str, key: Key, content: bytes) -> bytes | None:
        start = len(MAGIC) + 32
        body = content[start:]
        if not content.startswith(MAGIC) or not hmac.compare_digest(
            content[len(MAGIC) : start], self.code(kind, key, body)
        ):
            return None
        return body[8 + int.from_bytes(body[:8], "little") :]

    def code(self, kind: str, key: Key, body: bytes) -> bytes:
        digest = hmac.new(self.secret or b"", f"{kind} {key.digest}\n".encode(), "sha256")
        digest.update(body)
        return digest.digest()

    def discard(self, kind: str, path: Path) -> None:
        self.counts[f"{kind} discarded"] += 1
        self.note(f"{path} is truncated, was changed, or was written with another key: discarded")
        if self.mode == "on":
            with contextlib.suppress(OSError):
                path.unlink()

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 100:
            self.notes.append(text)

    # -- the folder -------------------------------------------------------------------------------------------------
    @cached_property
    def secret(self) -> bytes | None:
        """The key of this folder; None if the folder cannot be used, which `refused` and `notes` explain."""
        if self.mode == "off":
            return None
        try:
            if self.mode == "on":
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            refusal = self.refusal()
            if refusal is None:
                return self.read_secret()
        except OSError as error:
            refusal = str(error)
        self.refuse(refusal)
        return None

    def refuse(self, reason: str) -> None:
        self.refused = f"the cache folder {self.folder} is not used: {reason}"
        self.note(self.refused)

    def refusal(self) -> str | None:
        """Why what lies in the folder cannot be ours alone."""
        found = self.folder.stat()
        if not hasattr(os, "geteuid"):
            return None
        if found.st_uid != os.geteuid():
            return f"it belongs to user {found.st_uid}"
        return "others can write to it (chmod go-w)" if found.st_mode & 0o022 else None

    def read_secret(self) -> bytes | None:
        path = self.folder / "key"
        if not path.exists():
            if self.mode != "on":
                return None
            self.new_secret(path)
        status = path.lstat()
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
            self.refuse(f"others can read its key (chmod 600 {path})")
            return None
        secret = path.read_bytes()
        if len(secret) != 32:
            self.refuse(f"its key is truncated (remove {path})")
            return None
        return secret

    def new_secret(self, path: Path) -> None:
        """The first process wins; a link appears with its contents, or not at all."""
        new = temporary(path)
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(new, path)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                self.name_once(new, path)
        finally:
            new.unlink(missing_ok=True)

    def name_once(self, new: Path, path: Path) -> None:
        """A complete file takes a name that none has, by one process at a time. Where there are no locks either, the last
        process wins, and what the others add with keys of their own is discarded."""
        with self.lock("key", Key(text=path.name)):
            if not path.exists():
                os.replace(new, path)

    def entries(self) -> list[CacheEntry]:
        """All of them, those used least recently first."""
        found: list[CacheEntry] = []
        for path in self.folder.glob("*/[0-9a-f][0-9a-f]/*"):
            with contextlib.suppress(OSError):  # evicted meanwhile
                status = path.lstat()
                found.append(CacheEntry(path, path.parent.parent.name, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def prune(self, limit: int | None = None) -> int:
        """Least recently used entries go while all of them are larger than the limit; gives the bytes that went."""
        wanted = self.limit if limit is None else limit
        entries, freed = self.entries(), 0
        total = sum(entry.size for entry in entries)
        for entry in entries:
            abandoned = entry.path.name.startswith(".") and time.time() - entry.used > STALE_S
            if abandoned or (total > wanted and total - freed > wanted * KEPT):
                with contextlib.suppress(OSError):
                    entry.remove()
                    freed += entry.size
        return freed

    def verify(self) -> tuple[int, list[Path]]:
        """How many entries are whole, and those that are not."""
        whole, broken = 0, []
        for entry in self.entries():
            key = Key(**{name: str(value) for name, value in entry.fields().items()})
            try:
                right = (
                    key.digest == entry.path.name and self.opened(entry.kind, key, entry.path.read_bytes()) is not None
                )
            except OSError:
                continue
            if right:
                whole += 1
            elif not entry.path.name.startswith("."):
                broken.append(entry.path)
        return whole, broken

    def clear(self) -> int:
        """Removes all entries; gives how many."""
        entries = self.entries()
        for entry in entries:
            with contextlib.suppress(OSError):
                entry.remove()
        return len(entries)


def wait_for(fcntl: Any, handle: int) -> None:
    """Until the lock is ours, nobody can have it (a file system without locks), or it takes too long."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(POLL_S)
        except OSError:
            return
