"""The terminal a command prints to: its width and colours, found by `rich`.

NO_COLOR, FORCE_COLOR, TERM and COLUMNS are honoured as `rich` has them. In a pipe nothing is wrapped or shortened, so that
`grep` sees whole lines.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Timer
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

UNLIMITED = 1 << 20


def console(stderr: bool = False) -> Console:
    """A console for tables and progress; in a pipe as wide as its contents."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=UNLIMITED)


def width() -> int:
    return console().width


def colours() -> bool:
    found = console()
    return found.is_terminal and not found.no_color


def waiting(text: str, after: float = 1.0) -> AbstractContextManager[Any]:
    """A spinner with a text and the time that has passed, if something takes longer than `after` seconds.

    It goes to stderr, is gone afterwards, and is not shown where nobody watches. Stdout is left alone: what a script
    prints to a file meanwhile goes to that file.

    with waiting("compiling the model"):
        compiled(x)
    """
    found = console(stderr=True)
    return Spinner(found, text, after) if found.is_interactive else nullcontext()


class Spinner:
    """A spinner that a timer starts; see `waiting`."""

    def __init__(self, console: Console, text: str, after: float) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        self.progress.add_task(text, total=None)
        self.timer = Timer(after, self.progress.start)
        self.timer.daemon = True

    def __enter__(self) -> Spinner:
        self.timer.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.timer.cancel()
        self.timer.join()
        self.progress.stop()
