"""The cache on disk: what it gives back, and that nothing on the disk can make it give back anything else."""

import errno
import itertools
import multiprocessing
import os
import random
import stat
import subprocess
import sys
import time
import zipfile

import pytest

from airgraph import disk_cache
from airgraph.disk_cache import Cache, Key, default_folder
from airgraph.errors import ConfigError
from airgraph.store.archive import ArchiveWriter
from airgraph.store.whole_files import write_file
from airgraph.tools.cache import cache as command

KEY = Key(text="a", cpu="here")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def made(cache, data=b"data", key=KEY):
    """(what came back, whether it had to be made)."""
    calls = []
    return cache.made("object", key, lambda: calls.append(1) or data), bool(calls)


def entry(cache, key=KEY):
    return cache.path("object", key)


def test_a_second_cache_has_what_the_first_made(folder):
    assert made(Cache(folder)) == (b"data", True)
    second = Cache(folder)
    assert made(second, b"other") == (b"data", False)
    assert made(second, b"other", Key(text="b", cpu="here")) == (b"other", True)
    assert second.counts == {"object hits": 1, "object misses": 1} and not second.notes
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(entry(second).stat().st_mode) == 0o600
    assert not list(folder.rglob("*.part"))


def test_modes(folder):
    assert made(Cache(folder, "read")) == (b"data", True) and not folder.exists()
    made(Cache(folder))
    reading = Cache(folder, "read")
    assert made(reading, b"x") == (b"data", False)
    assert made(reading, b"x", Key(text="b")) == (b"x", True) and not entry(reading, Key(text="b")).exists()
    assert made(Cache(folder, "off"), b"x") == (b"x", True)


def test_every_damage_is_noticed(folder):
    """Flipped bits, cuts and appended bytes at 60 places."""
    cache = Cache(folder)
    made(cache)
    whole = entry(cache).read_bytes()
    rng = random.Random(0)
    for _ in range(20):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        for damaged in (bytes(flipped), whole[: rng.randrange(len(whole))], whole + b"x"):
            entry(cache).write_bytes(damaged)
            assert cache.get("object", KEY) is None
            assert not entry(cache).exists()  # and it is gone
    assert cache.counts["object discarded"] == 60 and "was changed" in cache.notes[0]
    assert made(cache, b"new") == (b"new", True)


def test_an_entry_of_another_key_kind_or_user_is_not_used(folder, tmp_path):
    cache, other = Cache(folder), Cache(tmp_path / "other")
    made(cache)
    made(other, b"evil")
    for content in (
        entry(other).read_bytes(),
        cache.sealed("program", KEY, b"x"),
        cache.sealed("object", Key(a="b"), b"x"),
    ):
        entry(cache).write_bytes(content)
        assert cache.get("object", KEY) is None


@pytest.mark.parametrize("change", ["folder", "key", "short key"])
def test_folders_of_others_are_refused(folder, change):
    made(Cache(folder))
    if change == "folder":
        folder.chmod(0o777)
    elif change == "key":
        (folder / "key").chmod(0o644)
    else:
        (folder / "key").write_bytes(b"abc")
    cache = Cache(folder)
    assert made(cache, b"x") == (b"x", True)
    reason = {"folder": "others can write to it", "key": "others can read its key", "short key": "its key is truncated"}
    assert reason[change] in cache.notes[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder):
    made(Cache(folder))
    os.chown(folder, 12345, -1)
    cache = Cache(folder)
    assert made(cache, b"x") == (b"x", True) and "it belongs to user 12345" in cache.notes[0]


