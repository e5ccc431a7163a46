"""The figures of a benchmark, as a table, as data and as a page."""

from __future__ import annotations

import html
import io
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from airgraph.tools.terminal import UNLIMITED, console


@dataclass
class Figures:
    """One contender at one function; times in seconds."""

    name: str
    cold: float | None = None  # compiling, with nothing known
    warm: float | None = None  # compiling again in the same process
    error: float | None = None  # the largest distance from float64, relative
    advice: list[str] = field(default_factory=list)
    failed: str = ""
    medians: list[float] = field(default_factory=list)  # of each round
    memory: int | None = None  # the most the process had

    def add(self, found: dict[str, Any]) -> None:
        if "failed" in found:
            self.failed = found["failed"]
        else:
            self.medians.append(statistics.median(found["times"]))

    @property
    def seconds(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.medians) if self.medians and not self.failed else None

    @property
    def spread(self) -> float | None:
        """Half of what lies between the fastest and the slowest round, relative to the median."""
        return (max(self.medians) - min(self.medians)) / 2 / self.seconds if self.seconds else None

    def json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "spread": self.spread,
            "rounds": self.medians,
            "cold_compile_seconds": self.cold if self.name != "eager" else None,
            "warm_compile_seconds": self.warm,
            "peak_memory_bytes": self.memory,
            "distance_from_float64": self.error,
            "failed": self.failed or None,
        }


@dataclass
class JobResult:
    """One function and what each contender made of it."""

    name: str
    training: bool = False
    sizes: int = 1
    figures: dict[str, Figures] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        timed = [f for f in self.figures.values() if f.seconds]
        return min(timed, key=lambda f: f.seconds or 0).name if timed else None

    @property
    def advice(self) -> list[str]:
        return [line for figures in self.figures.values() for line in figures.advice]


HEAD = ("", "ms per\ncall", "±", "of\neager", "compile\ns", "again\ns", "peak\nMB", "from\nfloat64")  # fits 80 columns


class BenchResult:
    """What `airgraph.bench` returns."""

    def __init__(self, jobs: list[dict[str, Any]], note: str = "") -> None:
        self.jobs = [JobResult(**job) for job in jobs]
        self.note = note  # why all was timed in one process

    @property
    def best(self) -> str | None:
        """The fastest contender; of several functions, at the first."""
        return self.jobs[0].best

    def text(self, width: int = UNLIMITED) -> str:
        """The tables and the advice, without colours."""
        page = io.StringIO()
        self.show(Console(width=width, no_color=True, file=page, highlight=False))
        return page.getvalue()

    def show(self, to: Console | None = None) -> None:
        """Print the tables and the advice, to a terminal in colour."""
        to = to or console()
        for job in self.jobs:
            to.print(table(job))
            for line in job.advice:
                to.print(f"  advice: {line}", markup=False)
            for figures in job.figures.values():
                if figures.failed:
                    to.print(f"  {figures.name} cannot run this: {figures.failed}", markup=False)
        if self.note:
            to.print(f"  timed in one process, as {self.note}", markup=False)

    def json(self) -> dict[str, Any]:
        jobs = [
            {
                "function": job.name,
                "training": job.training,
                "best": job.best,
                "advice": job.advice,
                "contenders": {name: figures.json() for name, figures in job.figures.items()},
            }
            for job in self.jobs
        ]
        return {"torch": torch.__version__, "threads": torch.get_num_threads(), "note": self.note, "jobs": jobs}

    def html(self) -> str:
        """One page without scripts; everything that comes from a program is escaped."""
        body = "".join(f"<h2>{html.escape(title(job))}</h2>{html_table(job)}{html_notes(job)}" for job in self.jobs)
        return f"{PAGE_HEAD}<h1>airgraph bench</h1>{body}<p>{html.escape(self.note)}</p></html>\n"

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{html.escape(title(job))}</h4>{html_table(job)}" for job in self.jobs)


def title(job: JobResult) -> str:
    return f"{job.name}, {'forward and backward' if job.training else 'inference'}"


def rows(job: JobResult) -> list[tuple[str, ...]]:
    eager = job.figures["eager"].seconds if "eager" in job.figures else None
    found: list[tuple[str, ...]] = []
    for f in job.figures.values():
        compiling = f.name != "eager"
        found.append(
            (
                f.name,
                (f"{f.seconds * 1e3:.3f}" if f.seconds < 1 else f"{f.seconds * 1e3:.0f}") if f.seconds else "-",
                f"{f.spread:.0%}" if f.spread is not None else "-",
                f"{f.seconds / eager:.2f}" if f.seconds and eager else "-",
                f"{f.cold:.2f}" if compiling and f.cold is not None else "-",
                f"{f.warm:.2f}" if f.warm is not None else "-",
                f"{f.memory / 1e6:.0f}" if f.memory else "-",
                f"{f.error:.1e}" if f.error is not None else "-",
            )
        )
    return found


def table(job: JobResult) -> Table:
    made = Table(title=title(job), title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(HEAD):
        made.add_column(name, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i == 0)
    for row in rows(job):
        made.add_row(*row, style="bold green" if row[0] == job.best else "")
    return made


PAGE_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>airgraph bench</title><style>
:root { color-scheme: light dark; font: 15px system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; } td, th { padding: .3rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr.best { font-weight: 600; } tr + tr { border-top: 1px solid #8884; }
</style>"""


def html_table(job: JobResult) -> str:
    head = "".join(f"<th>{html.escape(name).replace(chr(10), ' ')}</th>" for name in HEAD)
    lines = [
        f"<tr{' class=best' if row[0] == job.best else ''}>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>"
        for row in rows(job)
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def html_notes(job: JobResult) -> str:
    failed = [f"{f.name} cannot run this: {f.failed}" for f in job.figures.values() if f.failed]
    return "".join(f"<p>{html.escape(line)}</p>" for line in [*job.advice, *failed])
