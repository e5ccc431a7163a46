"""A report as a page for the terminal, 100 columns wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from airgraph.tools.dynamo_trace import Place
from airgraph.tools.explain import Break, GraphReport, OpReport, Recompile, Report

WIDTH = 100
BOLD, PLAIN = "\033[1m", "\033[0m"
BY = {"converter": "converter", "user": "your converter", "pytorch": "PyTorch"}
SHOWN = 40  # converted ops that get a line of their own
NOTHING = 'No graph was compiled: nothing here calls torch.compile with backend="airgraph", "npu" or TorchAir\'s.'


def render(report: Report, colour: bool) -> str:
    sections = {
        "Graphs": graphs(report.graphs),
        "Graph breaks: lines that Python runs between two graphs": graph_breaks(report.breaks),
        "Recompiles: calls that no compiled code fits": recompiles(report.recompiles),
        "Ops": ops(report.ops),
        "Passes": passes(report.graphs),
        "Compile time": times(report.seconds),
        "Notes": notes(report),
    }
    lines = wrapped(headline(report), "")
    for title, body in sections.items():
        rows = list(body)
        if rows:
            lines += ["", f"{BOLD}{title}{PLAIN}" if colour else title, *rows]
    return "\n".join(lines)


def headline(report: Report) -> str:
    if not report.graphs:
        return f"airgraph: {NOTHING}"
    here = sum(graph.converted for graph in report.graphs)
    there = sum(graph.fallbacks for graph in report.graphs)
    return (
        f"airgraph: {number(len(report.graphs), 'graph')}, {number(len(report.breaks), 'graph break')}, "
        f"{number(len(report.recompiles), 'recompile')}; {number(here, 'op')} by converters, {there} by PyTorch; "
        f"compiled in {sum(report.seconds.values()):.2f} s"
    )


def number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    return [line for row in aligned(rows) for line in row]


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """The lines of each row: columns as wide as they need to be, numbers to the right; the last column wraps."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for *cells, last in rows:
        head = "  " + "  ".join(c.rjust(w) if c.isdigit() else c.ljust(w) for c, w in zip(cells, widths)) + "  "
        room = max(WIDTH - len(head), 30)
        first, *rest = textwrap.wrap(last, room, break_on_hyphens=False) or [""]
        yield [(head + first).rstrip(), *(" " * len(head) + line for line in rest)]


# -- sections --------------------------------------------------------------------------------------------------------
def graphs(found: Sequence[GraphReport]) -> Iterator[str]:
    if not found:
        return
    head = ("name", "phase", "shapes", "ops", "PyTorch", "ms", "function")
    rows = [
        (
            g.name,
            g.phase,
            g.shapes,
            str(g.converted + g.fallbacks),
            str(g.fallbacks),
            f"{sum(g.stages.values()) * 1e3:.0f}",
            f"{g.function}  {g.place or ''}",
        )
        for g in found
    ]
    titles, *lines = aligned([head, *rows])
    yield from titles
    for graph, own in zip(found, lines):
        yield from own
        for symbol in graph.symbols:
            yield from wrapped(f"{symbol.name} = {symbol.source or 'unknown'}: {symbol.why}", " " * 8)
        if graph.symbols and graph.shapes == "static":
            yield " " * 8 + "only numbers are open, and every tensor has a fixed shape: static"


def graph_breaks(found: Sequence[Break]) -> Iterator[str]:
    for item in found:
        times = f"  ({item.count} times)" if item.count > 1 else ""
        yield from wrapped(f"{item.place or 'unknown line'}  {item.reason}{times}", "  ")
        yield from quoted(item.place)
        yield from wrapped(item.explanation, " " * 6)
        for hint in item.hints[:1]:
            yield from wrapped(f"try: {hint}", " " * 6)


def quoted(place: Place | None) -> Iterator[str]:
    if place and place.code:
        yield " " * 6 + textwrap.shorten(place.code, WIDTH - 8, placeholder=" …")


def recompiles(found: Sequence[Recompile]) -> Iterator[str]:
    for caller, group in groupby(found, key=lambda item: item.caller):
        yield f"  {caller or 'unknown line'}"
        yield from quoted(caller)
        for item in group:
            first, others = item.guards[0], len(item.guards) - 1
            needed = f", needed by {first.place}" if first.place else ""
            more = f" (and {others} older)" if others else ""
            yield from wrapped(f"{item.function} ({item.place}): failed {first.text}{needed}{more}", " " * 6)


def ops(found: Sequence[OpReport]) -> Iterator[str]:
    if not found:
        return
    elsewhere = [op for op in found if op.by == "pytorch"]
    here = [op for op in found if op.by != "pytorch"]
    rows = [
        (op.target.removeprefix("torch.ops."), BY[op.by], str(op.count), where(op)) for op in elsewhere + here[:SHOWN]
    ]
    yield from table(rows)
    if len(here) > SHOWN:
        yield f"  and {len(here) - SHOWN} more, all by converters"


def where(op: OpReport) -> str:
    """A fallback names every line; of a converted op the first will do."""
    places = [str(place) for place in op.places]
    if op.by == "pytorch":
        return "; ".join([*([op.reason] if op.reason else []), ", ".join(places)])
    return places[0] + (f" and {number(len(places) - 1, 'line')} more" if len(places) > 1 else "") if places else ""


def passes(found: Sequence[GraphReport]) -> Iterator[str]:
    made: Counter[str] = Counter()
    for graph in found:
        made.update(graph.passes)
    if made:
        yield from table([(name, number(count, "rewrite"), "") for name, count in made.items()])


def times(seconds: dict[str, float]) -> Iterator[str]:
    total = sum(seconds.values())
    if total:
        yield from table([(name, f"{s:7.3f} s", f"{s / total:4.0%}") for name, s in seconds.items()])


def notes(report: Report) -> Iterator[str]:
    for remark in dict.fromkeys(remark for graph in report.graphs for remark in graph.remarks):
        yield from wrapped(remark, "  ")
    if report.elsewhere:
        yield from wrapped(f"compiled by another backend: {', '.join(dict.fromkeys(report.elsewhere))}", "  ")
    if report.unread:
        yield f"  {number(report.unread, 'record')} of Dynamo could not be read: this report may miss something"