def test_a_disk_that_is_full_or_read_only(folder, monkeypatch):
    cache = Cache(folder)
    made(cache)
    for number in (errno.ENOSPC, errno.EROFS, errno.EACCES):

        def fail(*args, number=number):
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr("airgraph.disk_cache.os.replace", fail)
            assert made(cache, b"x", Key(text=str(number))) == (b"x", True)
        assert os.strerror(number) in cache.notes[-1] and not list(folder.rglob("*.part"))
        with monkeypatch.context() as patch:
            patch.setattr("airgraph.disk_cache.os.link", fail)
            assert made(Cache(folder.with_name(f"new{number}")), b"x") == (b"x", True)
    assert made(Cache(folder / "key" / "below"), b"x") == (b"x", True)  # a file where a folder should be


def test_least_recently_used_entries_go_first(folder):
    cache = Cache(folder, limit=10_000)
    keys = [Key(text=str(i)) for i in range(8)]
    for i, key in enumerate(keys):
        cache.put("object", key, bytes(2000))
        os.utime(entry(cache, key), (i, i))
    cache.get("object", keys[0])  # used now
    assert cache.prune() > 0
    assert [entry(cache, key).exists() for key in keys] == [True, *[False] * 5, True, True]
    assert sum(e.size for e in cache.entries()) <= 10_000


def test_abandoned_files_go(folder):
    cache = Cache(folder)
    made(cache)
    old = entry(cache).with_name(".1-1.part")
    old.touch()
    os.utime(old, (1, 1))
    cache.prune()
    assert not old.exists() and entry(cache).exists()


def slow(folder, results):
    def make():
        time.sleep(0.5)
        results.put(1)
        return b"data"

    assert Cache(folder).made("object", KEY, make) == b"data"


def test_several_processes_make_it_once(folder):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=slow, args=(folder, results)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert results.get(timeout=5) == 1 and results.empty()


def test_the_lock_of_a_process_that_died_is_free(folder):
    made(Cache(folder))
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom airgraph.disk_cache import Cache, Key\n"
        "Cache(Path(sys.argv[1])).made('object', Key(text='new'), lambda: os._exit(3))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)]).returncode == 3
    start = time.monotonic()
    assert made(Cache(folder), b"x", Key(text="new")) == (b"x", True)
    assert time.monotonic() - start < 5


def write_for_ever(folder):
    cache = Cache(folder, limit=200_000)
    for i in itertools.count():
        cache.put("object", Key(text=str(i % 50)), bytes([i % 50]) * 10_000)


def test_killed_at_any_moment(folder):
    """While it writes, replaces and evicts: what is there afterwards is whole, and nobody waits."""
    context, rng = multiprocessing.get_context("fork"), random.Random(0)
    for _ in range(12):
        child = context.Process(target=write_for_ever, args=(folder,))
        child.start()
        time.sleep(rng.uniform(0.01, 0.08))
        child.kill()
        child.join(60)
        cache = Cache(folder)
        assert cache.secret is not None and cache.verify()[1] == []
        for i in range(50):
            found = cache.get("object", Key(text=str(i)))
            assert found in (None, bytes([i]) * 10_000)
        assert not cache.counts["object discarded"] and not cache.notes


