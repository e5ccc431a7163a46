"""`fusion_result.json`: how often each pass found its pattern, and how often it rewrote it.

    {"session_and_graph_id_0_1": {
        "graph_fusion": {"attention": {"effect_times": "2", "match_times": "3"}},
        "ub_fusion": {}}}

The form is GE's, so that what reads theirs reads ours: one entry for each graph, numbers as strings. The session is the
rank of the process, the passes are those of `passes_off`. What was matched and not rewritten was refused; the journal has
the reasons. `ub_fusion` is GE's second kind, fusion on the cores of an NPU; there is none here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from airgraph.config import Config, check_dump_path
from airgraph.errors import DumpError
from airgraph.journal import Journal, rank
from airgraph.passes import PASSES
from airgraph.passes.rewrite import RulePass
from airgraph.store.dump import write

FILE = "fusion_result.json"


def write_fusion_result(journal: Journal, config: Config) -> Path | None:
    """The graph's entry, added to the file; None where nobody asked for one."""
    wanted = config.dump is not None if config.fusion_result is None else config.fusion_result
    if not wanted:
        return None
    check_dump_path(config.dump_path)
    target = Path(config.dump_path) / FILE
    session = f"session_and_graph_id_{rank()}_{journal.graph.removeprefix('graph_')}"
    try:
        write(target, json.dumps({**earlier(target), session: entry(journal)}, indent=4) + "\n")
    except OSError as error:
        raise DumpError(
            f"the fusion result could not be written to {target}",
            where={"reason": str(error)},
            hint="another dump_path",
        ) from error
    return target


def earlier(target: Path) -> dict[str, Any]:
    """What other graphs wrote; a file that is no result is overwritten."""
    try:
        found = json.loads(target.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def entry(journal: Journal) -> dict[str, Any]:
    fired, refused = counts(journal, "fired"), counts(journal, "refused")
    passes = [name for name in PASSES if fired[name] or refused[name]]
    times = {
        name: {"effect_times": str(fired[name]), "match_times": str(fired[name] + refused[name])} for name in passes
    }
    return {"graph_fusion": times, "ub_fusion": {}}


def counts(journal: Journal, word: str) -> Counter[str]:
    """By pass, without the rules of others that ran along."""
    found: Counter[str] = Counter()
    for key, count in journal.counters.items():
        kind, _, place = key.partition(" ")
        name, _, rule = place.partition("/")
        run = PASSES.get(name)
        if kind == word and isinstance(run, RulePass) and rule in {r.name for r in run.rules}:
            found[name] += count
    return found
