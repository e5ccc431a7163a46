"""`airgraph cache why SCRIPT`: for every graph of a script whether its program is in the cache, and if not, why.

The script runs with AIRGRAPH_CACHE=read, so that asking changes nothing. A program that is not there is compared with its
nearest relative: the entry that agrees with it in most fields of the key, and of those the one whose graph has most lines
in common. The first field that differs is the answer:

    graph_1 (inference): missed, line 5 of the graph differs (nearest relative: used 3 m ago)
        here   %4 = aten.addmm.default(%1, %3, %2): torch.float32 [9,16] cpu …
        there  %4 = aten.addmm.default(%1, %3, %2): torch.float32 [8,16] cpu …
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from airgraph.disk_cache import Cache, CacheEntry, Key, open_cache
from airgraph.tools.cache import age
from airgraph.tools.escape import printable
from airgraph.tools.run import Script, run_script

WIDEST = 160
# What a field of a key is, in the order in which differences are looked for; options and the graph come last.
WORDS = {
    "torch": "another version of PyTorch",
    "llvmlite": "another version of llvmlite",
    "sources": "airgraph itself is another version",
    "system": "another operating system",
    "cpu": "another CPU",
    "features": "a CPU with other features",
    "passes": "other passes of LLVM",
    "phase": "another phase",
    "device": "another device",
    "engines": "another table of engines",
    "AIRGRAPH_CHIP": "another AIRGRAPH_CHIP",
    "AIRGRAPH_PACK": "another AIRGRAPH_PACK",
    "AIRGRAPH_PACK_MB": "another AIRGRAPH_PACK_MB",
}


def why(script: Script) -> int:
    from airgraph.journal import JOURNALS
    from airgraph.store.program_entry import ProgramEntry, watching_misses

    script.check("cache why")
    os.environ["AIRGRAPH_CACHE"] = "read"
    missed: dict[str, ProgramEntry] = {}
    JOURNALS.clear()
    with watching_misses(lambda entry: missed.setdefault(entry.maker.name, entry)):
        try:
            return run_script(script, "cache why")
        finally:
            sys.stdout.flush()
            for journal in JOURNALS:
                head = f"{journal.graph} ({journal.phase})"
                if journal.graph in missed:
                    entry = missed[journal.graph]
                    lines = reason(open_cache(), entry.key, entry.text)
                elif journal.counters["program hits"]:
                    lines = ["found"]
                else:
                    lines = [n for s in journal.stages for n in s.notes if n.startswith("program not kept")]
                    lines += [r for r in journal.remarks if r.startswith(("missed, cache ", "not kept as "))][:1]
                if lines:  # (a graph that is compiled for a model under a name is not looked for by itself)
                    print(printable_lines(f"{head}: ", lines))
            if not JOURNALS:
                print("no graph was compiled")


def printable_lines(head: str, lines: list[str]) -> str:
    shown = [printable(line)[:WIDEST] for line in lines]
    return head + "\n    ".join(shown)


def reason(cache: Cache, key: Key, text: str) -> list[str]:
    """The first thing that differs from the nearest relative, then both sides of it."""
    relatives = list(programs(cache))
    if not relatives:
        return ["missed, the cache holds no programs"]
    entry, fields, graph = max(relatives, key=lambda r: nearness(key.fields, text, r[1], r[2]))
    relative = f"(nearest relative: used {age(time.time() - entry.used)} ago)"
    names = [*WORDS, *(name for name in key.fields if name not in WORDS and name != "graph")]
    for name in names:
        here, there = key.fields.get(name, ""), fields.get(name, "")
        if here != there:
            what = WORDS.get(name, f"another option {name}")
            return [f"missed, {what} {relative}", f"here   {here}", f"there  {there}"]
    return [*first_line(text.splitlines(), graph.splitlines(), relative)]


def first_line(here: list[str], there: list[str], relative: str) -> Iterator[str]:
    """The first line of the graph that differs."""
    for number in range(max(len(here), len(there))):
        ours, theirs = (lines[number] if number < len(lines) else "(the graph ends)" for lines in (here, there))
        if ours != theirs:
            yield f"missed, line {number + 1} of the graph differs {relative}"
            yield f"here   {ours}"
            yield f"there  {theirs}"
            return
    yield "missed, although the key is the same: its entry or its object code was discarded"


def nearness(fields: dict[str, str], text: str, others: dict[str, str], graph: str) -> tuple[int, int]:
    equal = sum(fields[name] == others.get(name) for name in fields if name != "graph")
    return equal, len(set(text.splitlines()) & set(graph.splitlines()))


def programs(cache: Cache) -> Iterator[tuple[CacheEntry, dict[str, str], str]]:
    """The programs of the cache that are whole: (entry, fields of the key, text of the graph)."""
    from airgraph.store.programs import KIND, text_of

    for entry in cache.entries() if cache.secret is not None else []:
        if entry.kind == KIND:
            try:
                data = cache.opened(KIND, Key.known(entry.path.name), entry.path.read_bytes())
                if data is not None:
                    yield entry, entry.fields(), text_of(data)
            except (OSError, ValueError, KeyError):
                continue