def test_two_containers_in_which_the_processes_have_the_same_number(folder, monkeypatch):
    """Each writes a file of its own: neither removes what the other one is writing."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    first, second = Cache(folder), Cache(folder)
    monkeypatch.setattr(disk_cache, "_numbers", itertools.repeat(0), raising=False)
    sealed = first.sealed

    def meanwhile(kind, key, data):
        assert second.put(kind, key, data)
        return sealed(kind, key, data)

    first.sealed = meanwhile
    assert first.put("object", KEY, b"data") and first.notes == second.notes == []
    assert Cache(folder).get("object", KEY) == b"data" and not [*folder.rglob("*.part")]


def test_files_of_two_containers_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "model.air"

    def pieces():
        yield b"first "
        write_file(path, [b"the other one"])
        assert path.read_bytes() == b"the other one"
        yield b"one"

    write_file(path, pieces())
    assert path.read_bytes() == b"first one"
    with ArchiveWriter(tmp_path / "a") as one:
        one.add("x", [b"1"])
        with ArchiveWriter(tmp_path / "a") as other:
            other.add("y", [b"2"])
        one.add("z", [b"3"])
    with zipfile.ZipFile(tmp_path / "a") as found:
        assert found.testzip() is None and found.namelist() == ["x", "z"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "model.air"]


def test_a_file_system_without_locks(folder, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    assert made(Cache(folder)) == (b"data", True)
    assert made(Cache(folder), b"x") == (b"data", False)


def secret_of(folder):
    return Cache(folder).secret


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_a_file_system_without_hard_links(folder, monkeypatch, number):
    def none(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.link", none)
    with multiprocessing.get_context("fork").Pool(8) as pool:
        assert len({*pool.map(secret_of, [folder] * 32, chunksize=1)}) == 1
    first = Cache(folder)
    assert made(first) == (b"data", True) and not first.refused
    assert made(Cache(folder), b"x") == (b"data", False)
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert not [path for path in folder.iterdir() if path.name.endswith(".part")]


def test_a_file_system_without_hard_links_and_without_locks(folder, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("os.link", none)
    monkeypatch.setattr("fcntl.flock", none)
    first, exists = Cache(folder), os.path.exists
    assert made(first) == (b"data", True)
    with monkeypatch.context() as patch:  # two processes at the same time: neither sees the other's key
        patch.setattr("pathlib.Path.exists", lambda path: path.name != "key" and exists(path))
        second = Cache(folder)
        assert made(second, b"x") == (b"x", True)
    assert first.secret != second.secret
    assert made(Cache(folder), b"y") == (b"x", False)
    assert made(first, b"z") == (b"z", True), "an entry that was sealed with another key"


def test_waiting_for_another_process_ends(folder, monkeypatch):
    """One that takes too long: it is made here, too."""
    monkeypatch.setattr("airgraph.disk_cache.WAIT_S", 0.1)
    made(Cache(folder), key=Key(text="first"))
    with Cache(folder).lock("object", KEY):
        assert made(Cache(folder), b"x") == (b"x", True)


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("AIRGRAPH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("airgraph.disk_cache.sys.platform", "linux")
    assert default_folder() == tmp_path / "xdg" / "airgraph"


def test_the_command(folder, monkeypatch, capsys):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(folder))
    cache = Cache(folder)
    made(cache)
    made(cache, b"x", Key(text="b", cpu="\x1b[31m"))
    assert command("path") == 0 and capsys.readouterr().out == f"{folder}\n"
    assert command("list") == 0
    text = capsys.readouterr().out
    assert "2 entries, " in text and "cpu here" in text and "added 0 s ago" in text and "cpu \\x1b[31m" in text
    assert command("verify") == 0 and "2 entries are whole, 0 are not" in capsys.readouterr().out
    entry(cache).write_bytes(b"")
    assert command("verify") == 3 and str(entry(cache)) in capsys.readouterr().out
    assert command("prune") == 0 and command("clear") == 0
    assert "2 entries removed" in capsys.readouterr().out and not cache.entries()


def test_hits_are_counted(folder, monkeypatch, capsys):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(folder))
    made(Cache(folder))
    for mode in ("on", "on", "read"):
        assert made(Cache(folder, mode)) == (b"data", False)
    (found,) = Cache(folder).entries()
    assert found.hits == 2  # reading adds nothing
    assert command("list") == 0 and "2 hits, the last" in capsys.readouterr().out
    assert command("clear") == 0 and not any((folder / "hits").iterdir())


def test_a_limit_that_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AIRGRAPH_CACHE_MB", "much")
    with pytest.raises(ConfigError, match="AIRGRAPH_CACHE_MB cannot be 'much'"):
        disk_cache.open_cache()


def test_a_cache_that_is_only_read_has_no_locks(tmp_path):
    Cache(tmp_path).put("object", KEY, b"code")
    with Cache(tmp_path, "read").lock("object", KEY):
        assert not (tmp_path / "locks").exists()
