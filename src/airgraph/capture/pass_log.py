"""What the log says about an FX pass at level DEBUG, in TorchAir's words: its time, and what it changed.

After fx graph pass(optimize_noop_ops) optimization:
    cost 0.0002130000s,
    before 6 nodes, after 5 nodes,
    removed nodes: ['clone'],
    added nodes: [],
    operations statistics: …
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

HEADS = ("name", "cnt(before)", "cnt(after)", "diff")


@contextmanager
def compared(name: str, gm: torch.fx.GraphModule, log: logging.Logger) -> Iterator[None]:
    """The graph before and after the pass of that name."""
    if not log.isEnabledFor(logging.DEBUG):
        yield
        return
    before, start = list(gm.graph.nodes), time.perf_counter()
    names, ops, targets = facts(before)
    yield
    seconds, after = time.perf_counter() - start, facts(gm.graph.nodes)
    log.debug(
        "After fx graph pass(%s) optimization:\n    cost %.10fs,\n    before %d nodes, after %d nodes,\n"
        "    removed nodes: %s,\n    added nodes: %s,\n    operations statistics:\n%s\n\n    targets statistics:\n%s",
        name,
        seconds,
        len(names),
        len(after[0]),
        [n for n in names if n not in after[0]],
        [n for n in after[0] if n not in names],
        table(ops, after[1]),
        table(targets, after[2]),
    )


def facts(nodes: Any) -> tuple[dict[str, None], Counter[str], Counter[str]]:
    """Names in order, how many nodes there are of each kind, and of each target."""
    given = list(nodes)
    text: Callable[[torch.fx.Node], str] = lambda n: n._pretty_print_target(n.target)  # noqa: E731
    return dict.fromkeys(n.name for n in given), Counter(n.op for n in given), Counter(map(text, given))


def table(before: Counter[str], after: Counter[str]) -> str:
    names = dict.fromkeys([*before, *after])
    rows: list[Sequence[Any]] = [HEADS, ("total", before.total(), after.total(), after.total() - before.total())]
    rows += [(name, before[name], after[name], after[name] - before[name]) for name in names]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(HEADS))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("    " + "  ".join(justified(row, widths)) for row in rows)


def justified(row: Sequence[Any], widths: Sequence[int]) -> Iterator[str]:
    first, *rest = map(str, row)
    yield first.ljust(widths[0])
    yield from (cell.rjust(width) for cell, width in zip(rest, widths[1:]))
