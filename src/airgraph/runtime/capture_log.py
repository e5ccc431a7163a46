"""What the log says about captures, in TorchAir's words, and the counters of `torch._dynamo.utils.counters`.

[INFO] … Success to capture fx_graph graph_1 for graph key{[2]}. Start to run AclGraph{id: 3} with the updated node num {0}.
[INFO] … Find captured AclGraph{id: 3} of fx_graph graph_1 with graph key {[2]}.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from airgraph.journal import Journal

MOVED, FORCED, HELD = "mutated_input_change", "force_recapture", "held_results"  # why a key is captured once more
NO_KEY = "no_updated_input"


def key_text(key: tuple[Any, ...]) -> str:
    """The sizes and numbers of a call: `[2, 7]`."""
    return str(list(key)) if key else NO_KEY


def tell_found(journal: Journal, key: tuple[Any, ...], recording: Any) -> None:
    log = journal.log
    if not log.isEnabledFor(logging.INFO):
        return  # this is said at every call
    text = key_text(key)
    log.info("Find captured AclGraph{id: %s} of fx_graph %s with graph key {%s}.", id(recording), journal.graph, text)
    log.debug(
        "The current AclGraph no needs to be recaptured for fx_graph %s with graph key {%s}.", journal.graph, text
    )


def tell_capture(journal: Journal, key: tuple[Any, ...], again: str | None) -> None:
    """Before a capture; `again` is why there is another one for this key."""
    text = "No find captured AclGraph of fx_graph %s with graph key {%s}, and start to capture it."
    if again is not None:
        text = "The current AclGraph needs to be recaptured for fx_graph %s with graph key {%s}."
    dynamo = sys.modules.get("torch._dynamo.utils")  # a saved program runs without it
    if dynamo is not None:
        name = f"recapture_due_to_{again}_{journal.graph}" if again else f"captured_{journal.graph}"
        dynamo.counters[journal.log_name][name] += 1
    journal.log.debug(text, journal.graph, key_text(key))


def tell_captured(journal: Journal, key: tuple[Any, ...], recording: Any, updated: int) -> None:
    """After a capture; `updated` nodes are not part of it."""
    journal.log.info(
        "Success to capture fx_graph %s for graph key{%s}. Start to run AclGraph{id: %s} with the updated node num {%s}.",
        journal.graph,
        key_text(key),
        id(recording),
        updated,
    )


def limit_text(journal: Journal, key: tuple[Any, ...], limit: int) -> str:
    return (
        f"The static_capture_size_limit reached when capturing fx_graph {journal.graph} with graph key {key_text(key)}: "
        f"the least recently used recording is evicted (capture_limit is {limit})"
    )
