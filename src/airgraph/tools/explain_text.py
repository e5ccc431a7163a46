"""A report as text, wrapped to the width of a terminal; in a pipe nothing is wrapped or shortened."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from airgraph.tools.dynamo_trace import SourceLine
from airgraph.tools.recompile_advice import advice
from airgraph.tools.terminal import UNLIMITED

if TYPE_CHECKING:
    from airgraph.tools.explain import Break, GraphReport, OpReport, Recompile, Report

BOLD, PLAIN = "\033[1m", "\033[0m"
BY = {"converter": "converter", "user": "your converter", "pytorch": "PyTorch"}
SHOWN = 40  # converted ops that get a line of their own on a terminal
FOUND = "found, nothing was compiled"  # what is said of a program from the cache
NOTHING = 'No graph was compiled: nothing here calls torch.compile with backend="airgraph", "npu" or TorchAir\'s.'


def headline(report: Report) -> str:
    if not report.graphs:
        return f"airgraph: {NOTHING}"
    converted = sum(graph.converted for graph in report.graphs)
    fallbacks = sum(graph.fallbacks for graph in report.graphs)
    return (
        f"airgraph: {number(len(report.graphs), 'graph')}, {number(len(report.breaks), 'graph break')}, "
        f"{number(len(report.recompiles), 'recompile')}; {number(converted, 'op')} by converters, {fallbacks} by PyTorch; "
        f"compiled in {sum(report.seconds.values()):.2f} s"
    )


def number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def amount(count: float | None, unit: str) -> str:
    """`3.15 MB`; - where it is not known."""
    if count is None:
        return "-"
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k"), (0, ""), (-3, "m"), (-6, "µ")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}{unit}"
    return f"{count * 1e9:.3g} n{unit}" if unit == "s" else f"0 {unit}"


def where(op: OpReport) -> str:
    """A fallback names every line; of a converted op the first will do."""
    places = [str(place) for place in op.places]
    if op.by == "pytorch":
        return "; ".join([*([op.reason] if op.reason else []), ", ".join(places)])
    return places[0] + (f" and {number(len(places) - 1, 'line')} more" if len(places) > 1 else "") if places else ""


def render(report: Report, colour: bool, width: int) -> str:
    return Page(width).render(report, colour)


@dataclass(frozen=True)
class Page:
    """Lays a report out in lines of at most `width` columns."""

    width: int

    def render(self, report: Report, colour: bool) -> str:
        sections = {
            "Graphs": self.graphs(report.graphs),
            "Graph breaks: lines that Python runs between two graphs": self.graph_breaks(report.breaks),
            "Recompiles: calls that no compiled code fits": self.recompiles(report.recompiles),
            "Ops": self.ops(report.ops),
            "Kernels: what they take at least at this machine's bandwidth and peak": self.kernels(report.graphs),
            "Passes": self.passes(report.graphs),
            "Compilation cache": [f"  {g.name}  {g.cache}" for g in report.graphs if g.cache],
            "Compile time": self.times(report.seconds),
            "Notes": self.notes(report),
        }
        lines = self.wrapped(headline(report), "")
        for title, body in sections.items():
            rows = list(body)
            if rows:
                lines += ["", f"{BOLD}{title}{PLAIN}" if colour else title, *rows]
        return "\n".join(lines)

    def wrapped(self, text: str, indent: str) -> list[str]:
        return textwrap.wrap(text, self.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)

    def table(self, rows: Sequence[Sequence[str]]) -> list[str]:
        return [line for row in self.aligned(rows) for line in row]

    def aligned(self, rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
        """The lines of each row: columns as wide as they need to be, numbers to the right; the last column wraps."""
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        for *cells, last in rows:
            head = "  " + "  ".join(c.rjust(w) if c.isdigit() else c.ljust(w) for c, w in zip(cells, widths)) + "  "
            room = max(self.width - len(head), 30)
            first, *rest = textwrap.wrap(last, room, break_on_hyphens=False) or [""]
            yield [(head + first).rstrip(), *(" " * len(head) + line for line in rest)]

    # -- sections ---------------------------------------------------------------------------------------------------
    def graphs(self, found: Sequence[GraphReport]) -> Iterator[str]:
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
        titles, *lines = self.aligned([head, *rows])
        yield from titles
        for graph, own in zip(found, lines):
            yield from own
            for symbol in graph.symbols:
                yield from self.wrapped(f"{symbol.name} = {symbol.source or 'unknown'}: {symbol.why}", " " * 8)
            if graph.symbols and graph.shapes == "static":
                yield " " * 8 + "only numbers are symbolic, and every tensor has a fixed shape: static"

    def graph_breaks(self, found: Sequence[Break]) -> Iterator[str]:
        for item in found:
            times = f"  ({item.count} times)" if item.count > 1 else ""
            yield from self.wrapped(f"{item.place or 'unknown line'}  {item.reason}{times}", "  ")
            yield from self.quoted(item.place)
            yield from self.wrapped(item.explanation, " " * 6)
            for hint in item.hints[:1]:
                yield from self.wrapped(f"try: {hint}", " " * 6)

    def quoted(self, place: SourceLine | None) -> Iterator[str]:
        if place and place.code:
            yield " " * 6 + textwrap.shorten(place.code, self.width - 8, placeholder=" …")

    def recompiles(self, found: Sequence[Recompile]) -> Iterator[str]:
        for caller, group in groupby(found, key=lambda item: item.caller):
            yield f"  {caller or 'unknown line'}"
            yield from self.quoted(caller)
            for item in group:
                first, others = item.guards[0], len(item.guards) - 1
                needed = f", needed by {first.place}" if first.place else ""
                more = f" (and {others} older)" if others else ""
                yield from self.wrapped(f"{item.function} ({item.place}): failed {first.text}{needed}{more}", " " * 6)
                if (hint := advice(first.text)) is not None:
                    yield from self.wrapped(f"try: {hint}", " " * 8)

    def ops(self, found: Sequence[OpReport]) -> Iterator[str]:
        if not found:
            return
        elsewhere = [op for op in found if op.by == "pytorch"]
        here = [op for op in found if op.by != "pytorch"]
        shown = len(here) if self.width >= UNLIMITED else SHOWN
        yield from self.table(
            [
                (op.target.removeprefix("torch.ops."), BY[op.by], str(op.count), where(op))
                for op in elsewhere + here[:shown]
            ]
        )
        if len(here) > shown:
            yield f"  and {len(here) - shown} more, all by converters"

    def kernels(self, found: Sequence[GraphReport]) -> Iterator[str]:
        """Of each graph, the expensive ones first; on a terminal no more than SHOWN."""
        for graph in found:
            rows = Counter[tuple[str, ...]]()
            least: dict[tuple[str, ...], float] = {}
            total = sum(k.seconds or 0.0 for k in graph.kernels)
            for k in graph.kernels:
                row = (k.kernel, amount(k.bytes, "B"), amount(k.flops, "FLOP"), amount(k.seconds, "s"), k.source)
                rows[row] += 1
                least[row] = least.get(row, 0.0) + (k.seconds or 0.0)
            if graph.cache == FOUND:
                yield f"  {graph.name}: not listed, as its program came from the cache (AIRGRAPH_CACHE=off lists them)"
            if not rows:
                continue
            shown = sorted(rows, key=lambda row: -least[row])[: len(rows) if self.width >= UNLIMITED else SHOWN]
            yield f"  {graph.name}: {number(len(graph.kernels), 'kernel')}, {amount(total, 's')}"
            yield from self.table(
                [
                    (row[0], f"×{rows[row]}", *row[1:4], f"{least[row] / total:4.0%}" if total else "-", row[4])
                    for row in shown
                ]
            )
            if len(rows) > len(shown):
                yield f"  and {len(rows) - len(shown)} more"

    def passes(self, found: Sequence[GraphReport]) -> Iterator[str]:
        made: Counter[str] = Counter()
        for graph in found:
            made.update(graph.passes)
        if made:
            yield from self.table([(name, number(count, "rewrite"), "") for name, count in made.items()])

    def times(self, seconds: dict[str, float]) -> Iterator[str]:
        total = sum(seconds.values())
        if total:
            yield from self.table([(name, f"{s:7.3f} s", f"{s / total:4.0%}") for name, s in seconds.items()])

    def notes(self, report: Report) -> Iterator[str]:
        for remark in dict.fromkeys(remark for graph in report.graphs for remark in graph.remarks):
            yield from self.wrapped(remark, "  ")
        if report.elsewhere:
            yield from self.wrapped(f"compiled by another backend: {', '.join(dict.fromkeys(report.elsewhere))}", "  ")
        if report.unread:
            yield f"  {number(report.unread, 'record')} of Dynamo could not be read: this report may miss something"
